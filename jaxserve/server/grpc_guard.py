"""What every gRPC call goes through: API keys, messages that are none, and errors as statuses."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health

from jaxserve.core import FinishReason
from jaxserve.server.auth import KeyRing
from jaxserve.server.engine_api import EngineApi, StreamApi
from jaxserve.server.errors import ApiError, stream_error
from jaxserve.server.grpc_convert import error_metadata

HEALTH_PREFIX = f"/{health.SERVICE_NAME}/"
Context = Any
"""`grpc.aio.ServicerContext`, whose methods the stubs describe only in part."""


def _is_of_a_fault(record: logging.LogRecord) -> bool:
    """Whether a record of gRPC's tells of more than a message that could not be sent, as its client has gone."""
    return record.exc_info is None or type(record.exc_info[1]).__name__ != "ExecuteBatchError"


def quiet_lost_clients() -> None:
    """A client that leaves while a message is on its way to it is no fault, and gets no traceback in the log."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_of_a_fault)


async def abort(context: Context, error: ApiError) -> NoReturn:
    """Ends a call with an error."""
    await context.abort(grpc.StatusCode[error.grpc_status], error.message, error_metadata(error))
    raise AssertionError("context.abort returned")


@contextlib.asynccontextmanager
async def errors_to_status(engine: EngineApi, context: Context, what: str = "a call") -> AsyncIterator[None]:
    """Turns any exception of the body into the call's status; `what` names the call in the log."""
    try:
        yield
    except Exception as exc:
        await abort(context, stream_error(exc, engine.state, what))


def seconds_left(context: Context) -> float | None:
    """Until a call's deadline; None: it has none.

    Raises:
      ApiError: it has passed.
    """
    left: float | None = context.time_remaining()
    if left is not None and left <= 0:
        raise ApiError("expired", "the call's deadline has passed", code="deadline_exceeded")
    return left


def cancel_with(context: Context, stream: StreamApi, deadline_s: float | None) -> None:
    """Aborts what is left of a call's stream; it has expired where the call ended by its deadline, of `deadline_s`.

    The client's clock may be first: its deadline travels rounded up, by 1 % at most, and takes its time.
    """
    left = context.time_remaining()
    late = deadline_s is not None and left is not None and left <= max(0.02 * deadline_s, 0.1)
    stream.cancel(FinishReason.EXPIRED if late else FinishReason.ABORT)


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


class MessageInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses bytes that are no message of the method's type, which grpc would log as a fault of the server's."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's handler, given what has been parsed."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        parse = handler.request_deserializer

        async def parsed(data: bytes, context: Context) -> Any:
            try:
                return parse(data)
            except DecodeError:
                message = "the message's bytes are none of the method's type"
                await abort(context, ApiError("invalid", message, code="invalid_message"))

        if not handler.response_streaming:

            async def answer(data: bytes, context: Context) -> Any:
                return await handler.unary_unary(await parsed(data, context), context)

            return grpc.unary_unary_rpc_method_handler(answer, None, handler.response_serializer)
        if not inspect.isasyncgenfunction(handler.unary_stream):  # it writes to the context

            async def write(data: bytes, context: Context) -> None:
                await handler.unary_stream(await parsed(data, context), context)

            return grpc.unary_stream_rpc_method_handler(write, None, handler.response_serializer)

        async def stream(data: bytes, context: Context) -> AsyncIterator[Any]:
            async with contextlib.aclosing(handler.unary_stream(await parsed(data, context), context)) as responses:
                async for response in responses:
                    yield response

        return grpc.unary_stream_rpc_method_handler(stream, None, handler.response_serializer)


def _refusing(error: ApiError) -> Any:
    async def refuse(_: Any, context: Context) -> None:
        await abort(context, error)

    # A refusal has no message, so it is one for calls of every kind.
    return grpc.unary_unary_rpc_method_handler(refuse)
