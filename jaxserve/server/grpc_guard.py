"""What every gRPC call goes through: API keys, and errors as statuses."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health

from jaxserve.server.auth import KeyRing
from jaxserve.server.engine_api import EngineApi
from jaxserve.server.errors import ApiError, stream_error
from jaxserve.server.grpc_convert import error_metadata

HEALTH_PREFIX = f"/{health.SERVICE_NAME}/"
Context = Any
"""`grpc.aio.ServicerContext`, whose methods the stubs describe only in part."""


async def abort(context: Context, error: ApiError) -> NoReturn:
    """Ends a call with an error."""
    await context.abort(grpc.StatusCode[error.grpc_status], error.message, error_metadata(error))
    raise AssertionError("context.abort returned")


@contextlib.asynccontextmanager
async def errors_to_status(engine: EngineApi, context: Context) -> AsyncIterator[None]:
    """Turns any exception of the body into the call's status."""
    try:
        yield
    except Exception as exc:
        await abort(context, stream_error(exc, engine.state))


def seconds_left(context: Context) -> float | None:
    """Until a call's deadline; None: it has none.

    Raises:
      ApiError: it has passed.
    """
    left: float | None = context.time_remaining()
    if left is not None and left <= 0:
        raise ApiError("expired", "the call's deadline has passed", code="deadline_exceeded")
    return left


def tenant_of_call(keys: KeyRing, metadata: Any) -> str:
    """The tenant of a call's key; see `KeyRing.tenant_of`."""
    header = dict(metadata or ()).get("authorization")
    return keys.tenant_of(header if isinstance(header, str) else None)


class KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without a key, whatever service they are for.

    Args:
      keys: none: every call passes.
      guard_health: whether health checks need a key too.
    """

    def __init__(self, keys: KeyRing, guard_health: bool) -> None:
        self._keys = keys
        self._guard_health = guard_health

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's handler, or one that refuses."""
        if handler_call_details.method.startswith(HEALTH_PREFIX) and not self._guard_health:
            return await continuation(handler_call_details)
        try:
            tenant_of_call(self._keys, handler_call_details.invocation_metadata)
        except ApiError as error:
            return _refusing(error)
        return await continuation(handler_call_details)


def _refusing(error: ApiError) -> Any:
    async def refuse(_: Any, context: Context) -> None:
        await abort(context, error)

    # A refusal has no message, so it is one for calls of every kind.
    return grpc.unary_unary_rpc_method_handler(refuse)
