"""Output that a thread of its own writes: nobody waits for its readers, and what is lost is said."""

import logging
import os
import subprocess
import sys
import threading
import time

import pytest

from jaxserve.core.queued_output import OutputQueue, QueuedStream


@pytest.fixture
def pipe():
    """A pipe's two ends."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def soon(call):
    """What a call gives that must not wait."""
    began = time.monotonic()
    given = call()
    assert time.monotonic() - began < 5, "it waited"
    return given


def read_until(end, last, text=b""):
    while not text.endswith(last):
        text += os.read(end, 1 << 16)
    return text


def test_what_is_written_comes_in_its_order(pipe):
    read, write = pipe
    queue = OutputQueue(write)
    for number in range(1000):
        queue.put(b"%d\n" % number)
    assert read_until(read, b"999\n").split() == [b"%d" % number for number in range(1000)]


def test_a_pipe_that_is_full_holds_up_nobody_and_what_is_dropped_is_said(pipe, caplog):
    read, write = pipe
    queue = OutputQueue(write, capacity_bytes=1 << 18)
    line = b"x" * 1023 + b"\n"
    soon(lambda: [queue.put(line) for _ in range(1000)])
    soon(lambda: queue.drain(0.1))
    num_kept = (1 << 18) // len(line)
    text = b""
    while len(text) < num_kept * len(line):
        text += os.read(read, 1 << 16)
    queue.drain(10)
    (record,) = caplog.records
    num_dropped = record.args[0]
    assert record.levelno == logging.WARNING and "lines of output were dropped" in record.getMessage()
    assert num_dropped >= 1000 - num_kept - 1
    queue.put(b"again\n")
    assert (read_until(read, b"again\n", text).count(b"\n") + num_dropped) == 1001


def test_one_piece_that_is_larger_than_the_queue_is_written(pipe):
    read, write = pipe
    queue = OutputQueue(write, capacity_bytes=10)
    queue.put(b"x" * 100 + b"\n")
    assert read_until(read, b"\n") == b"x" * 100 + b"\n"


def test_a_pipe_that_another_has_set_not_to_wait_is_waited_for(pipe):
    read, write = pipe
    os.set_blocking(write, False)
    queue = OutputQueue(write)
    queue.put(b"x" * (1 << 19) + b"\n")
    assert len(read_until(read, b"\n")) == (1 << 19) + 1


def test_a_pipe_without_a_reader_ends_nothing():
    read, write = os.pipe()
    os.close(read)
    queue = OutputQueue(write)
    queue.put(b"to nobody\n")
    queue.drain(10)
    queue.put(b"again\n")
    soon(lambda: queue.drain(60))
    os.close(write)


def test_a_stream_hands_over_whole_lines_and_what_is_flushed(pipe):
    read, write = pipe
    with os.fdopen(os.dup(write), "w", encoding="ascii", errors="backslashreplace") as file:
        stream = QueuedStream(file)
        assert not stream.isatty() and stream.writable() and stream.encoding == "ascii"
        print("one ", end="", file=stream)
        print("line", "ü\nand", file=stream, end="")
        assert read_until(read, b"\n") == b"one line \\xfc\n"
        stream.flush()
        assert read_until(read, b"and") == b"and"


def test_threads_that_print_at_once_mix_no_lines(pipe):
    read, write = pipe
    with os.fdopen(os.dup(write), "w") as file:
        stream = QueuedStream(file)
        threads = [
            threading.Thread(target=lambda word=word: [stream.write(f"{word * 50}\n") for _ in range(200)])
            for word in "abcd"
        ]
        for thread in threads:
            thread.start()
        text = b""
        while text.count(b"\n") < 800:
            text += os.read(read, 1 << 16)
    assert sorted(text.split()) == sorted(word * 50 for word in (b"a", b"b", b"c", b"d") for _ in range(200))


START = """
import os, signal, sys, time
from jaxserve.core import queue_output, write_last
queue_output("stdout", "stderr")
"""


@pytest.mark.parametrize(
    ("ends", "status", "stdout", "stderr"),
    [
        ("print('out'); print('err', end='', file=sys.stderr)", 0, "out\n", "err"),
        ("print('out'); sys.exit('no more')", 1, "out\n", "no more\n"),
        ("print('out'); write_last(); os._exit(3)", 3, "out\n", ""),
        ("print('out', end=''); raise KeyError('k')", 1, "out", "KeyError: 'k'\n"),
    ],
)
def test_what_was_printed_is_there_at_the_end(ends, status, stdout, stderr):
    done = subprocess.run([sys.executable, "-c", START + ends], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (status, stdout)
    assert done.stderr.endswith(stderr) and bool(done.stderr) == bool(stderr)


@pytest.mark.parametrize("name", ["stdout", "stderr"])
@pytest.mark.parametrize("ends", ["", "sys.exit(0)", "write_last(); os._exit(0)"])
def test_a_process_ends_though_nobody_reads(name, ends):
    code = START + f"print('x' * (4 << 20), file=sys.{name})\nprint('y', file=sys.{name})\n{ends}"
    with subprocess.Popen([sys.executable, "-c", code], **{name: subprocess.PIPE}) as process:
        try:
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_a_signal_handler_may_print_within_a_print():
    code = """
signal.signal(signal.SIGALRM, lambda *_: print("in the handler"))
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
end = time.monotonic() + 1
while time.monotonic() < end:
    print("in the loop")
signal.setitimer(signal.ITIMER_REAL, 0)
"""
    done = subprocess.run([sys.executable, "-c", START + code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and {"in the handler", "in the loop"} <= set(done.stdout.split("\n"))
