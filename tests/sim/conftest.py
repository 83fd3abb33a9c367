"""The simulate command, run in this process."""

import json

import pytest

from jaxserve.simulate import main


@pytest.fixture
def workload(tmp_path):
    """Path of a small workload file."""
    path = tmp_path / "workload.json"
    document = {"num_requests": 60, "arrivals": {"kind": "poisson", "rate": 0.2}, "prompt": 20, "output": 5}
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def simulate(tmp_path):
    """Runs the command with some words; its exit status, and its output document or None."""
    output = tmp_path / "output.json"

    def run(*words):
        output.unlink(missing_ok=True)
        with pytest.raises(SystemExit) as raised:
            main(["simulate", *map(str, words), f"--output={output}"])
        return raised.value.code, json.loads(output.read_text()) if output.exists() else None

    return run
