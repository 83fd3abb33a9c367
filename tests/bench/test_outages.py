"""`bench outages`: its fault plans are right; slow: all faults strike once."""

import json

import pytest

from jaxserve.bench.__main__ import main
from jaxserve.bench.outages import FAULTS, LINES, STREAMS
from jaxserve.faults import ALLOW_VARIABLE, read_fault_plan


def test_each_fault_either_has_a_plan_that_is_read_or_a_victim(tmp_path, monkeypatch):
    monkeypatch.setenv(ALLOW_VARIABLE, "1")
    for fault in FAULTS:
        assert bool(fault.plan) == (fault.victim is None), fault.name
        (tmp_path / "plan").write_text(json.dumps(fault.plan))
        assert len(read_fault_plan(str(tmp_path / "plan")).faults) == len(fault.plan)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_service_comes_back_with_the_ids_that_it_had(tmp_path):
    main(["bench", "outages", "--model=tiny", "--runs=1", f"--output={tmp_path / 'outages.json'}"])
    results = json.loads((tmp_path / "outages.json").read_text())["results"]
    assert len(results) == len(FAULTS) + 1
    *served, batch = results
    assert batch["whole"] == LINES
    for each in served:
        assert each["error"] + each["cut"] + each["whole"] == STREAMS
        assert (each["ended_s"] is None) == (each["status"] is None) and each["status"] != 0
        assert 0 < each["noticed_s"] < each["again_s"]
