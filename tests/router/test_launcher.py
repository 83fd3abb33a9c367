"""A router as a process: its children, its signals, its end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading

import httpx
import pytest

from jaxserve.router import children
from tests.server.running import events_of, until

ROUND = {"prompt": "The sea", "max_tokens": 40, "stream": True, "ignore_eos": True}


class RouterProcess:
    """`python -m tests.router.fake_main`, once it takes requests."""

    def __init__(self, grace=5, replicas=2, step_s=0.01):
        words = [sys.executable, "-m", "tests.router.fake_main", str(grace), str(replicas), str(step_s)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        line = self.process.stdout.readline()
        found = re.fullmatch(r"jaxserve router ready http=(127\.0\.0\.1:\d+)\n", line)
        assert found, (line, self.log)
        self.url = f"http://{found[1]}"
        until(lambda: self.in_rotation == replicas, 30, "all replicas in rotation")

    def _read(self):
        for line in self.process.stderr:
            self.log.append(line.rstrip())

    @property
    def in_rotation(self):
        return httpx.get(f"{self.url}/health").json()["in_rotation"]

    def pids(self):
        return [int(found[1]) for line in self.log if (found := re.search(r"is starting \(pid (\d+)\)", line))]

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait(30)

    def close(self):
        if self.process.poll() is None:
            self.end(signal.SIGKILL)
        self._reader.join(10)
        self.process.stdout.close()
        self.process.stderr.close()


@pytest.fixture
def make_process():
    made = []

    def make(**settings):
        made.append(RouterProcess(**settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


def lives(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_killed_child_costs_its_own_streams_and_is_started_again(make_process):
    router = make_process()
    streams: list[str] = []

    def ask():
        with httpx.stream(
            "POST", f"{router.url}/v1/completions", json=ROUND | {"max_tokens": 300}, timeout=60
        ) as answer:
            pieces = answer.iter_text()
            first = next(pieces)
            begun.release()
            streams.append(first + "".join(pieces))

    begun = threading.Semaphore(0)
    clients = [threading.Thread(target=ask) for _ in range(8)]
    for client in clients:
        client.start()
    for _ in clients:
        assert begun.acquire(timeout=30), "a stream did not begin"
    first, other = router.pids()
    os.kill(first, signal.SIGKILL)
    for client in clients:
        client.join(60)
    ends = [events_of(text)[-1] for text in streams]
    broken = [end for end in ends if end != "[DONE]"]
    assert len(broken) == 4 and len(ends) == 8
    assert all(end["error"]["code"] == "replica_lost" for end in broken)
    for _ in range(6):
        assert httpx.post(f"{router.url}/v1/completions", json=ROUND).text.endswith("data: [DONE]\n\n")
    until(lambda: router.in_rotation == 2, 30, "the child back in rotation")
    assert any("ended with signal 9" in line and "(1 of 2)" in line for line in router.log)
    assert len(router.pids()) == 3 and lives(other)
    assert router.end() == 0
    assert not any("given up" in line for line in router.log)
    assert not any(lives(pid) for pid in router.pids())


def test_sigterm_lets_streams_finish_and_ends_the_children(make_process):
    router = make_process()
    with httpx.stream("POST", f"{router.url}/v1/completions", json=ROUND, timeout=30) as answer:
        pieces = answer.iter_text()
        next(pieces)
        router.process.send_signal(signal.SIGTERM)
        assert "".join(pieces).endswith("data: [DONE]\n\n")
    assert router.process.wait(30) == 0
    assert not any(lives(pid) for pid in router.pids())


def test_what_outlasts_the_grace_ends_with_an_error(make_process):
    router = make_process(grace=0.3, step_s=0.05)
    with httpx.stream("POST", f"{router.url}/v1/completions", json=ROUND | {"max_tokens": 400}, timeout=30) as answer:
        pieces = answer.iter_text()
        first = next(pieces)
        router.process.send_signal(signal.SIGTERM)
        error = events_of(first + "".join(pieces))[-1]["error"]
    assert error["code"] == "draining" and error["message"] == "the router shut down before the request finished"
    assert router.process.wait(30) == 0


def test_a_second_signal_ends_all_at_once(make_process):
    router = make_process(grace=20, step_s=0.2)
    with httpx.stream("POST", f"{router.url}/v1/completions", json=ROUND, timeout=30) as answer:
        next(answer.iter_text())
        router.process.send_signal(signal.SIGTERM)
        until(lambda: any("a second signal ends now" in line for line in router.log), 10, "the drain")
        assert router.end() == 128 + signal.SIGTERM
    until(lambda: not any(lives(pid) for pid in router.pids()), 10, "the children's end")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends children with their parent on Linux only")
def test_children_do_not_outlive_a_killed_router(make_process):
    router = make_process()
    assert router.end(signal.SIGKILL) == -signal.SIGKILL
    until(lambda: not any(lives(pid) for pid in router.pids()), 10, "the children's end")


def test_children_that_keep_dying_are_given_up(tmp_path):
    code = (
        "import asyncio, sys\n"
        "from jaxserve.router.children import ChildSettings\n"
        "from jaxserve.router.launcher import FrontSettings, RouterLauncher\n"
        "from jaxserve.router.settings import RouterSettings\n"
        "children = ChildSettings((sys.executable, '-c', 'raise SystemExit(3)'), ({}, {}), 1, 0.05)\n"
        "async def main(): return await RouterLauncher(FrontSettings(http_port=0), RouterSettings(), children).run()\n"
        "sys.exit(asyncio.run(main()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "every replica is given up" in done.stderr and not done.stdout


def test_probing_that_fails_ends_the_router():
    code = (
        "import asyncio, sys\n"
        "from jaxserve.router import launcher\n"
        "from jaxserve.router.settings import RouterSettings\n"
        "async def fails(self): raise RuntimeError('probing broke')\n"
        "launcher.HealthChecker.run = fails\n"
        "front = launcher.FrontSettings(http_port=0)\n"
        "run = launcher.RouterLauncher(front, RouterSettings(), ('http://127.0.0.1:9',)).run\n"
        "async def main(): return await run()\n"
        "sys.exit(asyncio.run(main()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "RuntimeError: probing broke" in done.stderr


# Other tests of this process may have loaded jax, which warns of forks; the router loads none.
no_fork_warning = pytest.mark.filterwarnings("ignore:os.fork")


@no_fork_warning
@pytest.mark.parametrize("was_up", [False, True])
def test_only_a_life_in_rotation_makes_a_child_new(monkeypatch, was_up):
    monkeypatch.setattr(children, "STEADY_S", 0.0)
    ends = []

    def ended(number, how, again):
        ends.append((how, again))
        if len(ends) == 5:
            asyncio.current_task().cancel()

    settings = children.ChildSettings((sys.executable, "-S", "-c", "raise SystemExit(3)"), ({},), 1, 0.01)
    started = children.Children(settings, ended, lambda number: 0.0 if was_up else None)
    asyncio.run(started.run())
    wanted = [("status 3", True)] * 5 if was_up else [("status 3", True), ("status 3", False)]
    assert ends == wanted


@no_fork_warning
def test_a_child_that_cannot_be_started_has_ended():
    ends = []
    settings = children.ChildSettings(("/nothing/is/here",), ({},), 1, 0.01)
    asyncio.run(children.Children(settings, lambda *end: ends.append(end), lambda number: None).run())
    assert [again for _, _, again in ends] == [True, False]
    assert all("no process" in how and "/nothing/is/here" in how for _, how, _ in ends)


def test_probes_have_a_key_of_the_file_that_has_no_tenant(tmp_path):
    from jaxserve.config.flags import parse_flags
    from jaxserve.router.__main__ import _settings

    (tmp_path / "keys").write_text("alice:sk-alice\nsk-operator\n")
    words = ["router", "--replicas=http://a:1", f"--api_key_file={tmp_path / 'keys'}"]
    assert _settings(parse_flags("router", words)).health.api_key == "sk-operator"
    assert _settings(parse_flags("router", [*words, "--replica_api_key=sk-r"])).health.api_key == "sk-r"


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ([], "--replicas, of running servers, or num_replicas, of servers to start: give one of the two"),
        (["--replicas=http://a:1", "--num_replicas=2"], "give one of the two"),
        (["--replicas=http://a:1,http://a:1/"], "--replicas names a server twice"),
        (["--replicas=a:1"], "must be http:// or https:// and a host"),
        (["--replicas=http://a:1", "--", "--dtype=float32"], "replica_flags are given without num_replicas"),
        (["--replicas=http://a:1", "--cache_threshold=2"], "--cache_threshold is 2; it must be between 0 and 1"),
        (["--num_replicas=2", "--ssl_certfile=x"], "ssl_keyfile is missing"),
    ],
)
def test_bad_flags_name_the_rule(words, rule, capsys):
    from jaxserve.router.__main__ import main

    with pytest.raises(SystemExit) as ended:
        main(["router", *words])
    assert ended.value.code == 2
    assert rule in capsys.readouterr().err


def test_the_router_loads_no_jax():
    code = (
        "import sys, jaxserve.router.__main__, jaxserve.router.launcher\n"
        "print([name for name in ('jax', 'jaxlib', 'flax', 'numpy', 'jaxserve.engine') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_flags_of_children_come_from_both_places_and_keys_stay_out_of_sight(monkeypatch, tmp_path):
    from jaxserve.config.flags import parse_flags
    from jaxserve.router.__main__ import _replicas

    monkeypatch.setenv("JAXSERVE_API_KEY", "sk-secret")
    flags = parse_flags(
        "router", ["router", "--num_replicas=2", "--replica_flags=--dtype=float32", "--max_body_bytes=99"]
    )
    children = _replicas(flags, ["--max_num_seqs=4"])
    assert {"--dtype=float32", "--max_num_seqs=4", "--max_body_bytes=99", "--host=127.0.0.1"} <= set(children.command)
    assert not any("sk-secret" in word for word in children.command)
    assert [each["JAXSERVE_API_KEY"] for each in children.environments] == ["sk-secret"] * 2
