"""Several processes hold one model, over gloo on CPU: their answers are those of one."""

import json
import math

import pytest

from tests.hosts.processes import as_flags, free_ports
from tests.hosts.scenarios import SETTINGS, answers, make_llm


def assert_alike(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if "logprobs" not in name:
            assert found[name] == value, name
            continue
        for row, wanted_row in zip(found[name], value, strict=True):
            for position, wanted_position in zip(row, wanted_row, strict=True):
                for number, wanted_number in zip(position, wanted_position, strict=True):
                    assert math.isclose(number, wanted_number, abs_tol=2e-4), name


@pytest.fixture(scope="session")
def wanted(tiny_model_dir, adapters):
    """The answers of one process, as JSON has them."""
    found = json.loads(json.dumps(answers(make_llm(tiny_model_dir, adapters), adapters)))
    assert found["cache hits"] and found["preempted"] and found["steps in loops"], found
    return found


def run(processes, tmp_path, model, adapters, count, devices=1, *more):
    """Answers of `count` processes, and what else process 0 found."""
    settings = {
        "num_processes": count,
        "coordinator_address": f"127.0.0.1:{free_ports()}",
        "tensor_parallel_size": count * devices,
        # Others that stop this machine's processes for a while are not to end them.
        "host_timeout_s": 60,
    }
    # The offline class has its own limits of the queue; they may differ.
    flags = as_flags(SETTINGS | settings | {"model": model})
    for process_id in range(1, count):
        processes.start(
            f"follower{process_id}", "jaxserve.server", f"--process_id={process_id}", "--http_port=0", *flags,
            devices=devices,
        )  # fmt: skip
    words = ("tests.hosts.scenarios", str(model), str(adapters), json.dumps(settings | {"process_id": 0}))
    processes.start("leader", *words, str(tmp_path / "found.json"), *more, devices=devices)
    status = processes.wait("leader", 250)
    assert status == (1 if more else 0), processes.log("leader")[-3000:]
    return json.loads((tmp_path / "found.json").read_text())


def test_two_processes_answer_as_one_and_a_wrong_step_is_noticed(processes, tmp_path, tiny_model_dir, adapters, wanted):
    found, said = run(processes, tmp_path, tiny_model_dir, adapters, 2, 1, "diverge")
    assert_alike(found, wanted)
    assert said.startswith("HostLostError: process 1 has diverged: its plans or tokens up to iteration")
    assert processes.wait("follower1", 30) == 1
    assert "has given the engine up: process 1 has diverged" in processes.log("follower1")


@pytest.mark.slow
@pytest.mark.parametrize(("count", "devices"), [(4, 1), (2, 2)])
def test_more_processes_and_devices_answer_as_one_and_end_together(
    processes, tmp_path, tiny_model_dir, adapters, wanted, count, devices
):
    found, _ = run(processes, tmp_path, tiny_model_dir, adapters, count, devices)
    assert_alike(found, wanted)
    for process_id in range(1, count):
        assert processes.wait(f"follower{process_id}", 30) == 0, processes.log(f"follower{process_id}")[-2000:]
