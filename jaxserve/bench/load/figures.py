"""Figures of a load, from its records.

| figure | meaning |
|---|---|
| ttft_ms | arrival to first token |
| itl_ms | gap between two successive token events of one request, all gaps together |
| tpot_ms | (last token - first token) / (tokens - 1), requests with two tokens or more |
| e2e_ms | arrival to last token |
| refusal_ms | arrival to the answer that refused it |
| late_ms | by how much the client sent after the arrival: above a few ms the client is the bottleneck |
| duration_s | first arrival to last end |
| output_tokens_per_s, requests_per_s | of completed requests, over duration_s |
| offered_requests_per_s | requests over the span of arrivals; over duration_s where all came at once |
| goodput_requests_per_s | completed requests that met every objective, over duration_s |
| slo_share | the same over all offered |
| short_outputs | completed with fewer tokens than asked for: the server does not know `ignore_eos` |
| tokens_per_event | 1 where every token is an event; above, gaps of itl_ms span several tokens |

Latencies are of completed requests; each is a dict of mean, p50, p90 and p99. A request meets its objectives when its
ttft, every gap and its tpot are at most as long as given. Standard library only.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.bench.load.record import COMPLETED, FAILED, REFUSED, Record

QUANTILES = {"p50": 50, "p90": 90, "p99": 99}


@dataclass(frozen=True, slots=True)
class Objectives:
    """Most milliseconds of each; None: any."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    tpot_ms: float | None = None

    def met_by(self, record: Record) -> bool:
        """Whether a request completed within them."""
        if record.outcome != COMPLETED:
            return False
        values = (
            (self.ttft_ms, record.ttft_s),
            (self.itl_ms, max(record.gaps_s, default=0.0)),
            (self.tpot_ms, record.tpot_s or 0.0),
        )
        return all(limit is None or 1e3 * value <= limit for limit, value in values)


def figures(records: Sequence[Record], objectives: Objectives) -> dict[str, Any]:
    """All figures of one run, JSON-able; None where there is nothing to take a figure of.

    Args:
      records: of at least one request, all ended.
    """
    completed = [record for record in records if record.outcome == COMPLETED]
    refused = [record for record in records if record.outcome == REFUSED]
    failed = [record for record in records if record.outcome == FAILED]
    began_at = min(record.due_at for record in records)
    duration_s = max(record.ended_at for record in records) - began_at
    span_s = max(record.due_at for record in records) - began_at
    met = sum(objectives.met_by(record) for record in records)
    output_tokens = sum(record.num_output for record in completed)
    events = sum(len(record.token_at) for record in completed)
    return {
        "offered": len(records),
        "completed": len(completed),
        "refused": len(refused),
        "refused_by_status": dict(Counter(str(record.status) for record in refused)),
        "failed": len(failed),
        "errors": dict(Counter(record.error for record in failed).most_common(5)),
        "short_outputs": sum(record.num_output < record.max_tokens for record in completed),
        "prompt_tokens": sum(record.num_prompt for record in completed),
        "output_tokens": output_tokens,
        "duration_s": duration_s,
        "output_tokens_per_s": _ratio(output_tokens, duration_s),
        "requests_per_s": _ratio(len(completed), duration_s),
        "offered_requests_per_s": _ratio(len(records) - 1, span_s) or _ratio(len(records), duration_s),
        "goodput_requests_per_s": _ratio(met, duration_s),
        "slo_share": met / len(records),
        "tokens_per_event": _ratio(output_tokens, events),
        "ttft_ms": summary(record.ttft_s for record in completed),
        "itl_ms": summary(gap for record in completed for gap in record.gaps_s),
        "tpot_ms": summary(record.tpot_s for record in completed if record.tpot_s is not None),
        "e2e_ms": summary(record.e2e_s for record in completed),
        "refusal_ms": summary(record.ended_at - record.due_at for record in refused),
        "retry_after_s": max((record.retry_after_s or 0.0 for record in refused), default=None),
        "late_ms": summary(record.sent_at - record.due_at for record in records if record.sent_at),
    }


def summary(seconds: Iterable[float]) -> dict[str, float | None]:
    """Mean and quantiles in milliseconds; quantiles are nearest-rank, so each is a value that occurred."""
    ranked = sorted(seconds)
    if not ranked:
        return dict.fromkeys(("mean", *QUANTILES))
    named = {name: 1e3 * ranked[max(-(-len(ranked) * percent // 100), 1) - 1] for name, percent in QUANTILES.items()}
    return {"mean": 1e3 * statistics.fmean(ranked), **named}


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figure by figure the median over runs; of counts by name the sum."""
    found: dict[str, Any] = {}
    for key, first in runs[0].items():
        values = [run[key] for run in runs]
        if key in ("refused_by_status", "errors"):
            found[key] = dict(sum((Counter(value) for value in values), Counter()))
        elif isinstance(first, dict):
            found[key] = medians(values)
        else:
            present = [value for value in values if value is not None]
            found[key] = statistics.median(present) if present else None
    return found


def _ratio(value: float, over: float) -> float | None:
    return value / over if over > 0 else None
