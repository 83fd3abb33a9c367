"""What an engine shows of itself: frozen values, made by its thread or under its lock, free to read anywhere.

They hold ids, counts and instants of the engine's clock, never tokens or texts, but for `RequestRecord`, which has
the request itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.core.outputs import RequestMetrics
from jaxserve.core.request import Request


class ChunkView(NamedTuple):
    """A prompt chunk: so many tokens of a request, in a slot."""

    slot: int
    request_id: str
    num_tokens: int


class IterationView(NamedTuple):
    """One iteration.

    Attributes:
      iteration: its number, from 0.
      began_at, ended_at: of the step; it does not begin before the one ahead of it has ended.
      bucket: the compiled shape it ran in; None in simulation.
      decode_slots, decode_ids: of the decode rows, by column.
      prefill: the prompt chunks.
      placed: slots that were taken in it.
      preempted: ids that lost their slots for it, at `preempted_at`.
      num_waiting: requests in the queue at its end; the pages likewise.
      decode_tokens: of each decode row, where there were several steps; empty: one each.
    """

    iteration: int
    began_at: float
    ended_at: float
    bucket: str | None
    decode_slots: tuple[int, ...]
    decode_ids: tuple[str, ...]
    prefill: tuple[ChunkView, ...]
    placed: tuple[int, ...]
    preempted: tuple[str, ...]
    preempted_at: float
    num_waiting: int
    pages_free: int
    pages_cached: int
    pages_owned: int
    decode_tokens: tuple[int, ...] = ()

    @property
    def num_steps(self) -> int:
        """Steps that ran: as many as the decode row with the most tokens has."""
        return max(self.decode_tokens) if self.decode_tokens else 1

    @property
    def num_decode_tokens(self) -> int:
        """Tokens that its decode rows brought."""
        return sum(self.decode_tokens) if self.decode_tokens else len(self.decode_ids)

    @property
    def num_prefill_tokens(self) -> int:
        """Prompt tokens computed in it."""
        return sum(chunk.num_tokens for chunk in self.prefill)


class EventView(NamedTuple):
    """What happened to a request outside an iteration: "rejected", "aborted" or "expired", with the reason."""

    name: str
    now: float
    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class SlotView:
    """A slot and who holds it.

    Attributes:
      phase: "prefill" or "decode".
      prompt_tokens, output_tokens, max_tokens: of the request.
      computed_tokens: whose K and V are written, or will be by the steps in flight.
      age_s: seconds since it arrived.
    """

    slot: int
    request_id: str
    phase: str
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    max_tokens: int
    cached_tokens: int
    pages: int
    preemptions: int
    priority: int
    tenant: str
    service_class: str
    age_s: float


@dataclass(frozen=True, slots=True)
class WaitingView:
    """A request in the queue; `age_s` as for a slot."""

    request_id: str
    prompt_tokens: int
    max_tokens: int
    preemptions: int
    priority: int
    tenant: str
    service_class: str
    age_s: float


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """Sums since the engine's start; `prefix_cache_*` count prompt tokens.

    An iteration has one step, or several decode steps. Of requests: offered = completed + rejected + expired +
    aborted + failed + those that run or wait.
    """

    iterations: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    steps: int = 0
    offered: int = 0
    completed: int = 0
    rejected: int = 0
    expired: int = 0
    aborted: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class EngineView:
    """The state of an engine at one instant.

    Attributes:
      now: of the engine's clock.
      num_running, num_waiting: requests; `waiting_tokens`: prompts and granted outputs in the queue.
      pages_total: without the null page; = free + cached + owned.
      slots: those that are held, lowest first.
      queue: the first few that wait, in order of arrival.
      iterations: the last ones, oldest first.
    """

    now: float
    num_running: int
    num_waiting: int
    waiting_tokens: int
    max_num_seqs: int
    page_size: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_owned: int
    totals: EngineTotals
    slots: tuple[SlotView, ...] = ()
    queue: tuple[WaitingView, ...] = ()
    iterations: tuple[IterationView, ...] = ()


@dataclass(frozen=True, slots=True)
class Recording:
    """The last iterations and events, each oldest first, of an engine with so many slots."""

    model: str
    max_num_seqs: int
    iterations: tuple[IterationView, ...]
    events: tuple[EventView, ...]


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that has ended or was refused; choices count singly.

    Attributes:
      index: its choice number.
      outcome: a `FinishReason`, or the reason of its rejection.
      rejected: it was never live, or it was displaced.
      metrics: its instants, final.
      last_token_at: instant of its last token; None without one.
      cause: what ended all that was open, "engine_dead", "engine_stuck" or "draining"; "": nothing did.
    """

    request: Request
    index: int
    outcome: str
    rejected: bool
    metrics: RequestMetrics
    last_token_at: float | None
    num_output_tokens: int
    num_cached_tokens: int
    cause: str = ""

    @property
    def queue_s(self) -> float | None:
        """Seconds from arrival to its first slot; None when it never had one."""
        return _since(self.metrics.arrived_at, self.metrics.first_scheduled_at)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to first token; None without one."""
        return _since(self.metrics.arrived_at, self.metrics.first_token_at)

    @property
    def mean_itl_s(self) -> float | None:
        """Seconds between tokens: (last - first) / (n - 1); None below two tokens."""
        first, last = self.metrics.first_token_at, self.last_token_at
        if first is None or last is None or self.num_output_tokens < 2:
            return None
        return (last - first) / (self.num_output_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        """Seconds from arrival to end; None when it was refused."""
        return _since(self.metrics.arrived_at, self.metrics.finished_at)


def _since(earlier: float, later: float | None) -> float | None:
    return None if later is None else max(later - earlier, 0.0)
