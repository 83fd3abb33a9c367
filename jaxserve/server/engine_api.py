"""What the fronts need from an engine, as typing protocols.

`jaxserve.engine.AsyncEngine` satisfies them; so do the scripted engines of the tests. Naming the few
members in use here keeps HTTP and gRPC thin, and free of anything that loads jax.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from jaxserve.core import (
    Adapter,
    EngineTotals,
    EngineView,
    FinishReason,
    Logprob,
    Recording,
    Rejection,
    RequestOutput,
    StructuredOutputs,
    Submission,
)
from jaxserve.text.tool_forms import ToolForms

TokenLogprobs = dict[int, Logprob]
"""Of one position: the chosen token and the alternatives asked for."""


class TokenizerApi(Protocol):
    """Text to ids and back; see `jaxserve.text.tokenizer`."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def strips_first_space(self) -> bool: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def tool_forms(self) -> ToolForms | None: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def token_text(self, token_id: int) -> str: ...
    def token_id(self, token: str) -> int | None: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        /,
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int]: ...


class MetricsApi(Protocol):
    """The engine's metrics; the fronts export them, and count what they refuse themselves."""

    @property
    def registry(self) -> CollectorRegistry: ...
    def rejected(self, reason: str, count: int = 1) -> None: ...
    def failed(self, count: int = 1) -> None: ...


class LoadApi(Protocol):
    """See `jaxserve.engine.EngineLoad`."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def kv_usage(self) -> float: ...
    @property
    def full(self) -> Rejection | None: ...


class Delta(Protocol):
    """What one choice gained since its last delta; see `jaxserve.engine.OutputDelta`."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_logprobs: list[TokenLogprobs | None] | None


class StreamApi(Protocol):
    """The deltas of one prompt's choices, for one consumer."""

    @property
    def request_id(self) -> str: ...
    @property
    def prompt_token_ids(self) -> list[int]: ...
    @property
    def num_cached_tokens(self) -> int:
        """Of the prompt, found in the prefix cache; known at the end."""
        ...

    def __aiter__(self) -> AsyncIterator[Delta]: ...
    def cancel(self, reason: FinishReason = FinishReason.ABORT) -> None:
        """Aborts what still runs, for `reason` unless it has failed."""
        ...

    async def collect(self) -> RequestOutput: ...


class AdaptersApi(Protocol):
    """LoRA adapters; see `jaxserve.engine.live_adapters`."""

    @property
    def listed(self) -> tuple[Adapter, ...]:
        """Those that requests may name."""
        ...

    def load(self, name: str, path: str) -> Adapter:
        """May take seconds."""
        ...

    def unload(self, name: str) -> None: ...


class RemotePrefillApi(Protocol):
    """Has prompts computed by other servers; see `jaxserve.disaggregation.RemotePrefill`."""

    async def fetch(self, submissions: Sequence[Submission]) -> list[Submission]:
        """The same, with K/V where another server computed it."""
        ...

    def release(self, submissions: Sequence[Submission]) -> None:
        """They were not taken: their K/V is forgotten."""
        ...


class EngineApi(Protocol):
    """An engine as its fronts see it; `submit_all`, `abort` and every property return at once."""

    @property
    def state(self) -> str:
        """One of "loading", "warming_up", "ready", "stuck", "draining", "stopped", "dead"."""
        ...

    @property
    def step_age_s(self) -> float:
        """Seconds since the last progress while there is work; 0 when idle."""
        ...

    @property
    def progress(self) -> tuple[int, int, str]:
        """Steps done, steps in all, and what is being done."""
        ...

    @property
    def error(self) -> BaseException | None: ...
    @property
    def model_name(self) -> str: ...
    @property
    def model_root(self) -> str:
        """What `--model` said."""
        ...

    @property
    def adapters(self) -> AdaptersApi: ...

    @property
    def max_model_len(self) -> int: ...
    @property
    def created(self) -> int: ...
    @property
    def tokenizer(self) -> TokenizerApi: ...
    @property
    def metrics(self) -> MetricsApi: ...
    @property
    def load(self) -> LoadApi: ...
    @property
    def totals(self) -> EngineTotals: ...
    def view(self, num_iterations: int = 0) -> EngineView:
        """Its state now, and so many of the last iterations."""
        ...

    def recording(self, num_iterations: int, seconds: float) -> Recording:
        """At most so many of the last iterations, of at most the last `seconds`."""
        ...

    def start(self) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def start_profile(self, folder: str) -> None:
        """May take seconds, as `stop_profile`."""
        ...

    def stop_profile(self) -> None: ...
    def submit_all(self, submissions: Sequence[Submission]) -> Sequence[StreamApi]:
        """Takes or refuses all of them together; see `jaxserve.engine.AsyncEngine`."""
        ...

    def compile_grammar(self, wanted: StructuredOutputs) -> object:
        """May take seconds; ValueError where it cannot be followed."""
        ...

    def abort(self, request_id: str) -> bool: ...
    async def drain(self, grace_s: float) -> bool: ...
    def shutdown(self) -> None: ...
