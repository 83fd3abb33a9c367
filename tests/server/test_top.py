"""`python -m jaxserve.top`: one frame of a server that works, and what is said of one that cannot be read."""

import io
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from jaxserve.config.api_keys import ApiKey
from jaxserve.server.settings import HttpSettings
from jaxserve.sim.metric_samples import MetricSamples
from jaxserve.top.__main__ import main
from jaxserve.top.frame import _slots
from tests.config.readerless import run_for_nobody
from tests.server.fake_engine import FakeEngine
from tests.server.running import RunningServer, until


def top(*words):
    """Exit status and what the console shows."""
    file = io.StringIO()
    status = main(["prog", "--once", "--interval_s=0.1", *words], Console(file=file, width=140))
    return status, file.getvalue()


def replace_sleep(monkeypatch, sleep):
    """Of the view alone: `time.sleep` itself is called by threads of other tests' servers, too."""
    monkeypatch.setattr("jaxserve.top.__main__.time", SimpleNamespace(sleep=sleep))


def test_a_frame_shows_slots_queue_pages_and_latencies(server, client):
    engine = server.engine.engine
    engine.monitor.keep(50)
    client.post("/v1/completions", json={"prompt": "a", "max_tokens": 9, "ignore_eos": True})
    engine.gate.clear()
    body = {"prompt": "abcd", "n": 6, "max_tokens": 90, "stream": True, "ignore_eos": True, "request_id": "six"}
    with client.stream("POST", "/v1/completions", json=body):
        until(lambda: engine.scheduler.num_running == 4, what="four slots are taken")
        status, shown = top(f"--url={server.url}/")
    engine.gate.set()
    assert status == 0
    assert "tiny  ready" in shown and "4 running of 4 slots, 2 waiting" in shown
    assert re.search(r"0 │ six#0 +│ +4/94", shown) and "six#5" in shown
    assert "▒████████" in shown, "a chunk, then tokens"
    assert re.search(r"TTFT +│ +[\d.]+ ms", shown) and re.search(r"ITL +│ +[\d.]+ ms", shown)
    assert re.search(r"KV pages +[\d.]+ % used: \d+ owned, \d+ cached, \d+ free", shown)


@pytest.fixture
def keyed():
    server = RunningServer(FakeEngine, HttpSettings(api_keys=(ApiKey("operator"), ApiKey("a-key", "alice"))))
    yield server
    server.stop()


def test_a_keyed_server_is_read_with_its_key(keyed, capsys, monkeypatch):
    status, _ = top(f"--url={keyed.url}")
    assert status == 1 and "--api_key" in capsys.readouterr().err
    status, shown = top(f"--url={keyed.url}", "--api_key=operator")
    assert status == 0 and "fake  ready" in shown
    monkeypatch.setenv("JAXSERVE_API_KEY", "a-key")
    status, shown = top(f"--url={keyed.url}")
    assert status == 0 and "0 running, 0 waiting" in shown and "slots and queue are not shown" in shown


def test_a_loading_server_says_how_far_it_is(fake_server, capsys):
    fake_server.engine.state, fake_server.engine.progress = "loading", (3, 7, "weights")
    assert top(f"--url={fake_server.url}")[0] == 1
    assert "not ready" in (said := capsys.readouterr().err) and "3 of 7" in said


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("stuck", "is stuck: the engine has work and has made no step for 61.5 s\n"),
        ("dead", "is dead: the engine died; the server must be restarted; the last step was 61.5 s ago\n"),
        ("stopped", "is stopped: the engine has stopped; the server must be restarted\n"),
    ],
)
def test_a_server_that_does_not_go_on_is_named_with_state_reason_and_age(fake_server, capsys, state, said):
    fake_server.engine.state, fake_server.engine.step_age_s = state, 61.5
    assert top(f"--url={fake_server.url}")[0] == 1
    assert capsys.readouterr().err == f"error: {fake_server.url} {said}"


