"""bench simulation: the figures belong to the run, and no jax is loaded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.bench.__main__ import main
from jaxserve.bench.simulation import SLOTS, measure

ROOT = Path(__file__).parents[2]

RUN = """
import sys
from jaxserve.bench.__main__ import main
main(["bench", "simulation", "--simulated_requests=20"])
print("loaded:", sorted({"jax", "jaxlib"} & set(sys.modules)))
"""


def test_it_needs_no_jax():
    run = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "peak MiB" in run.stdout
    assert run.stdout.endswith("loaded: []\n")


def test_it_simulates_as_many_requests_as_asked_for_and_writes_json(tmp_path, capsys):
    output = tmp_path / "figures.json"
    main(["bench", "simulation", "--simulated_requests=300", f"--output={output}"])
    document = json.loads(output.read_text())
    (result,) = document["results"]
    assert (result["requests"], result["completed"], result["rejected"]) == (300, 300, 0)
    assert document["settings"]["workload"]["num_requests"] == 300
    assert result["requests_per_wall_s"] == pytest.approx(300 / result["wall_s"])
    assert result["tokens_per_wall_s"] == pytest.approx(result["output_tokens"] / result["wall_s"])
    assert result["peak_mib"] >= result["grown_mib"] >= 0 and result["peak_mib"] > 10
    assert "requests/s" in " ".join(capsys.readouterr().out.split())


def test_the_workload_keeps_slots_busy_without_filling_the_queue():
    result = measure(2000)
    assert result["completed"] == 2000
    assert 0.2 < result["slot_utilisation"] < 0.9
    assert result["iterations"] * SLOTS > result["output_tokens"]


def test_it_measures_at_least_one_request(capsys):
    with pytest.raises(SystemExit) as raised:
        main(["bench", "simulation", "--simulated_requests=0"])
    assert raised.value.code == 2
    assert "--simulated_requests=0: must be at least 1" in capsys.readouterr().err
