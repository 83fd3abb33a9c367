"""The router's HTTP application.

    POST /v1/completions  /v1/chat/completions  /v1/responses  /v1/embeddings    to one replica, by the policy
    POST /tokenize  /detokenize     GET /tokenizer_info  /openapi.json           to one replica
    GET, DELETE /v1/responses/{id}                                               to one replica
    GET  /v1/models  /v1/models/{id}  /load                                      of all, merged
    POST /v1/load_lora_adapter  /v1/unload_lora_adapter  /reset_prefix_cache     to all
    GET  /health (200 while a replica is in rotation)  /ready (and not draining)  /version  /metrics    its own
    GET  /v1/router/replicas                                                     for operators
    /  /debug/state  /debug/trace  /start_profile  /stop_profile                 of one replica: refused, saying where

Whatever else is asked for is 404 here and reaches no replica.
"""

from __future__ import annotations

from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxserve.router.fan_out import all_or_which, ask_all, merged_models, one_model, summed_load
from jaxserve.router.pool import ReplicaPool
from jaxserve.router.proxy import Call, ProxiedResponse
from jaxserve.router.request_reader import read_route
from jaxserve.router.settings import RouterSettings
from jaxserve.router.upstream import TextHeaders, Upstream, request_headers
from jaxserve.routing import RouteRequest
from jaxserve.server.auth import PROBES, ApiKeyGuard, KeyRing, check_operator, key_tenant
from jaxserve.server.cors import add_cors
from jaxserve.server.errors import ApiError, to_api_error
from jaxserve.server.host_guard import HostGuard
from jaxserve.server.http_errors import http_exception, unexpected
from jaxserve.server.json_body import JsonResponse, error_response, read_body
from jaxserve.server.metrics_export import render_metrics
from jaxserve.server.version import package_version

ROUTED = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
"""Paths whose requests are routed by their prompts."""
ANY_REPLICA = ("/v1/embeddings", "/tokenize", "/detokenize")
ALL_REPLICAS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/reset_prefix_cache")
ONE_REPLICA = ("/", "/debug/state", "/debug/trace", "/start_profile", "/stop_profile")


