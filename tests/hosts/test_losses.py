"""Servers of two processes, one of which is killed, stopped or told to end: what clients and operators see."""

import contextlib
import json
import os
import signal
import threading
import time

import httpx
import pytest

from jaxserve.server.launcher import LAST_EXIT_S
from tests.hosts.processes import as_flags, free_ports

pytestmark = pytest.mark.slow

SETTINGS = dict(
    dtype="float32",
    max_model_len=256,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    num_pages=80,
    decode_buckets=(4,),
    prefill_buckets=(64,),
    table_width_buckets=(16,),
    tensor_parallel_size=2,
    num_processes=2,
    host_timeout_s=3,
    http_port=0,
    grpc_port=0,
)


class Server:
    """Two processes, or more; `url` is the leader's.

    Attributes:
      follower: process 1; more: those after it, which are named follower2 and so on.
    """

    def __init__(self, processes, model, cache, num_processes=2, faults=None, exit_on_death=True):
        flags = as_flags(
            SETTINGS
            | {"model": model, "coordinator_address": f"127.0.0.1:{free_ports()}", "compile_cache": str(cache)}
            | {"num_processes": num_processes, "tensor_parallel_size": num_processes, "exit_on_death": exit_on_death}
        )
        self.follower = processes.start("follower", "jaxserve.server", "--process_id=1", *flags)
        self.more = [
            processes.start(f"follower{number}", "jaxserve.server", f"--process_id={number}", *flags)
            for number in range(2, num_processes)
        ]
        allowed = {"JAXSERVE_ALLOW_FAULTS": "1"} if faults else {}
        flags += [f"--fault_plan={faults}"] if faults else []
        self.leader = processes.start("leader", "jaxserve.server", "--process_id=0", *flags, **allowed)
        line = processes.until_logged("leader", "jaxserve ready", 200)
        self.url = f"http://{line.split('http=')[1].split()[0]}"
        self.events = []
        self.ended_at = 0.0

    def stream(self, max_tokens=240):
        """Reads a stream on a thread; returns once tokens come."""
        body = {"model": "model", "prompt": "The sea", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}

        def read():
            url = f"{self.url}/v1/completions"
            gone = contextlib.suppress(httpx.TransportError)  # the leader itself
            with gone, httpx.stream("POST", url, json=body, timeout=60) as response:
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line.removeprefix("data: "))
            self.ended_at = time.monotonic()

        self._reading = threading.Thread(target=read)
        self._reading.start()
        while len(self.events) < 3:
            time.sleep(0.002)

    def until_dead(self):
        """Seconds until /health answers 503."""
        began = time.monotonic()
        while httpx.get(f"{self.url}/health", timeout=10).status_code != 503:
            assert time.monotonic() < began + 30
            time.sleep(0.005)
        return time.monotonic() - began

    def end_of_stream(self):
        self._reading.join(60)
        assert self.ended_at, "the stream did not end"
        return json.loads(self.events[-1]) if self.events[-1] != "[DONE]" else "[DONE]"


@pytest.fixture
def start(processes, tiny_model_dir, tmp_path_factory):
    """`start(...)`: a `Server` that is ready."""
    return lambda **how: Server(processes, tiny_model_dir, tmp_path_factory.getbasetemp() / "hosts_xla", **how)


