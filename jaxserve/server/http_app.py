"""The HTTP application: routes, the error map's HTTP side, and nothing else.

    POST /v1/completions  /v1/chat/completions     generation
    GET  /v1/models  /v1/models/{id}               the served model
    POST /tokenize  /detokenize
    GET  /health   200 unless the engine is dead   /ready   200 when requests are taken
    GET  /metrics  /version

Bodies are parsed here by hand (`json_body`), not by FastAPI: its own parsing accepts NaN, takes "0.7"
for a number and answers in another error format. The request models still describe the API at /docs.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.core import NotReadyError
from jaxserve.server.auth import ApiKeyGuard
from jaxserve.server.chat import create_chat_completion
from jaxserve.server.completions import create_completion
from jaxserve.server.engine_api import EngineApi
from jaxserve.server.errors import ApiError, to_api_error
from jaxserve.server.json_body import JsonResponse, error_response, read_json
from jaxserve.server.messages import normalize_messages
from jaxserve.server.metrics_export import render_metrics
from jaxserve.server.schema import (
    NO_SPECIAL_TOKENS_IN_CHAT,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_model,
)
from jaxserve.server.service import GenerationService
from jaxserve.server.streaming import ClientGoneError

Handler = Callable[[GenerationService, Request, dict[str, Any]], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """What the HTTP front can be told.

    Attributes:
      api_key: needed on every path but the probes; None: open.
      max_body_bytes: largest request body.
      metrics_compat: "vllm" exports metrics under vLLM's names too; "" does not.
    """

    api_key: str | None = None
    max_body_bytes: int = 8 << 20
    metrics_compat: str = ""


def package_version() -> str:
    """The installed version; "0" where the package is not installed."""
    try:
        return version("jaxserve")
    except PackageNotFoundError:
        return "0"


def build_app(engine: EngineApi, settings: HttpSettings | None = None, service: GenerationService | None = None) -> Any:
    """The ASGI application over `engine`, which may still be loading.

    Args:
      service: shared with the gRPC front; made here when None.
    """
    settings = settings or HttpSettings()
    own_service = service or GenerationService(engine)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        own_service.close()

    app = FastAPI(title="jaxserve", version=package_version(), lifespan=lifespan, redirect_slashes=False)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(Exception, _unexpected)
    _add_generation(app, own_service, settings)
    _add_models(app, own_service)
    _add_tokens(app, own_service, settings)
    _add_probes(app, engine, settings)
    if settings.api_key:
        app.add_middleware(ApiKeyGuard, api_key=settings.api_key)
    return app


def _add_generation(app: FastAPI, service: GenerationService, settings: HttpSettings) -> None:
    @app.post("/v1/completions", openapi_extra=_body_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        return await _answer(service, settings, request, create_completion)

    @app.post("/v1/chat/completions", openapi_extra=_body_schema(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        return await _answer(service, settings, request, create_chat_completion)


def _add_models(app: FastAPI, service: GenerationService) -> None:
    engine = service.engine

    def card() -> dict[str, Any]:
        return {
            "id": engine.model_name,
            "object": "model",
            "created": engine.created,
            "owned_by": "jaxserve",
            "max_model_len": engine.max_model_len,
        }

    # Clients poll this list to learn that a server is up, so it waits for the model.
    @app.get("/v1/models")
    async def models(_: Request) -> Response:
        return _guarded(service, lambda: {"object": "list", "data": [card()]})

    @app.get("/v1/models/{model:path}")
    async def model(request: Request) -> Response:
        return _guarded(service, card, request.path_params["model"])


def _add_tokens(app: FastAPI, service: GenerationService, settings: HttpSettings) -> None:
    async def tokenize_body(service: GenerationService, _: Request, body: dict[str, Any]) -> Response:
        spec = parse_model(TokenizeRequest, body)
        service.check_ready(spec.model)
        if (spec.prompt is None) == (spec.messages is None):
            raise ApiError("invalid", "give either prompt or messages", param="prompt")
        if spec.prompt is not None:
            add_special = spec.add_special_tokens is not False
            (ids,) = await service.encode([spec.prompt], add_special, param="prompt", converts=True)
        else:
            if spec.add_special_tokens is not None:
                raise ApiError("invalid", NO_SPECIAL_TOKENS_IN_CHAT, param="add_special_tokens")
            messages = normalize_messages(spec.messages)
            add_prompt = spec.add_generation_prompt is not False
            variables = spec.chat_template_kwargs
            ids = await service.encode_chat(messages, add_prompt, variables, param="messages", converts=True)
        strings = await service.token_texts(ids) if spec.return_token_strs else None
        max_model_len = service.engine.max_model_len
        content = {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": strings}
        return JsonResponse(content)

    async def detokenize_body(service: GenerationService, _: Request, body: dict[str, Any]) -> Response:
        spec = parse_model(DetokenizeRequest, body)
        service.check_ready(spec.model)
        return JsonResponse({"prompt": await service.decode(spec.tokens)})

    @app.post("/tokenize", openapi_extra=_body_schema(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        return await _answer(service, settings, request, tokenize_body)

    @app.post("/detokenize", openapi_extra=_body_schema(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        return await _answer(service, settings, request, detokenize_body)


def _add_probes(app: FastAPI, engine: EngineApi, settings: HttpSettings) -> None:
    @app.get("/health")
    async def health(_: Request) -> Response:
        status = 503 if engine.state in ("dead", "stopped") else 200
        return JsonResponse({"status": "ok" if status == 200 else "dead", "state": engine.state}, status)

    @app.get("/ready")
    async def ready(_: Request) -> Response:
        done, total, what = engine.progress
        body: dict[str, Any] = {"ready": engine.state == "ready", "state": engine.state}
        if engine.state == "ready":
            return JsonResponse(body)
        body["progress"] = {"done": done, "total": total, "what": what}
        if engine.error is not None:
            body["error"] = type(engine.error).__name__
        return JsonResponse(body, 503, {"Retry-After": "5"})

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        try:
            registry = engine.metrics.registry
        except NotReadyError:
            registry = CollectorRegistry()
        compat = settings.metrics_compat == "vllm"
        text, content_type = render_metrics(registry, request.headers.get("accept", ""), compat)
        return Response(text, headers={"Content-Type": content_type})

    @app.get("/version")
    async def version_(_: Request) -> Response:
        return JsonResponse({"version": package_version()})


async def _answer(service: GenerationService, settings: HttpSettings, request: Request, handler: Handler) -> Response:
    try:
        body = await read_json(request, settings.max_body_bytes)
        service.check_ready()
        return await handler(service, request, body)
    except ClientGoneError:
        return Response(status_code=499)  # nobody reads it
    except Exception as exc:
        return error_response(to_api_error(exc))


def _guarded(service: GenerationService, content: Callable[[], Any], model: str | None = None) -> Response:
    try:
        service.check_ready(model)
        return JsonResponse(content())
    except Exception as exc:
        return error_response(to_api_error(exc))


async def _http_exception(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException), f"handler is for HTTPException, got {type(exc)}"
    path = request.url.path[:200]
    if exc.status_code == 404:
        return error_response(ApiError("not_found", f"there is no path {path!r}", code="path_not_found"))
    if exc.status_code == 405:
        return error_response(ApiError("method_not_allowed", f"{request.method} is not allowed on {path!r}"))
    return error_response(ApiError("invalid", str(exc.detail)))


async def _unexpected(_: Request, exc: Exception) -> Response:
    return error_response(to_api_error(exc))


def _body_schema(model: type[BaseModel]) -> dict[str, Any]:
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = schema.pop("$defs", {})
    for name, field in schema.get("properties", {}).items():
        # Nested definitions are written in place: the document has no component of that name.
        text = str(field)
        if "$ref" in text:
            schema["properties"][name] = next(iter(definitions.values()), {})
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
