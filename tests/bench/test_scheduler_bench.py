"""bench scheduler: every choice is measured once, its parts add up, and no jax is loaded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.bench.__main__ import main
from jaxserve.bench.scheduler import SteadyState, counted_operations

ROOT = Path(__file__).parents[2]

RUN = """
import sys
from jaxserve.bench.__main__ import main
main(["bench", "scheduler", "--policies=sjf", "--running=3", "--waiting=2", "--iterations=2"])
print("loaded:", sorted({"jax", "jaxlib"} & set(sys.modules)))
"""


def test_it_needs_no_jax():
    run = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "sjf" in run.stdout
    assert run.stdout.endswith("loaded: []\n")


def test_it_measures_every_choice_and_writes_json(tmp_path, capsys):
    output = tmp_path / "figures.json"
    flags = ("--policies=fcfs,fair", "--running=4,9", "--waiting=0,30", "--iterations=5", f"--output={output}")
    main(["bench", "scheduler", *flags])
    results = json.loads(output.read_text())["results"]
    named = [(result["setting"], result["running"], result["waiting"]) for result in results]
    grid = [(policy, running, waiting) for policy in ("fcfs", "fair") for running in (4, 9) for waiting in (0, 30)]
    # The other choices are measured at the sizes nearest to 256 and 1000.
    assert named == [*grid, *((name, 9, 30) for name in ("exact", "expected", "optimistic", "prefix cache"))]
    for result in results:
        parts = [result[name] for name in ("schedule_us", "tables_us", "update_us")]
        assert min(parts) > 0 and result["total_p99_us"] >= result["total_us"] >= max(parts)
        assert result["operations"] > 10 * result["running"] / 4
    assert "schedule us" in (shown := capsys.readouterr().out) and "prefix cache" in shown


def test_slots_stay_full_while_requests_come_and_go():
    state = SteadyState(8, 5, policy="priority")
    state.warm_up()
    before = state.scheduler.counters.completed
    for _ in range(300):
        state.step()
    # 300 rows per slot, in outputs of 128 to 256 tokens.
    assert 8 <= state.scheduler.counters.completed - before <= 20
    assert state.mean_running > 7.9
    state.scheduler.check_invariants()


def test_a_call_and_a_round_of_a_loop_count_one_each():
    with counted_operations() as clock:
        before = clock()
        for _ in range(10):
            abs(1)
        after = clock()
    # Ten calls of abs, ten jumps back, `range` and the second reading.
    assert after - before == pytest.approx(22, abs=1)
    assert clock() == clock()
