"""Exports: the prompts that a prefill server computes for others, and their pages until they have been taken.

An export's pages leave the KV pool as they are computed and lie in memory of the host, so a slow or dead decode server
holds nothing that others need. What all exports may come to together is bounded in bytes, and set aside before a prompt
is queued; an export with which nobody has had a connection for `hold_s` is ended and forgotten.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from jaxserve.core import FinishReason
from jaxserve.engine import OutputDelta
from jaxserve.runtime import PageBlock


class Export:
    """The pages of one prompt, as far as they are computed and not yet acknowledged: a `PageSink`.

    Args:
      key: of the pull that asked for it, which no other has.
      request_id: of the prompt's request.
      num_bytes: of all its pages.
      on_device: see `PageSink`.

    Attributes:
      queued: the engine has taken its request.
      connection: serves it; None: it waits for another.
      left_at: instant at which the last connection left it.
    """

    def __init__(self, key: str, request_id: str, num_bytes: int, on_device: bool = False) -> None:
        self.key = key
        self.request_id = request_id
        self.num_bytes = num_bytes
        self.on_device = on_device
        self.queued = False
        self.connection: socket.socket | None = None
        self.left_at = time.monotonic()
        self._blocks: deque[PageBlock] = deque()
        self._first = 0  # number of the first of them
        self._ended: str | None = None
        self._changed = threading.Condition()

    def put(self, block: PageBlock) -> None:
        """One more block; on the engine's thread."""
        with self._changed:
            if self._ended is None:
                self._blocks.append(block)
                self._changed.notify_all()

    @property
    def is_live(self) -> bool:
        """Its request is the engine's, and has not ended."""
        return self.queued and self._ended is None

    def take_delta(self, delta: OutputDelta) -> None:
        """The request's output: it samples nothing, so all there is to learn is its end."""
        if delta.finish_reason is not None:
            self.end(str(delta.finish_reason))

    def end(self, reason: str) -> None:
        """No further block comes; LENGTH is the good end."""
        with self._changed:
            self._ended = self._ended or reason
            self._changed.notify_all()

    def wait_for(self, index: int, timeout_s: float) -> PageBlock | str | None:
        """Block `index`, or the reason of the end if there is none of that number; None when neither came in time.

        Raises:
          KeyError: it was acknowledged, and is gone.
        """
        with self._changed:
            self._changed.wait_for(lambda: index < self._end or self._ended is not None, timeout_s)
            if index < self._first:
                raise KeyError(index)
            if index < self._end:
                return self._blocks[index - self._first]
            return self._ended

    def acknowledge(self, index: int) -> None:
        """Blocks up to `index` have arrived whole and are forgotten."""
        with self._changed:
            while self._blocks and self._first <= index:
                self._blocks.popleft()
                self._first += 1

    def clear(self) -> None:
        """Forgets every block."""
        with self._changed:
            self._ended = self._ended or FinishReason.ABORT.value
            self._blocks.clear()

    @property
    def _end(self) -> int:
        return self._first + len(self._blocks)


class Exports:
    """All exports of a server.

    Args:
      max_bytes: that their pages may come to together.
      hold_s: seconds that one is kept without a connection.
      abort: ends a request of the engine.
    """

    def __init__(self, max_bytes: int, hold_s: float, abort: Callable[[str], object]) -> None:
        self.max_bytes = max_bytes
        self._hold_s = hold_s
        self._abort = abort
        self._by_key: dict[str, Export] = {}
        self._lock = threading.Lock()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def open(self, export: Export, connection: socket.socket) -> bool:
        """Sets an export's bytes aside for a connection that serves it; False when there is no room."""
        with self._lock:
            if export.key in self._by_key or self.num_bytes + export.num_bytes > self.max_bytes:
                return False
            self.num_bytes += export.num_bytes
            self._by_key[export.key] = export
            export.connection = connection
            return True

    def reconnect(self, key: str, connection: socket.socket) -> Export | None:
        """The export of a pull that goes on; None when it is not known.

        A connection that still serves it is ended: its other side has left it, whether that is to be seen or not.
        """
        with self._lock:
            export = self._by_key.get(key)
            if export is None:
                return None
            old, export.connection = export.connection, connection
        if old is not None:
            with contextlib.suppress(OSError):
                old.shutdown(socket.SHUT_RDWR)  # wakes the thread that serves it, which closes it
        return export

    def leave(self, export: Export, connection: socket.socket) -> None:
        """A connection was lost; another may come, or has."""
        with self._lock:
            if export.connection is connection:
                export.connection, export.left_at = None, time.monotonic()

    def close(self, export: Export, connection: socket.socket | None = None) -> None:
        """Everything was taken, or nobody wants it: the request ends, the pages are forgotten.

        Args:
          connection: says so, which counts only if no other serves the export by now; None: it counts.
        """
        with self._lock:
            if connection is not None and export.connection is not connection:
                return
            if self._by_key.pop(export.key, None) is None:
                return
            self.num_bytes -= export.num_bytes
        if export.is_live:  # else its id may be another's by now
            self._abort(export.request_id)
        export.clear()

    def expire(self, now: float) -> int:
        """Closes those without a connection for too long; how many."""
        with self._lock:
            lost = [each for each in self._by_key.values() if each.connection is None]
            late = [each for each in lost if now - each.left_at > self._hold_s]
        for export in late:
            self.close(export)
        return len(late)

    def close_all(self) -> None:
        """Closes all."""
        with self._lock:
            exports = list(self._by_key.values())
        for export in exports:
            self.close(export)
