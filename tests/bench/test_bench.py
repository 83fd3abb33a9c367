"""bench: the figures follow from the engine's sums, and a run writes them."""

import json

import pytest

from jaxserve.bench.__main__ import main
from jaxserve.bench.offline import figures
from jaxserve.engine.stats import EngineStats
from jaxserve.testing.tiny import tiny_config, tiny_weights


def test_figures_of_a_run_worked_by_hand():
    stats = EngineStats(
        iterations=4,
        steps=6,
        slot_steps=18,
        wasted_rows=2,
        tokens=30,
        padded_tokens=40,
        output_tokens=10,
        host_s=0.02,
        hidden_s=0.015,
        device_s=0.2,
    )
    assert figures(stats, 2.0, slots=4) == pytest.approx(
        {
            "wall_s": 2.0,
            "iterations": 4,
            "output_tokens_per_s": 5.0,
            "slot_utilisation": 0.75,
            "padding_ratio": 0.25,
            "wasted_rows": 2,
            "hidden_share": 0.75,
            "steps_per_iteration": 1.5,
            "host_us_per_token": 2000.0,
            "host_ms_per_iteration": 5.0,
            "device_ms_per_iteration": 50.0,
        }
    )


@pytest.mark.usefixtures("own_cache")
def test_offline_measures_and_writes_json(tiny_model_dir, tmp_path, capsys):
    output = tmp_path / "figures.json"
    main(
        [
            "bench",
            "offline",
            f"--model={tiny_model_dir}",
            "--dtypes=float32",
            "--slots=2",
            "--quantizations=none,int8",
            "--prompt-tokens=8",
            "--output-tokens=8",
            "--runs=1",
            f"--output={output}",
        ]
    )
    document = json.loads(output.read_text())
    result, quantised = document["results"]
    assert (result["quantization"], quantised["quantization"]) == ("none", "int8")
    assert quantised["output_tokens"] == result["output_tokens"]
    assert document["machine"]["platform"] == "cpu"
    assert (result["slots"], result["requests"], result["dtype"]) == (2, 6, "float32")
    assert 24 <= result["output_tokens"] <= 48
    assert 0.5 < result["slot_utilisation"] <= 1 and 0 <= result["hidden_share"] <= 1
    assert result["wasted_rows"] == 0, "outputs that end by length waste none"
    assert 0 <= result["padding_ratio"] < 1
    assert result["output_tokens_per_s"] > 0 and result["host_ms_per_iteration"] > 0
    assert "output tokens/s" in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("own_cache")
def test_offline_compares_settings_in_turns(tiny_model_dir, tmp_path, capsys):
    output = tmp_path / "figures.json"
    words = ["--slots=2", "--prompt-tokens=8", "--output-tokens=8", "--runs=1", f"--output={output}"]
    settings = ["--dtype=float32", "--dtype=bfloat16 --kv_cache_dtype=int8"]
    main(["bench", "offline", f"--model={tiny_model_dir}", *words, *(f"--settings={each}" for each in settings)])
    results = json.loads(output.read_text())["results"]
    assert [each["settings"] for each in results] == settings
    assert [each["dtype"] for each in results] == ["float32", "bfloat16"]
    assert all(each["output_tokens_per_s"] > 0 and each["slots"] == 2 for each in results)
    for wrong, message in (
        (["--settings=--max_num_seqs=2"], "sets max_num_seqs, which the measurement sets itself"),
        (["--settings=--model=other"], "sets model, which"),
        (["--settings=", "--settings="], "the same twice"),
        (["--settings=--seed=1", "--dtypes=float32"], "--dtypes says nothing beside --settings"),
    ):
        with pytest.raises(SystemExit):
            main(["bench", "offline", f"--model={tiny_model_dir}", *words, *wrong])
        assert message in capsys.readouterr().err


@pytest.mark.usefixtures("own_cache")
def test_decode_steps_compares_engines_in_turns(tiny_model_dir, tmp_path):
    output = tmp_path / "figures.json"
    words = ["--dtypes=float32", "--slots=2", "--prompt-tokens=8", "--output-tokens=40", "--runs=2"]
    main(["bench", "decode_steps", f"--model={tiny_model_dir}", *words, "--max-decode-steps=1,5", f"--output={output}"])
    single, several = json.loads(output.read_text())["results"]
    assert (single["max_decode_steps"], several["max_decode_steps"]) == (1, 5)
    assert single["steps_per_iteration"] == single["ratio_tokens_per_s"] == single["ratio_host"] == 1.0
    assert several["steps_per_iteration"] > 2 and several["iterations"] < single["iterations"]
    assert several["equal_outputs_share"] == 1.0 and len(several["ratios_host"]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("offline", "--max-decode-steps=1,8"), "max_decode_steps is 1,8; offline takes one, decode_steps several"),
        ((), "say first what to measure: offline, serve, compare, compare_modes, machine, decode_ratio"),
        (("speed",), "there is no measurement 'speed'"),
        (("offline", "--runs=0"), "--runs=0: must be at least 1"),
    ],
)
def test_a_mistake_is_named(capsys, words, message):
    with pytest.raises(SystemExit) as raised:
        main(["bench", *words])
    assert raised.value.code not in (0, None)
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("own_cache")
def test_preemption_modes_are_measured_beside_ample_pages(tiny_model_dir, tmp_path):
    output = tmp_path / "figures.json"
    flags = ["--dtypes=float32", "--slots=4", "--prompt-tokens=16", "--output-tokens=64", "--runs=1"]
    main(["bench", "preemption", f"--model={tiny_model_dir}", *flags, f"--output={output}"])
    results = {result["preemption"]: result for result in json.loads(output.read_text())["results"]}
    assert list(results) == ["ample pages", "swap", "recompute", "auto"]
    assert results["ample pages"]["preemptions"] == 0 and results["ample pages"]["ratio"] == 1
    assert results["swap"]["preemptions"] > 0 and results["swap"]["swapped_mib"] > 0
    assert results["recompute"]["recomputed_tokens"] > 0 == results["recompute"]["swapped_mib"]


