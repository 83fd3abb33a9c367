"""An engine whose answers are known in advance, with faults on demand; no jax, no model.

Token ids are bytes. A request's output is `b"abcdefgh..."` from its prompt's last byte on, one token per
turn of the event loop; `hold_off` stops all of them, `fail_after` breaks them. With a `script` every choice is that
text instead, cut into pieces, and ends by itself.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Gauge

from jaxserve.core import (
    Adapter,
    AdapterNotFoundError,
    CompletionOutput,
    EngineDeadError,
    EngineTotals,
    EngineView,
    Logprob,
    NotReadyError,
    Recording,
    RejectedError,
    Rejection,
    RequestFailedError,
    RequestOutput,
    SamplingParams,
    SlotView,
    StructuredOutputs,
    Submission,
)
from jaxserve.text.tool_forms import ToolForms

VOCAB_SIZE = 257
EOS_ID = 256


class ByteTokenizer:
    """id = byte; 256 is EOS."""

    vocab_size = VOCAB_SIZE
    bos_id = None
    eos_ids = (EOS_ID,)
    special_ids = frozenset((EOS_ID,))
    strips_first_space = False
    chat_template: str | None = "yes"
    tool_forms: ToolForms | None = ToolForms("<tool_call>", writes_tools=True, writes_calls=True)
    rendered: dict[str, Any] | None = None  # what encode_chat got last

    def token_id(self, token: str) -> int | None:
        return None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"<eos>"

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        /,
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Any] | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int]:
        self.rendered = {"messages": messages, "tools": tools} | variables
        if messages[0]["role"] == "system":
            raise ValueError("the chat template refused the messages: System role not supported")
        return self.encode("".join(message["content"] + "\n" for message in messages))


class FakeMetrics:
    """One gauge, and the reasons of refusals."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.registry = CollectorRegistry()
        gauge = Gauge("jaxserve:num_requests_running", "x", ["model_name"], registry=self.registry)
        self.running = gauge.labels(model_name="fake")

    def rejected(self, reason: str, count: int = 1) -> None:
        """So many choices were refused together."""
        self.reasons += [reason] * count

    def failed(self, count: int = 1) -> None:
        """So many choices failed on their way to the engine."""
        self.reasons += ["error"] * count


