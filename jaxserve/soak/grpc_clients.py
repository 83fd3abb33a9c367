"""gRPC clients of a soak."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from jaxserve.server.proto import inference_pb2 as pb
from jaxserve.server.proto import inference_pb2_grpc
from jaxserve.soak import answers
from jaxserve.soak.answers import Verdict
from jaxserve.soak.findings import Findings
from jaxserve.soak.http_clients import STUCK_S, tell
from jaxserve.soak.kinds import Action

_OUTCOMES = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: answers.REJECTED,
    grpc.StatusCode.DEADLINE_EXCEEDED: answers.EXPIRED,
    grpc.StatusCode.INVALID_ARGUMENT: answers.REFUSED,
    grpc.StatusCode.NOT_FOUND: answers.REFUSED,
    grpc.StatusCode.UNAVAILABLE: answers.UNAVAILABLE,
    grpc.StatusCode.CANCELLED: answers.LEFT,
}
_ENDS = (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH)


class GrpcClients:
    """Does actions over gRPC, all on one channel; a context of one round.

    Args:
      address: of the server's gRPC port.
      findings: that are told.
    """

    def __init__(self, address: str, findings: Findings) -> None:
        self._address, self._findings = address, findings

    async def __aenter__(self) -> GrpcClients:
        # A pool of channels of its own: one that another round closed would be taken again.
        self._channel = grpc.aio.insecure_channel(self._address, options=(("grpc.use_local_subchannel_pool", 1),))
        self._stub: Any = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close(None)

    async def do(self, action: Action) -> None:
        """One action, from its call to its end."""
        try:
            async with asyncio.timeout(STUCK_S):
                verdict = await self._verdict(action)
        except TimeoutError:
            verdict = Verdict(answers.STUCK, f"no end within {STUCK_S:g} s")
        except grpc.aio.AioRpcError as error:
            verdict = Verdict(_OUTCOMES.get(error.code(), answers.FAILED))
            if verdict.outcome == answers.FAILED and not self._findings.faults_allowed:
                verdict = Verdict(answers.FAILED, f"{error.code()}: {error.details()}")
        tell(self._findings, action, verdict)

    async def _verdict(self, action: Action) -> Verdict:
        request = _request(action)
        deadline = action.leave_after_s if action.kind == "grpc_deadline" else None
        call = self._stub.Generate(request, timeout=deadline)
        reading = asyncio.create_task(_read(call))
        leave_after = action.leave_after_s if action.kind == "grpc_cancel" else None
        done, _ = await asyncio.wait([reading], timeout=leave_after)
        if not done:
            call.cancel()
            await asyncio.wait([reading])
            if not reading.cancelled():
                reading.exception()  # taken: the call was cut short by this client
            return Verdict(answers.LEFT)
        messages = reading.result()
        ends = [message for message in messages if message.finish_reason]
        if len(ends) != 1 or ends[0].finish_reason not in _ENDS or not messages[-1].HasField("usage"):
            return Verdict(
                answers.BROKEN, f"{len(messages)} messages with {len(ends)} ends; the last is {messages[-1:]}"
            )
        num_tokens = sum(len(message.token_ids) for message in messages)
        if messages[-1].usage.completion_tokens != num_tokens:
            return Verdict(answers.BROKEN, f"{num_tokens} tokens came, usage says {messages[-1].usage}")
        return Verdict(answers.COMPLETED)


async def _read(call: Any) -> list[Any]:
    return [message async for message in call]


def _request(action: Action) -> Any:
    body = action.body
    sampling = pb.SamplingParams(max_tokens=body["max_tokens"], temperature=body.get("temperature", 1.0))
    if "seed" in body:
        sampling.seed = body["seed"]
    if action.kind == "grpc_invalid":
        sampling.temperature = -1.0
    return pb.GenerateRequest(text=body["prompt"], sampling=sampling, request_id=action.request_id)