class RouterApp:
    """The routes over a pool of replicas.

    Args:
      upstream: open while the application serves.

    Attributes:
      asgi: the application.
      active: answers on their way.
    """

    def __init__(self, pool: ReplicaPool, upstream: Upstream, settings: RouterSettings) -> None:
        self._pool = pool
        self._upstream = upstream
        self._settings = settings
        self.active: set[ProxiedResponse] = set()
        routes = [
            *(Route(path, self._routed, methods=["POST"]) for path in ROUTED),
            *(Route(path, self._any_replica, methods=["POST"]) for path in ANY_REPLICA),
            *(Route(path, self._to_all, methods=["POST"]) for path in ALL_REPLICAS),
            *(Route(path, self._of_one_replica, methods=["GET", "POST"]) for path in ONE_REPLICA),
            Route("/tokenizer_info", self._asked, methods=["GET"]),
            Route("/openapi.json", self._asked, methods=["GET"]),
            Route("/v1/responses/{response_id}", self._response, methods=["GET", "DELETE"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{model:path}", self._model, methods=["GET"]),
            Route("/load", self._load, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
            Route("/ready", self._ready, methods=["GET"]),
            Route("/version", self._version, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/v1/router/replicas", self._replicas, methods=["GET"]),
        ]
        app = Starlette(
            routes=routes,
            exception_handlers={HTTPException: http_exception, ApiError: self._api_error, Exception: unexpected},
        )
        app.router.redirect_slashes = False
        if settings.api_keys:
            open_paths = frozenset[str]() if settings.guard_probes else PROBES
            app.add_middleware(ApiKeyGuard, keys=KeyRing(settings.api_keys), open_paths=open_paths)
        if settings.allowed_origins:
            add_cors(app, settings.allowed_origins)
        if settings.allowed_hosts:
            app.add_middleware(HostGuard, names=settings.allowed_hosts)
        self.asgi = app

    async def _routed(self, request: Request) -> Response:
        body = await self._body(request)
        route = read_route(
            body, request.headers, key_tenant(request.scope), self._settings.proxy.session_header.lower()
        )
        return self._proxied(request, _target(request), body, route)

    async def _any_replica(self, request: Request) -> Response:
        return self._proxied(request, _target(request), await self._body(request), RouteRequest())

    async def _asked(self, request: Request) -> Response:
        self._check_open()
        return self._proxied(request, _target(request), None, RouteRequest())

    async def _response(self, request: Request) -> Response:
        self._check_open()
        target = f"/v1/responses/{quote(request.path_params['response_id'], safe='')}"
        return self._proxied(request, target, None, RouteRequest())

    async def _models(self, request: Request) -> Response:
        return merged_models(await ask_all(self._pool, self._upstream, "GET", "/v1/models", _headers(request)))

    async def _model(self, request: Request) -> Response:
        target = f"/v1/models/{quote(request.path_params['model'], safe='/')}"
        if ".." in target.split("/"):
            raise ApiError("not_found", f"there is no model {request.path_params['model'][:200]!r}")
        return one_model(await ask_all(self._pool, self._upstream, "GET", target, _headers(request)))

    async def _load(self, request: Request) -> Response:
        return summed_load(await ask_all(self._pool, self._upstream, "GET", "/load", _headers(request)))

    async def _to_all(self, request: Request) -> Response:
        body = await self._body(request)
        path = request.scope["path"]
        replies = await ask_all(self._pool, self._upstream, "POST", path, _headers(request), body)
        for reply in replies:
            if path == "/reset_prefix_cache" and reply.status < 300:
                self._pool.forget_prompts(reply.replica)
            reply.replica.probe_now.set()  # an adapter is routed to once it is listed
        return all_or_which(replies)

    async def _of_one_replica(self, request: Request) -> Response:
        message = (
            f"{request.scope['path']} is of one replica: ask it at its own address, as GET /v1/router/replicas lists"
        )
        return error_response(ApiError("not_found", message, code="of_one_replica"))

    async def _health(self, _: Request) -> Response:
        num_up = len(self._pool.in_rotation)
        body = {"status": "ok" if num_up else "dead", "replicas": len(self._pool.replicas), "in_rotation": num_up}
        return JsonResponse(body, 200 if num_up else 503)

    async def _ready(self, _: Request) -> Response:
        num_up = len(self._pool.in_rotation)
        state = "draining" if self._pool.draining else "ready" if num_up else "no_replica"
        body = {"ready": state == "ready", "state": state, "in_rotation": num_up}
        return JsonResponse(body, 200) if state == "ready" else JsonResponse(body, 503, {"Retry-After": "5"})

    async def _version(self, _: Request) -> Response:
        return JsonResponse({"version": package_version()})

    async def _metrics(self, request: Request) -> Response:
        text, content_type = render_metrics(self._pool.metrics.registry, request.headers.get("accept", ""), False)
        return Response(text, headers={"Content-Type": content_type})

    async def _replicas(self, request: Request) -> Response:
        check_operator(request.scope, "this shows the load of every tenant")
        return JsonResponse({"policy": self._settings.routing.policy, "replicas": self._pool.view()})

    async def _body(self, request: Request) -> bytes:
        self._check_open()
        return await read_body(request, self._settings.proxy.max_body_bytes)

    async def _api_error(self, _: Request, exc: Exception) -> Response:
        error = to_api_error(exc)
        self._pool.metrics.refused.labels(error.code or error.kind).inc()
        return error_response(error)

    def _check_open(self) -> None:
        if self._pool.draining:
            raise ApiError("unavailable", "the router is shutting down", code="draining", retry_after_s=5.0)

    def _proxied(self, request: Request, target: str, body: bytes | None, route: RouteRequest) -> Response:
        call = Call(request.method, target, _headers(request), body, route)
        return ProxiedResponse(call, self._pool, self._upstream, self._settings.proxy.max_retries, self.active)


def _target(request: Request) -> str:
    """Path and query; the path is one of a route's own, so nothing of it is the client's.

    Not from `request.url`, which is put together with the client's Host header and taken apart again.
    """
    path: str = request.scope["path"]
    query = request.scope["query_string"].decode("latin-1")
    return path + (f"?{query}" if query else "")


def _headers(request: Request) -> TextHeaders:
    return request_headers(request.scope["headers"])
