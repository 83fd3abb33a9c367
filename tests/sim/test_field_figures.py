"""The field's well-known figures: against arithmetic, against each other, and against the table in docs/."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.scheduler import Scheduler
from jaxserve.sim import field_figures, simulator
from jaxserve.sim.figure import markdown_table
from jaxserve.sim.lengths_run import run_lengths
from jaxserve.sim.long_prompt_figures import LLAMA_3_1_8B
from jaxserve.sim.roofline import ModelShape

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found():
    """All figures, computed once."""
    return field_figures.field_figures()


@pytest.fixture(scope="module")
def value_of(found):
    """The value of a figure by its name."""
    values = {figure.name: figure.value for figure in found}
    assert len(values) == len(found), "two figures have one name"
    return values.__getitem__


def test_the_slots_of_a_static_batch_are_used_as_arithmetic_says(value_of):
    used = value_of("slot utilisation, static")
    assert used == (900 + 7 * 40) / (8 * 900)
    assert round(used, 3) == 0.164


def test_continuous_batching_gives_over_five_times_the_tokens_per_iteration(value_of):
    assert value_of("slot utilisation, continuous") > 0.99
    ratio = value_of("tokens per iteration, continuous with backlog over static without")
    assert 5.0 < ratio <= 8 * 900 / 1180
    # Of the same requests: static needs 900 iterations, then 40 for each of twenty batches.
    iterations = 7340 / 8 / value_of("slot utilisation, continuous")
    same = value_of("tokens per iteration, continuous over static, both with backlog")
    assert same == pytest.approx((900 + 20 * 40) / iterations)


def test_mixed_lengths_lose_the_slot_steps_that_arithmetic_says(value_of):
    assert value_of("slot-steps lost, evenly spread") == pytest.approx(1 - 880 / 1600)
    assert round(value_of("slot-steps lost, sum as the textbook's"), 4) == 0.5219


def test_a_queue_grows_by_the_surplus_and_a_bound_turns_it_into_rejections(value_of):
    assert value_of("queue growth per unit, no bound") == 6.0
    assert value_of("rejections per unit, no bound") == 0.0
    assert value_of("queue growth per unit, bound of 32") == 0.0
    assert value_of("rejections per unit, bound of 32") == 6.0
    assert value_of("longest wait in units, no bound") == 300.0
    assert value_of("longest wait in units, bound of 32") <= 16.0


@pytest.mark.parametrize("quantile", ["p99", "max"])
def test_chunks_keep_a_long_prompt_from_stalling_the_others(value_of, quantile):
    whole, chunked = (value_of(f"ITL {quantile} of the others, {name}") for name in ("unchunked", "prefill_chunk 512"))
    # Twelve chunks; each iteration also reads the weights.
    assert whole / 12 < chunked < whole / 5


def test_a_stall_is_as_long_as_its_prompt_takes_and_chunks_cost_the_prompt_time(found, value_of):
    longest = [figure for figure in found if figure.name.startswith("ITL max")]
    assert len(longest) == 2
    for figure in longest:
        assert figure.expected < figure.value < 1.1 * figure.expected
    names = ("TTFT of the long prompt, unchunked", "TTFT of the long prompt, prefill_chunk 512")
    whole, chunked = map(value_of, names)
    assert whole < chunked < 1.5 * whole


def test_static_throughput_falls_as_lengths_vary_more_and_continuous_keeps_up(found, value_of):
    kinds = ("constant", "uniform", "exponential", "lognormal")
    for batching in ("static", "request_dynamic"):
        values = [value_of(f"{kind}, {batching}") for kind in kinds]
        assert values == sorted(values, reverse=True)
        assert values[-1] < 0.5 * values[0]
    expected = {figure.name: figure.expected for figure in found}
    for kind in kinds:
        # What is missing of the offered load is the last requests' time.
        name = f"{kind}, continuous"
        assert 0.95 * expected[name] < value_of(name) <= expected[name]
        for older in (f"{kind}, static", f"{kind}, request_dynamic"):
            assert value_of(older) < value_of(name)
            assert value_of(older) == pytest.approx(expected[older], rel=0.06)


def test_static_batching_catches_up_with_equal_lengths_or_a_single_batch(value_of):
    assert value_of("lengths 64 ± 0%, 256 requests") == pytest.approx(1.0, abs=0.05)
    assert value_of("lengths 64 ± 50%, 8 requests") == pytest.approx(1.0, abs=0.05)
    assert value_of("lengths 64 ± 50%, 256 requests, longest first") == pytest.approx(1.0, abs=0.05)
    by_spread = [value_of(f"lengths 64 ± {spread}%, 256 requests") for spread in (0, 10, 25, 50, 90)]
    assert by_spread == sorted(set(by_spread))
    by_count = [value_of(f"lengths 64 ± 50%, {count} requests") for count in (8, 16, 64, 256)]
    assert by_count == sorted(set(by_count))


def test_gaps_between_arrivals_count_as_time():
    run = run_lengths([3, 3], 2, "continuous", [0.0, 10.0])
    assert (run.output_tokens, run.iterations, run.slot_utilisation) == (6, 13.0, 6 / 26)


def test_the_figures_are_made_by_the_serving_scheduler(monkeypatch):
    plans = []

    class Counting(Scheduler):
        def schedule(self, now):
            plans.append(now)
            return super().schedule(now)

    monkeypatch.setattr(simulator, "Scheduler", Counting)
    run_lengths([5], 2, "static")
    assert len(plans) >= 5


def test_the_model_is_the_one_in_configs():
    assert ModelShape.from_file(REPOSITORY / "configs" / "models" / "llama-3.1-8b.json") == LLAMA_3_1_8B


def test_the_table_in_docs_is_what_the_command_prints(found):
    assert markdown_table(found) in (REPOSITORY / "docs" / "figures.md").read_text()


def test_the_command_writes_the_figures_it_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(field_figures, "TOPICS", (field_figures.mixed_lengths,))
    output = tmp_path / "figures.json"
    field_figures.main(["field_figures", f"--output={output}"])
    entries = json.loads(output.read_text())["figures"]
    assert [entry["value"] for entry in entries] == pytest.approx([0.45, 0.521875])
    assert {"topic", "name", "unit", "scope", "expected", "basis"} < set(entries[0])
    assert "| 45.00 % | 52.19 % (textbook, of other lengths) |" in capsys.readouterr().out
    with pytest.raises(SystemExit) as raised:
        field_figures.main(["field_figures", f"--output={tmp_path / 'none' / 'f.json'}"])
    assert raised.value.code == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


def test_the_tool_runs_where_it_stands():
    environment = {**os.environ, "VENV": sys.prefix}
    tool = REPOSITORY / "tools" / "field_figures"
    done = subprocess.run([tool, "--help"], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "Usage: tools/field_figures" in done.stdout
