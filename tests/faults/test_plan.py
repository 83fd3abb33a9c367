"""Fault plans: what they match, how often, and what is refused."""

import errno
import json
from pathlib import Path

import pytest

from jaxserve.faults import (
    ALLOW_VARIABLE,
    Fault,
    FaultPlan,
    InjectedFault,
    failpoint,
    faults_injected,
    read_fault_plan,
    use_fault_plan,
)
from jaxserve.faults.plan import KINDS


@pytest.fixture
def plan_file(tmp_path, monkeypatch):
    monkeypatch.setenv(ALLOW_VARIABLE, "1")

    def write(value):
        path = tmp_path / "plan.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return str(path)

    return write


@pytest.fixture
def active():
    yield lambda *faults: use_fault_plan(FaultPlan(faults))
    use_fault_plan(None)


def test_without_a_plan_nothing_fails():
    assert failpoint("runner.dispatch", iteration=1, request_ids=["a"]) is None
    assert faults_injected() is None


@pytest.mark.parametrize(
    ("settings", "struck"),
    [
        ({"skip": 2, "times": 2}, [2, 3]),
        ({"skip": 1, "times": 3, "every": 3}, [1, 4, 7]),
        ({"times": None, "every": 4}, [0, 4, 8]),
    ],
)
def test_strikes_after_skip_every_so_many_passages_and_no_more_than_times(active, settings, struck):
    active(Fault("runner.collect", "raise", **settings))
    found = []
    for passage in range(12):
        try:
            failpoint("runner.collect")
        except InjectedFault:
            found.append(passage)
    assert found == struck
    assert faults_injected() == {("runner.collect", "raise"): len(struck)}


@pytest.mark.parametrize(
    ("fault", "fits"),
    [
        (Fault("runner.dispatch", "nan", iteration=3), True),
        (Fault("runner.dispatch", "nan", iteration=4), False),
        (Fault("runner.dispatch", "nan", request_id="b*"), True),
        (Fault("runner.dispatch", "nan", request_id="c*"), False),
        (Fault("runner.sample", "raise"), False),
    ],
)
def test_fits_by_place_iteration_and_request(active, fault, fits):
    active(fault)
    found = failpoint("runner.dispatch", iteration=3, request_ids=["a1", "b1"])
    assert found == (fault if fits else None)


def test_disk_full_is_the_systems_own_error(active):
    active(Fault("trace.write", "disk_full"))
    with pytest.raises(OSError, match="No space left") as caught:
        failpoint("trace.write")
    assert caught.value.errno == errno.ENOSPC


def test_two_faults_of_one_place_each_have_their_turn(active):
    active(Fault("runner.dispatch", "nan", times=1), Fault("runner.dispatch", "out_of_memory", times=1))
    kinds = [failpoint("runner.dispatch", iteration=number) for number in range(3)]
    assert [fault and fault.do for fault in kinds] == ["nan", "out_of_memory", None]


def test_a_plan_is_refused_unless_allowed(plan_file, monkeypatch):
    path = plan_file([])
    monkeypatch.delenv(ALLOW_VARIABLE)
    with pytest.raises(ValueError, match=ALLOW_VARIABLE):
        read_fault_plan(path)


def test_a_plan_is_read(plan_file):
    plan = read_fault_plan(plan_file([{"at": "runner.collect", "do": "hang", "seconds": 2, "times": None}]))
    assert plan.faults == (Fault("runner.collect", "hang", seconds=2, times=None),)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[", "cannot be read"),
        ({}, "must be a JSON list"),
        ([1], "entry 0 is int"),
        ([{"at": "runner.collect"}], "lacks 'do'"),
        ([{"at": "nowhere", "do": "raise"}], "places are"),
        ([{"at": "runner.collect", "do": "smoke"}], "kinds are"),
        ([{"at": "trace.write", "do": "nan"}], "it is for runner.dispatch"),
        ([{"at": "runner.collect", "do": "raise", "when": 1}], "names are"),
        ([{"at": "runner.collect", "do": "raise", "times": True}], "times is True"),
    ],
)
def test_what_is_no_plan_is_refused(plan_file, value, message):
    with pytest.raises(ValueError, match=message):
        read_fault_plan(plan_file(value))


def test_the_plan_of_the_soak_is_read(monkeypatch):
    monkeypatch.setenv(ALLOW_VARIABLE, "1")
    plan = read_fault_plan(str(Path(__file__).parents[2] / "configs" / "faults" / "soak.json"))
    assert {fault.do for fault in plan.faults} == set(KINDS) - {"kill"}
