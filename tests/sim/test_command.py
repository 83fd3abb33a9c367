"""`simulate --workload`: flags reach the scheduler, sweeps show what differs, mistakes are named."""

import json
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from jaxserve.config import SchedulerConfig
from jaxserve.config.flags import flags_of, parse_flags
from jaxserve.scheduler import Scheduler
from jaxserve.sim.settings import given_settings, parse_sweep, scheduler_config
from jaxserve.simulate import main

MODEL = Path(__file__).parents[2] / "configs" / "models" / "llama-3.1-8b.json"


def flags(*words):
    return parse_flags("simulate", ["simulate", *words])


def test_every_setting_of_the_scheduler_is_a_flag():
    assert {field.name for field in fields(SchedulerConfig)} <= {flag.name for flag in flags_of("simulate")}


def test_flags_without_values_give_the_engine_s_defaults():
    config = scheduler_config(flags(), max_model_len=100, num_pages=None)
    assert config == SchedulerConfig(max_model_len=100, num_pages=8 * 7 + 1, enable_prefix_caching=True)
    assert given_settings(flags()) == {}


def test_flags_with_values_reach_the_scheduler():
    words = ("--max_model_len=50", "--num-pages=9", "--prefill_chunk=900", "--arrivals_claim_slots", "--page_size=8")
    words += ("--noenable_prefix_caching",)
    config = scheduler_config(flags(*words), max_model_len=100, num_pages=77)
    assert config == SchedulerConfig(max_model_len=50, num_pages=9, page_size=8, arrivals_claim_slots=True)
    assert given_settings(flags(*words))["prefill_chunk"] == 900
    unchunked = scheduler_config(
        flags("--noenable_chunked_prefill", "--prefill_chunk=9"), max_model_len=99, num_pages=77
    )
    assert (unchunked.prefill_chunk, unchunked.num_pages) == (512, 77)
    with pytest.raises(ValueError, match="without chunked prefill the token budget must hold a whole prompt"):
        scheduler_config(flags("--noenable_chunked_prefill"), max_model_len=999, num_pages=77)


def test_flag_files_of_engines_are_read():
    for path in sorted((Path(__file__).parents[2] / "configs" / "engines").glob("*.flags")):
        assert given_settings(flags(f"--flagfile={path}"))["max_num_seqs"] >= 8


def test_a_sweep_parses_values_as_the_flag_does():
    assert parse_sweep("prefill-chunk=128, 256") == ("prefill_chunk", {"128": 128, "256": 256})
    assert parse_sweep("priority_preemption=true,false") == ("priority_preemption", {"true": True, "false": False})
    assert parse_sweep("policy=fcfs") == ("policy", {"fcfs": "fcfs"})
    for text, message in (
        ("prefill_chunk", "sweep is 'prefill_chunk'; it must be NAME=VALUE,VALUE with one of arrivals_claim_slots"),
        ("rate=0,1", "it must be NAME=VALUE,VALUE"),
        ("prefill_chunk=0", "a value of prefill_chunk must be at least 1"),
        ("page_size=x", "a value of page_size must be an integer"),
    ):
        with pytest.raises(ValueError) as raised:
            parse_sweep(text)
        assert message in str(raised.value)


def test_a_run_prints_tables_and_writes_figures(simulate, workload, capsys):
    status, document = simulate(f"--workload={workload}", "--slo_ttft_s=3", "--max_num_seqs=2")
    assert status == 0
    assert (document["figures"]["completed"], document["scheduler"]["max_num_seqs"]) == (60, 2)
    assert 0 < document["figures"]["slo_share"] < 1
    shown = capsys.readouterr().out
    for word in ("requests", "ttft", "itl", "tpot", "e2e", "queue", "all_terminal"):
        assert word in shown


def test_the_trace_of_a_run_is_a_workload(simulate, workload, tmp_path):
    trace = tmp_path / "trace.jsonl"
    first = simulate(f"--workload={workload}", f"--trace_file={trace}")[1]["figures"]
    again = simulate(f"--workload={trace}")[1]["figures"]
    assert json.loads(trace.read_text().splitlines()[0])["config"]["max_model_len"] == 25
    assert {key: again[key] for key in ("completed", "iterations", "output_tokens")} == {
        key: first[key] for key in ("completed", "iterations", "output_tokens")
    }


