"""The gRPC front: `jaxserve.v1.Inference` over a `GenerationService`, with health and reflection.

A cancelled call, or one whose deadline passed, arrives here as a cancelled task; its request is aborted
on the way out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jaxserve.core import MAX_TRACEPARENT, SamplingParams, Terms
from jaxserve.core.sampling_params import MAX_NUM_CHOICES
from jaxserve.server.auth import KeyRing, agreed_tenant
from jaxserve.server.engine_api import StreamApi
from jaxserve.server.errors import ApiError, unfinished_error
from jaxserve.server.field_checks import check_name, check_request_id, check_truncation, kept_tokens
from jaxserve.server.grpc_convert import chat_messages, constraint, delta_response, prompt_scores, sampling_params
from jaxserve.server.grpc_guard import (
    Context,
    KeyInterceptor,
    MessageInterceptor,
    cancel_with,
    errors_to_status,
    quiet_lost_clients,
    seconds_left,
    tenant_of_call,
)
from jaxserve.server.messages import chat_end
from jaxserve.server.orchestrator import ORCHESTRATOR_NAME, OrchestratorServicer
from jaxserve.server.proto import inference_pb2 as pb
from jaxserve.server.proto import inference_pb2_grpc, orchestrator_pb2_grpc
from jaxserve.server.refusals import counting_refusals
from jaxserve.server.schema import NO_SPECIAL_TOKENS_IN_CHAT
from jaxserve.server.service import GenerationService, new_request_id
from jaxserve.server.settings import HttpSettings
from jaxserve.server.tls import TlsFiles
from jaxserve.server.version import package_version

log = logging.getLogger("jaxserve.server")

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Inference"].full_name
HEALTH_PERIOD_S = 0.2
MAX_STREAMS = 1024
"""Calls at once of one connection; more wait."""
MAX_METADATA_BYTES = 1 << 16
MAX_ID_SHOWN = 128
"""Characters that the log has of an id that may not be one."""
KEEPALIVE = (
    # A prompt may be computed for minutes before its first token. Clients that ping meanwhile, however often, are not
    # sent away.
    ("grpc.http2.max_ping_strikes", 0),
    # A client that is gone is noticed, with a call or without, and its requests are aborted. It is the ping's timeout
    # that ends the connection; `grpc.keepalive_timeout_ms` does not.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
PENDING = (
    # Of calls that come faster than they are taken up, gRPC cancels some at random from 1,000 on. What is too much is
    # for the queue to say, by its own bounds and with RESOURCE_EXHAUSTED.
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 200_000),
)


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    """The service's methods.

    Args:
      service: shared with the HTTP front.
      keys: one is needed in the metadata `authorization: Bearer KEY`; none: open.
    """

    def __init__(self, service: GenerationService, keys: KeyRing) -> None:
        self._service = service
        self._engine = service.engine
        self._keys = keys

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Streams one prompt's choices."""
        request_id = request.request_id if request.HasField("request_id") else new_request_id("gen")
        what = f"Generate, request {request_id[:MAX_ID_SHOWN]!r}"
        async with errors_to_status(self._engine, context, what):
            num_choices = min(request.sampling.n, MAX_NUM_CHOICES)
            with counting_refusals(self._engine, num_choices, what):
                stream, params, terms = await self._begin(request, request_id, context)
            responses = self._stream(stream, params, terms, context)
            async with contextlib.aclosing(responses):
                async for response in responses:
                    yield response

    async def _begin(
        self, request: pb.GenerateRequest, request_id: str, context: Context
    ) -> tuple[StreamApi, SamplingParams, Terms]:
        """Submits a request."""
        model = request.model if request.HasField("model") else None
        self._service.check_ready(model)
        wanted = grammar = None
        if request.sampling.HasField("structured_outputs"):
            asked = request.sampling.structured_outputs
            wanted, grammar = await self._service.constrain(lambda: constraint(asked), 1, request.sampling.n)
        params = sampling_params(request.sampling, wanted)
        check_request_id(request_id)
        prompt = await self._prompt(request)
        if request.HasField("truncate_prompt_tokens"):
            prompt = prompt[-self._kept_tokens(request, params) :]
        terms = self._terms(request, context)
        if params.logprobs is not None or params.prompt_logprobs is not None:
            self._service.check_tokenizer()
        (stream,) = await self._service.submit([prompt], lambda _: params, request_id, terms, grammar, model)
        return stream, params, terms

    async def _stream(
        self, stream: StreamApi, params: SamplingParams, terms: Terms, context: Context
    ) -> AsyncGenerator[pb.GenerateResponse]:
        prompt = stream.prompt_token_ids
        # A call that ends while a message is being written never resumes this generator.
        context.add_done_callback(lambda _: cancel_with(context, stream, terms.deadline_s))
        info: pb.PromptInfo | None = pb.PromptInfo(request_id=stream.request_id, token_ids=prompt)
        num_finished = num_tokens = 0
        try:
            async for delta in stream:
                error = unfinished_error(delta.finish_reason, self._engine.state)
                if error is not None:
                    raise error
                response = delta_response(self._engine, delta)
                if info is not None:
                    response.prompt.CopyFrom(info)
                    info = None
                if delta.prompt_logprobs is not None:
                    scores = prompt_scores(self._engine.tokenizer, prompt, delta.prompt_logprobs)
                    response.prompt_scores.CopyFrom(scores)
                num_tokens += len(delta.token_ids)
                num_finished += delta.finish_reason is not None
                if num_finished == params.n:
                    response.usage.CopyFrom(
                        pb.Usage(
                            prompt_tokens=len(prompt),
                            completion_tokens=num_tokens,
                            cached_tokens=stream.num_cached_tokens,
                        )
                    )
                yield response
        finally:
            cancel_with(context, stream, terms.deadline_s)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Token ids of a text or a chat."""
        async with errors_to_status(self._engine, context):
            self._service.check_ready()
            ids = await self._prompt(request, converts=True)
            return pb.TokenizeResponse(token_ids=ids, max_model_len=self._engine.max_model_len)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Text of token ids."""
        async with errors_to_status(self._engine, context):
            self._service.check_ready()
            text = await self._service.decode(list(request.token_ids), request.skip_special_tokens)
            return pb.DetokenizeResponse(text=text)

    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Ends a live request."""
        async with errors_to_status(self._engine, context):
            return pb.AbortResponse(aborted=self._engine.abort(request.request_id))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        """What is served."""
        async with errors_to_status(self._engine, context):
            self._service.check_ready()
            info = pb.GetModelInfoResponse(
                model=self._engine.model_name,
                max_model_len=self._engine.max_model_len,
                version=package_version(),
                state=self._engine.state,
            )
            with contextlib.suppress(ValueError):  # there may be no tokenizer
                tokenizer = self._engine.tokenizer
                info.has_tokenizer = True
                info.vocab_size = tokenizer.vocab_size
                info.eos_token_ids.extend(tokenizer.eos_ids)
                info.has_chat_template = tokenizer.chat_template is not None
                if tokenizer.bos_id is not None:
                    info.bos_token_id = tokenizer.bos_id
            return info

    async def _prompt(self, request: pb.GenerateRequest | pb.TokenizeRequest, converts: bool = False) -> list[int]:
        kind = request.WhichOneof("input")
        num_choices = request.sampling.n if isinstance(request, pb.GenerateRequest) else 1
        if kind == "text":
            add_special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            (ids,) = await self._service.encode(
                [request.text], add_special, param="input", num_choices=num_choices, converts=converts
            )
            return ids
        if kind == "chat":
            chat = request.chat
            if request.HasField("add_special_tokens"):
                raise ApiError("invalid", NO_SPECIAL_TOKENS_IN_CHAT, param="add_special_tokens")
            add_prompt = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None
            messages = chat_messages(chat)
            end = chat_end(messages, add_prompt, chat.continue_final_message)
            return await self._service.encode_chat(
                messages, end, param="input", num_choices=num_choices, converts=converts
            )
        if kind == "token_ids" and isinstance(request, pb.GenerateRequest):
            return list(request.token_ids.ids)
        raise ApiError("invalid", "input is missing; set text, token_ids or chat", param="input")

    def _kept_tokens(self, request: pb.GenerateRequest, params: SamplingParams) -> int:
        check_truncation(request.truncate_prompt_tokens)
        room = 1 if params.max_tokens is None else params.max_tokens
        return kept_tokens(request.truncate_prompt_tokens, max(room, params.min_tokens), self._engine.max_model_len)

    def _terms(self, request: pb.GenerateRequest, context: Context) -> Terms:
        """What the call asks of the scheduler; its deadline is the request's, its key's tenant too."""
        for name in ("service_class", "tenant", "cache_salt"):
            check_name(name, getattr(request, name))
        metadata = context.invocation_metadata()
        return Terms(
            priority=request.priority if request.HasField("priority") else None,
            deadline_s=seconds_left(context),
            service_class=request.service_class,
            tenant=agreed_tenant(request.tenant, tenant_of_call(self._keys, metadata)),
            cache_salt=request.cache_salt,
            operation="chat" if request.WhichOneof("input") == "chat" else "text_completion",
            traceparent=str(dict(metadata or ()).get("traceparent", ""))[:MAX_TRACEPARENT],
        )


class GrpcServer:
    """A gRPC server in the running event loop.

    Args:
      service: shared with the HTTP front.
      host, port: where to listen; port 0 picks a free one.
      settings: the HTTP front's; keys, guards and the largest request hold here too.
      tls: None: plain text.

    Raises:
      OSError: the address cannot be had.
    """

    def __init__(
        self,
        service: GenerationService,
        host: str,
        port: int,
        settings: HttpSettings,
        tls: TlsFiles | None = None,
    ) -> None:
        self._service = service
        keys = KeyRing(settings.api_keys)
        options = [
            # Else two servers share a port in silence, each getting half of the calls.
            ("grpc.so_reuseport", 0),
            ("grpc.max_receive_message_length", settings.max_body_bytes),
            ("grpc.max_concurrent_streams", MAX_STREAMS),
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
            *KEEPALIVE,
            *PENDING,
        ]
        quiet_lost_clients()
        interceptors = [KeyInterceptor(keys, settings.guard_probes), MessageInterceptor()]
        self._server = grpc.aio.server(options=options, interceptors=interceptors)
        servicer = InferenceServicer(service, keys)
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, self._server)  # type: ignore[no-untyped-call]
        orchestrator_pb2_grpc.add_OrchestratorServicer_to_server(  # type: ignore[no-untyped-call]
            OrchestratorServicer(service, keys), self._server
        )
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE_NAME, ORCHESTRATOR_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if tls is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, tls.grpc_credentials())
        except RuntimeError as exc:
            raise OSError(_cannot_listen(address)) from exc
        if self.port == 0:
            raise OSError(_cannot_listen(address))
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to serve."""
        await self._server.start()
        self._watcher = asyncio.create_task(self._watch_state())

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, lets open ones go on for `grace_s`, then cancels them."""
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)

    async def _watch_state(self) -> None:
        """Keeps the health service's answer that of /ready; where that cannot be told, nothing is served."""
        status = health_pb2.HealthCheckResponse
        is_told = False
        while True:
            try:
                now = status.SERVING if self._service.health.is_ready else status.NOT_SERVING
                is_told = False
            except Exception:
                now = status.NOT_SERVING
                if not is_told:
                    log.exception("the engine's health cannot be read; gRPC health is NOT_SERVING until it can")
                is_told = True
            for name in ("", SERVICE_NAME):
                await self._health.set(name, now)
            await asyncio.sleep(HEALTH_PERIOD_S)


def _cannot_listen(address: str) -> str:
    return f"gRPC cannot listen on {address}: it is in use, or not this machine's; set --grpc_port or --host"
