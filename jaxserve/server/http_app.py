"""The HTTP application: routes, the error map's HTTP side, and nothing else.

    POST /v1/completions  /v1/chat/completions     generation
    POST /v1/responses                             generation  (`responses`)
    POST /v1/embeddings                            501
    GET  /v1/models  /v1/models/{id}               the served model and its LoRA adapters
    POST /v1/load_lora_adapter  /v1/unload_lora_adapter            (`lora_routes`)
    POST /tokenize  /detokenize                    GET /tokenizer_info    (`token_routes`)
    GET  /health   200 unless the engine is dead   /ready   200 when requests are taken
    GET  /metrics  /version  /load                 POST /reset_prefix_cache  /start_profile  /stop_profile
                                                   (`operator_routes`)
    GET  /debug/state  /debug/trace                (`debug_routes`)   /   (`playground`)

Bodies are parsed here by hand (`json_body`), not by FastAPI: its own parsing accepts NaN, takes "0.7"
for a number and answers in another error format. `description` is what /openapi.json says of them. FastAPI's pages
made of it load scripts from a public network, so there are none.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.server import playground
from jaxserve.server.answering import answer_with, generate
from jaxserve.server.auth import PROBES, ApiKeyGuard, KeyRing
from jaxserve.server.chat import begin_chat_completion
from jaxserve.server.completions import begin_completion
from jaxserve.server.cors import add_cors
from jaxserve.server.debug_routes import add_debug_routes
from jaxserve.server.description import ERRORS, answers, describe_keys, parameters, takes
from jaxserve.server.engine_api import EngineApi
from jaxserve.server.errors import ApiError
from jaxserve.server.head_requests import HeadRequests
from jaxserve.server.host_guard import HostGuard
from jaxserve.server.http_errors import http_exception, unexpected
from jaxserve.server.json_body import error_response
from jaxserve.server.lora_routes import add_lora_routes
from jaxserve.server.operator_routes import add_operator_routes, add_probes
from jaxserve.server.responses import add_response_routes
from jaxserve.server.schema import ChatRequest, CompletionRequest
from jaxserve.server.service import GenerationService
from jaxserve.server.settings import HttpSettings
from jaxserve.server.token_routes import add_token_routes
from jaxserve.server.version import package_version


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

    app = FastAPI(
        title="jaxserve",
        version=package_version(),
        lifespan=lifespan,
        redirect_slashes=False,
        responses=ERRORS,
        docs_url=None,
        redoc_url=None,
    )
    app.add_exception_handler(HTTPException, http_exception)
    app.add_exception_handler(Exception, unexpected)
    _add_generation(app, own_service, settings.max_body_bytes)
    add_response_routes(app, own_service, settings.max_body_bytes)
    _add_models(app, own_service)
    add_token_routes(app, own_service, settings.max_body_bytes)
    add_probes(app, own_service, settings)
    add_operator_routes(app, own_service, settings)
    add_lora_routes(app, own_service, settings)
    add_debug_routes(app, own_service)
    if settings.enable_playground:
        playground.add_playground(app)
    if settings.api_keys:
        open_paths = frozenset[str]() if settings.guard_probes else PROBES
        open_paths |= (
            {playground.PATH} if settings.enable_playground else set()
        )  # browsers ask for a page without a key
        app.add_middleware(ApiKeyGuard, keys=KeyRing(settings.api_keys), open_paths=open_paths)
        describe_keys(app, open_paths)
    if settings.allowed_origins:
        add_cors(app, settings.allowed_origins)
    if settings.allowed_hosts:
        app.add_middleware(HostGuard, names=settings.allowed_hosts)
    app.add_middleware(HeadRequests)
    return app


def _add_generation(app: FastAPI, service: GenerationService, max_body_bytes: int) -> None:
    completion = takes(CompletionRequest, {"prompt": "The sea is", "max_tokens": 8}, ["prompt"])
    members = ("id", "object", "created", "model", "choices", "usage")

    @app.post("/v1/completions", **completion, **answers(*members, streams=True))
    async def completions(request: Request) -> Response:
        return await generate(service, max_body_bytes, request, begin_completion)

    messages = [{"role": "user", "content": "Hello"}]
    chat = takes(ChatRequest, {"messages": messages, "max_tokens": 8}, ["messages"])

    @app.post("/v1/chat/completions", **chat, **answers(*members, streams=True))
    async def chat_completions(request: Request) -> Response:
        return await generate(service, max_body_bytes, request, begin_chat_completion)

    @app.post("/v1/embeddings")
    async def embeddings(_: Request) -> Response:
        message = "embeddings are not supported: this server generates text; use /v1/completions"
        return error_response(ApiError("not_implemented", message, code="not_implemented"))


def _add_models(app: FastAPI, service: GenerationService) -> None:
    engine = service.engine

    def cards() -> dict[str, dict[str, Any]]:
        """By name, the model's first."""
        service.check_ready()
        base = engine.model_name
        found: dict[str, tuple[int, str, str | None]] = {base: (engine.created, engine.model_root, None)}
        found |= {adapter.name: (adapter.created, adapter.path, base) for adapter in engine.adapters.listed}
        return {
            name: {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "jaxserve",
                "root": root,
                "parent": parent,
                "max_model_len": engine.max_model_len,
            }
            for name, (created, root, parent) in found.items()
        }

    def card(model: str) -> dict[str, Any]:
        service.check_ready(model)
        return cards()[model]

    # Clients poll this list to learn that a server is up, so it waits for the model.
    @app.get("/v1/models", **answers("object", "data"))
    async def models(_: Request) -> Response:
        return answer_with(lambda: {"object": "list", "data": list(cards().values())})

    @app.get("/v1/models/{model:path}", **parameters(("model", "path", {"type": "string"})), **answers("id", "object"))
    async def model(request: Request) -> Response:
        return answer_with(lambda: card(request.path_params["model"]))
