"""RequestLog: the instants and counts of every request, in columns.

A finished request costs 66 bytes here and nothing elsewhere, so a million fit in memory.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

from jaxserve.sim.histogram import Histogram
from jaxserve.sim.source import Arrival

LIVE, COMPLETED = "live", "completed"
REJECTED = "rejected"
NEVER = math.nan
"""An instant that did not come."""


@dataclass(slots=True)
class LiveRequest:
    """A request that has not ended.

    Attributes:
      index: of its row in the log.
      num_before_last: tokens after which only the last of its output is to come.
      gaps: of its class.
      num_tokens: emitted so far; last_at: instant of the newest.
      largest_gap_s: between two successive ones.
    """

    index: int
    num_before_last: int
    gaps: Histogram
    num_tokens: int = 0
    last_at: float = NEVER
    largest_gap_s: float = 0.0


class RequestLog:
    """One row per request, in order of arrival.

    Attributes:
      ids: of the requests; kept only when asked for.
      arrived_at, started_at, first_at, last_at, ended_at: instants of arrival, first plan, first and last
        token, end; NEVER where it did not come.
      largest_gap_s: between two successive tokens of it; 0 with fewer than two tokens.
      num_prompt, num_output: tokens; preemptions: times it lost its slot.
      class_index, service_class_index, outcome: indices into `classes`, `service_classes` ("" for none) and
        `outcomes`. Outcomes are "live", the finish reasons (both kinds of completion as "completed") and the
        reasons of rejection.
      gaps: between successive tokens, all requests together, by class index.
    """

    def __init__(self, *, keep_ids: bool = False) -> None:
        self.ids: list[str] | None = [] if keep_ids else None
        self.arrived_at, self.started_at = array("d"), array("d")
        self.first_at, self.last_at, self.ended_at = array("d"), array("d"), array("d")
        self.largest_gap_s = array("d")
        self.num_prompt, self.num_output, self.preemptions = array("I"), array("I"), array("I")
        self.class_index, self.service_class_index, self.outcome = array("H"), array("H"), array("H")
        self.classes: list[str] = []
        self.service_classes: list[str] = []
        self.outcomes: list[str] = [LIVE, COMPLETED]
        self.rejections: list[str] = []
        self.gaps: list[Histogram] = []

    def __len__(self) -> int:
        return len(self.arrived_at)

    def arrived(self, arrival: Arrival) -> LiveRequest:
        """A new row."""
        if arrival.class_name not in self.classes:
            self.classes.append(arrival.class_name)
            self.gaps.append(Histogram())
        if arrival.request.service_class not in self.service_classes:
            self.service_classes.append(arrival.request.service_class)
        if self.ids is not None:
            self.ids.append(arrival.request.request_id)
        self.arrived_at.append(arrival.at if arrival.asked_at is None else arrival.asked_at)
        for column in (self.started_at, self.first_at, self.last_at, self.ended_at):
            column.append(NEVER)
        self.largest_gap_s.append(0.0)
        self.num_prompt.append(arrival.request.num_prompt_tokens)
        for counts in (self.num_output, self.preemptions):
            counts.append(0)
        class_index = self.classes.index(arrival.class_name)
        self.class_index.append(class_index)
        self.service_class_index.append(self.service_classes.index(arrival.request.service_class))
        self.outcome.append(0)
        return LiveRequest(len(self) - 1, arrival.num_output_tokens - 1, self.gaps[class_index])

    def started(self, live: LiveRequest, now: float) -> None:
        """A plan carries a row of it; only the first counts."""
        if math.isnan(self.started_at[live.index]):
            self.started_at[live.index] = now

    def token(self, live: LiveRequest, now: float) -> None:
        """It emitted a token."""
        if live.num_tokens:
            gap = now - live.last_at
            live.gaps.add(gap)
            if gap > live.largest_gap_s:
                live.largest_gap_s = gap
        else:
            self.first_at[live.index] = now
        live.num_tokens += 1
        live.last_at = now

    def close(self, live: LiveRequest) -> None:
        """Puts down its tokens: when it ends, or the run is cut short."""
        self.last_at[live.index] = live.last_at
        self.largest_gap_s[live.index] = live.largest_gap_s
        self.num_output[live.index] = live.num_tokens

    def preempted(self, live: LiveRequest) -> None:
        """It lost its slot."""
        self.preemptions[live.index] += 1

    def ended(self, live: LiveRequest, outcome: str, now: float) -> None:
        """It left, or was refused for the reason `outcome`."""
        if outcome not in self.outcomes:
            self.outcomes.append(outcome)
        self.outcome[live.index] = self.outcomes.index(outcome)
        self.ended_at[live.index] = now
        self.close(live)

    def refused(self, live: LiveRequest, reason: str, now: float) -> None:
        """It never was live."""
        if reason not in self.rejections:
            self.rejections.append(reason)
        self.ended(live, reason, now)

    def outcome_of(self, index: int) -> str:
        """ "live", "completed", "rejected", "expired", "aborted" or "failed"."""
        outcome = self.outcomes[self.outcome[index]]
        return REJECTED if outcome in self.rejections else outcome
