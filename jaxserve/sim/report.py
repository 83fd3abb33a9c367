"""Figures of a run, from its log: latencies, throughput, goodput, utilisation.

| figure | meaning |
|---|---|
| ttft_s | arrival to first token |
| itl_s | gap between two successive tokens of one request, all gaps together |
| tpot_s | (last token - first token) / (tokens - 1), requests with two tokens or more |
| e2e_s | arrival to last token, completed requests |
| queue_s | arrival to the begin of the first iteration that works on it |
| duration_s | first arrival to last end, or to the last iteration where the limit cut the run short |
| tokens_per_s, requests_per_s | output tokens and completed requests over duration_s |
| offered_requests_per_s | requests over the span of arrivals; over duration_s where all came at once |
| goodput_requests_per_s | requests that met their objectives over duration_s |
| slo_share | requests that met their objectives over all offered |
| slot_utilisation | slots with work for live requests over all slots, mean over steps |
| wasted_rows | rows of requests that had ended when their iteration was over |
| budget_utilisation | tokens computed over the token budget, mean over steps |
| busy_share | seconds in which the device ran over duration_s |

A request meets its objectives when it completed, its ttft is at most `ttft_s`, every gap at most `itl_s`
and its tpot at most `tpot_s`, each where given. The targets of a request's service class come before
the objectives of the whole run. Without either all completed requests do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxserve.config import SchedulerConfig, ServiceClass
from jaxserve.sim.histogram import Histogram
from jaxserve.sim.request_log import COMPLETED, RequestLog
from jaxserve.sim.simulator import SimulationResult
from jaxserve.sim.split import SplitTotals

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
LATENCIES = ("ttft_s", "itl_s", "tpot_s", "e2e_s", "queue_s")

Column = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Objectives:
    """Most seconds of each; None: any."""

    ttft_s: float | None = None
    itl_s: float | None = None
    tpot_s: float | None = None

    @property
    def given(self) -> bool:
        """Whether there is one."""
        return any(value is not None for value in asdict(self).values())

    def with_targets_of(self, service_class: ServiceClass) -> Objectives:
        """Those of its requests: its targets, these where it has none."""
        ttft_s, itl_s = service_class.ttft_target_s, service_class.itl_target_s
        return replace(
            self,
            ttft_s=self.ttft_s if ttft_s is None else ttft_s,
            itl_s=self.itl_s if itl_s is None else itl_s,
        )

    def by_service_class(self, config: SchedulerConfig) -> dict[str, Objectives]:
        """Of each service class that `config` has, by name; "" is for requests of none."""
        return {"": self} | {each.name: self.with_targets_of(each) for each in config.service_classes}


def figures(result: SimulationResult, objectives: Objectives) -> dict[str, Any]:
    """All figures of a run, JSON-able; None where there is nothing to take a figure of.

    Latencies are dicts with mean, p50, p90, p99 and max. `classes` has the request figures per class of the workload,
    `service_class_objectives` the objectives of each service class that is configured.
    """
    log, totals, config = result.log, result.totals, result.config
    by_class = objectives.by_service_class(config)
    columns = _Columns(log, by_class, totals.ended_at)
    gaps = Histogram()
    for each in log.gaps:
        gaps.merge(each)
    everyone = np.ones(len(log), bool)
    duration_s = columns.duration_s
    iterations, steps = max(totals.iterations, 1), max(totals.steps, 1)
    overall = columns.figures(everyone, gaps)
    return {
        "termination": result.termination,
        "objectives": asdict(objectives),
        "service_class_objectives": {name: asdict(each) for name, each in by_class.items() if name},
        "duration_s": duration_s,
        **overall,
        "iterations": totals.iterations,
        "steps": totals.steps,
        "mean_iteration_s": totals.busy_s / iterations,
        "slot_utilisation": (totals.slot_steps - totals.wasted_rows) / (steps * config.max_num_seqs),
        "wasted_rows": totals.wasted_rows,
        "budget_utilisation": totals.tokens / (steps * config.max_num_batched_tokens),
        "busy_share": _ratio(totals.busy_s, duration_s * (result.split.num_decode if result.split else 1)),
        "recomputed_tokens": sum(totals.recomputed_tokens.values()),
        "recomputed_tokens_by_service_class": totals.recomputed_tokens,
        "swapped_pages": sum(totals.swapped_pages.values()),
        "swapped_pages_by_service_class": totals.swapped_pages,
        "cached_tokens": totals.cached_tokens,
        "largest_pages_owned": max((span.pages_owned for span in result.timeline.spans), default=0),
        **({} if result.split is None else {"split": _split_figures(result.split, duration_s)}),
        "largest_queue": max((span.queue for span in result.timeline.spans), default=0),
        "classes": {
            name: columns.figures(columns.class_index == index, log.gaps[index])
            for index, name in enumerate(log.classes)
        },
    }


def _split_figures(split: SplitTotals, duration_s: float) -> dict[str, Any]:
    """Of the prefill engines and their links."""
    engines_s = duration_s * split.num_prefill
    return {
        "prefill_engines": split.num_prefill,
        "decode_engines": split.num_decode,
        "prefill_busy_share": _ratio(split.prefill.busy_s, engines_s),
        "prefill_tokens": split.prefill.tokens,
        "link_busy_share": _ratio(split.link_busy_s, engines_s),
        "sent_requests": split.sent_requests,
        "sent_pages": split.sent_pages,
        "transfer_s": _summary(np.array(split.transfer_s)),
        "short_prompts": split.short_prompts,
        "refused_prompts": split.refused_prompts,
    }


class _Columns:
    """The log's columns as arrays, and what follows from them request by request."""

    def __init__(self, log: RequestLog, by_service_class: Mapping[str, Objectives], ended_at: float) -> None:
        self._log = log
        self._arrived = _array(log.arrived_at)
        self._outputs = np.asarray(log.num_output, np.int64)
        self._outcome = np.asarray(log.outcome, np.int64)
        self._preemptions = np.asarray(log.preemptions, np.int64)
        self.class_index = np.asarray(log.class_index, np.int64)
        first, last = _array(log.first_at), _array(log.last_at)
        self.completed = self._outcome == log.outcomes.index(COMPLETED)
        self.ttft_s = first - self._arrived
        self.queue_s = _array(log.started_at) - self._arrived
        self.e2e_s = np.where(self.completed, last - self._arrived, np.nan)
        several = self._outputs > 1
        self.tpot_s = np.where(several, (last - first) / np.maximum(self._outputs - 1, 1), np.nan)
        # Requests of a class that is not configured are refused, so any objectives do.
        own = [by_service_class.get(name, by_service_class[""]) for name in log.service_classes]
        service_class_index = np.asarray(log.service_class_index, np.int64)
        self.met = self.completed.copy()
        for limits, values in (
            ([each.ttft_s for each in own], self.ttft_s),
            ([each.itl_s for each in own], _array(log.largest_gap_s)),
            ([each.tpot_s for each in own], np.where(several, self.tpot_s, 0.0)),
        ):
            # NaN: no limit. Where a request has no value, it does not keep within a limit.
            limit = np.array(limits, np.float64)[service_class_index]
            self.met &= np.isnan(limit) | (values <= limit)
        # A run that was cut short ends at its last iteration, not at the last end of a request.
        ends = np.concatenate([[ended_at], self._arrived, finite(log.ended_at)])
        self.duration_s = float(ends.max() - self._arrived.min()) if len(log) else 0.0

    def figures(self, chosen: npt.NDArray[np.bool_], gaps: Histogram) -> dict[str, Any]:
        """Of some of the requests; rates are over the whole run's duration."""
        offered, completed = int(chosen.sum()), int(self.completed[chosen].sum())
        met = int(self.met[chosen].sum())
        arrived = self._arrived[chosen]
        span_s = float(arrived.max() - arrived.min()) if offered else 0.0
        tokens = int(self._outputs[chosen].sum())
        counts = np.bincount(self._outcome[chosen], minlength=len(self._log.outcomes))
        by_outcome = {name: int(count) for name, count in zip(self._log.outcomes, counts, strict=True)}
        rejections = {name: by_outcome.pop(name) for name in self._log.rejections}
        return {
            "offered": offered,
            **{name: by_outcome.get(name, 0) for name in ("completed", "expired", "aborted", "failed", "live")},
            "rejected": sum(rejections.values()),
            "rejected_by_reason": rejections,
            "preemptions": int(self._preemptions[chosen].sum()),
            "output_tokens": tokens,
            "tokens_per_s": _ratio(tokens, self.duration_s),
            "requests_per_s": _ratio(completed, self.duration_s),
            "offered_requests_per_s": _ratio(offered - 1, span_s) or _ratio(offered, self.duration_s),
            "goodput_requests_per_s": _ratio(met, self.duration_s),
            "slo_share": _ratio(met, offered),
            "ttft_s": _summary(self.ttft_s[chosen]),
            "itl_s": _histogram_summary(gaps),
            "tpot_s": _summary(self.tpot_s[chosen]),
            "e2e_s": _summary(self.e2e_s[chosen]),
            "queue_s": _summary(self.queue_s[chosen]),
        }


def finite(values: Any) -> Column:
    """Without the instants that did not come."""
    column = _array(values)
    return column[~np.isnan(column)]


def _summary(values: Column) -> dict[str, float | None]:
    values = finite(values)
    if not len(values):
        return dict.fromkeys(("mean", *QUANTILES, "max"))
    # The least value that the share of values does not exceed: one that occurred.
    quantiles = np.quantile(values, list(QUANTILES.values()), method="inverted_cdf")
    named: Mapping[str, float] = dict(zip(QUANTILES, quantiles.tolist(), strict=True))
    return {"mean": float(values.mean()), **named, "max": float(values.max())}


def _histogram_summary(gaps: Histogram) -> dict[str, float | None]:
    quantiles = {name: gaps.quantile(share) for name, share in QUANTILES.items()}
    return {"mean": gaps.mean, **quantiles, "max": gaps.largest if gaps.count else None}


def _array(values: Any) -> Column:
    return np.asarray(values, np.float64)


def _ratio(value: float, over: float) -> float | None:
    return value / over if over > 0 else None
