"""Sweeps: grids of settings, the search for a rate, and the ranking of what it finds."""

import json

import pytest

from jaxserve.sim.rate_search import NARROW, PRECISION, WIDE, find_rate, likely_runs, most_runs
from jaxserve.sim.sweep import Axis, Grid, run_grid, search_grid


def limited(limit):
    """A system that meets its objectives up to a rate."""
    return lambda rate: {"slo_share": 1.0 if rate <= limit else 0.5}


def grid_of(**axes):
    return Grid(tuple(Axis(name, {str(value): value for value in values}) for name, values in axes.items()))


@pytest.mark.parametrize("limit", [0.3, 7.7, 1000.0])
@pytest.mark.parametrize("start", [0.01, 1.0, 900.0])
def test_the_highest_rate_is_found_within_its_precision(limit, start):
    found = find_rate(limited(limit), 0.99, start)
    assert limit / (1 + PRECISION) <= found.rate <= limit
    assert list(found.tried) == sorted(found.tried)
    assert len(found.tried) <= most_runs()


def test_where_a_search_begins_does_not_change_what_it_finds():
    rates = {find_rate(limited(7.7), 0.99, start, step).rate for start in (0.2, 7.0, 300.0) for step in (NARROW, WIDE)}
    assert len(rates) == 1


def test_a_search_that_begins_near_its_end_is_short():
    near = find_rate(limited(7.7), 0.99, 7.3, NARROW)
    assert len(near.tried) <= likely_runs(NARROW) < likely_runs(WIDE)
    assert len(find_rate(limited(7.7), 0.99, 5.0).tried) <= likely_runs(WIDE)


@pytest.mark.parametrize("step", [NARROW, WIDE])
@pytest.mark.parametrize("limit", [0.0, 1.1e-6, 9e6])
@pytest.mark.parametrize("start", [1e-9, 1e-6, 1.0, 1e7, 1e9])
def test_no_search_takes_more_runs_than_was_said(limit, start, step):
    found = find_rate(limited(limit), 0.99, start, step)
    assert len(found.tried) <= most_runs(step)
    assert (found.rate is None) == (limit == 0.0)


def test_a_search_without_an_end_is_refused():
    with pytest.raises(ValueError, match=r"the objectives are met even at .* use a workload with more requests"):
        find_rate(limited(1e9), 0.99)


def test_the_points_of_a_grid_are_all_combinations_the_last_axis_fastest():
    grid = grid_of(a=(1, 2), b=(3, 4, 5))
    points = run_grid(grid, lambda index: {"index": index})
    assert [(point["a"], point["b"]) for point in points] == [(a, b) for a in "12" for b in "345"]
    assert [point["figures"]["index"] for point in points] == [(a, b) for a in range(2) for b in range(3)]
    assert grid.points()[(1, 0)] == {"a": 2, "b": 3}


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ([("a", 2), ("a", 2)], "sweep has a twice; name each flag once, with all its values"),
        ([("a", 30), ("b", 40)], r"sweep has 1200 points \(30 a x 40 b\); the limit is 1000"),
    ],
)
def test_an_impossible_grid_names_the_rule(axes, message):
    with pytest.raises(ValueError, match=message):
        Grid(tuple(Axis(name, {value: value for value in range(count)}) for name, count in axes))


def test_settings_are_ranked_by_the_rate_they_reach():
    limits = {(0, 0): 3.0, (0, 1): 9.0, (1, 0): 0.0, (1, 1): 9.0}
    points = search_grid(grid_of(a=(1, 2), b=(3, 4)), lambda index: limited(limits[index]), 0.99)
    assert [(point["a"], point["b"]) for point in points] == [("1", "4"), ("2", "4"), ("1", "3"), ("2", "3")]
    assert points[0]["rate"] == points[1]["rate"] == pytest.approx(9.0, rel=PRECISION)
    assert points[-1]["rate"] is None and points[-1]["figures"]["slo_share"] == 0.5
    tried = points[0]["tried"]
    assert [each["slo_share"] for each in tried if each["rate"] <= points[0]["rate"]][-1] == 1.0
    assert next(each["slo_share"] for each in tried if each["rate"] > points[0]["rate"]) == 0.5


def test_of_equal_rates_the_one_with_more_requests_in_time_is_first():
    def run_of(index):
        return lambda rate: {"slo_share": 0.0 if rate > 5.0 else 0.95 + 0.01 * index[0]}

    points = search_grid(grid_of(a=(1, 2, 3)), run_of, 0.9)
    assert [point["a"] for point in points] == ["3", "2", "1"]


def test_a_search_begins_where_its_neighbour_ended():
    begun = {}

    def run_of(index):
        def run(rate):
            begun.setdefault(index, rate)
            return limited(5.0 + index[0])(rate)

        return run

    grid = grid_of(a=(1, 2), b=(3, 4, 5))
    points = {(point["a"], point["b"]): point for point in search_grid(grid, run_of, 0.99)}
    assert begun[(0, 0)] == 1.0
    assert begun[(0, 1)] == begun[(0, 2)] == begun[(1, 0)] == points["1", "3"]["rate"]
    assert begun[(1, 1)] == points["2", "3"]["rate"]
    total = sum(len(point["tried"]) for point in points.values())
    assert total <= likely_runs(WIDE) + 2 + 5 * (likely_runs(NARROW) + 2)