@dataclass
class FakeDelta:
    """As `jaxserve.engine.OutputDelta`."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


class FakeLoad(NamedTuple):
    """As `jaxserve.engine.EngineLoad`."""

    running: int
    waiting: int
    kv_usage: float
    full: Rejection | None = None


class FakeStream:
    """As `jaxserve.engine.RequestStream`."""

    def __init__(self, engine: FakeEngine, request_id: str, ids: list[int], params: SamplingParams) -> None:
        self.request_id = request_id
        self.prompt_token_ids = ids
        self.n = params.n
        self.cancelled = asyncio.Event()
        self._engine = engine
        self._params = params

    def cancel(self, reason: str = "abort") -> None:
        if self._engine.live.pop(self.request_id, None) is not None:
            self._engine.num_cancelled += 1
        self._engine.metrics.running.set(len(self._engine.live))
        self.cancelled.set()

    num_cached_tokens = 0

    async def __aiter__(self) -> AsyncIterator[FakeDelta]:
        if self._engine.script is not None:
            async for delta in self._scripted(self._engine.script):
                yield delta
            return
        max_tokens = 64 if self._params.max_tokens is None else self._params.max_tokens
        for step in range(max(max_tokens, 1)):
            for index in range(self.n):
                yield await self._delta(index, step, max_tokens)
        self._engine.live.pop(self.request_id, None)
        self._engine.metrics.running.set(len(self._engine.live))

    async def _scripted(self, text: str) -> AsyncIterator[FakeDelta]:
        limit, size, data = self._params.max_tokens, self._engine.script_piece, text.encode()
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        kept = pieces if limit is None else pieces[:limit]
        decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(self.n)]
        for step, piece in enumerate(kept):
            for index in range(self.n):
                await asyncio.sleep(self._engine.step_s)
                if self.cancelled.is_set():
                    return
                logprobs = None if self._params.logprobs is None else [_scores(piece[0], self._params.logprobs)]
                finish = None
                if step + 1 == len(kept):
                    finish = "stop" if len(kept) == len(pieces) else "length"
                yield FakeDelta(index, decoders[index].decode(piece), [piece[0]], logprobs, finish)
        self._engine.live.pop(self.request_id, None)
        self._engine.metrics.running.set(len(self._engine.live))

    async def _delta(self, index: int, step: int, max_tokens: int) -> FakeDelta:
        engine = self._engine
        await asyncio.sleep(engine.step_s)
        if engine.fail_after is not None and step >= engine.fail_after:
            raise engine.fault
        if not engine.hold_off.is_set():
            waits = [asyncio.create_task(engine.hold_off.wait()), asyncio.create_task(self.cancelled.wait())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in waits:
                task.cancel()
        if self.cancelled.is_set():
            return FakeDelta(index, "", [], None, "abort")
        if engine.expire_after is not None and step >= engine.expire_after:
            return FakeDelta(index, "", [], None, "expired")
        scores = None
        if self._params.prompt_logprobs is not None and step == 0 and index == 0:
            scores = [None, *(_scores(i, self._params.prompt_logprobs) for i in self.prompt_token_ids[1:])]
        if max_tokens == 0:
            return FakeDelta(index, "", [], None, "length", prompt_logprobs=scores)
        token_id = output_id(self.prompt_token_ids, index, step)
        logprobs = None if self._params.logprobs is None else [_scores(token_id, self._params.logprobs)]
        finish = "length" if step + 1 == max_tokens else None
        return FakeDelta(index, chr(token_id), [token_id], logprobs, finish, prompt_logprobs=scores)

    async def collect(self) -> RequestOutput:
        outputs = [CompletionOutput(index) for index in range(self.n)]
        scores = None
        async for delta in self:
            output = outputs[delta.index]
            output.text += delta.text
            output.token_ids += delta.token_ids
            output.finish_reason = delta.finish_reason
            scores = delta.prompt_logprobs or scores
            if delta.logprobs is not None:
                output.logprobs = (output.logprobs or []) + delta.logprobs
        return RequestOutput(self.request_id, None, self.prompt_token_ids, outputs, scores)


class FakeAdapters:
    """As `jaxserve.engine.live_adapters`. `fault`: what loading raises."""

    def __init__(self) -> None:
        self.listed: tuple[Adapter, ...] = ()
        self.fault: Exception | None = None

    def load(self, name: str, path: str) -> Adapter:
        if self.fault is not None:
            raise self.fault
        number = len(self.listed) + 1
        adapter = Adapter(name, path, number, number, 7)
        self.listed += (adapter,)
        return adapter

    def unload(self, name: str) -> None:
        kept = tuple(adapter for adapter in self.listed if adapter.name != name)
        if kept == self.listed:
            raise AdapterNotFoundError(f"the LoRA adapter {name!r} cannot be found")
        self.listed = kept


class FakeEngine:
    """Satisfies `EngineApi`.

    Attributes:
      hold_off: cleared, no request gets a token.
      fail_after, fault: raise `fault` at that step of every request.
      step_s: seconds per token.
      expire_after: end with "expired" at that step.
      max_live: more are refused as a full queue.
      script, script_piece: every choice's text, and how many of its bytes come at once, as the token of the first.
    """

    def __init__(self) -> None:
        self.state = "ready"
        self.progress = (1, 1, "warm-up")
        self.error: BaseException | None = None
        self.step_age_s = 0.0
        self.model_name = "fake"
        self.model_root = "/models/fake"
        self.adapters = FakeAdapters()
        self.max_model_len = 100
        self.created = 1
        self.tokenizer = ByteTokenizer()
        self.metrics = FakeMetrics()
        self.hold_off = asyncio.Event()
        self.hold_off.set()
        self.fail_after: int | None = None
        self.fault: BaseException = RequestFailedError("broken on purpose")
        self.expire_after: int | None = None
        self.step_s = 0.0
        self.max_live = 100
        self.script: str | None = None
        self.script_piece = 3
        self.num_views = 0
        self.live: dict[str, FakeStream] = {}
        self.num_cancelled = 0
        self.num_resets = 0
        self.profiles: list[str] = []
        self._totals = EngineTotals(iterations=3, decode_tokens=7)
        self.recorded = Recording("fake", 8, (), ())
        self.asked_recordings: list[tuple[int, float]] = []
        self.submitted: list[dict[str, Any]] = []

    def start(self) -> None:
        """Ready from the beginning."""

    @property
    def load(self) -> FakeLoad:
        return FakeLoad(len(self.live), 0, len(self.live) / self.max_live)

    @property
    def totals(self) -> EngineTotals:
        return self._totals

    def view(self, num_iterations: int = 0) -> EngineView:
        self.num_views += 1
        iterations = self.recorded.iterations[-num_iterations:] if num_iterations else ()
        slots = tuple(
            SlotView(slot, request_id, "decode", 4, 6, 3, 8, 0, 1, 0, 0, "", "", 0.5)
            for slot, request_id in enumerate(self.live)
        )
        return EngineView(1.0, len(self.live), 0, 0, 8, 16, 79, 70, 4, 5, self._totals, slots, (), iterations)

    def recording(self, num_iterations: int, seconds: float) -> Recording:
        self.asked_recordings.append((num_iterations, seconds))
        return self.recorded

    def reset_prefix_cache(self) -> None:
        self.num_resets += 1

    def start_profile(self, folder: str) -> None:
        self.profiles.append(folder)

    def stop_profile(self) -> None:
        self.profiles.append("stopped")

    def submit_all(self, submissions: Sequence[Submission]) -> list[FakeStream]:
        if self.state == "dead":
            raise EngineDeadError("it died")
        if self.state != "ready":
            raise NotReadyError("the model is loading")
        if len(self.live) + len(submissions) > self.max_live:
            raise RejectedError(Rejection("queue_full_requests", "the queue has 100 requests", 2.5))
        for submission in submissions:
            if not submission.prompt_token_ids:
                raise ValueError("prompt has no tokens; it must have at least 1")
            if submission.request_id in self.live:
                raise RejectedError(Rejection("duplicate_id", f"request_id {submission.request_id!r} is live"))
        return [self._submit(submission) for submission in submissions]

    def _submit(self, submission: Submission) -> FakeStream:
        self.submitted.append(
            {
                "params": submission.params,
                "terms": submission.terms,
                "prompt": submission.prompt_token_ids,
                "adapter": submission.adapter,
            }
        )
        stream = FakeStream(self, submission.request_id, submission.prompt_token_ids, submission.params)
        self.live[submission.request_id] = stream
        self.metrics.running.set(len(self.live))
        return stream

    def compile_grammar(self, wanted: StructuredOutputs) -> object:
        return wanted

    def abort(self, request_id: str) -> bool:
        stream = self.live.get(request_id)
        if stream is not None:
            stream.cancel()
        return stream is not None

    async def drain(self, grace_s: float) -> bool:
        self.state = "draining"
        for _ in range(round(grace_s / 0.01)):
            if not self.live:
                return True
            await asyncio.sleep(0.01)
        for stream in list(self.live.values()):
            stream.cancel()
        return False

    def shutdown(self) -> None:
        self.state = "stopped"


def script(server: Any, text: str, piece: int = 3) -> None:
    """Has the engine of a `RunningServer` answer `text`, so many bytes at once."""

    def change() -> None:
        server.engine.script, server.engine.script_piece = text, piece

    server.call(change)


def output_id(prompt: Sequence[int], index: int, step: int) -> int:
    """The token of a choice at a step: letters in order, from the prompt's last byte plus the choice number on."""
    return ord("a") + (prompt[-1] + index + step) % 26


def _scores(token_id: int, count: int) -> dict[int, Logprob]:
    """The token at -0.5, then ids 0, 1, ... at -1, -2, ..., -inf last."""
    entry = {token_id: Logprob(-0.5, 1, chr(token_id))}
    for rank in range(1, count):
        entry[rank] = Logprob(-float(rank) if rank < 4 else float("-inf"), rank + 1, chr(rank))
    return entry
