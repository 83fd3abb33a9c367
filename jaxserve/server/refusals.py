"""What is refused, or fails by a fault of ours, before the engine has it: counted here, once, for both fronts.

What the engine refuses it counts itself, and so does the service where it refuses on the engine's behalf: each of these
is a `RejectedError`. What the fronts refuse alone, as the engine takes nothing or too many grammars wait, comes as an
`ApiError` or as what a stuck or dead engine raises. A fault counts as a request that failed: no reason of a refusal
would have anybody look for its cause. Mistakes of the caller that show before the prompt has tokens are not counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from jaxserve.core import JaxserveError, RejectedError
from jaxserve.core.sampling_params import MAX_NUM_CHOICES
from jaxserve.server.engine_api import EngineApi
from jaxserve.server.errors import to_api_error

REASONS = ("draining", "engine_stuck", "engine_dead", "grammars_waiting")


@contextlib.contextmanager
def counting_refusals(engine: EngineApi, num_choices: int, what: str) -> Iterator[None]:
    """The block brings a request to the engine; what ends it is counted and raised as an `ApiError`.

    Args:
      num_choices: that are refused together; of a number that is still to be checked, the next valid one counts.
      what: the request, for the log.
    """
    try:
        yield
    except Exception as exc:
        error = to_api_error(exc, what)
        # Until the model is loaded there is nothing to count with.
        with contextlib.suppress(JaxserveError):
            if error.code in REASONS and not isinstance(exc, RejectedError):
                engine.metrics.rejected(error.code, max(num_choices, 1))
            elif error.kind == "internal":
                engine.metrics.failed(max(num_choices, 1))
        if error is exc:
            raise
        raise error from exc


def num_choices_of(body: Mapping[str, Any]) -> int:
    """How many choices a request's body asks for that has not been checked; where that cannot be told, one."""
    n, prompt = body.get("n"), body.get("prompt")
    each = min(max(n, 1), MAX_NUM_CHOICES) if isinstance(n, int) else 1
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):  # a list of numbers is one prompt
        return each * len(prompt)
    return each
