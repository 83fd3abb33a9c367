"""What every probe says of an engine's state, over HTTP and gRPC; the table is in docs/reliability.md.

`/health` says whether a supervisor should restart the process, `/ready` whether clients should come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxserve.server.engine_api import EngineApi

_ALIVE = frozenset(("loading", "warming_up", "ready", "draining"))


@dataclass(frozen=True, slots=True)
class Health:
    """A row of the table.

    Attributes:
      state: the engine's, or "draining" of a server that is about to.
      is_alive, is_ready: what `/health` and `/ready` say.
      body: JSON members that both have: the state, and unless it is ready why.
    """

    state: str
    is_alive: bool
    is_ready: bool
    body: dict[str, Any]


def health_of(engine: EngineApi, *, is_leaving: bool = False) -> Health:
    """The health now; waits for nobody.

    Args:
      is_leaving: balancers are to be told that the server drains, though requests are still taken.
    """
    state = engine.state
    if is_leaving and state == "ready":
        state = "draining"
    is_alive = state in _ALIVE
    body: dict[str, Any] = {"status": "ok" if is_alive else state, "state": state}
    if state != "ready":
        body["reason"] = _reason(engine, state, is_leaving and engine.state == "ready")
    if state in ("stuck", "draining", "dead"):
        body["step_age_s"] = round(engine.step_age_s, 3)
    if engine.error is not None:
        body["error"] = type(engine.error).__name__
    return Health(state, is_alive, state == "ready", body)


def _reason(engine: EngineApi, state: str, takes_requests: bool) -> str:
    """Why a server is not ready."""
    if state == "stuck":
        return f"the engine has work and has made no step for {engine.step_age_s:.1f} s"
    if state == "draining":
        return "the server is about to shut down" if takes_requests else "the server is shutting down"
    if state == "dead":
        return "the engine died; the server must be restarted"
    if state == "stopped":
        return "the engine has stopped; the server must be restarted"
    done, total, what = engine.progress
    return f"the model is not ready: {what} ({done} of {total})"
