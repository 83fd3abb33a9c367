"""What lasts as long as the server, and raises: nothing of it ends in silence."""

import asyncio
import json
import subprocess
import sys

import pytest

from jaxserve.server.follower import _serve_probes
from jaxserve.server.streaming import EventStreamResponse, collect_all

HTTP_ENDS = """
import asyncio, sys
from jaxserve.server.console import StartupDisplay
from jaxserve.server.launcher import Launcher, ServerSettings
from jaxserve.server.listening import HttpServer
from tests.server.fake_engine import FakeEngine

how, state = sys.argv[1:]

async def main_loop(self):
    await asyncio.sleep(0.3)
    if how == "raises":
        raise RuntimeError("the loop broke")

async def main():
    engine = FakeEngine()
    engine.state = state
    return await Launcher(engine, ServerSettings(http_port=0, grpc_port=0), StartupDisplay()).run()

HttpServer.main_loop = main_loop
sys.exit(asyncio.run(main()))
"""


@pytest.mark.parametrize("state", ["ready", "loading"])
@pytest.mark.parametrize("how", ["raises", "returns"])
def test_an_http_server_that_ends_by_itself_ends_the_process_with_status_1(how, state):
    done = subprocess.run(
        [sys.executable, "-c", HTTP_ENDS, how, state], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "the HTTP server has ended by itself; the process ends" in done.stderr
    assert ("RuntimeError: the loop broke" in done.stderr) == (how == "raises")
    assert done.stderr.count("RuntimeError") <= 1


def test_a_thread_that_raises_is_a_log_record():
    code = (
        "import threading\n"
        "from absl import flags, logging\n"
        "from jaxserve.server.log_format import set_log_format\n"
        "flags.FLAGS.mark_as_parsed()\n"
        "logging.use_absl_handler()\n"
        "set_log_format('json')\n"
        "def fails(): raise RuntimeError('broke')\n"
        "def leaves(): raise SystemExit(0)\n"
        "for each in (leaves, fails):\n"
        "    thread = threading.Thread(target=each, name='some work')\n"
        "    thread.start()\n"
        "    thread.join()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    (line,) = done.stderr.splitlines()
    record = json.loads(line)
    assert record["level"] == "error" and record["message"] == "the thread 'some work' has ended"
    assert "RuntimeError: broke" in record["exception"]


@pytest.mark.parametrize("error", [RuntimeError("broke"), SystemExit(3), None])
def test_a_follower_whose_probes_end_says_so(caplog, error):
    class Server:
        def run(self, sockets):
            assert sockets == ["the socket"]
            if error is not None:
                raise error

    try:
        _serve_probes(Server(), "the socket")
    except BaseException as raised:
        assert raised is error
    else:
        assert error is None
    assert [each.getMessage() for each in caplog.records] == ["the probes are not answered any more"]


class Stream:
    """Never has anything; notes that it was cancelled."""

    def __init__(self):
        self.is_cancelled = False

    def cancel(self):
        self.is_cancelled = True

    async def collect(self):
        await asyncio.sleep(30)


async def fails():
    raise RuntimeError("of the connection")


async def no_events():
    await asyncio.sleep(30)
    yield b""


@pytest.mark.parametrize("is_stream", [True, False])
def test_watching_a_client_that_fails_is_an_error_of_the_request_and_no_client_that_left(is_stream):
    stream = Stream()

    async def send(message):
        assert message["type"] == "http.response.start"

    async def answer():
        if is_stream:
            await EventStreamResponse(no_events(), [stream])({}, fails, send)
        else:

            class Request:
                receive = staticmethod(fails)

            await collect_all(Request(), [stream])

    with pytest.raises(RuntimeError, match="of the connection"):
        asyncio.run(answer())
    assert stream.is_cancelled
