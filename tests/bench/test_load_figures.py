"""Figures of a load, worked by hand."""

import pytest

from jaxserve.bench.compare import ratios
from jaxserve.bench.load.figures import Objectives, figures, medians, summary
from jaxserve.bench.load.record import COMPLETED, FAILED, REFUSED, Record


def completed(due_at, token_at, max_tokens=None, num_output=None):
    count = num_output or len(token_at)
    return Record(due_at, 10, max_tokens or count, due_at, token_at, count, token_at[-1], COMPLETED, 200)


RECORDS = [
    completed(0.0, [1.0, 2.0, 3.0, 6.0]),  # gaps 1, 1, 3
    completed(2.0, [2.5, 3.0], max_tokens=3),
    completed(4.0, [8.0]),
    Record(5.0, 10, 4, 5.1, [], 0, 5.5, REFUSED, 429, "429: full", 3.0),
    Record(6.0, 10, 4, 6.0, [], 0, 9.0, FAILED, 200, "died"),
]


def test_every_figure_of_a_run():
    found = figures(RECORDS, Objectives())
    assert (found["offered"], found["completed"], found["refused"], found["failed"]) == (5, 3, 1, 1)
    assert found["refused_by_status"] == {"429": 1} and found["errors"] == {"died": 1}
    assert (found["output_tokens"], found["prompt_tokens"], found["short_outputs"]) == (7, 30, 1)
    assert found["duration_s"] == 9.0  # from 0 to the failure at 9
    assert found["output_tokens_per_s"] == pytest.approx(7 / 9)
    assert found["requests_per_s"] == pytest.approx(3 / 9)
    assert found["offered_requests_per_s"] == pytest.approx(4 / 6)  # five in six seconds
    assert found["ttft_ms"] == pytest.approx({"mean": 5500 / 3, "p50": 1000, "p90": 4000, "p99": 4000})
    assert found["itl_ms"] == pytest.approx({"mean": 5500 / 4, "p50": 1000, "p90": 3000, "p99": 3000})
    assert found["tpot_ms"] == pytest.approx(
        {"mean": (5000 / 3 + 500) / 2, "p50": 500, "p90": 5000 / 3, "p99": 5000 / 3}
    )
    assert found["e2e_ms"] == pytest.approx({"mean": 11000 / 3, "p50": 4000, "p90": 6000, "p99": 6000})
    assert found["refusal_ms"]["p50"] == pytest.approx(500) and found["retry_after_s"] == 3.0
    assert found["late_ms"]["p99"] == pytest.approx(100)
    assert found["tokens_per_event"] == 1.0


@pytest.mark.parametrize(
    ("objectives", "met"),
    [
        (Objectives(), 3),
        (Objectives(ttft_ms=1000), 2),
        (Objectives(ttft_ms=999), 1),
        (Objectives(itl_ms=1000), 2),  # the first has a gap of 3 s
        (Objectives(tpot_ms=1000), 2),  # and 5/3 s per token
        (Objectives(tpot_ms=400), 1),  # one token has no tpot to miss
        (Objectives(ttft_ms=1000, itl_ms=1000), 1),
    ],
)
def test_goodput_counts_those_that_met_every_objective_of_all_offered(objectives, met):
    found = figures(RECORDS, objectives)
    assert found["goodput_requests_per_s"] == pytest.approx(met / 9)
    assert found["slo_share"] == pytest.approx(met / 5)


def test_all_at_once_are_offered_over_the_run():
    found = figures([completed(0.0, [1.0]), completed(0.0, [4.0])], Objectives())
    assert found["offered_requests_per_s"] == 0.5


def test_events_of_several_tokens_show():
    assert figures([completed(0.0, [1.0, 2.0], num_output=6)], Objectives())["tokens_per_event"] == 3.0


def test_quantiles_are_values_that_occurred():
    found = summary(value / 1000 for value in range(1, 201))
    assert found == pytest.approx({"mean": 100.5, "p50": 100, "p90": 180, "p99": 198})
    assert summary([]) == {"mean": None, "p50": None, "p90": None, "p99": None}


def test_medians_go_into_dicts_add_counts_and_skip_what_is_missing():
    runs = [
        {"x": 1.0, "ttft_ms": {"p50": 3.0}, "errors": {"died": 1}, "y": None},
        {"x": 9.0, "ttft_ms": {"p50": 1.0}, "errors": {}, "y": 2.0},
        {"x": 2.0, "ttft_ms": {"p50": 2.0}, "errors": {"died": 2}, "y": None},
    ]
    assert medians(runs) == {"x": 2.0, "ttft_ms": {"p50": 2.0}, "errors": {"died": 3}, "y": 2.0}


def test_ratios_are_taken_pair_by_pair():
    def run(speed):
        return figures([completed(0.0, [1.0 / speed, 2.0 / speed])], Objectives())

    # The machine's speed wanders by a factor of 8; B is twice A but in one pair.
    of_a, of_b = [run(each) for each in (1, 2, 4, 8, 1)], [run(each) for each in (2, 4, 8, 16, 3)]
    rows = {row["figure"]: row for row in ratios(of_a, of_b)}
    speed, ttft = rows["output_tokens_per_s"], rows["ttft_ms.p50"]
    assert (speed["a"], speed["b"], speed["pairs"]) == (2.0, 4.0, 5)
    assert [speed[key] for key in ("ratio_b_over_a", "least", "largest")] == pytest.approx([2.0, 2.0, 3.0])
    assert [speed[key] for key in ("first_quartile", "third_quartile")] == pytest.approx([2.0, 2.0])
    assert [ttft[key] for key in ("ratio_b_over_a", "least", "largest")] == pytest.approx([0.5, 1 / 3, 0.5])
