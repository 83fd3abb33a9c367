"""/debug/state and /debug/trace: what the engine is doing and what it just did, for operators.

Both show the ids and tenants of every request, so the key of a tenant does not open them.
"""

from __future__ import annotations

import asyncio
import io
import math
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.core import EngineView, IterationView
from jaxserve.server.answering import answer_with
from jaxserve.server.auth import check_operator
from jaxserve.server.description import answers, parameters
from jaxserve.server.errors import ApiError, to_api_error
from jaxserve.server.json_body import error_response
from jaxserve.server.service import GenerationService
from jaxserve.sim.perfetto import write_recording

MAX_VIEW_ITERATIONS = 256
"""Most iterations of one /debug/state."""


def add_debug_routes(app: FastAPI, service: GenerationService) -> None:
    """Adds both."""

    iterations = {"type": "integer", "minimum": 0, "maximum": MAX_VIEW_ITERATIONS}
    members = ("model", "state", "totals", "slots", "queue", "iterations")

    @app.get("/debug/state", **parameters(("iterations", "query", iterations)), **answers(*members))
    async def state(request: Request) -> Response:
        return answer_with(lambda: _state(service, request))

    bounds = parameters(
        ("iterations", "query", {"type": "integer", "minimum": 1, "maximum": 10**9 - 1}),
        ("seconds", "query", {"type": "number", "exclusiveMinimum": 0}),
    )

    @app.get("/debug/trace", **bounds, **answers("traceEvents"))
    async def trace(request: Request) -> Response:
        try:
            _check_operator(service, request)
            count = _whole_number(request, "iterations", 1, None)
            seconds = _seconds(request)
            recording = service.engine.recording(2**31 if count is None else count, seconds)
            if not recording.iterations and not recording.events and count is None and seconds == math.inf:
                _check_recorded(service)
            file = io.StringIO()
            await asyncio.to_thread(write_recording, recording, file)
        except Exception as exc:
            return error_response(to_api_error(exc))
        headers = {"Content-Disposition": 'attachment; filename="jaxserve-trace.json"'}
        return Response(file.getvalue(), media_type="application/json", headers=headers)


def _state(service: GenerationService, request: Request) -> dict[str, Any]:
    _check_operator(service, request)
    count = _whole_number(request, "iterations", 0, MAX_VIEW_ITERATIONS)
    engine = service.engine
    view = engine.view(count or 0)
    return {"model": engine.model_name, "state": engine.state, "max_model_len": engine.max_model_len, **_shown(view)}


def _shown(view: EngineView) -> dict[str, Any]:
    return {
        "num_requests_running": view.num_running,
        "num_requests_waiting": view.num_waiting,
        "waiting_tokens": view.waiting_tokens,
        "max_num_seqs": view.max_num_seqs,
        "kv": {
            "page_size": view.page_size,
            "pages_total": view.pages_total,
            "pages_free": view.pages_free,
            "pages_cached": view.pages_cached,
            "pages_owned": view.pages_owned,
        },
        "totals": asdict(view.totals),
        "slots": [asdict(slot) for slot in view.slots],
        "queue": [asdict(waiting) for waiting in view.queue],
        "iterations": [_shown_iteration(iteration, view.now) for iteration in view.iterations],
    }


def _shown_iteration(view: IterationView, now: float) -> dict[str, Any]:
    return {
        "iteration": view.iteration,
        "age_s": now - view.ended_at,
        "duration_s": view.ended_at - view.began_at,
        "bucket": view.bucket,
        "decode": view.decode_slots,
        "steps": view.num_steps,
        "decode_tokens": view.num_decode_tokens,
        "prefill": [(chunk.slot, chunk.num_tokens) for chunk in view.prefill],
        "num_preempted": len(view.preempted),
        "num_requests_waiting": view.num_waiting,
        "pages_owned": view.pages_owned,
    }


def _check_operator(service: GenerationService, request: Request) -> None:
    """Raises ApiError 403 for a tenant's key, 503 unless there is an engine to look at."""
    check_operator(request.scope, "this shows the requests of every tenant")
    if service.health.state != "draining":
        service.check_ready()


def _check_recorded(service: GenerationService) -> None:
    """Raises ApiError 400 when iterations ran and none was kept."""
    if service.engine.totals.iterations:
        message = "no iteration is kept in memory; start the server with --trace_buffer=N, N at least 1"
        raise ApiError("invalid", message, code="trace_buffer_off")


def _whole_number(request: Request, name: str, low: int, high: int | None) -> int | None:
    """A query parameter; None without it."""
    text = request.query_params.get(name)
    if text is None:
        return None
    rule = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    if not (
        text.isascii() and text.isdigit() and len(text) <= 9 and low <= int(text) and (not high or int(text) <= high)
    ):
        raise ApiError("invalid", f"{name} is {text[:50]!r}; it must be {rule}", param=name)
    return int(text)


def _seconds(request: Request) -> float:
    """The parameter `seconds`; infinity without it."""
    text = request.query_params.get("seconds")
    if text is None:
        return math.inf
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise ApiError("invalid", f"seconds is {text[:50]!r}; it must be a number above 0", param="seconds")
    return seconds
