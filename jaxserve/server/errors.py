"""One error map for both fronts: what went wrong -> HTTP status and body, gRPC status.

kind                   HTTP  gRPC                 when
invalid                400   INVALID_ARGUMENT     a caller's mistake, a request that can never fit or be followed
unauthenticated        401   UNAUTHENTICATED      missing or wrong API key
forbidden              403   PERMISSION_DENIED    another tenant than the API key's
not_found              404   NOT_FOUND            unknown model, LoRA adapter or path
method_not_allowed     405   UNIMPLEMENTED
request_timeout        408   DEADLINE_EXCEEDED    the body did not arrive in time
conflict               409   ALREADY_EXISTS       the request id is live, or a profile is (not) running
too_large              413   INVALID_ARGUMENT     the body is over the limit
unsupported_media      415   INVALID_ARGUMENT     not JSON
overloaded             429   RESOURCE_EXHAUSTED   the waiting queue is full
internal               500   INTERNAL             a fault of ours
not_implemented        501   UNIMPLEMENTED        no such ability
unavailable            503   UNAVAILABLE          loading, warming up, stuck, draining or dead
expired                504   DEADLINE_EXCEEDED    the request's own deadline passed
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from jaxserve.core import (
    AdapterNotFoundError,
    CutShortError,
    EngineDeadError,
    EngineStuckError,
    FinishReason,
    JaxserveError,
    NotReadyError,
    RejectedError,
    RequestFailedError,
    UnfollowableError,
)

log = logging.getLogger("jaxserve.server")


@dataclass(frozen=True, slots=True)
class Kind:
    """One row of the map above; `type` is OpenAI's `error.type`."""

    http_status: int
    type: str
    grpc_status: str


KINDS = {
    "invalid": Kind(400, "invalid_request_error", "INVALID_ARGUMENT"),
    "unauthenticated": Kind(401, "authentication_error", "UNAUTHENTICATED"),
    "forbidden": Kind(403, "permission_error", "PERMISSION_DENIED"),
    "not_found": Kind(404, "invalid_request_error", "NOT_FOUND"),
    "method_not_allowed": Kind(405, "invalid_request_error", "UNIMPLEMENTED"),
    "request_timeout": Kind(408, "timeout_error", "DEADLINE_EXCEEDED"),
    "conflict": Kind(409, "invalid_request_error", "ALREADY_EXISTS"),
    "too_large": Kind(413, "invalid_request_error", "INVALID_ARGUMENT"),
    "unsupported_media": Kind(415, "invalid_request_error", "INVALID_ARGUMENT"),
    "overloaded": Kind(429, "rate_limit_error", "RESOURCE_EXHAUSTED"),
    "internal": Kind(500, "server_error", "INTERNAL"),
    "not_implemented": Kind(501, "invalid_request_error", "UNIMPLEMENTED"),
    "unavailable": Kind(503, "service_unavailable_error", "UNAVAILABLE"),
    "expired": Kind(504, "timeout_error", "DEADLINE_EXCEEDED"),
}

_REJECTIONS = {
    "queue_full_requests": "overloaded",
    "queue_full_tokens": "overloaded",
    "queue_full_class_requests": "overloaded",
    "queue_full_class_tokens": "overloaded",
    "displaced": "overloaded",
    "deadline_infeasible": "overloaded",
    "unknown_class": "invalid",
    "unknown_adapter": "not_found",
    "adapter_leaving": "overloaded",
    "never_fits": "invalid",
    "duplicate_id": "conflict",
    "draining": "unavailable",
    "prefill_unavailable": "unavailable",
    "deadline": "expired",
}

