"""Sequence: the scheduler's mutable record of one request.

All progress is one number: `num_scheduled`, the tokens whose K/V some plan has been told to write. It
starts at 0, grows per plan by a chunk or by decode steps, mostly one, and the request needs no more plans
when it reaches `num_kv_tokens`. Whether a row decodes, where it writes and which pages it lacks follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.core import FinishReason, Request
from jaxserve.scheduler.holding import Holding

NO_SLOT = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """One request while it is live, or while a step that carries one of its rows is in flight.

    Attributes:
      arrival: number of the arrival, from 0; breaks every tie.
      arrived_at: instant of `Scheduler.add`.
      slot: row of the decode table, or NO_SLOT.
      turn: number of the promotion that gave it its last slot; orders those that hold one.
      num_scheduled: tokens whose K/V is written or will be by a step in flight; K/V of tokens
        [0, num_scheduled) is valid for the next plan.
      output_token_ids: tokens the host has seen; trails by the steps in flight.
      holdings: its pages, by group of layers.
      num_in_flight: plans not yet updated that carry a row of it.
      num_preemptions: times it lost its slot.
      num_setbacks: these, and arrivals of higher class that took a free slot while it was the queue's front.
      num_prefill_tokens: tokens that come in chunks: the prompt, and after a recompute the outputs it had.
      num_recoveries: times it was sent back to the queue, or lost its pages there, as a step had failed.
      num_outputs_at_start: output tokens it had when it took its slot.
      num_cached_tokens: tokens found in the prefix cache when it took its first slot.
      num_to_import: tokens whose K/V came with the request and is not in the pool yet, though they count as scheduled;
        until it is, the sequence holds no pages but those it shares.
      num_exported_pages: of its pages, from the first, those that plans have copied out.
      restarted: it lost its pages; until it gets a slot again nothing of it is in the pool.
      page_names: of its full pages as far as they were needed, see `prefix_cache`.
      num_named_pages: of its pages, from the first, those entered in the prefix cache.
      first_scheduled_at: instant of the first plan with a row of it.
      finish_reason: None while it is live.
    """

    request: Request
    arrival: int
    arrived_at: float
    holdings: list[Holding] = field(default_factory=lambda: [Holding()])
    slot: int = NO_SLOT
    turn: int = -1
    num_scheduled: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    num_in_flight: int = 0
    num_preemptions: int = 0
    num_setbacks: int = 0
    num_recoveries: int = 0
    num_outputs_at_start: int = 0
    num_cached_tokens: int = 0
    num_to_import: int = 0
    num_exported_pages: int = 0
    restarted: bool = False
    page_names: list[bytes] = field(default_factory=list, repr=False)
    num_named_pages: int = 0
    first_scheduled_at: float | None = None
    finish_reason: FinishReason | None = None
    # Copied from the request, because every iteration asks for them of every row.
    request_id: str = field(init=False, repr=False)
    stop_ids: frozenset[int] = field(init=False, repr=False)
    max_tokens: int = field(init=False, repr=False)
    num_prompt_tokens: int = field(init=False, repr=False)
    num_prefill_tokens: int = field(init=False, repr=False)
    num_kv_tokens: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.request_id = self.request.request_id
        self.stop_ids = self.request.stop_ids
        self.max_tokens = self.request.max_tokens
        self.num_prompt_tokens = self.num_prefill_tokens = self.request.num_prompt_tokens
        # The last output token is sampled and never fed back, so its K/V is not written.
        self.num_kv_tokens = self.num_prompt_tokens + max(self.max_tokens - 1, 0)

    @property
    def max_total_tokens(self) -> int:
        """Prompt and granted output: what the queue bound counts and admission sets aside."""
        return self.num_prompt_tokens + self.max_tokens

    @property
    def num_known_tokens(self) -> int:
        """Prompt and the output tokens the host has seen."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_pages(self) -> int:
        """Pages it has had for its tokens in each group: those given back and those held."""
        return self.holdings[0].num_pages

    @property
    def num_held_pages(self) -> int:
        """Pages it holds, in all groups together."""
        return sum([len(holding.pages) for holding in self.holdings])

    @property
    def num_promised_pages(self) -> int:
        """Pages it does not hold yet and will find free, in all groups together."""
        return sum([holding.num_promised for holding in self.holdings])

    @property
    def is_swapped_out(self) -> bool:
        """Its pages are on the host."""
        return any([holding.host_pages for holding in self.holdings])

    @property
    def decode_ready(self) -> bool:
        """All its chunks are scheduled: the next row feeds the last sampled token."""
        return self.num_scheduled >= self.num_prefill_tokens

    @property
    def fully_scheduled(self) -> bool:
        """No plan has to carry it any more; it ends, at the latest, when the last one lands."""
        return self.num_scheduled >= self.num_kv_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Prompt and output tokens it may still need: its remaining work."""
        return self.max_total_tokens - self.num_scheduled

    @property
    def resumable(self) -> bool:
        """It may take a slot now: the tokens its next row feeds are known on the host, its old pages are free.

        One that lost its slot with a step in flight waits for that step; on the device its last token
        was in the slot it gave up.
        """
        return self.num_in_flight == 0 or not (self.decode_ready or self.restarted)

    @property
    def has_gained(self) -> bool:
        """It has a token more than when it took its slot."""
        return len(self.output_token_ids) > self.num_outputs_at_start

    def token_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens [start, end) of prompt and outputs."""
        prompt = self.request.prompt_token_ids
        if end <= self.num_prompt_tokens:
            return prompt[start:end]
        outputs = self.output_token_ids[max(start - self.num_prompt_tokens, 0) : end - self.num_prompt_tokens]
        return (*prompt[start:], *outputs)

    @property
    def last_token_id(self) -> int:
        """Token its next decode row feeds, as far as the host knows; -1 when a prompt chunk comes first."""
        return self.output_token_ids[-1] if self.decode_ready else -1
