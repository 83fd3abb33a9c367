"""Diagnoses: from the figures of a run to its bottleneck. Each is a pure function of a `TraceSummary`.

| name | symptom |
|---|---|
| died | the trace was left by an engine that died: the others are of the time before |
| kv_pressure | slots idle while the queue waits for pages |
| no_refill | slots idle while the queue waits for a whole batch to end |
| ttft_queueing | the slowest first tokens spent their time in the queue |
| ttft_prefill | the slowest first tokens spent their time in prefill |
| itl_decode_batch, itl_prefill, itl_preemption | most requests see a long gap, by what made it long |
| itl_steps | tokens come several at a time, as iterations have several decode steps |
| itl_tail | a long tail of gaps whose cause the source does not tell |
| long_outputs | TTFT is stable, end-to-end time has a long tail, and so have the outputs |
| rejections | refused or expired requests |

A tail is long when it is more than `TAIL` medians. Several may hold at once; causes come before effects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.sim.spread import Spread
from jaxserve.sim.trace_summary import TAIL, TraceSummary

_SHARE_OF_ITERATIONS = 0.05
_SHARE_OF_REQUESTS = 0.01
_SHARE_OF_STALLS = 0.3
_MAJORITY = 0.5
_FULL = 0.9
_SEVERAL_STEPS = 1.25
"""Decode steps of an iteration, in the mean, from which on they show in the gaps between tokens."""
_PAGE_FLAGS = ("memory_fraction", "num_pages", "reservation")
_REJECTION_FLAGS = {
    "queue_full_requests": ("max_queue_requests", "max_num_seqs"),
    "queue_full_tokens": ("max_queue_tokens", "max_num_seqs"),
    "never_fits": ("max_model_len", "num_pages"),
    "deadline": ("max_num_seqs", "max_queue_requests"),
    "expired": ("max_num_seqs", "max_queue_requests"),
    "draining": ("drain_grace_s",),
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A finding.

    Attributes:
      name: see the table above, or "healthy" or "no_data".
      says: what is seen, one sentence.
      figures: those that led to it.
      flags: of the server, to try; empty where none helps.
      advice: what to do with them.
    """

    name: str
    says: str
    figures: dict[str, float]
    flags: tuple[str, ...]
    advice: str


def diagnose(summary: TraceSummary) -> list[Diagnosis]:
    """Every finding, causes first; "healthy" when there is none, "no_data" when nothing was offered.

    Of an engine that died the first is "died", and it is never healthy.
    """
    if summary.died_of:
        return [_died(summary), *_found(summary)]
    if not summary.offered:
        return [Diagnosis("no_data", "No request came in.", {}, (), "Record a run with requests.")]
    return _found(summary) or [_healthy(summary)]


def kv_pressure(summary: TraceSummary) -> Diagnosis | None:
    """Slots idle while the queue waits for pages; of a server, a queue and a full pool at the time of asking."""
    share, waiting, usage = summary.blocked_on_pages, summary.waiting or 0, summary.kv_usage or 0.0
    if share is not None and share >= _SHARE_OF_ITERATIONS:
        figures = {"iterations_blocked_on_pages": share}
    elif waiting and usage >= _FULL:
        figures = {"waiting": waiting, "kv_usage": usage}
    else:
        return None
    return Diagnosis(
        "kv_pressure",
        "Slots are idle while the queue waits for KV pages.",
        figures,
        _PAGE_FLAGS,
        "Give the pool more pages. Under the reservations guaranteed and exact, pages for all of max_tokens are set"
        " aside on admission: lower it, or promise less by another reservation.",
    )


def no_refill(summary: TraceSummary) -> Diagnosis | None:
    """Slots idle because the batching does not fill them."""
    share = summary.not_refilled
    if share is None or share < _SHARE_OF_ITERATIONS:
        return None
    return Diagnosis(
        "no_refill",
        "Slots are idle while the queue waits for a whole batch to end.",
        {"iterations_not_refilled": share},
        ("batching",),
        "Continuous batching refills before every iteration; other batchings wait for a whole batch to end.",
    )