_STATUS_OF_END = {
    FinishReason.STOP: 200,
    FinishReason.LENGTH: 200,
    FinishReason.ABORT: 499,
    FinishReason.EXPIRED: 504,
    FinishReason.ERROR: 500,
    FinishReason.UNFOLLOWABLE: 400,
    FinishReason.DISPLACED: 429,
}


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
      kind: a key of `KINDS`.
      message: for the client; names field, rule and value.
      param: the request field at fault, if one is.
      code: a stable word for programs, as `model_not_found` or `queue_full_requests`.
      retry_after_s: seconds after which a retry may succeed; None where it never will.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def http_status(self) -> int:
        """HTTP status code."""
        return KINDS[self.kind].http_status

    @property
    def grpc_status(self) -> str:
        """Name of the `grpc.StatusCode`."""
        return KINDS[self.kind].grpc_status

    def body(self) -> dict[str, object]:
        """OpenAI's error object; strings and null only, so always strict JSON."""
        error = {"message": self.message, "type": KINDS[self.kind].type, "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """`Retry-After` (whole seconds, at least 1) and `WWW-Authenticate` where they belong."""
        headers = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.kind == "unauthenticated":
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def to_api_error(exc: BaseException, what: str = "a request") -> ApiError:
    """The answer to an exception of the engine or of request parsing.

    Anything unknown becomes a plain 500: its text may hold a prompt, so it goes to the log as a
    traceback of our own frames and never to the client. `what` names the request there.
    """
    match exc:
        case ApiError():
            return exc
        case RejectedError():
            rejection = exc.rejection
            kind = _REJECTIONS.get(rejection.reason, "overloaded")
            retry_after_s = rejection.retry_after_s
            if retry_after_s is None and kind in ("overloaded", "unavailable"):
                retry_after_s = 1.0
            param = "request_id" if rejection.reason == "duplicate_id" else None
            return ApiError(kind, rejection.message, param=param, code=rejection.reason, retry_after_s=retry_after_s)
        case AdapterNotFoundError():
            return ApiError("not_found", str(exc), code="lora_not_found")
        case NotReadyError():
            return ApiError("unavailable", str(exc), code="not_ready", retry_after_s=exc.retry_after_s)
        case EngineDeadError():
            return ApiError("unavailable", f"the engine stopped: {exc}", code=exc.code, retry_after_s=30.0)
        case EngineStuckError():
            return ApiError("unavailable", str(exc), code=exc.code, retry_after_s=30.0)
        case UnfollowableError():
            return ApiError("invalid", str(exc), param=_param(str(exc)), code="unfollowable")
        case CutShortError():
            return ApiError("unavailable", str(exc), code=exc.code, retry_after_s=5.0)
        case RequestFailedError():
            return ApiError("internal", f"the request failed: {exc}", code="request_failed")
        case ValueError():
            return ApiError("invalid", str(exc), param=_param(str(exc)))
        case JaxserveError():
            return ApiError("internal", str(exc), code="internal_error")
    log.error("unexpected %s while answering %s", type(exc).__name__, what, exc_info=exc)
    return ApiError("internal", "an internal error occurred; the server's log has its cause", code="internal_error")


def stream_error(exc: BaseException, state: str, what: str = "a request") -> ApiError:
    """The error that ends an answer; while the engine drains or is dead, the cause is the shutdown."""
    error = to_api_error(exc, what)
    if error.kind == "internal" and error.code == "request_failed" and state in ("draining", "stopped"):
        return ApiError("unavailable", str(exc), code=state, retry_after_s=5.0)
    return error


def unfinished_error(finish_reason: str | None, state: str) -> ApiError | None:
    """The error behind an end that is no completion; None when the choice ended as a client may expect.

    Args:
      finish_reason: a `FinishReason` value.
      state: the engine's state; an abort while it drains or is dead is the server's doing.
    """
    if finish_reason == FinishReason.EXPIRED:
        return ApiError("expired", "the request's deadline passed before it finished", code="deadline_exceeded")
    if finish_reason == FinishReason.ERROR:
        return ApiError("internal", "the request failed", code="request_failed")
    if finish_reason == FinishReason.ABORT and state in ("draining", "stopped", "dead"):
        return ApiError("unavailable", "the server shut down before it finished", code=state, retry_after_s=5.0)
    return None


def status_of_end(outcome: str, rejected: bool, cause: str = "") -> int:
    """The HTTP status that an end comes down to, also where a stream had begun with 200; 499: the client left.

    Args:
      outcome: a `FinishReason` value, or the reason of a rejection.
      rejected: it is a rejection.
      cause: see `RequestRecord`.
    """
    if cause:
        return KINDS["unavailable"].http_status
    if rejected:
        return KINDS[_REJECTIONS.get(outcome, "overloaded")].http_status
    return _STATUS_OF_END[FinishReason(outcome)]


def _param(message: str) -> str | None:
    """The field a `SamplingParams` message starts with."""
    first = message.split(" ", 1)[0].removesuffix(":")
    return first if first.isidentifier() and ("_" in first or first in _FIELDS) else None


_FIELDS = frozenset(("n", "temperature", "seed", "stop", "logprobs", "prompt", "messages", "priority"))
