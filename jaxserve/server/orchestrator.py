"""JetStream's gRPC service, `jetstream_proto.Orchestrator`, over the same engine.

Its requests have no sampling settings: outputs are greedy, as JetStream's are unless its server is told otherwise.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from jaxserve.core import SamplingParams, Terms
from jaxserve.core.sampling_params import MAX_NUM_CHOICES
from jaxserve.server.auth import KeyRing
from jaxserve.server.errors import ApiError, unfinished_error
from jaxserve.server.grpc_guard import Context, cancel_with, errors_to_status, seconds_left, tenant_of_call
from jaxserve.server.proto import orchestrator_pb2 as pb
from jaxserve.server.proto import orchestrator_pb2_grpc
from jaxserve.server.refusals import counting_refusals
from jaxserve.server.service import GenerationService, new_request_id

ORCHESTRATOR_NAME = pb.DESCRIPTOR.services_by_name["Orchestrator"].full_name
_Sample = pb.DecodeResponse.StreamContent.Sample


class OrchestratorServicer(orchestrator_pb2_grpc.OrchestratorServicer):
    """The service's methods.

    Args:
      service: shared with the other fronts.
      keys: see `InferenceServicer`.
    """

    def __init__(self, service: GenerationService, keys: KeyRing) -> None:
        self._service = service
        self._engine = service.engine
        self._keys = keys

    async def Decode(self, request: pb.DecodeRequest, context: Context) -> AsyncIterator[pb.DecodeResponse]:
        """Streams one prompt's samples; every message has one `Sample` for each."""
        request_id = new_request_id("gen")
        what = f"Decode, request {request_id!r}"
        num_samples = request.num_samples or 1
        async with errors_to_status(self._engine, context, what):
            with counting_refusals(self._engine, min(num_samples, MAX_NUM_CHOICES), what):
                self._service.check_ready()
                params = SamplingParams(n=num_samples, temperature=0, max_tokens=request.max_tokens or None)
                prompt = await self._prompt(request)
                terms = Terms(
                    deadline_s=seconds_left(context),
                    tenant=tenant_of_call(self._keys, context.invocation_metadata()),
                )
                (stream,) = await self._service.submit([prompt], lambda _: params, request_id, terms)
            context.add_done_callback(lambda _: cancel_with(context, stream, terms.deadline_s))
            try:
                async for delta in stream:
                    error = unfinished_error(delta.finish_reason, self._engine.state)
                    if error is not None:
                        raise error
                    samples = [_Sample() for _ in range(num_samples)]
                    samples[delta.index] = _Sample(text=delta.text, token_ids=delta.token_ids)
                    yield pb.DecodeResponse(stream_content=pb.DecodeResponse.StreamContent(samples=samples))
            finally:
                cancel_with(context, stream, terms.deadline_s)

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        """What `/ready` says."""
        return pb.HealthCheckResponse(is_live=self._service.health.is_ready)

    async def _prompt(self, request: pb.DecodeRequest) -> list[int]:
        kind = request.WhichOneof("content")
        if kind == "token_content":
            return list(request.token_content.token_ids)
        if kind == "text_content":
            texts = [request.text_content.text]
            (ids,) = await self._service.encode(texts, param="text_content", num_choices=request.num_samples)
            return ids
        raise ApiError("invalid", "content is missing; set text_content or token_content", param="content")
