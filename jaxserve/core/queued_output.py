"""What a process prints and logs, written by threads of their own: a reader that does not read holds up nothing else.

    print, log, traceback -> QueuedStream -> queue, at most `CAPACITY_BYTES` -> one thread -> file descriptor

A pipe that is full, and a terminal that is halted, take no more, and whoever writes to them waits. Behind a
`QueuedStream` that is a thread that does nothing else. What finds the queue full is dropped, until all that waits is
written; then a log record says how many lines are missing. At its end a process waits for the queue, within a bound.

What native libraries write to the descriptors by themselves does not pass here.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from typing import Any

CAPACITY_BYTES = 1 << 20
"""So much may wait to be written."""
LAST_WRITES_S = 1.0
"""A process that ends waits so long for readers of its output."""

log = logging.getLogger("jaxserve.output")


class OutputQueue:
    """Writes to a file descriptor, in the order of `put`, on a thread of its own.

    Args:
      descriptor: it is not closed.
      capacity_bytes: that may wait; of nothing that waits, one piece may be larger.
    """

    def __init__(self, descriptor: int, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self._descriptor = descriptor
        self._capacity_bytes = capacity_bytes
        self._changed = threading.Condition()  # may be taken again: a signal's handler may print within a print
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0  # that wait or are being written
        self._num_dropped = 0
        threading.Thread(target=self._run, name="output", daemon=True).start()

    def put(self, piece: bytes) -> None:
        """Takes whole lines in, or drops them; returns at once."""
        with self._changed:
            if self._num_dropped or (self._num_bytes and self._num_bytes + len(piece) > self._capacity_bytes):
                self._num_dropped += max(piece.count(b"\n"), 1)
                return
            self._waiting.append(piece)
            self._num_bytes += len(piece)
            self._changed.notify_all()

    def drain(self, seconds: float) -> None:
        """Waits until all is written, for so long at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_bytes, timeout=seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                piece = self._waiting.popleft()
            _write(self._descriptor, piece)
            with self._changed:
                num_dropped = 0 if self._waiting else self._num_dropped
                self._num_dropped -= num_dropped
            if num_dropped:
                log.warning("%d lines of output were dropped: they came faster than they were read", num_dropped)
            with self._changed:  # only now, so that `drain` waits for that line too
                self._num_bytes -= len(piece)
                self._changed.notify_all()


class QueuedStream(io.TextIOBase):
    """A text file whose writes never wait: whole lines, and what is flushed, go to the queue.

    Args:
      instead_of: the file whose descriptor and encoding it has.
    """

    def __init__(self, instead_of: Any) -> None:
        self._instead_of = instead_of
        self._descriptor: int = instead_of.fileno()
        self._queue = OutputQueue(self._descriptor)
        self._lock = threading.RLock()
        self._rest = ""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """That of the file that it replaces."""
        return str(self._instead_of.encoding)

    @property
    def errors(self) -> str:  # type: ignore[override]
        """What becomes of characters that the encoding lacks."""
        return str(self._instead_of.errors)

    def fileno(self) -> int:
        """The descriptor that is written to."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether a terminal shows it."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, text: str) -> int:
        """Takes text in."""
        with self._lock:
            lines, newline, self._rest = (self._rest + text).rpartition("\n")
            self._put(lines + newline)
        return len(text)

    def flush(self) -> None:
        """Hands over what has no line break yet; returns before it is written."""
        with self._lock:
            rest, self._rest = self._rest, ""
            self._put(rest)

    def drain(self, seconds: float) -> None:
        """Writes all that was taken in, for so long at most."""
        self.flush()
        self._queue.drain(seconds)

    def _put(self, text: str) -> None:
        if text:
            self._queue.put(text.encode(self.encoding, self.errors))


_streams: list[QueuedStream] = []


def queue_output(*names: str) -> None:
    """From now on what this process writes to `sys.stdout` or `sys.stderr` is written by a thread for each.

    Handlers of log records that are made later write there too; one that was made before is to be told. At the
    process's end, what waits is written within `LAST_WRITES_S`.

    Args:
      names: "stdout", "stderr"; one that the process does not have stays away.
    """
    for name in names:
        if getattr(sys, name) is not None:
            _streams.append(QueuedStream(getattr(sys, name)))
            setattr(sys, name, _streams[-1])
    atexit.register(_drain, LAST_WRITES_S)


def write_last(seconds: float = LAST_WRITES_S) -> None:
    """Writes what was printed and logged, queued or not, for so long at most; for the end of a process.

    Once the interpreter has begun to end, as in `atexit`, no thread can be started: then what is not queued waits for
    its reader.
    """
    writer = threading.Thread(target=_write_all, args=(seconds,), name="last-writes", daemon=True)
    try:
        writer.start()
    except RuntimeError:
        _write_all(seconds)
        return
    writer.join(seconds)


def _write_all(seconds: float) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads, or it is closed
            stream.flush()
    _drain(seconds)


def _drain(seconds: float) -> None:
    ends_at = time.monotonic() + seconds
    for stream in _streams:
        stream.drain(max(ends_at - time.monotonic(), 0.0))


def _write(descriptor: int, piece: bytes) -> None:
    while piece:
        try:
            piece = piece[os.write(descriptor, piece) :]
        except BlockingIOError:  # whoever shares the pipe has set it so
            select.select((), (descriptor,), ())
        except OSError:  # nobody can read it any more
            return
