"""What every process over an engine does."""

import asyncio
import gc
import subprocess
import sys

import pytest

from jaxserve.server.process import wait_until_ready
from tests.server.fake_engine import FakeEngine


def test_what_is_loaded_when_the_engine_is_ready_is_left_out_of_garbage_collection():
    loaded = len(gc.get_objects())
    try:
        assert asyncio.run(wait_until_ready(FakeEngine(), asyncio.Event()))
        assert len(gc.get_objects()) < loaded // 10, "a collection goes through what was loaded"
        assert gc.get_freeze_count() > loaded // 2
    finally:
        gc.unfreeze()


def test_a_dead_engine_and_a_stop_end_the_wait():
    dead, stopped = FakeEngine(), FakeEngine()
    dead.state, stopped.state = "dead", "loading"
    stop = asyncio.Event()
    assert not asyncio.run(wait_until_ready(dead, stop))
    stop.set()
    assert not asyncio.run(wait_until_ready(stopped, stop))
    assert not gc.get_freeze_count()


FULL = """
import sys, threading, time
from jaxserve.server.process import end, exit_later, flush_and_exit
stream = sys.{name}
stream.write("x")  # a buffer with something in it
threading.Thread(target=lambda: stream.write("x" * (4 << 20)), daemon=True).start()
time.sleep(0.1)
{last}
time.sleep(60)
"""


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@pytest.mark.parametrize("last", ["flush_and_exit(7)", "end(7)", "exit_later(0.01, 7)"])
def test_a_process_ends_though_nobody_reads_its_full_pipe(name, last):
    command = [sys.executable, "-c", FULL.format(name=name, last=last)]
    with subprocess.Popen(command, **{name: subprocess.PIPE}) as process:
        try:
            assert process.wait(20) == 7
        finally:
            process.kill()


@pytest.mark.parametrize("status", [0, 3])
def test_what_was_printed_is_there_when_a_process_ends(status):
    code = f"import sys; from jaxserve.server.process import end; sys.stdout.write('to the last'); end({status})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (status, "to the last")
