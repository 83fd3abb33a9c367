"""TraceSummary: the figures of a run from which a diagnosis can be made.

summary = summarize(TraceReader("trace.jsonl"), "trace.jsonl")        jaxserve.sim.summarizer
summary = summary_of_metrics(text, "http://127.0.0.1:8000")             jaxserve.sim.metrics_summary
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.sim.iteration_cost import IterationCost
from jaxserve.sim.spread import Spread

TAIL = 2.0
"""A value belongs to the tail when it is more than this many medians."""
STALL_CAUSES = ("decode", "prefill", "preemption", "steps", "unexplained")


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """Figures of a run; None where the source does not tell.

    Attributes:
      source: the trace's path or the server's address.
      died_of: of what the engine died that left the trace, in one line; "" of others.
      max_num_seqs: slots.
      offered: arrivals, the refused included.
      ended: live requests that ended, by completed, aborted, expired and failed.
      rejected: refused, by reason.
      preemptions: times a request lost its slot.
      ttft_s, queue_s, prefill_s: arrival to first token, arrival to first chunk, first chunk to first token.
      ttft_tail_queue_share: of the TTFT of the slowest 5 percent, the share spent in the queue.
      itl_s, e2e_s, output_tokens: of successive tokens, of completed requests, of completed requests.
      pace_s: of successive tokens too, each gap shared out among the tokens that came together at its end.
      stall_s: longest gap of each request between two of its tokens.
      stall_causes: of the requests whose longest gap is in the tail (`TAIL` medians of `pace_s`), the share
        by what made it long.
      decode_rows, prefill_tokens: of the iterations that have any.
      decode_steps: of an iteration with decode rows, mean.
      cost: of a step, fitted.
      blocked_on_pages: share of iterations with an idle slot while the queue's front lacked pages, or while
        nobody was promoted because pages had been taken from others.
      not_refilled: share of iterations with an idle slot while the batching waited for a batch to end.
      waiting, kv_usage: at the time of asking a server.
    """

    source: str
    num_iterations: int
    offered: int
    ended: dict[str, int]
    rejected: dict[str, int]
    preemptions: int
    max_num_seqs: int | None = None
    ttft_s: Spread | None = None
    queue_s: Spread | None = None
    prefill_s: Spread | None = None
    ttft_tail_queue_share: float | None = None
    itl_s: Spread | None = None
    pace_s: Spread | None = None
    stall_s: Spread | None = None
    stall_causes: dict[str, float] | None = None
    e2e_s: Spread | None = None
    output_tokens: Spread | None = None
    decode_rows: Spread | None = None
    prefill_tokens: Spread | None = None
    decode_steps: float | None = None
    cost: IterationCost | None = None
    blocked_on_pages: float | None = None
    not_refilled: float | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    died_of: str = ""
