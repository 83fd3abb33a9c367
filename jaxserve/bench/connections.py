"""`bench connections`: very many connections on one server: idle ones, streams that run and that wait, gRPC calls.

    idle       connections without a request, all open at once
    streams    so many run, the rest waits in the queue, all open at once, each on a connection of its own
    grpc       the same as calls, on `GRPC_CHANNELS` connections

The server is a process of its own; `--model=tiny` is the tests' tiny model. While a phase lasts, /health is asked ten
times a second, and the server's memory is read. Every stream must end, and have the token ids that its request has
alone. The clients share the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import grpc
from absl.flags import FlagValues

from jaxserve.bench.host_work import TINY
from jaxserve.bench.report import Column, MeasurementError, report
from jaxserve.server.proto import inference_pb2 as pb
from jaxserve.server.proto import inference_pb2_grpc
from jaxserve.soak.findings import quantile
from jaxserve.soak.watch import sums_by_name
from jaxserve.testing.serving_process import ServingProcess
from jaxserve.testing.tiny import write_tiny_model

SLOTS, PROMPTS, GRPC_CHANNELS = 512, 16, 50
HEALTH_S, SETTLE_S = 0.1, 3.0
CONNECTING = 200
"""Connections that are opened at a time: more than that at once overflow the kernel's queue of some machines."""
COLUMNS = (
    Column("phase", "phase"),
    Column("count", "open at once", "d"),
    Column("ended", "ended well", "d"),
    Column("right", "right ids", "d"),
    Column("seconds", "s", ".1f"),
    Column("rss_mib", "RSS MiB", ".0f"),
    Column("kib_each", "KiB each", ".1f"),
    Column("files", "server's open files", ".0f"),
    Column("health_ms.p50", "/health ms p50", ".1f"),
    Column("health_ms.p99", "p99", ".0f"),
    Column("health_ms.max", "most", ".0f"),
)


def run(flags: FlagValues) -> None:
    """Runs the phases and reports.

    Raises:
      MeasurementError: a stream did not end well, or had other ids than alone.
    """
    _allow_files()
    with tempfile.TemporaryDirectory() as folder:
        model = flags.model
        if model == TINY:
            model = str(write_tiny_model(folder))
        count = flags.connections
        words = [
            *(f"--model={model}", "--dtype=float32", f"--max_num_seqs={SLOTS}", "--max_model_len=128"),
            *(f"--num_pages={4 * SLOTS + 64}", f"--decode_buckets={SLOTS}", "--prefill_buckets=512"),
            *("--max_num_batched_tokens=1024", f"--max_queue_requests={count}", "--max_queue_tokens=10000000"),
        ]
        with ServingProcess(words) as server:
            results = asyncio.run(_phases(server.wait_until_ready(), count, flags.output_tokens))
    report("connections", {"connections": count, "model": flags.model, "slots": SLOTS}, results, COLUMNS, flags.output)
    for result in results:
        if result["right"] < result["count"]:
            message = f"{result['phase']}: {result['count']} were open, {result['right']} ended well with the right ids"
            raise MeasurementError(message)


async def _phases(server: ServingProcess, count: int, tokens: int) -> list[dict[str, Any]]:
    alone = [await _stream(server.url, number, tokens) for number in range(PROMPTS)]

    async def idle(number: int) -> list[int]:
        return await _idle(server.url, number, alone)

    channels = [grpc.aio.insecure_channel(server.grpc_address, _own(number)) for number in range(GRPC_CHANNELS)]
    stubs: list[Any] = [inference_pb2_grpc.InferenceStub(channel) for channel in channels]  # type: ignore[no-untyped-call]
    phases: tuple[tuple[str, int, Callable[[int], Awaitable[list[int]]]], ...] = (
        ("idle connections", count, idle),
        (f"streams, {SLOTS} slots", SLOTS, lambda number: _stream(server.url, number, tokens)),
        (f"streams, {SLOTS} slots, others wait", count, lambda number: _stream(server.url, number, tokens)),
        (f"gRPC calls, {SLOTS} slots", SLOTS, lambda number: _call(stubs[number % GRPC_CHANNELS], number, tokens)),
        (
            f"gRPC calls, {SLOTS} slots, others wait",
            count,
            lambda number: _call(stubs[number % GRPC_CHANNELS], number, tokens),
        ),
    )
    results = [await _phase(server, name, size, one, alone) for name, size, one in phases]
    await asyncio.gather(*(channel.close() for channel in channels))
    return results


