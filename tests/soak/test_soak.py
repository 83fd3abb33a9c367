"""A soak: its schedule, its figures, and a short one of a real server."""

import json

from jaxserve.soak.__main__ import main
from jaxserve.soak.findings import Findings, quantile, slope_per_s
from jaxserve.soak.kinds import KINDS, Sizes
from jaxserve.soak.schedule import Shape, make_round
from jaxserve.soak.watch import faults_by_place, sums_by_name

SHAPE = Shape(60, rate=20, mixed_s=60, burst=10)


def test_the_same_seed_gives_the_same_traffic_of_every_kind():
    first, second = (make_round(5, 2, 100, SHAPE, Sizes()) for _ in range(2))
    assert first == second != make_round(6, 2, 100, SHAPE, Sizes())
    assert {action.kind for action in first.actions} == set(KINDS)
    assert [action.number for action in first.actions] == list(range(100, 100 + len(first.actions)))
    times = [action.at for action in first.actions]
    assert times == sorted(times) and times.count(SHAPE.mixed_s) == 10, "the burst comes last, at once"


def test_a_slope_is_that_of_the_line_and_a_quantile_occurred():
    assert slope_per_s([(0, 1.0), (1, 3.0), (2, 5.0)]) == 2.0
    assert slope_per_s([(1, 5.0)]) == slope_per_s([]) == 0.0
    assert quantile([3.0, 1.0, 2.0], 50) == 2.0 and quantile([3.0, 1.0, 2.0], 99) == 3.0 and quantile([], 99) == 0.0


def test_breaches_are_kept_up_to_a_number_and_all_are_counted():
    findings = Findings()
    for number in range(300):
        findings.breach("rule", str(number))
    assert findings.num_breaches == 300 and len(findings.breaches) == 200 and findings.breaches[0].what == "0"


def test_metrics_are_summed_over_labels():
    text = '# HELP x\njaxserve:a_total{b="1"} 2.0\njaxserve:a_total{b="2"} 3.0\njaxserve:h_bucket{le="1"} 9\nother 1\n'
    assert sums_by_name(text) == {"a_total": 5.0}


def test_faults_are_read_by_place_and_kind():
    text = (
        "# TYPE jaxserve:faults_injected_total counter\n"
        'jaxserve:faults_injected_total{at="swap.out",do="raise",engine="0",model_name="m"} 3.0\n'
        'jaxserve:faults_injected_total{at="runner.collect",do="hang",engine="0",model_name="m"} 1.0\n'
    )
    assert faults_by_place(text) == {"swap.out: raise": 3, "runner.collect: hang": 1}


SMALL = (
    *("--max_num_seqs=4", "--decode_buckets=4", "--prefill_buckets=64", "--table_width_buckets=32"),
    *("--num_pages=36", "--max_queue_requests=12"),
)


def test_a_server_stands_a_short_soak(tmp_path, compile_cache, capsys):
    output = tmp_path / "report"
    words = ["--seconds=12", "--round_s=6", "--burst=30", "--storm=40", "--seed=3", f"--output={output}"]
    # Shared machines stand still now and then; what a longer run measures is bounded by its own defaults.
    status = main(["soak", *words, "--max_growth_mib=96", "--", *SMALL, f"--compile_cache={compile_cache}"])
    found = json.loads(output.with_suffix(".json").read_text())
    assert status == 0 and found["breaches"] == [], capsys.readouterr().out
    counts = found["outcomes"]
    assert counts["probe"]["same ids"] >= 6 and counts["invalid"]["refused"] > 0 and counts["cancel"]["left"] > 0
    assert sum(kind.get("rejected", 0) for kind in counts.values()) > 0, "the burst is more than the queue holds"
    assert found["counters"]["num_preemptions_total"] > 0 and found["compiles"] == 0 and found["rounds"] >= 1
    assert "0 breaches" in output.with_suffix(".md").read_text()


def test_a_server_stands_a_short_soak_while_its_steps_fail(tmp_path, compile_cache, capsys):
    plan = [
        {"at": "runner.dispatch", "do": "raise", "skip": 20, "every": 97, "times": None},
        {"at": "runner.collect", "do": "raise", "skip": 60, "every": 151, "times": None},
        {"at": "runner.dispatch", "do": "nan", "request_id": "*7*", "skip": 30, "every": 67, "times": None},
        {"at": "runner.sample", "do": "out_of_memory", "skip": 120},
        {"at": "tokenizer.encode", "do": "raise", "skip": 40, "every": 31, "times": None},
    ]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    words = ["--seconds=8", "--round_s=4", "--burst=20", "--storm=20", "--seed=4", f"--output={tmp_path / 'report'}"]
    words += [f"--fault_plan={tmp_path / 'plan.json'}", "--max_growth_mib=96"]
    status = main(["soak", *words, "--", *SMALL, f"--compile_cache={compile_cache}"])
    found = json.loads((tmp_path / "report.json").read_text())
    assert status == 0 and found["breaches"] == [], capsys.readouterr().out
    struck, counted = found["faults"], found["counters"]
    assert set(struck) == {f"{each['at']}: {each['do']}" for each in plan}
    failures = sum(
        struck[each] for each in ("runner.dispatch: raise", "runner.collect: raise", "runner.sample: out_of_memory")
    )
    assert counted["step_failures_total"] == counted["step_recoveries_total"] > 0
    assert counted["step_failures_total"] <= failures, "of the two steps in flight one may go unseen"
    assert counted["nan_logits_total"] > 0 and found["outcomes"]["probe"]["same ids"] > 0
