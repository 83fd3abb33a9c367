"""What operators and their tools call: probes, metrics, load, the prefix cache, profiles."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from jaxserve.core import EngineDeadError, NotReadyError
from jaxserve.server.answering import answer_with
from jaxserve.server.auth import check_operator
from jaxserve.server.description import answers
from jaxserve.server.errors import ApiError, to_api_error
from jaxserve.server.json_body import JsonResponse, error_response
from jaxserve.server.metrics_export import render_metrics
from jaxserve.server.process_metrics import ProcessCollector
from jaxserve.server.service import GenerationService
from jaxserve.server.settings import HttpSettings
from jaxserve.server.version import package_version

_METRICS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Prometheus' text, or OpenMetrics if it is asked for",
        "content": {kind: {"schema": {"type": "string"}} for kind in ("text/plain", "application/openmetrics-text")},
    }
}


def add_probes(app: FastAPI, service: GenerationService, settings: HttpSettings) -> None:
    """Adds /health, /ready, /metrics and /version, which answer in every state of the engine."""
    engine = service.engine

    @app.get("/health", **answers("status", "state", other=[503]))
    async def health(_: Request) -> Response:
        health = service.health
        return JsonResponse(health.body, 200 if health.is_alive else 503)

    @app.get("/ready", **answers("ready", "state", other=[503]))
    async def ready(_: Request) -> Response:
        health = service.health
        body = {"ready": health.is_ready} | {name: value for name, value in health.body.items() if name != "status"}
        if health.is_ready:
            return JsonResponse(body)
        if health.state in ("loading", "warming_up"):
            done, total, what = engine.progress
            body["progress"] = {"done": done, "total": total, "what": what}
        return JsonResponse(body, 503, {"Retry-After": "5"})

    @app.get("/metrics", response_class=PlainTextResponse, responses=_METRICS)
    async def metrics(request: Request) -> Response:
        try:
            registry = engine.metrics.registry
        except (NotReadyError, EngineDeadError):  # loading, or dead before it was loaded
            registry = CollectorRegistry()
        compat = settings.metrics_compat == "vllm"
        text, content_type = render_metrics(
            registry, request.headers.get("accept", ""), compat, ProcessCollector(engine.model_name)
        )
        return Response(text, headers={"Content-Type": content_type})

    @app.get("/version", **answers("version"))
    async def version_(_: Request) -> Response:
        return JsonResponse({"version": package_version()})


def add_operator_routes(app: FastAPI, service: GenerationService, settings: HttpSettings) -> None:
    """Adds /load, /reset_prefix_cache, /start_profile and /stop_profile."""
    profiler = _Profiler(service, settings.profile_dir)

    @app.get("/load", **answers("server_load"))
    async def load(_: Request) -> Response:
        return answer_with(lambda: _load(service))

    @app.post("/reset_prefix_cache", **answers("status"))
    async def reset_prefix_cache(request: Request) -> Response:
        return answer_with(lambda: _reset_prefix_cache(service, request))

    @app.post("/start_profile", **answers("status", "profile_dir"))
    async def start_profile(request: Request) -> Response:
        return await profiler.answer(request, start=True)

    @app.post("/stop_profile", **answers("status", "profile_dir"))
    async def stop_profile(request: Request) -> Response:
        return await profiler.answer(request, start=False)


def _load(service: GenerationService) -> dict[str, Any]:
    """vLLM's `server_load`, and what it is made of under the names of the metrics."""
    if service.health.state != "draining":
        service.check_ready()
    load = service.engine.load
    return {
        "server_load": load.running + load.waiting,
        "num_requests_running": load.running,
        "num_requests_waiting": load.waiting,
        "kv_cache_usage_perc": load.kv_usage,
    }


def _reset_prefix_cache(service: GenerationService, request: Request) -> dict[str, Any]:
    check_operator(request.scope, "this clears the pages of every tenant")
    service.check_ready()
    service.engine.reset_prefix_cache()
    return {"status": "ok"}


class _Profiler:
    """Starts and stops the process's one profile.

    Args:
      folder: where traces go; "": none are written.
    """

    def __init__(self, service: GenerationService, folder: str) -> None:
        self._service = service
        self._folder = folder
        self._running = False
        self._changing = asyncio.Lock()

    async def answer(self, request: Request, start: bool) -> Response:
        """Does it and answers 200, or says why not."""
        try:
            check_operator(request.scope, "a profile slows the requests of every tenant")
            self._service.check_ready()
            if not self._folder:
                message = "profiling is off; start the server with --profile_dir=FOLDER"
                raise ApiError("invalid", message, code="profiling_off")
            async with self._changing:
                await (self._start() if start else self._stop())
            return JsonResponse({"status": "started" if start else "stopped", "profile_dir": self._folder})
        except Exception as exc:
            return error_response(to_api_error(exc))

    async def _start(self) -> None:
        if self._running:
            raise ApiError("conflict", "a profile is running; POST /stop_profile ends it", code="profile_running")
        await asyncio.to_thread(self._service.engine.start_profile, self._folder)
        self._running = True

    async def _stop(self) -> None:
        if not self._running:
            raise ApiError("conflict", "no profile is running; POST /start_profile begins one", code="no_profile")
        self._running = False
        await asyncio.to_thread(self._service.engine.stop_profile)