async def _phase(
    server: ServingProcess, name: str, count: int, one: Callable[[int], Awaitable[list[int]]], alone: list[list[int]]
) -> dict[str, Any]:
    before = await _metrics(server.url)
    health: list[float] = []
    most = dict.fromkeys(("process_resident_memory_bytes", "process_open_fds"), 0.0)

    async def look() -> None:
        while True:
            began = time.monotonic()
            await _get(server.url, "/health")
            health.append(1e3 * (time.monotonic() - began))
            now = await _metrics(server.url)
            for key in most:
                most[key] = max(most[key], now[key])
            await asyncio.sleep(HEALTH_S)

    looking = asyncio.create_task(look())
    began = time.monotonic()
    found = await _all(one, count)
    seconds = time.monotonic() - began
    looking.cancel()
    (end,) = await asyncio.gather(looking, return_exceptions=True)
    if isinstance(end, Exception):
        raise end
    ended = [(number, ids) for number, ids in enumerate(found) if isinstance(ids, list)]
    grown = most["process_resident_memory_bytes"] - before["process_resident_memory_bytes"]
    for error in {repr(each) for each in found if isinstance(each, BaseException)}:
        print(f"{name}: {error}")
    return {
        "phase": name,
        "count": count,
        "ended": len(ended),
        "right": sum(ids == alone[number % PROMPTS] for number, ids in ended),
        "seconds": seconds,
        "rss_mib": most["process_resident_memory_bytes"] / 2**20,
        "kib_each": grown / 2**10 / count,
        "files": most["process_open_fds"],
        "health_ms": {"p50": quantile(health, 50), "p99": quantile(health, 99), "max": max(health)},
    }


async def _all(one: Callable[[int], Awaitable[list[int]]], count: int) -> list[list[int] | BaseException]:
    return list(await asyncio.gather(*(one(number) for number in range(count)), return_exceptions=True))


_connecting = asyncio.Semaphore(CONNECTING)


async def _open(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    async with _connecting:
        return await asyncio.open_connection(parts.hostname, parts.port)


async def _idle(url: str, number: int, alone: list[list[int]]) -> list[int]:
    """Connected for a while, then asks for its first time; as its ids the right ones, when it was answered."""
    reader, writer = await _open(url)
    await asyncio.sleep(SETTLE_S)
    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    line = await reader.readline()
    writer.close()
    return alone[number % PROMPTS] if b" 200 " in line else []


async def _stream(url: str, number: int, tokens: int) -> list[int]:
    """The ids of a streamed completion on a connection of its own."""
    body = {"prompt": _prompt(number), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    data = json.dumps(body | {"return_token_ids": True}).encode()
    reader, writer = await _open(url)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    ids: list[int] = []
    done = False
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:]).get("choices", ()):
                ids += choice.get("token_ids") or ()
        done = done or line.startswith(b"data: [DONE]")
    writer.close()
    return ids if done else []


async def _call(stub: Any, number: int, tokens: int) -> list[int]:
    """The ids of a gRPC call."""
    sampling = pb.SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    request = pb.GenerateRequest(text=_prompt(number), sampling=sampling)
    return [token_id async for message in stub.Generate(request) for token_id in message.token_ids]


def _prompt(number: int) -> str:
    return f"number {number % PROMPTS}"


async def _metrics(url: str) -> dict[str, float]:
    return sums_by_name(await _get(url, "/metrics"))


async def _get(url: str, path: str) -> str:
    reader, writer = await _open(url)
    with contextlib.closing(writer):
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = await reader.read()
    return answer.partition(b"\r\n\r\n")[2].decode()


def _own(number: int) -> tuple[tuple[str, int], ...]:
    """Channels of equal settings would share one connection."""
    return (("grpc.use_local_subchannel_pool", 1), ("jaxserve.channel", number))


def _allow_files() -> None:
    """As many open files as the system lets this process, and the server it starts, have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