@pytest.fixture
def server(start):
    return start()


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_lost_follower_ends_streams_with_errors_and_health_says_so(start, processes, how):
    server = start(exit_on_death=False)  # so that there is time to look
    server.stream()
    began = time.monotonic()
    server.follower.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    seconds = server.until_dead()
    error = server.end_of_stream()
    print(f"follower {how}: /health 503 after {seconds:.2f} s, stream's error after {server.ended_at - began:.2f} s")
    assert error["error"]["code"] == "engine_dead" and "HostLostError" in error["error"]["message"]
    assert seconds < (2 if how == "killed" else 3 + 4)
    answer = httpx.post(f"{server.url}/v1/completions", json={"model": "model", "prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
    said = "process 1 is gone" if how == "killed" else "process 1 gave no sign of life for 3 s"
    assert said in processes.log("leader") or "process 1 has not ended iteration" in processes.log("leader")
    server.leader.send_signal(signal.SIGTERM)
    assert processes.wait("leader", 20) == 1
    if how == "stopped":
        server.follower.send_signal(signal.SIGCONT)
        assert processes.wait("follower", 20) == 1
        assert "the leader (process 0)" in processes.log("follower")


@pytest.mark.parametrize("killed", ["leader", "follower"])
def test_a_killed_process_ends_all_others_with_status_1(start, processes, killed):
    server = start(num_processes=3)
    server.stream()
    began = time.monotonic()
    os.kill((server.leader if killed == "leader" else server.follower).pid, signal.SIGKILL)
    others = ["follower2", "follower" if killed == "leader" else "leader"]
    for name in others:
        left = (5 if name.startswith("follower") else LAST_EXIT_S + 5) - (time.monotonic() - began)
        assert processes.wait(name, max(left, 0.1)) == 1, processes.log(name)[-2000:]
        print(f"{killed} killed: {name} has ended after {time.monotonic() - began:.2f} s")
    reason = "the leader (process 0) is gone" if killed == "leader" else "process 1 is gone"
    assert all(reason in processes.log(name) for name in others)


def test_a_step_that_fails_ends_all_processes_and_the_log_says_why(start, processes, tmp_path):
    plan = tmp_path / "faults.json"
    plan.write_text(json.dumps([{"at": "runner.dispatch", "do": "raise", "skip": 20}]))
    server = start(faults=plan)
    server.stream()
    error = server.end_of_stream()["error"]
    assert error["code"] == "engine_dead" and "InjectedFault" in error["message"]
    assert processes.wait("leader", LAST_EXIT_S + 5) == 1
    assert processes.wait("follower", 5) == 1
    assert "an engine of several processes does not go on from that" in processes.log("leader")


def test_a_lost_leader_ends_its_follower(server, processes):
    server.stream()
    began = time.monotonic()
    os.kill(server.leader.pid, signal.SIGKILL)
    assert processes.wait("follower", 20) == 1
    print(f"leader killed: its follower has ended after {time.monotonic() - began:.2f} s")
    assert "this process ends: the leader (process 0) is gone" in processes.log("follower")


def test_a_leader_that_gives_no_sign_of_life_ends_its_follower(server, processes):
    server.stream()
    server.leader.send_signal(signal.SIGSTOP)
    assert processes.wait("follower", 30) == 1
    assert "this process ends: the leader (process 0) gave no sign of life for 3 s" in processes.log("follower")


def test_a_signal_drains_the_leader_and_both_end_in_good_order(server, processes):
    server.stream(120)
    server.follower.send_signal(signal.SIGTERM)  # as when all pods of an engine are deleted
    server.leader.send_signal(signal.SIGTERM)
    assert server.end_of_stream() == "[DONE]"
    assert processes.wait("leader", 30) == 0, processes.log("leader")[-2000:]
    assert processes.wait("follower", 30) == 0, processes.log("follower")[-2000:]
    assert "the leader has stopped" in processes.log("follower")


def test_a_signal_ends_a_follower_that_waits_for_the_others(processes, tiny_model_dir):
    address = f"127.0.0.1:{free_ports()}"
    flags = as_flags(SETTINGS | {"model": tiny_model_dir, "coordinator_address": address})
    follower = processes.start("follower", "jaxserve.server", "--process_id=1", *flags)
    processes.until_logged("follower", "probes at", 60)
    time.sleep(1)
    follower.send_signal(signal.SIGTERM)
    assert processes.wait("follower", 10) == -signal.SIGTERM


def test_a_follower_tells_its_probes_how_far_it_is(server, processes):
    url = processes.until_logged("follower", "probes at", 5).split("probes at ")[1].split()[0]
    assert httpx.get(f"{url}/health").json() == {"status": "ok", "state": "ready"}
    ready = httpx.get(f"{url}/ready")
    assert ready.status_code == 200 and ready.json()["ready"] is True
    assert httpx.post(f"{url}/v1/completions", json={}).status_code == 404
