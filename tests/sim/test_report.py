"""Figures: their definitions worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from jaxserve.config import SchedulerConfig, ServiceClass
from jaxserve.sim.histogram import Histogram
from jaxserve.sim.report import Objectives, figures
from jaxserve.sim.request_log import RequestLog
from jaxserve.sim.simulator import SimulationResult
from jaxserve.sim.source import Arrival, make_request
from jaxserve.sim.timeline import Span, Timeline

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=10)


def logged(*requests):
    """A log of (arrival, start, token instants, class, outcome[, service class])."""
    log = RequestLog()
    for at, start, tokens, class_name, outcome, *service_class in requests:
        num_output = max(len(tokens), 1)
        request = make_request("r", (1, 2), num_output, service_class=service_class[0] if service_class else "")
        live = log.arrived(Arrival(at, request, num_output, class_name))
        if start is not None:
            log.started(live, start)
        for token_at in tokens:
            log.token(live, token_at)
        if outcome == "queue_full_requests":
            log.refused(live, outcome, at)
        elif outcome == "live":
            log.close(live)
        else:
            log.ended(live, outcome, tokens[-1] if tokens else at)
    return log


LOG = (
    (0.0, 1.0, (2.0, 3.0, 5.0), "web", "completed"),  # ttft 2, gaps 1 2, tpot 1.5, e2e 5, queue 1
    (1.0, 1.0, (4.0,), "web", "completed"),  # ttft 3, e2e 3, queue 0
    (2.0, 6.0, (8.0, 8.5), "batch", "completed"),  # ttft 6, gap 0.5, e2e 6.5, queue 4
    (3.0, None, (), "batch", "queue_full_requests"),
    (10.0, 10.0, (11.0,), "batch", "expired"),  # ttft 1
)


def report(log=LOG, objectives=None, config=CONFIG, **totals):
    result = SimulationResult(config, log=logged(*log))
    for name, value in totals.items():
        setattr(result.totals, name, value)
    return figures(result, objectives or Objectives())


def test_latencies_by_hand():
    found = report()
    assert found["ttft_s"] == pytest.approx({"mean": 3.0, "p50": 2.0, "p90": 6.0, "p99": 6.0, "max": 6.0})
    assert found["itl_s"] == pytest.approx({"mean": 3.5 / 3, "p50": 1.0, "p90": 2.0, "p99": 2.0, "max": 2.0})
    assert found["tpot_s"]["mean"] == pytest.approx(1.0)
    assert found["e2e_s"]["mean"] == pytest.approx((5 + 3 + 6.5) / 3)
    assert found["queue_s"]["mean"] == pytest.approx(5 / 4)
    assert found["classes"]["web"]["ttft_s"]["mean"] == 2.5
    assert found["classes"]["batch"]["itl_s"]["max"] == 0.5


def test_rates_and_counts_by_hand():
    found = report(iterations=4, steps=5, slot_steps=15, wasted_rows=3, tokens=40, busy_s=5.5)
    assert found["duration_s"] == 11.0
    assert (found["offered"], found["completed"], found["rejected"], found["expired"], found["live"]) == (5, 3, 1, 1, 0)
    assert found["rejected_by_reason"] == {"queue_full_requests": 1}
    assert found["output_tokens"] == 7
    assert found["tokens_per_s"] == pytest.approx(7 / 11)
    assert found["requests_per_s"] == pytest.approx(3 / 11)
    assert found["offered_requests_per_s"] == pytest.approx(0.4)
    assert (found["slot_utilisation"], found["budget_utilisation"], found["busy_share"]) == (12 / 20, 0.8, 0.5)
    assert found["wasted_rows"] == 3
    assert found["classes"]["batch"]["rejected_by_reason"] == {"queue_full_requests": 1}
    assert found["classes"]["web"]["rejected_by_reason"] == {"queue_full_requests": 0}


@pytest.mark.parametrize(
    ("objectives", "met"),
    [
        (Objectives(), 3),
        (Objectives(ttft_s=3.0), 2),
        (Objectives(ttft_s=2.9), 1),
        (Objectives(itl_s=1.9), 2),
        (Objectives(itl_s=0.4), 1),
        (Objectives(tpot_s=1.4), 2),
        (Objectives(ttft_s=3.0, itl_s=1.0), 1),
    ],
)
def test_goodput_counts_requests_that_met_every_objective(objectives, met):
    """The expired request had its first token in time; it does not count."""
    found = report(objectives=objectives)
    assert found["goodput_requests_per_s"] == pytest.approx(met / 11)
    assert found["slo_share"] == met / 5


def test_targets_of_the_service_class_come_before_the_objectives_of_the_run():
    """`web` requests have ttft 2 and 3 and gaps up to 2; `batch` ones ttft 6 and 1."""
    classes = (ServiceClass("chat", ttft_target_s=2.5), ServiceClass("bulk", itl_target_s=0.4), ServiceClass("plain"))
    config = replace(CONFIG, service_classes=classes)
    service_classes = {"web": "chat", "batch": "bulk"}
    log = [(*entry, service_classes[entry[3]]) for entry in LOG]
    found = report(log, config=config)
    assert (found["classes"]["web"]["slo_share"], found["classes"]["batch"]["slo_share"]) == (1 / 2, 0.0)
    assert found["classes"]["web"]["goodput_requests_per_s"] == pytest.approx(1 / 11)
    # The run's objectives hold where the class has no target of the kind.
    found = report(log, Objectives(ttft_s=1.0, itl_s=1.5), config=config)
    assert (found["classes"]["web"]["slo_share"], found["slo_share"]) == (0.0, 0.0)
    found = report(log, Objectives(ttft_s=1.0, itl_s=2.0), config=config)
    assert (found["classes"]["web"]["slo_share"], found["slo_share"]) == (1 / 2, 1 / 5)
    assert found["service_class_objectives"] == {
        "chat": {"ttft_s": 2.5, "itl_s": 2.0, "tpot_s": None},
        "bulk": {"ttft_s": 1.0, "itl_s": 0.4, "tpot_s": None},
        "plain": {"ttft_s": 1.0, "itl_s": 2.0, "tpot_s": None},
    }


def test_requests_without_a_service_class_have_the_objectives_of_the_run():
    config = replace(CONFIG, service_classes=(ServiceClass("chat", ttft_target_s=0.1),))
    assert report(config=config)["slo_share"] == 3 / 5
    assert report(objectives=Objectives(ttft_s=3.0), config=config)["slo_share"] == 2 / 5


def test_a_run_cut_short_lasts_until_its_last_iteration():
    found = report([(1.0, 1.0, (2.0, 3.0), "web", "live")], ended_at=3.0)
    assert (found["duration_s"], found["tokens_per_s"]) == (2.0, 1.0)


def test_unfinished_requests_have_no_end_to_end_time():
    found = report([(0.0, 0.0, (1.0,), "web", "live")])
    assert (found["live"], found["e2e_s"]["mean"], found["ttft_s"]["mean"]) == (1, None, 1.0)


@pytest.mark.parametrize("seed", range(20))
def test_histogram_quantiles_are_within_one_percent(seed):
    rng = np.random.default_rng(seed)
    values = np.exp(rng.normal(0.0, rng.uniform(0.01, 5.0), rng.integers(1, 400)))
    histogram, half = Histogram(), Histogram()
    for index, value in enumerate(values.tolist()):
        (histogram if index % 2 else half).add(value)
    histogram.merge(half)
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        exact = np.quantile(values, share, method="inverted_cdf")
        assert histogram.quantile(share) == pytest.approx(exact, rel=0.0101)
    assert histogram.mean == pytest.approx(values.mean())
    assert histogram.largest == values.max()


def test_equal_values_and_zero_are_exact():
    histogram = Histogram()
    for value in (0.0, 0.0, 0.3, 0.3):
        histogram.add(value)
    assert (histogram.quantile(0.5), histogram.quantile(0.51)) == (0.0, 0.3)
    assert Histogram().quantile(0.5) is None


def test_the_timeline_is_bounded_and_loses_no_token():
    timeline = Timeline()
    count = 3 * Timeline.LIMIT + 5
    for index in range(count):
        timeline.add(Span(float(index), index + 0.5, 0.5, 1, 2, 3, index, 1, 2))
    assert len(timeline.spans) <= Timeline.LIMIT
    assert sum(span.iterations for span in timeline.spans) == count
    assert sum(span.decode_tokens for span in timeline.spans) == 2 * count
    assert (timeline.spans[0].began_at, timeline.spans[-1].ended_at) == (0.0, count - 0.5)
    assert timeline.spans[-1].pages_owned == count - 1
    assert all(left.ended_at <= right.began_at for left, right in zip(timeline.spans, timeline.spans[1:], strict=False))
