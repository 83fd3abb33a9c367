"""Sequence: the scheduler's mutable record of one request.

All progress is one number: `num_scheduled`, the tokens whose K/V some plan has been told to write. It
starts at 0, grows by a chunk or by one per plan, and the request needs no more plans when it reaches
`num_kv_tokens`. Whether a row decodes, where it writes and which pages it lacks follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.core import FinishReason, Request

NO_SLOT = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """One request while it is live, or while a step that carries one of its rows is in flight.

    Attributes:
      arrival: number of the arrival, from 0; breaks every tie.
      arrived_at: instant of `Scheduler.add`.
      slot: row of the decode table, or NO_SLOT.
      num_scheduled: tokens whose K/V is written or will be by a step in flight; K/V of tokens
        [0, num_scheduled) is valid for the next plan.
      output_token_ids: tokens the host has seen; trails by the steps in flight.
      pages: pages held, in token order.
      num_reserved_pages: pages set aside for it, those in `pages` included.
      num_in_flight: plans not yet updated that carry a row of it.
      num_preemptions: times it lost its slot to another request.
      first_scheduled_at: instant of the first plan with a row of it.
      finish_reason: None while it is live.
    """

    request: Request
    arrival: int
    arrived_at: float
    slot: int = NO_SLOT
    num_scheduled: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    num_reserved_pages: int = 0
    num_in_flight: int = 0
    num_preemptions: int = 0
    first_scheduled_at: float | None = None
    finish_reason: FinishReason | None = None
    stop_ids: frozenset[int] = field(init=False, repr=False)
    num_prompt_tokens: int = field(init=False, repr=False)
    num_kv_tokens: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.stop_ids = self.request.stop_ids
        self.num_prompt_tokens = self.request.num_prompt_tokens
        # The last output token is sampled and never fed back, so its K/V is not written.
        self.num_kv_tokens = self.num_prompt_tokens + max(self.request.max_tokens - 1, 0)

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def max_total_tokens(self) -> int:
        """Prompt and granted output: what the queue bound counts and admission sets aside."""
        return self.num_prompt_tokens + self.request.max_tokens

    @property
    def decode_ready(self) -> bool:
        """Its whole prompt is scheduled: the next row feeds the last sampled token."""
        return self.num_scheduled >= self.num_prompt_tokens

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
        """It may take a slot now: the token its next row feeds is known on the host.

        One that lost its slot with a step in flight waits for that step; on the device its last token
        was in the slot it gave up.
        """
        return self.num_in_flight == 0 or not self.decode_ready

    @property
    def last_token_id(self) -> int:
        """Token its next decode row feeds, as far as the host knows; -1 when a prompt chunk comes first."""
        return self.output_token_ids[-1] if self.decode_ready else -1
