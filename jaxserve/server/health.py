"""What every probe says of an engine's state: one table for HTTP, gRPC and the exit status.

state          /health   /ready   gRPC          requests
loading        200       503      NOT_SERVING   503 loading
warming_up     200       503      NOT_SERVING   503 warming_up
ready          200       200      SERVING       taken
stuck          503       503      NOT_SERVING   503 engine_stuck; open ones have failed, while it drains too
draining       200       503      NOT_SERVING   503 draining; open ones go on
stopped        503       503      NOT_SERVING   503 engine_dead
dead           503       503      NOT_SERVING   503 engine_dead; open ones have failed

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
      body: JSON members that both have.
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
    if state == "stuck":
        age_s = round(engine.step_age_s, 3)
        body |= {"reason": f"the engine has work and has made no step for {age_s:.1f} s", "step_age_s": age_s}
    if engine.error is not None:
        body |= {"reason": "the engine died; the server must be restarted", "error": type(engine.error).__name__}
    return Health(state, is_alive, state == "ready", body)