def ttft_queueing(summary: TraceSummary) -> Diagnosis | None:
    """The slow first tokens waited for a slot, and longer than a usual prefill takes."""
    ttft, queue, share = summary.ttft_s, summary.queue_s, summary.ttft_tail_queue_share
    if ttft is None or queue is None or share is None or share < _MAJORITY:
        return None
    usual_prefill = summary.prefill_s.p50 if summary.prefill_s else max(ttft.p50 - queue.p50, 0.0)
    if queue.p95 <= TAIL * usual_prefill:
        return None
    for_pages = kv_pressure(summary) is not None
    return Diagnosis(
        "ttft_queueing",
        f"The slowest first tokens waited in the queue{' for KV pages' if for_pages else ' for a slot'}.",
        {**_tail("ttft", ttft), **_tail("queue", queue), "queue_share_of_slowest": share},
        _PAGE_FLAGS if for_pages else ("max_num_seqs", "max_num_batched_tokens", "max_queue_requests"),
        "More pages end the wait."
        if for_pages
        else "More slots admit more at once, if the device keeps pace; a shorter queue refuses early instead.",
    )


def ttft_prefill(summary: TraceSummary) -> Diagnosis | None:
    """The slow first tokens were computing their prompts."""
    ttft, share = summary.ttft_s, summary.ttft_tail_queue_share
    if ttft is None or share is None or share >= _MAJORITY or not _long(ttft):
        return None
    prefill = summary.prefill_s
    return Diagnosis(
        "ttft_prefill",
        "The slowest first tokens spent their time in prefill.",
        {**_tail("ttft", ttft), **(_tail("prefill", prefill) if prefill else {}), "queue_share_of_slowest": share},
        ("max_num_batched_tokens", "prefill_chunk"),
        "Larger chunks and a larger token budget end long prompts in fewer iterations, at the price of longer gaps"
        " between the tokens of others.",
    )


def itl_decode_batch(summary: TraceSummary) -> Diagnosis | None:
    """Long gaps in iterations with many decode rows."""
    rows, cost = summary.decode_rows, summary.cost
    if rows is None or cost is None:
        return None
    return _stall(
        summary,
        "decode",
        "itl_decode_batch",
        "Gaps between tokens are long when many requests decode at once.",
        {"decode_rows_p50": rows.p50, "decode_rows_p99": rows.p99, "seconds_per_decode_row": cost.per_row_s},
        ("max_num_seqs",),
        "Fewer slots bound the batch; the rest waits in the queue.",
    )


def itl_prefill(summary: TraceSummary) -> Diagnosis | None:
    """Long gaps in iterations with many prompt tokens."""
    tokens, cost = summary.prefill_tokens, summary.cost
    if tokens is None or cost is None:
        return None
    return _stall(
        summary,
        "prefill",
        "itl_prefill",
        "Gaps between tokens are long when prompts of others are computed beside them.",
        {
            "prefill_tokens_p50": tokens.p50,
            "prefill_tokens_p99": tokens.p99,
            "seconds_per_prefill_token": cost.per_token_s,
        },
        ("itl_target_s", "prefill_chunk", "max_num_batched_tokens"),
        "A target for the gap, smaller chunks or a smaller token budget bound an iteration; long prompts then take"
        " more of them.",
    )


def itl_preemption(summary: TraceSummary) -> Diagnosis | None:
    """Long gaps of requests that lost their slot."""
    return _stall(
        summary,
        "preemption",
        "itl_preemption",
        "Gaps between tokens are long where a request lost its slot: to a higher priority, or for want of pages.",
        {"preemptions": summary.preemptions, "requests": summary.offered},
        ("priority_preemption", "reservation", "max_num_seqs"),
        "More slots make preemption rare. Without priority_preemption nobody loses a slot to a higher priority, and"
        " with the guaranteed reservation nobody for want of pages.",
    )


def itl_steps(summary: TraceSummary) -> Diagnosis | None:
    """Tokens that come several at a time; of a server, wherever iterations have several steps and gaps are long."""
    says = "Tokens come several at a time, as one dispatch has several decode steps."
    flags = ("max_decode_steps", "max_arrival_delay_s")
    advice = "Fewer steps spread the same tokens evenly, at the price of more work for the host."
    if summary.stall_causes is not None:
        return _stall(summary, "steps", "itl_steps", says, {}, flags, advice)
    itl, steps = summary.itl_s, summary.decode_steps
    if itl is None or steps is None or steps < _SEVERAL_STEPS or not _long(itl):
        return None
    return Diagnosis("itl_steps", says, {**_tail("itl", itl), "decode_steps": steps}, flags, advice)


