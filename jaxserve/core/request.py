"""Request: what a client sent, immutable; and how requests end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import ClassVar

from jaxserve.core.sampling_params import SamplingParams


class FinishReason(StrEnum):
    """Why a request ended. `stop` and `length` are completions; the others are not."""

    STOP = "stop"  # EOS, a stop id or a stop string
    LENGTH = "length"  # max_tokens or the context's end
    ABORT = "abort"  # the client went away or asked
    EXPIRED = "expired"  # its deadline passed
    ERROR = "error"  # it failed; others went on
    UNFOLLOWABLE = "unfollowable"  # what it asks of its output left no token to go on with; others went on
    DISPLACED = "displaced"  # a request of higher class took its place in the queue


MAX_TRACEPARENT = 256
"""Characters kept of a `traceparent`; one of today's version has 55."""


class Priority:
    """Integer priority, lower first, with the three named classes."""

    HIGH = -10
    NORMAL = 0
    LOW = 10
    NAMES: ClassVar[dict[str, int]] = {"high": HIGH, "normal": NORMAL, "low": LOW}
    MIN, MAX = -(2**31), 2**31 - 1


@dataclass(frozen=True, slots=True)
class Terms:
    """What a client asks of the scheduler for a request.

    Attributes:
      priority: lower first; None: the service class's.
      deadline_s: seconds after which it expires; None: the service class's.
      service_class: name of a configured `ServiceClass`, or "" for none.
      tenant: for fairness; tenants share no cached pages.
      cache_salt: requests of a tenant share cached pages only with those of the same salt.
      operation: what the client called it, "chat" or "text_completion"; for records alone.
      traceparent: the client's W3C trace context, or ""; for records alone.
    """

    priority: int | None = None
    deadline_s: float | None = None
    service_class: str = ""
    tenant: str = ""
    cache_salt: str = ""
    operation: str = field(default="text_completion", compare=False)
    traceparent: str = field(default="", compare=False)


NO_TERMS = Terms()
"""Nothing in particular."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One prompt as it is handed to an engine, which makes `params.n` `Request`s of it.

    Attributes:
      prompt_token_ids: int[L].
      request_id: unique among live requests.
      terms: what is asked of the scheduler.
      prompt: its text, when it was text.
      grammar: the engine's compiled form of `params.structured_outputs`; None: compiled when it is submitted.
      adapter: name of a loaded LoRA adapter; "": none.
      kv: K/V of its prompt that comes from elsewhere, or is to go there (`runtime.page_transfers`); None: neither.
      received_at: instant of the engine's clock from which its times and its deadline count; None: of the submission.
    """

    prompt_token_ids: list[int]
    params: SamplingParams
    request_id: str
    terms: Terms = NO_TERMS
    prompt: str | None = None
    grammar: object | None = None
    adapter: str = ""
    kv: object | None = None
    received_at: float | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and one completion (a client's n > 1 is n of these).

    Attributes:
      request_id: unique among live requests.
      prompt_token_ids: int[L], L >= 1.
      params: sampling settings; `params.n` is ignored here.
      eos_token_ids: ids that end the output unless `params.ignore_eos`.
      bad_token_ids: ids that are never sampled, those of the words of `params.bad_words` that are one token.
      bad_sequences: ids of each of the other words, whose last token is barred right after the others.
      max_tokens: output tokens granted: `params.max_tokens` clipped to the context; >= 0.
      seed: 64 bits, drawn by the engine when the client gave none.
      priority: lower first.
      deadline_at: instant of the engine's clock after which the request expires.
      tenant: for fairness and cache isolation.
      service_class: name of a configured `ServiceClass`, or "" for none.
      cache_salt: requests share cached pages only with those of the same tenant and salt.
      adapter: number of its LoRA adapter, which no other that was ever loaded has; 0: none. Requests share cached pages
        only with those of the same.
      adapter_place: where that lies on the device; 0: none.
      grammar: compiled form of `params.structured_outputs`, for the engine alone.
      free_running: set by the engine where no token of it waits for the host: an id of `stop_ids` or `max_tokens` ends
        it and nothing else, and all that decides on a token is on the device.
      operation, traceparent: see `Terms`.
      num_imported_tokens: of the prompt, from its first, whose K/V was computed elsewhere and comes with the request:
        whole pages, and fewer than the prompt has.
      exports_kv: K/V of the prompt's full pages is copied out as it is computed.
      received_at: instant from which its times count, where it came before it was queued; for records alone.
      kv: where the runtime finds the pages to import, or puts those it exports; for the runtime alone.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    eos_token_ids: tuple[int, ...] = ()
    max_tokens: int = 16
    seed: int = 0
    priority: int = Priority.NORMAL
    deadline_at: float | None = None
    tenant: str = ""
    service_class: str = ""
    cache_salt: str = ""
    adapter: int = 0
    adapter_place: int = 0
    bad_token_ids: tuple[int, ...] = ()
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    grammar: object | None = field(default=None, compare=False, repr=False)
    free_running: bool = False
    operation: str = "text_completion"
    traceparent: str = ""
    num_imported_tokens: int = 0
    exports_kv: bool = False
    kv: object | None = field(default=None, compare=False, repr=False)
    received_at: float | None = field(default=None, compare=False, repr=False)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt length L."""
        return len(self.prompt_token_ids)

    @property
    def masked(self) -> bool:
        """Whether the host says at every step which tokens may be sampled."""
        return self.grammar is not None or bool(self.bad_sequences)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every id that ends this request's output."""
        return _union(() if self.params.ignore_eos else self.eos_token_ids, self.params.stop_token_ids)


@lru_cache(maxsize=1024)
def _union(first: tuple[int, ...], second: tuple[int, ...]) -> frozenset[int]:
    """One object for all requests with the same ids: the scheduler looks into it once per token."""
    return frozenset(first) | frozenset(second)
