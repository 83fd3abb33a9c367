"""API keys on gRPC: who calls, and the guard of the services beside ours."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health

from jaxserve.server.auth import KeyRing
from jaxserve.server.errors import ApiError
from jaxserve.server.grpc_convert import error_metadata

HEALTH_PREFIX = f"/{health.SERVICE_NAME}/"
Context = Any
"""`grpc.aio.ServicerContext`, whose methods the stubs describe only in part."""


async def abort(context: Context, error: ApiError) -> NoReturn:
    """Ends a call with an error."""
    await context.abort(grpc.StatusCode[error.grpc_status], error.message, error_metadata(error))
    raise AssertionError("context.abort returned")


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
