"""`bench sse`: what the HTTP front costs per streamed token, an engine that needs no time behind it.

The server's own routes, streams and engine thread run in this process; in place of a model, `_Tokens` gives every
open stream a token as soon as the front has taken the last one of each. So the front alone sets the pace, and every
token is an event of its own. The clients are a process of their own and are not counted, nor is the thread that makes
the tokens. Times are of the processor, so other work on the machine only slows the caches.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import uvicorn
from absl.flags import FlagValues

from jaxserve.bench.report import Column, report
from jaxserve.config import EngineConfig
from jaxserve.core import FinishReason, Request, Submission
from jaxserve.engine import AsyncEngine
from jaxserve.engine.engine import Engine, Sink
from jaxserve.engine.metrics import EngineMetrics
from jaxserve.engine.output_processor import OutputDelta
from jaxserve.server.bounded_http import HttpLimits, http_config
from jaxserve.server.http_app import build_app
from jaxserve.server.service import GenerationService
from jaxserve.server.settings import HttpSettings

ROUTES = {
    "completions": ("/v1/completions", {"prompt": "The sea"}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "The sea"}]}),
}
WORD = " token"

COLUMNS = (
    Column("route", "route"),
    Column("streams", "streams", "d"),
    Column("events", "events", "d"),
    Column("front_us_per_token", "front us/token", ".1f"),
    Column("tokens_per_s", "tokens/s", ".0f"),
)


def run(flags: FlagValues) -> None:
    """Measures both routes at every number of streams, each several times, and reports medians."""
    results = []
    for route in ROUTES:
        for streams in flags.streams:
            runs = [asyncio.run(_measure(route, streams, flags.output_tokens)) for _ in range(flags.runs)]
            medians = {key: statistics.median(each[key] for each in runs) for key in runs[0]}
            results.append({"route": route, "streams": streams} | medians | {"events": runs[0]["events"]})
    report("sse", {"output_tokens": flags.output_tokens, "runs": flags.runs}, results, COLUMNS, flags.output)


async def _measure(route: str, streams: int, tokens: int) -> dict[str, float]:
    """One run: from the first token to the end of the last stream.

    Raises:
      RuntimeError: the clients did not get every token as an event.
    """
    source = _Tokens(streams)
    engine = AsyncEngine(
        EngineConfig(model="none", max_num_seqs=streams), factory=lambda config, progress: cast(Engine, source)
    )
    engine.start()
    listener = socket.create_server(("127.0.0.1", 0), backlog=streams)
    app = build_app(engine, HttpSettings(), GenerationService(engine))
    server = uvicorn.Server(http_config(app, None, HttpLimits(), timeout_graceful_shutdown=1))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    path, prompt = ROUTES[route]
    body = prompt | {"stream": True, "max_tokens": tokens, "ignore_eos": True}
    arguments = (listener.getsockname()[1], streams, path, body)
    clients = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "jaxserve.bench.sse_clients", json.dumps(arguments)), stdout=asyncio.subprocess.PIPE
    )
    try:
        printed, _ = await clients.communicate()
        front_s, wall_s = source.elapsed()
    finally:
        server.should_exit = True
        await serving
        engine.shutdown()
    # Per stream the tokens, a chat's role, and [DONE].
    events, expected = int(printed or 0), streams * (tokens + 1 + (route == "chat"))
    if events != expected:
        raise RuntimeError(f"the clients got {events} events; {expected} were to come")
    return {
        "events": events,
        "front_us_per_token": 1e6 * front_s / (streams * tokens),
        "tokens_per_s": streams * tokens / wall_s,
    }


class _Tokens:
    """What `AsyncEngine` needs of an `Engine`: one that gives every stream a word a step, once `streams` are open."""

    max_model_len = 1 << 20
    model_name = "none"
    gathers = True
    """Until all streams are open it waits on purpose."""

    def __init__(self, streams: int) -> None:
        self.tokenizer = _Tokenizer()
        self.metrics = EngineMetrics(self.model_name)
        self.monitor = SimpleNamespace(on_request_end=None, keep=lambda num_iterations: None)
        self._num_streams = streams
        self._lock = threading.Lock()
        self._live: dict[str, tuple[Request, Sink, list[int]]] = {}
        self._began: tuple[float, float, float] | None = None
        self._thread_s = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a stream is open."""
        return bool(self._live)

    def warm_up(self) -> None:
        """Nothing is compiled."""

    def land(self) -> None:
        """Nothing is in flight."""

    def on_lost(self, call: Callable[[BaseException], None]) -> None:
        """No other process is needed."""

    def close(self, error: BaseException | None = None) -> None:
        """Nothing is open."""

    def make_requests(self, submission: Submission, now: float) -> list[Request]:
        """One request."""
        params = submission.params
        ids = tuple(submission.prompt_token_ids)
        return [Request(submission.request_id, ids, params, max_tokens=params.max_tokens or 1)]

    def add_all(self, arrivals: Sequence[tuple[Request, int, Sink]]) -> None:
        """Opens streams."""
        with self._lock:
            self._live.update({request.request_id: (request, sink, []) for request, _, sink in arrivals})

    def abort(self, request_id: str, reason: str = FinishReason.ABORT, cause: str = "") -> bool:
        """Closes one."""
        with self._lock:
            return self._live.pop(request_id, None) is not None

    def step(self) -> bool:
        """Gives every stream a word, when all have taken the last; False while streams are still to open."""
        with self._lock:
            live = list(self._live.values())
            if self._began is None:
                if len(live) < self._num_streams:
                    return False
                self._began = time.process_time(), time.thread_time(), time.perf_counter()
        if any(sink.args[0].num_pending for _, sink, _ in live):  # type: ignore[attr-defined]
            time.sleep(0.0005)
            return True
        for request, sink, given in live:
            given.append(len(given))
            ended = len(given) == request.max_tokens
            sink(OutputDelta(0, WORD, [len(given)], finish_reason="length" if ended else None))
            if ended:
                self.abort(request.request_id)
        self._thread_s = time.thread_time() - self._began[1]
        return bool(live)

    def elapsed(self) -> tuple[float, float]:
        """Processor seconds of the process without the engine's thread, and seconds, since the first token."""
        assert self._began is not None, "no stream was opened"
        front_s = time.process_time() - self._began[0] - self._thread_s
        return front_s, time.perf_counter() - self._began[2]


class _Tokenizer:
    """A token a byte; what a stream needs of a tokenizer."""

    vocab_size = 256

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The bytes."""
        return list(text.encode())

    def encode_chat(self, messages: Sequence[dict[str, Any]], *arguments: Any, **variables: Any) -> list[int]:
        """The bytes of the contents."""
        return [byte for message in messages for byte in self.encode(message["content"])]