def test_more_load_is_slower_and_a_sweep_shows_it(simulate, workload, capsys):
    words = (f"--workload={workload}", "--sweep_rates=0.05,0.5,2", "--max_num_seqs=2", "--slo_ttft_s=20")
    status, document = simulate(*words)
    assert (status, document["swept"], [point["rate"] for point in document["points"]]) == (0, ["rate"], [0.05, 0.5, 2])
    waits = [point["figures"]["queue_s"]["mean"] for point in document["points"]]
    assert waits == sorted(waits) and waits[2] > 10 * waits[0]
    shown = capsys.readouterr().out
    assert "goodput/s" in shown and "│ 0.05 │" in shown


def test_a_setting_is_swept(simulate, workload):
    _, document = simulate(f"--workload={workload}", "--sweep=prefill_chunk=2,20")
    slow, fast = (point["figures"]["ttft_s"]["mean"] for point in document["points"])
    # Ten chunks of a prompt instead of one, each an iteration of 1 s; and a busier engine, so that more
    # arrivals wait for the end of an iteration, half of one on average.
    assert 9.0 < slow - fast < 9.5


def test_service_classes_are_swept_and_written(simulate, workload, tmp_path):
    for name, slots in (("one", 1), ("four", 4)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"bulk": {"max_slots": slots}}))
    document = json.loads(workload.read_text()) | {"classes": [{"name": "all", "service_class": "bulk"}]}
    workload.write_text(json.dumps(document))
    files = [str(tmp_path / f"{name}.json") for name in ("one", "four")]
    _, swept = simulate(f"--workload={workload}", f"--sweep=service_classes={','.join(files)}", "--rate=1")
    assert [point["service_classes"] for point in swept["points"]] == files
    one, four = (point["figures"]["queue_s"]["mean"] for point in swept["points"])
    assert one > 10 * four
    _, single = simulate(f"--workload={workload}", f"--service_classes={files[0]}")
    assert single["scheduler"]["service_classes"][0]["max_slots"] == 1


def test_a_rate_is_found(simulate, workload, capsys):
    words = (f"--workload={workload}", "--find_rate", "--slo_ttft_s=10", "--slo_share=0.9", "--max_num_seqs=1")
    status, document = simulate(*words)
    assert status == 0
    # A request takes 5 iterations of the only slot: more than 0.2 per second cannot be served for long.
    assert 0.05 < document["rate"] < 0.4
    assert f"{document['rate']:.4g} requests/s" in capsys.readouterr().out


def test_a_roofline_limits_pages_and_shows_its_arithmetic(simulate, workload, capsys):
    words = (f"--workload={workload}", "--cost_model=roofline", "--chip=h100", f"--model_config={MODEL}")
    status, document = simulate(*words)
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
        (("--find_rate", "--sweep_rates=1"), "sweep_rates and find_rate are given; find_rate sets the rate itself"),
        (("--sweep_rates=1", "--rate=2"), "rate and sweep_rates are given; sweep_rates sets the rate itself"),
        (("--sweep_rates=1", "--trace_file=x"), "trace_file and sweep_rates are given; a trace is of one run"),
        (("--sweep_rates=0",), "must be at least"),
        (("--slo_share=1.5",), "slo_share is 1.5; it must be in (0, 1]"),
        (("--sweep=colour=1",), "sweep is 'colour=1'; it must be NAME=VALUE,VALUE with one of"),
        (("--sweep=page_size=3",), "page_size is 3; it must be a power of two"),
        (("--page_size=0",), "page_size is 0; it must be a power of two"),
        (("--page_size=0", "--cost_model=roofline", f"--model_config={MODEL}"), "page_size is 0; it must be a power"),
        (("--max_steps_ahead=-1",), "must be at least 0"),
        (("--workload=",), "give either --scenario=FILE or --workload=FILE"),
    ],
)
def test_a_mistake_names_flag_and_rule(simulate, workload, capsys, words, message):
    assert simulate(f"--workload={workload}", *words) == (2, None)
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


def test_the_scheduler_gets_what_the_output_says(simulate, workload, monkeypatch):
    seen = []
    original = Scheduler.__init__

    def spy(self, config, trace=None):
        seen.append(config)
        original(self, config, trace)

    monkeypatch.setattr(Scheduler, "__init__", spy)
    _, document = simulate(f"--workload={workload}", "--max_prefill_seqs=3", "--page_size=4")
    assert json.loads(json.dumps(asdict(seen[0]))) == document["scheduler"]
    assert (seen[0].max_prefill_seqs, seen[0].page_size) == (3, 4)