def test_too_few_pages_for_a_request_are_named(tiny_model_dir, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "preemption", f"--model={tiny_model_dir}", "--slots=2", "--page_share=0.1"])
    assert "page_share is 0.1: 1 pages for 2 slots; a request needs 6" in capsys.readouterr().err


@pytest.mark.usefixtures("own_cache")
def test_structured_measures_masks_beside_none(tiny_model_dir, tmp_path):
    output = tmp_path / "figures.json"
    settings = ["--dtypes=float32", "--slots=2", "--prompt-tokens=8", "--output-tokens=16", "--runs=1"]
    main(["bench", "structured", f"--model={tiny_model_dir}", *settings, f"--output={output}"])
    (result,) = json.loads(output.read_text())["results"]
    assert (result["slots"], result["dtype"]) == (2, "float32")
    assert result["mask_us_per_token"] > 0 and result["accept_us_per_token"] > 0
    assert 0 < result["share_of_step"] < 1 and result["ratio"] > 0


def test_startup_reports_one_cold_start_and_the_median_of_warm_ones(tiny_model_dir, tmp_path, monkeypatch):
    from jaxserve.bench import startup

    asked = []

    def start(model, dtype, cache):
        asked.append((model, dtype, cache))
        number = len(asked)
        return {name: float(number * 10) for name in ("ready_s", "weights_s", "programs_s")} | {
            "weights_peak_mib": 100.0 * number,
            "peak_mib": 200.0,
        }

    monkeypatch.setattr(startup, "start", start)
    output = tmp_path / "figures.json"
    main(["bench", "startup", f"--model={tiny_model_dir}", "--dtypes=bfloat16", "--runs=3", f"--output={output}"])
    (result,) = json.loads(output.read_text())["results"]
    assert {each[:2] for each in asked} == {(str(tiny_model_dir), "bfloat16")} and len({each[2] for each in asked}) == 1
    assert (result["cold_s"], result["warm_s"], result["slowest_warm_s"]) == (10, 30, 40)
    assert result["warm_runs_s"] == [20, 30, 40] and result["warm"]["weights_peak_mib"] == 300
    assert result["weights_mib"] == pytest.approx(
        2 * sum(value.size for value in tiny_weights(tiny_config()).values()) / 2**20
    )


@pytest.mark.usefixtures("own_cache")
def test_host_work_divides_the_engines_time_into_parts(tmp_path):
    output = tmp_path / "figures.json"
    workload = tmp_path / "few.json"
    requests = [{"id": i, "prompt_ids": [i, 2, 3, 4], "max_tokens": 6 + i % 3} for i in range(6)]
    workload.write_text(json.dumps({"name": "few", "requests": requests}))
    words = ["--model=tiny", "--dtypes=float32", "--slots=3", "--requests_per_slot=4", "--runs=1"]
    main(["bench", "host_work", *words, f"--workload={workload}", f"--output={output}"])
    document = json.loads(output.read_text())
    assert document["settings"]["workload"] == "few"
    (result,) = document["results"]
    assert (result["slots"], result["requests"], result["compiles"]) == (3, 12, 0)
    assert result["iterations"] > 6 and 0 <= result["hidden_share"] <= 1
    assert result["rows"] > 2, "a run ends while every slot is busy"
    for clock in ("wall_ms", "cpu_ms"):
        parts = result[f"{clock}_of"]
        assert set(parts) == {"schedule", "prepare", "dispatch", "sample", "collect", "update", "deliver", "other"}
        # The others are measured; this one is what is left, of clocks that differ by more where threads are many.
        assert result[clock] > 0 and all(parts[name] > 0 for name in parts if name != "other")


@pytest.mark.usefixtures("own_cache")
def test_recovery_times_what_a_failed_step_costs(tiny_model_dir, tmp_path):
    output = tmp_path / "figures.json"
    words = ["--dtypes=float32", "--slots=2", "--runs=1", "--prompt_tokens=20", "--output_tokens=60"]
    main(["bench", "recovery", f"--model={tiny_model_dir}", *words, f"--output={output}"])
    results = json.loads(output.read_text())["results"]
    assert [result["case"] for result in results] == ["prefix cache", "no cache", "pool lost"]
    for result in results:
        assert 0 < result["recover_ms"] <= result["first_token_ms"] <= result["all_tokens_ms"]
    with pytest.raises(SystemExit):
        main(["bench", "recovery", f"--model={tiny_model_dir}", *words[:-1], "--output_tokens=20"])
