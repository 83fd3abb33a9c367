"""Figures, sweeps and plots: definitions worked out by hand, and the command that prints them."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config import SchedulerConfig
from jaxserve.config.flags import flags_of, parse_flags
from jaxserve.scheduler import Scheduler
from jaxserve.sim import plots
from jaxserve.sim.histogram import Histogram
from jaxserve.sim.report import Objectives, figures
from jaxserve.sim.request_log import RequestLog
from jaxserve.sim.settings import given_settings, parse_sweep, scheduler_config
from jaxserve.sim.simulator import SimulationResult
from jaxserve.sim.source import Arrival, make_request
from jaxserve.sim.sweep import PRECISION, find_rate
from jaxserve.sim.timeline import Span, Timeline
from jaxserve.simulate import main

CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=10)


def logged(*requests):
    """A log of (arrival, start, token instants, class, outcome)."""
    log = RequestLog()
    for at, start, tokens, class_name, outcome in requests:
        live = log.arrived(Arrival(at, make_request("r", (1, 2), max(len(tokens), 1)), max(len(tokens), 1), class_name))
        if start is not None:
            log.started(live, start)
        for token_at in tokens:
            log.token(live, token_at)
        if outcome == "queue_full_requests":
            log.refused(live, outcome, at)
        elif outcome != "live":
            log.ended(live, outcome, tokens[-1] if tokens else at)
    return log


LOG = (
    (0.0, 1.0, (2.0, 3.0, 5.0), "web", "completed"),  # ttft 2, gaps 1 2, tpot 1.5, e2e 5, queue 1
    (1.0, 1.0, (4.0,), "web", "completed"),  # ttft 3, e2e 3, queue 0
    (2.0, 6.0, (8.0, 8.5), "batch", "completed"),  # ttft 6, gap 0.5, e2e 6.5, queue 4
    (3.0, None, (), "batch", "queue_full_requests"),
    (10.0, 10.0, (11.0,), "batch", "expired"),  # ttft 1
)


def report(log=LOG, objectives=None, **totals):
    result = SimulationResult(CONFIG, log=logged(*log))
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
    found = report(iterations=5, slot_steps=12, tokens=40, busy_s=5.5)
    assert found["duration_s"] == 11.0
    assert (found["offered"], found["completed"], found["rejected"], found["expired"], found["live"]) == (5, 3, 1, 1, 0)
    assert found["rejected_by_reason"] == {"queue_full_requests": 1}
    assert found["output_tokens"] == 7
    assert found["tokens_per_s"] == pytest.approx(7 / 11)
    assert found["requests_per_s"] == pytest.approx(3 / 11)
    assert found["offered_requests_per_s"] == pytest.approx(0.4)
    assert (found["slot_utilisation"], found["budget_utilisation"], found["busy_share"]) == (12 / 20, 0.8, 0.5)
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


def test_unfinished_requests_have_no_end_to_end_time():
    found = report([(0.0, 0.0, (1.0,), "web", "live")])
    assert (found["live"], found["e2e_s"]["mean"], found["ttft_s"]["mean"]) == (1, None, 1.0)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_histogram_quantiles_are_within_one_percent(values, share):
    histogram, half = Histogram(), Histogram()
    for index, value in enumerate(values):
        (histogram if index % 2 else half).add(value)
    histogram.merge(half)
    exact = np.sort(values)[max(int(np.ceil(share * len(values))), 1) - 1]
    assert histogram.quantile(share) == pytest.approx(exact, rel=0.0101)
    assert histogram.mean == pytest.approx(np.mean(values))
    assert histogram.largest == max(values)


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


@pytest.mark.parametrize("limit", [0.3, 7.7, 1000.0])
def test_the_highest_rate_is_found_within_its_precision(limit):
    rate, points = find_rate(lambda rate: {"slo_share": 1.0 if rate <= limit else 0.5}, 0.99)
    assert limit / (1 + PRECISION) <= rate <= limit
    assert [point["rate"] for point in points] == sorted(point["rate"] for point in points)
    assert len(points) < 30


def test_a_search_without_an_end_is_refused():
    with pytest.raises(ValueError, match="the objectives are met even at .* use a workload with more requests"):
        find_rate(lambda rate: {"slo_share": 1.0}, 0.99)
    with pytest.raises(ValueError, match="do not meet their objectives even at .* relax the objectives"):
        find_rate(lambda rate: {"slo_share": 0.0}, 0.99)


# Settings


def flags(*words):
    return parse_flags("simulate", ["simulate", *words])


def test_every_setting_of_the_scheduler_is_a_flag():
    assert {field.name for field in fields(SchedulerConfig)} <= {flag.name for flag in flags_of("simulate")}


def test_flags_without_values_give_the_engine_s_defaults():
    config = scheduler_config(flags(), max_model_len=100, num_pages=None)
    assert config == SchedulerConfig(max_model_len=100, num_pages=8 * 7 + 1)
    assert given_settings(flags()) == {}


def test_flags_with_values_reach_the_scheduler():
    words = ("--max_model_len=50", "--num-pages=9", "--prefill_chunk=900", "--arrivals_claim_slots", "--page_size=8")
    config = scheduler_config(flags(*words), max_model_len=100, num_pages=77)
    assert config == SchedulerConfig(max_model_len=50, num_pages=9, page_size=8, arrivals_claim_slots=True)
    assert given_settings(flags(*words))["prefill_chunk"] == 900
    unchunked = scheduler_config(
        flags("--noenable_chunked_prefill", "--prefill_chunk=9"), max_model_len=99, num_pages=77
    )
    assert (unchunked.prefill_chunk, unchunked.num_pages) == (512, 77)
    with pytest.raises(ValueError, match="without chunked prefill the token budget must hold a whole prompt"):
        scheduler_config(flags("--noenable_chunked_prefill"), max_model_len=999, num_pages=77)


def test_a_sweep_parses_values_as_the_flag_does():
    assert parse_sweep("prefill-chunk=128, 256") == ("prefill_chunk", [128, 256])
    assert parse_sweep("priority_preemption=true,false") == ("priority_preemption", [True, False])
    assert parse_sweep("policy=fcfs") == ("policy", ["fcfs"])
    for text, message in (
        ("prefill_chunk", "sweep is 'prefill_chunk'; it must be NAME=VALUE,VALUE with one of arrivals_claim_slots"),
        ("lag=0,1", "it must be NAME=VALUE,VALUE"),
        ("prefill_chunk=0", "a value of prefill_chunk must be at least 1"),
        ("page_size=x", "a value of page_size must be an integer"),
    ):
        with pytest.raises(ValueError) as raised:
            parse_sweep(text)
        assert message in str(raised.value)


# The command


@pytest.fixture
def workload(tmp_path):
    path = tmp_path / "workload.json"
    document = {"num_requests": 60, "arrivals": {"kind": "poisson", "rate": 0.2}, "prompt": 20, "output": 5}
    path.write_text(json.dumps(document))
    return path


def simulate(tmp_path, *words):
    """Exit status and output document of the command."""
    output = tmp_path / "output.json"
    with pytest.raises(SystemExit) as raised:
        main(["simulate", *map(str, words), f"--output={output}"])
    return raised.value.code, json.loads(output.read_text()) if output.exists() else None


def test_a_run_prints_tables_and_writes_figures(workload, tmp_path, capsys):
    status, document = simulate(tmp_path, f"--workload={workload}", "--slo_ttft_s=3", "--max_num_seqs=2")
    assert status == 0
    assert (document["figures"]["completed"], document["scheduler"]["max_num_seqs"]) == (60, 2)
    assert 0 < document["figures"]["slo_share"] < 1
    shown = capsys.readouterr().out
    for word in ("requests", "ttft", "itl", "tpot", "e2e", "queue", "all_terminal"):
        assert word in shown


def test_the_trace_of_a_run_is_a_workload(workload, tmp_path):
    trace = tmp_path / "trace.jsonl"
    first = simulate(tmp_path, f"--workload={workload}", f"--trace_file={trace}")[1]["figures"]
    again = simulate(tmp_path, f"--workload={trace}")[1]["figures"]
    assert json.loads(trace.read_text().splitlines()[0])["config"]["max_model_len"] == 25
    assert {key: again[key] for key in ("completed", "iterations", "output_tokens")} == {
        key: first[key] for key in ("completed", "iterations", "output_tokens")
    }


def test_more_load_is_slower_and_a_sweep_shows_it(workload, tmp_path, capsys):
    words = (f"--workload={workload}", "--sweep_rates=0.05,0.5,2", "--max_num_seqs=2", "--slo_ttft_s=20")
    status, document = simulate(tmp_path, *words)
    assert (status, document["swept"], [point["rate"] for point in document["points"]]) == (0, "rate", [0.05, 0.5, 2])
    waits = [point["figures"]["queue_s"]["mean"] for point in document["points"]]
    assert waits == sorted(waits) and waits[2] > 10 * waits[0]
    assert "goodput/s" in capsys.readouterr().out


def test_a_setting_is_swept(workload, tmp_path):
    _, document = simulate(tmp_path, f"--workload={workload}", "--sweep=prefill_chunk=2,20")
    slow, fast = (point["figures"]["ttft_s"]["mean"] for point in document["points"])
    # Ten chunks of a prompt instead of one, each an iteration of 1 s; and a busier engine, so that more
    # arrivals wait for the end of an iteration, half of one on average.
    assert 9.0 < slow - fast < 9.5


def test_a_rate_is_found(workload, tmp_path, capsys):
    words = (f"--workload={workload}", "--find_rate", "--slo_ttft_s=10", "--slo_share=0.9", "--max_num_seqs=1")
    status, document = simulate(tmp_path, *words)
    assert status == 0
    # A request takes 5 iterations of the only slot: more than 0.2 per second cannot be served for long.
    assert 0.05 < document["rate"] < 0.4
    assert f"{document['rate']:.4g} requests/s" in capsys.readouterr().out


def test_a_roofline_limits_pages_and_shows_its_arithmetic(workload, tmp_path, capsys):
    model = Path(__file__).parents[2] / "configs" / "models" / "llama-3.1-8b.json"
    words = (f"--workload={workload}", "--cost_model=roofline", "--chip=h100", f"--model_config={model}")
    status, document = simulate(tmp_path, *words)
    assert status == 0
    assert document["scheduler"]["num_pages"] == int((0.8 * 80e9 - 2 * 8.03e9) // (16 * 131072))
    assert document["figures"]["mean_iteration_s"] < 0.1
    assert "bound by memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--cost_model=linear",), "give its coefficients with cost_file"),
        (("--cost_file=x",), "cost_file is given and cost_model is unit"),
        (("--cost_model=roofline",), "say of which model with model_config"),
        (("--find_rate",), "find_rate needs an objective"),
        (("--find_rate", "--sweep_rates=1"), "sweep_rates and find_rate are given; a run can only do one"),
        (("--sweep_rates=1", "--rate=2"), "rate and sweep_rates are given; sweep_rates sets the rate itself"),
        (("--sweep_rates=1", "--trace_file=x"), "trace_file and sweep_rates are given; a trace is of one run"),
        (("--sweep_rates=0",), "must be at least"),
        (("--slo_share=1.5",), "slo_share is 1.5; it must be in (0, 1]"),
        (("--sweep=colour=1",), "sweep is 'colour=1'; it must be NAME=VALUE,VALUE with one of"),
        (("--sweep=page_size=3",), "page_size is 3; it must be a power of two"),
        (("--lag=2",), "must be at most 1"),
        (("--workload=",), "give either --scenario=FILE or --workload=FILE"),
    ],
)
def test_a_mistake_names_flag_and_rule(workload, tmp_path, capsys, words, message):
    assert simulate(tmp_path, f"--workload={workload}", *words) == (2, None)
    assert message in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_named(workload, tmp_path, capsys):
    with pytest.raises(SystemExit) as raised:
        main(["simulate", f"--workload={workload}", f"--output={tmp_path}/no/file"])
    assert raised.value.code == 2
    assert "no/file: No such file" in capsys.readouterr().err


def test_a_workload_never_loads_jax(workload):
    """A process of its own: other tests have loaded jax in this one."""
    script = (
        f"import sys\nfrom jaxserve.simulate import main\ntry: main(['simulate', '--workload={workload}'])\n"
        "except SystemExit as error: print(error.code, 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"


# Plots


def test_plots_without_matplotlib_name_the_extra(workload, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    assert simulate(tmp_path, f"--workload={workload}", f"--plots={tmp_path / 'plots'}") == (2, None)
    assert 'plots needs matplotlib, which is not installed; install the extra: pip install "jaxserve[plots]"' in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("form", ["svg", "png"])
def test_a_run_and_a_sweep_are_drawn(workload, tmp_path, form):
    pytest.importorskip("matplotlib", reason="the plots extra is not installed")
    folder = tmp_path / "plots"
    words = (f"--workload={workload}", f"--plots={folder}", f"--plot_format={form}")
    assert simulate(tmp_path, *words)[0] == 0
    assert simulate(tmp_path, *words, "--sweep_rates=0.1,1")[0] == 0
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(files) == {f"timeline.{form}", f"ttft_cdf.{form}", f"sweep.{form}"}
    start = {"svg": b"<?xml", "png": b"\x89PNG"}[form]
    assert all(content.startswith(start) for content in files.values())


def test_steps_show_pauses_and_many_spans_become_bins():
    spans = [Span(0.0, 1.0, 1.0, 1, 2, 6, 5, 1, 2), Span(4.0, 5.0, 1.0, 1, 3, 0, 7, 0, 3)]
    edges, (decode, prefill, pages, queue) = plots._bins(spans)
    assert edges.tolist() == [0.0, 1.0, 4.0, 5.0]
    assert (decode.tolist(), prefill.tolist()) == ([2, 0, 3], [6, 0, 0])
    assert (pages.tolist(), queue.tolist()) == ([5, 0, 7], [1, 0, 0])
    many = [Span(float(i), i + 1.0, 1.0, 1, 2, i % 2, i, 0, 2) for i in range(3000)]
    edges, (decode, prefill, pages, _) = plots._bins(many)
    assert len(edges) == len(decode) + 1 == 301
    assert decode.tolist() == [2.0] * 300
    assert prefill.mean() == pytest.approx(0.5)
    assert (pages[0], pages[-1]) == (9, 2999)


def test_the_scheduler_gets_what_the_output_says(workload, tmp_path, monkeypatch):
    seen = []
    original = Scheduler.__init__

    def spy(self, config, trace=None):
        seen.append(config)
        original(self, config, trace)

    monkeypatch.setattr(Scheduler, "__init__", spy)
    _, document = simulate(tmp_path, f"--workload={workload}", "--max_prefill_seqs=3", "--page_size=4")
    assert {field.name: getattr(seen[0], field.name) for field in fields(SchedulerConfig)} == document["scheduler"]
    assert (seen[0].max_prefill_seqs, seen[0].page_size) == (3, 4)