@pytest.mark.parametrize("part", ["leaving", "draining"])
def test_a_server_that_drains_is_shown_and_named(fake_server, part):
    fake_server.engine.step_age_s = 1.25
    if part == "leaving":
        fake_server.call(fake_server.service.leave)
        said = "draining: the server is about to shut down; the last step was 1.2 s ago"
    else:
        fake_server.engine.state = "draining"
        said = "draining: the server is shutting down; the last step was 1.2 s ago"
    status, shown = top(f"--url={fake_server.url}")
    assert status == 0 and said in shown and "fake  draining" in shown and "0 running of 8 slots" in shown


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:1", "http://127.0.0.1:1 does not answer: "),
        ("127.0.0.1:8000", "it must begin with http://"),
        ("http://127.0.0.1:a", "http://127.0.0.1:a does not answer: "),
        ("http://[::1", "http://[::1 does not answer: "),
    ],
)
def test_a_server_that_is_not_there_is_named(capsys, url, said):
    assert top(f"--url={url}")[0] == 1
    assert said in capsys.readouterr().err


def test_the_live_view_ends_quietly_at_ctrl_c(fake_server, monkeypatch):
    rounds = iter((None, KeyboardInterrupt))

    def sleep(_):
        if (what := next(rounds)) is not None:
            raise what

    replace_sleep(monkeypatch, sleep)
    file = io.StringIO()
    assert main(["prog", f"--url={fake_server.url}"], Console(file=file, width=100)) == 0
    assert "Latency, last" in file.getvalue()


def test_while_a_server_is_away_the_last_frame_stays_with_the_reason(fake_server, monkeypatch):
    rounds = iter((None, lambda: setattr(fake_server.engine, "state", "dead"), KeyboardInterrupt))

    def sleep(_):
        what = next(rounds)
        if what is KeyboardInterrupt:
            raise what
        if what is not None:
            what()

    replace_sleep(monkeypatch, sleep)
    file = io.StringIO()
    assert main(["prog", f"--url={fake_server.url}"], Console(file=file, width=100)) == 0
    assert "is dead: the engine died; the server must be restarted" in file.getvalue()
    assert "Latency, " in file.getvalue()


def test_latencies_of_an_interval_are_those_of_its_requests_alone():
    def text(fast, slow):
        rows = [f'jaxserve:x_bucket{{le="1.0"}} {fast}', f'jaxserve:x_bucket{{le="2.0"}} {fast + slow}']
        return "\n".join([*rows, f'jaxserve:x_bucket{{le="+Inf"}} {fast + slow}', "jaxserve:n_total 7"])

    earlier, later = MetricSamples(text(100, 0)), MetricSamples(text(100, 10))
    assert later.since(earlier).spread("x").count == 10 and 1.0 < later.since(earlier).spread("x").p50 <= 2.0
    assert later.spread("x").p50 < 1.0 and later.since(earlier).total("n_total") == 0


def test_one_frame_for_a_reader_that_has_gone_ends_quietly(fake_server):
    words = ["-m", "jaxserve.top", "--once", "--interval_s=0.1", f"--url={fake_server.url}"]
    assert run_for_nobody(*words) == (1, "")


def test_it_needs_no_jax():
    code = "import sys; import jaxserve.top.__main__; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_port_that_speaks_something_else_is_named(fake_server, capsys):
    assert top(f"--url=http://{fake_server.grpc_address}")[0] == 1
    assert f"http://{fake_server.grpc_address} does not answer: " in capsys.readouterr().err


@pytest.mark.parametrize("width", [80, 100, 200])
def test_on_a_narrow_terminal_the_oldest_iterations_give_way(width):
    iteration = {"prefill": [], "decode": [3]}
    slot = {"slot": 3, "request_id": "cmpl-6dc96c2d39884a97b0e2a00dca139607", "prompt_tokens": 1200, "max_tokens": 800}
    state = {
        "slots": [slot | {"output_tokens": 34, "pages": 78, "age_s": 12.3}],
        "iterations": [{"prefill": [[3, 64]], "decode": []}, *[iteration] * 47],
    }
    console = Console(file=io.StringIO(), width=width)
    console.print(_slots(state))
    lines = console.file.getvalue().splitlines()
    assert [cell.strip() for cell in lines[1].split("┃")] == ["slot", "request", "tokens", "pages", "age", "iterations"]
    *cells, marks = (cell.strip() for cell in lines[3].split("│"))
    assert cells == ["3", "cmpl-6dc96c2d39884a97b0e2a0…", "1234/2000", "78", "12.3 s"] and len(lines) == 4
    assert len(marks) >= 10 and marks.endswith("█" * 10) and ("▒" in marks) == (width == 200)
