"""The error tree.

ValueError                     a caller's mistake (bad parameter, too long, never fits): HTTP 400
JaxserveError                  a state of the service
 ├─ RejectedError              refused at submit; `.rejection` says why: HTTP 429 / 503, or 400 for never-fits
 ├─ RequestFailedError         this request failed, others go on: HTTP 500
 │   ├─ UnfollowableError      no output follows what it asks for any further: HTTP 400
 │   └─ CutShortError          it was open when the time to drain was over: HTTP 503
 ├─ EngineDeadError            the engine loop ended with an exception: HTTP 503
 ├─ HostLostError              another process of the engine is gone, hung or diverged: the engine dies of it
 ├─ NotReadyError              loading, warming up or draining: HTTP 503 + Retry-After
 ├─ MissingBucketError         a plan needs a program that was not compiled: an internal fault
 ├─ CheckpointError            a model file is damaged, short or does not fit its config
 ├─ AdapterNotFoundError       there is no LoRA adapter of that name, or in that folder: HTTP 404
 └─ UnsupportedModelError      architecture, rope scaling or quantisation that is not known
"""

from __future__ import annotations

from dataclasses import dataclass

REJECTION_REASONS = (
    "queue_full_requests",
    "queue_full_tokens",
    "queue_full_class_requests",
    "queue_full_class_tokens",
    "displaced",
    "never_fits",
    "duplicate_id",
    "unknown_class",
    "unknown_adapter",
    "adapter_leaving",
    "deadline",
    "deadline_infeasible",
    "draining",
    "engine_stuck",
    "engine_dead",
    "grammars_waiting",
    "prefill_unavailable",
    "invalid",
)


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a request was refused.

    Attributes:
      reason: one of `REJECTION_REASONS`.
      message: for the client; names the limit and the value seen.
      retry_after_s: seconds after which a retry may succeed; None where a retry never can.
    """

    reason: str
    message: str
    retry_after_s: float | None = None


class JaxserveError(Exception):
    """Base of the service's own errors."""


class RejectedError(JaxserveError):
    """The request was refused at submit."""

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(rejection.message)
        self.rejection = rejection


class RequestFailedError(JaxserveError):
    """This request failed; the engine and the other requests go on."""


class UnfollowableError(RequestFailedError):
    """What the request asks of its output leaves nothing to go on with, which showed while tokens came."""


class CutShortError(RequestFailedError):
    """The server is shutting down, and the request had not ended in time."""

    code = "draining"


class EngineDeadError(JaxserveError):
    """The engine loop ended with an exception; only a restart helps."""

    code = "engine_dead"


class EngineStuckError(JaxserveError):
    """The engine has work and makes no progress: a step has not come back in time, or a start goes no further."""

    code = "engine_stuck"


class HostLostError(JaxserveError):
    """Another process that holds the model too is gone, hung, or computed something else."""


class NotReadyError(JaxserveError):
    """The engine is loading, warming up or draining."""

    def __init__(self, message: str, retry_after_s: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class MissingBucketError(JaxserveError):
    """No compiled program covers a plan; compiling now would stall every request."""


class CheckpointError(JaxserveError):
    """A model file is damaged, short, or does not fit its configuration."""


class AdapterNotFoundError(JaxserveError):
    """There is no LoRA adapter of that name, or in that folder."""


class UnsupportedModelError(JaxserveError):
    """The model needs something this version lacks; the message names what is supported."""