def test_a_point_without_a_highest_rate_is_named():
    with pytest.raises(ValueError, match=r"a=2 b=3: find_rate: the objectives are met even at"):
        search_grid(grid_of(a=(1, 2), b=(3,)), lambda index: limited((1.0, 1e9)[index[0]]), 0.99)


# The command


def test_settings_are_swept_together(simulate, workload, capsys):
    words = ("--sweep=prefill_chunk=2,20", "--sweep", "max_num_seqs=1,8", "--sweep_rates=0.1,0.3")
    status, document = simulate(f"--workload={workload}", *words)
    assert (status, document["swept"]) == (0, ["prefill_chunk", "max_num_seqs", "rate"])
    named = [(point["prefill_chunk"], point["max_num_seqs"], point["rate"]) for point in document["points"]]
    assert named == [(chunk, slots, rate) for chunk in ("2", "20") for slots in "18" for rate in (0.1, 0.3)]
    assert document["simulations"] == len(named)
    waits = [point["figures"]["queue_s"]["mean"] for point in document["points"]]
    assert waits[1] == max(waits) and "8 simulations" in capsys.readouterr().out
    alone = simulate(f"--workload={workload}", "--prefill_chunk=20", "--max_num_seqs=1", "--rate=0.3")[1]
    assert document["points"][5]["figures"] == alone["figures"]


def test_the_best_settings_for_an_objective_are_found(simulate, workload, capsys):
    """Chunks of 2 take ten iterations of a prompt, more than the objective allows; one slot soon has a queue."""
    words = (
        "--sweep=prefill_chunk=2,20",
        "--sweep=max_num_seqs=1,4",
        "--find_rate",
        "--slo_ttft_s=8",
        "--slo_share=0.9",
    )
    status, document = simulate(f"--workload={workload}", *words)
    assert (status, document["best"]) == (0, {"prefill_chunk": "20", "max_num_seqs": "4"})
    ranked = [(point["prefill_chunk"], point["max_num_seqs"]) for point in document["points"]]
    assert ranked[:2] == [("20", "4"), ("20", "1")]
    rates = [point["rate"] for point in document["points"]]
    assert rates[0] == document["rate"] > rates[1] and rates[2:] == [None, None]
    assert document["points"][0]["figures"]["slo_share"] >= 0.9
    assert document["simulations"] == sum(len(point["tried"]) for point in document["points"])
    shown = capsys.readouterr().out
    assert "searching the highest rate of 4 settings: about 23 simulations, at most 77" in shown
    assert "best of 4 after" in shown and "prefill_chunk=20 max_num_seqs=4, up to" in shown


def test_one_setting_at_a_time_gives_the_same_rates_as_a_sweep(simulate, workload):
    words = (f"--workload={workload}", "--find_rate", "--slo_ttft_s=10", "--slo_share=0.9")
    swept = simulate(*words, "--sweep=max_num_seqs=1,2")[1]["points"]
    for point in swept:
        assert simulate(*words, f"--max_num_seqs={point['max_num_seqs']}")[1]["rate"] == point["rate"]


def test_a_rate_is_found_by_the_targets_of_service_classes(simulate, workload, tmp_path):
    (tmp_path / "classes.json").write_text(json.dumps({"quick": {"ttft_target_s": 10.0}}))
    document = json.loads(workload.read_text()) | {"classes": [{"name": "all", "service_class": "quick"}]}
    workload.write_text(json.dumps(document))
    words = (f"--workload={workload}", "--find_rate", "--slo_share=0.9", "--max_num_seqs=1")
    by_class = simulate(*words, f"--service_classes={tmp_path / 'classes.json'}")[1]
    assert by_class["points"][0]["figures"]["service_class_objectives"]["quick"]["ttft_s"] == 10.0
    workload.write_text(json.dumps({key: value for key, value in document.items() if key != "classes"}))
    assert simulate(*words, "--slo_ttft_s=10")[1]["rate"] == by_class["rate"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--sweep=policy=fcfs", "--sweep=policy=sjf"), "sweep has policy twice; name each flag once"),
        (("--sweep=policy=fcfs", "--sweep=colour=1"), "sweep is 'colour=1'; it must be NAME=VALUE,VALUE with one of"),
        (("--sweep=policy=fcfs", "--find_rate"), "find_rate needs an objective; give slo_ttft_s"),
        (
            ("--sweep=policy=fcfs", "--find_rate", "--rate=1", "--slo_itl_s=1"),
            "rate and find_rate are given; find_rate",
        ),
        (("--sweep=max_num_seqs=1,2", "--find_rate", "--slo_ttft_s=0.1"), "at any setting of the sweep even at 1.0"),
        (("--find_rate", "--slo_ttft_s=0.1"), "of the requests do not meet their objectives even at 1.0"),
        (("--sweep=max_num_seqs=4,5", "--find_rate", "--slo_itl_s=99"), "max_num_seqs=4: find_rate: the objectives"),
        (("--sweep=reservation=guaranteed,expected",), "reservation is 'expected' and preemption is 'pause'"),
    ],
)
def test_a_mistake_names_flag_and_rule(simulate, workload, capsys, words, message):
    assert simulate(f"--workload={workload}", *words) == (2, None)
    assert message in capsys.readouterr().err
