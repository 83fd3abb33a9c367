"""Clients that never stop asking, and count what fails: nothing is tried again."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import aiohttp
import grpc

from jaxserve.server.proto import inference_pb2 as pb
from jaxserve.server.proto import inference_pb2_grpc


class Clients:
    """Clients of one address each way, each with a request under way at any time.

    Args:
      url: for HTTP; grpc_address: for gRPC.

    Attributes:
      served: requests that were answered whole, by way.
      failures: what went wrong, in order.
    """

    def __init__(self, url: str, grpc_address: str) -> None:
        self._url, self._grpc_address = url, grpc_address
        self.served: Counter[str] = Counter()
        self.failures: list[str] = []
        self._stopping = False

    async def run(self, count: int, max_tokens: int) -> None:
        """`count` clients of each way ask for up to `max_tokens` tokens a time, until `stop`."""
        ways = (self._stream, self._whole, self._fresh)
        async with (
            aiohttp.ClientSession(self._url, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3)) as kept,
            aiohttp.ClientSession(self._url, connector=aiohttp.TCPConnector(limit=0, force_close=True)) as fresh,
            grpc.aio.insecure_channel(self._grpc_address) as channel,
        ):
            stub: Any = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            works = [way(fresh if way == self._fresh else kept, max_tokens) for way in ways for _ in range(count)]
            works += [self._grpc(stub, max_tokens) for _ in range(count)]
            await asyncio.gather(*works)

    def stop(self) -> None:
        """Lets the requests under way end, and begins no more."""
        self._stopping = True

    async def _stream(self, session: aiohttp.ClientSession, max_tokens: int) -> None:
        await self._ask("HTTP stream, connection kept", session, max_tokens, stream=True)

    async def _whole(self, session: aiohttp.ClientSession, max_tokens: int) -> None:
        await self._ask("HTTP whole, connection kept", session, max_tokens, stream=False)

    async def _fresh(self, session: aiohttp.ClientSession, max_tokens: int) -> None:
        await self._ask("HTTP stream, fresh connection", session, max_tokens, stream=True)

    async def _ask(self, way: str, session: aiohttp.ClientSession, max_tokens: int, stream: bool) -> None:
        body = {"prompt": "the sea", "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
        while not self._stopping:
            try:
                async with session.post("/v1/completions", json=body) as response:
                    answer = await response.read()
            except (aiohttp.ClientError, OSError) as error:
                self.failures.append(f"{way}: {error!r}")
                continue
            if response.status == 200 and (not stream or answer.endswith(b"data: [DONE]\n\n")):
                self.served[way] += 1
            else:
                self.failures.append(f"{way}: {response.status} {answer[-200:]!r}")

    async def _grpc(self, stub: Any, max_tokens: int) -> None:
        request = pb.GenerateRequest(text="the sea", sampling=pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        while not self._stopping:
            try:
                messages = [message async for message in stub.Generate(request)]
            except grpc.aio.AioRpcError as error:
                self.failures.append(f"gRPC: {error.code()} {error.details()}")
                continue
            if messages and messages[-1].HasField("usage"):
                self.served["gRPC"] += 1
            else:
                self.failures.append(f"gRPC: {len(messages)} messages without an end")