def itl_tail(summary: TraceSummary) -> Diagnosis | None:
    """Long gaps, and no telling why."""
    itl, causes = summary.itl_s, summary.stall_causes
    if causes is not None:
        return _stall(
            summary,
            "unexplained",
            "itl_tail",
            "Gaps between tokens are long in iterations that had no more work than others.",
            {},
            (),
            "What the engine died of may have taken the time before it ended it; so may other load on the host or the"
            " device."
            if summary.died_of
            else "Something outside the scheduler took the time: look for other load on the host or the device.",
        )
    if itl is None or not _long(itl) or itl_steps(summary) is not None:
        return None
    return Diagnosis(
        "itl_tail",
        "Gaps between tokens have a long tail.",
        {**_tail("itl", itl), "preemptions": summary.preemptions},
        ("trace_file",),
        "Metrics do not tell the cause: record a trace and ask again with it.",
    )


def long_outputs(summary: TraceSummary) -> Diagnosis | None:
    """Stable TTFT, long end-to-end tail, long outputs."""
    ttft, e2e, outputs = summary.ttft_s, summary.e2e_s, summary.output_tokens
    if ttft is None or e2e is None or outputs is None or _long(ttft) or not (_long(e2e) and _long(outputs)):
        return None
    return Diagnosis(
        "long_outputs",
        "First tokens come evenly; the slowest requests are those with long outputs.",
        {
            **_tail("ttft", ttft),
            **_tail("e2e", e2e),
            "output_tokens_p50": outputs.p50,
            "output_tokens_p95": outputs.p95,
        },
        ("max_model_len",),
        "Nothing is wrong with the service; where such outputs are not wanted, lower max_tokens of the requests.",
    )


def rejections(summary: TraceSummary) -> Diagnosis | None:
    """Refused or expired requests, by reason."""
    lost = {**summary.rejected, **({"expired": expired} if (expired := summary.ended.get("expired")) else {})}
    many = {reason: count for reason, count in lost.items() if count >= _SHARE_OF_REQUESTS * summary.offered}
    if not many:
        return None
    by_count = sorted(many, key=lambda reason: (-many[reason], reason))
    return Diagnosis(
        "rejections",
        f"Requests are refused or expire, most of them by {by_count[0]}.",
        {**{reason: many[reason] for reason in by_count}, "requests": summary.offered},
        tuple(dict.fromkeys(flag for reason in by_count for flag in _REJECTION_FLAGS.get(reason, ()))),
        "Larger bounds hold more; if the queue is full most of the time, only more capacity helps. never_fits,"
        " duplicate_id and invalid are for the clients to mend.",
    )


CHECKS: tuple[Callable[[TraceSummary], Diagnosis | None], ...] = (
    kv_pressure,
    no_refill,
    ttft_queueing,
    ttft_prefill,
    itl_decode_batch,
    itl_prefill,
    itl_preemption,
    itl_steps,
    itl_tail,
    long_outputs,
    rejections,
)


def _found(summary: TraceSummary) -> list[Diagnosis]:
    return [diagnosis for check in CHECKS if (diagnosis := check(summary))]


def _died(summary: TraceSummary) -> Diagnosis:
    return Diagnosis(
        "died",
        f"The engine died of {summary.died_of}",
        {},
        (),
        "The traceback is in the first line of the file, under `died`. What follows is of its last iterations.",
    )


def _healthy(summary: TraceSummary) -> Diagnosis:
    known = {"ttft": summary.ttft_s, "itl": summary.itl_s, "e2e": summary.e2e_s}
    figures = {key: value for name, spread in known.items() if spread for key, value in _tail(name, spread).items()}
    return Diagnosis("healthy", "No bottleneck shows.", figures, (), "Nothing to do.")


def _stall(
    summary: TraceSummary,
    cause: str,
    name: str,
    says: str,
    figures: dict[str, float],
    flags: tuple[str, ...],
    advice: str,
) -> Diagnosis | None:
    """The diagnosis, if requests see long gaps and enough of those have this cause."""
    itl, stall, causes = summary.pace_s or summary.itl_s, summary.stall_s, summary.stall_causes
    if itl is None or stall is None or causes is None:
        return None
    if stall.p95 <= TAIL * itl.p50 or causes[cause] < _SHARE_OF_STALLS:
        return None
    common = {"itl_p50_s": itl.p50, "longest_gap_p95_s": stall.p95, f"share_by_{cause}": causes[cause]}
    return Diagnosis(name, says, {**common, **figures}, flags, advice)


def _long(spread: Spread) -> bool:
    return spread.p95 > TAIL * spread.p50


def _tail(name: str, spread: Spread) -> dict[str, float]:
    return {f"{name}_p50_s": spread.p50, f"{name}_p95_s": spread.p95}
