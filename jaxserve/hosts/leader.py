"""Followers: the leader's side of the other processes of an engine.

    listen ─▶ accept ─▶ agree on settings, checkpoint, memory, programs ─▶ warm-up ─▶ steps ─▶ stop
                                        └──────────── lost, from anywhere ────────────┘

A thread per follower reads what it sends. Followers are lost, all together and once, when one of them

- closes its connection, or sends what is no frame of its own (it was killed, or ended by an error, told first);
- gives no sign of life for the timeout;
- has not told what a step came to the timeout after it was sent (it hangs, or its device does);
- tells that a step came to something else than here.

Then every follower is told and its connection closed, which ends it, and `on_lost` is called on the thread that
noticed: the one that runs steps may be inside a collective that never ends. What is asked of them later raises.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxserve.core import HostLostError
from jaxserve.hosts.channel import Channel, accept_peer
from jaxserve.hosts.messages import Kind, RunChain, read_digest, read_json
from jaxserve.hosts.pulse import Pulse

log = logging.getLogger(__name__)

MAX_ERROR_CHARS = 2000
_HANDSHAKES_PER_PROCESS = 16
"""At a time; whoever comes then is sent away, and followers come again."""
_ACCEPT_S = 0.05


@dataclass(slots=True, eq=False)
class _Follower:
    """One of them.

    Attributes:
      heard_at: beat of its last sign of life.
      reports: what it reported at the start and nobody has taken yet.
      outstanding: steps sent and not come to anything yet, each with the beat at which it was sent.
    """

    process_id: int
    channel: Channel
    heard_at: int = 0
    reports: queue.SimpleQueue[dict[str, Any] | None] = field(default_factory=queue.SimpleQueue)
    outstanding: deque[tuple[int, int]] = field(default_factory=deque)


class Followers:
    """All of them; one thread gives orders.

    Args:
      address: where to listen; bound at once.
      num_processes: the leader included.
      token: that they must know.
      timeout_s: see above.

    Attributes:
      on_lost: called once, with why, on any thread.
      error: why they are lost, or None.
      ready: warm-up has ended everywhere.

    Raises:
      OSError: the address cannot be listened on.
    """

    def __init__(self, address: tuple[str, int], num_processes: int, token: bytes, timeout_s: float) -> None:
        self._num_processes = num_processes
        self._token = token
        self._timeout_s = timeout_s
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family, backlog=2 * num_processes)
        self._followers: list[_Follower] = []
        self._pulse = Pulse(timeout_s, self._beat)
        self._chain = RunChain()
        self._lock = threading.Lock()  # of what follows
        self._digests: dict[int, tuple[bytes, int]] = {}  # own, and how many followers have not told theirs
        self._early: dict[int, list[tuple[int, bytes]]] = {}  # told before the own one was there
        self.error: HostLostError | None = None
        self._closed = False
        self._lost = threading.Event()
        self._all_joined = threading.Event()
        self.ready = False
        self.on_lost: Callable[[HostLostError], None] = lambda error: log.error("%s", error)

    def accept(self, within_s: float) -> None:
        """Waits until every follower is there, then stops listening. Those that are there get signs of life meanwhile.

        Raises:
          HostLostError: one is missing after `within_s`, or lost; the others are told.
        """
        end = time.monotonic() + within_s
        slots = threading.BoundedSemaphore(_HANDSHAKES_PER_PROCESS * self._num_processes)
        self._pulse.start()
        self._listener.settimeout(_ACCEPT_S)
        while not self._all_joined.is_set() and self.error is None:
            if time.monotonic() > end:
                missing = sorted(set(range(1, self._num_processes)) - {each.process_id for each in self._followers})
                listed = ", ".join(map(str, missing))
                self.lose(HostLostError(f"no connection from process(es) {listed} within {within_s:g} s"))
                break
            try:
                connection, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:  # closed by a loss, or there are no files left
                log.warning("no connection can be taken: %s", error)
                time.sleep(_ACCEPT_S)
                continue
            if slots.acquire(blocking=False):
                threading.Thread(target=self._greet, args=(connection, address[0], slots), daemon=True).start()
            else:
                log.warning("connection from %s refused: there are too many handshakes", address[0])
                connection.close()
        self._listener.close()
        self._raise_if_lost()

    def _greet(self, connection: socket.socket, where: str, slots: threading.Semaphore) -> None:
        """Takes in who proves to be a follower; on a thread of its own, so that nobody's silence holds up others."""
        try:
            process_id, channel = accept_peer(connection, self._token, self._timeout_s)
        except HostLostError as error:
            log.warning("connection from %s refused: %s", where, error)
            return
        finally:
            slots.release()
        follower = _Follower(process_id, channel, self._pulse.now)
        with self._lock:
            others = self._followers
            taken = process_id in {each.process_id for each in others} or not 0 < process_id < self._num_processes
            if taken or self.error is not None or self._closed:
                log.warning("connection from %s refused: process_id %d is taken or none", where, process_id)
                channel.close()
                return
            self._followers = sorted([*others, follower], key=lambda each: each.process_id)
            is_last = len(self._followers) == self._num_processes - 1
        log.info("process %d has joined from %s", process_id, where)
        threading.Thread(target=self._read, args=(follower,), name=f"process {process_id}", daemon=True).start()
        if is_last:
            self._all_joined.set()

    def reports(self) -> dict[int, dict[str, Any]]:
        """The next report of each, by process id; waits for them.

        Raises:
          HostLostError: one is lost first.
        """
        found = {}
        for follower in self._followers:
            report = follower.reports.get()
            self._raise_if_lost()
            assert report is not None, "only a loss ends the wait"
            found[follower.process_id] = report
        return found

    def decide(self, decision: dict[str, Any]) -> None:
        """Tells all what was decided from their reports."""
        self.send(Kind.DECISION, json.dumps(decision).encode())

    def send(self, kind: Kind, *parts: bytes | memoryview) -> None:
        """Sends a frame to all.

        Raises:
          HostLostError: one is lost.
        """
        self._raise_if_lost()
        for follower in self._followers:
            try:
                follower.channel.send(kind, *parts)
            except HostLostError as error:
                self.lose(error)
                self._raise_if_lost()

    def run(self, kind: Kind, *parts: bytes | memoryview, ends_step: int | None = None) -> bytes:
        """Sends what is to be run to all; returns the digest of all that was.

        Args:
          ends_step: the iteration whose tokens come of this; what they are is waited for from now on.

        Raises:
          HostLostError: one is lost.
        """
        if ends_step is not None:
            with self._lock:
                for follower in self._followers:
                    follower.outstanding.append((ends_step, self._pulse.now))
        self.send(kind, *parts)
        return self._chain.add(kind, parts)

    def compare_step(self, iteration: int, digest: bytes) -> None:
        """What a step came to here; compared with what the others tell, now or later.

        Raises:
          HostLostError: a follower is lost, maybe by this.
        """
        with self._lock:
            told = self._early.pop(iteration, [])
            left = len(self._followers) - len(told)
            if left:
                self._digests[iteration] = digest, left
        for process_id, other in told:
            self._compare(iteration, process_id, digest, other)
        self._raise_if_lost()

    def lose(self, error: HostLostError) -> None:
        """Gives all of them up, once."""
        with self._lock:
            if self.error is not None or self._closed:
                return
            self.error = error
        self._lost.set()
        self._end()
        self.on_lost(error)
        log.error("several hosts: %s", error)  # last: it may wait for whoever reads the log

    def close(self) -> None:
        """Has the followers stop in good order; does nothing once they are lost."""
        with self._lock:
            if self.error is not None or self._closed:
                return
            self._closed = True
        for follower in self._followers:
            try:
                follower.channel.send(Kind.STOP)
            except HostLostError as error:
                log.warning("at the end: %s", error)
        self._pulse.stop()
        self._listener.close()

    def explain(self, within_s: float) -> None:
        """After a device has failed: waits whether a follower turns out to be lost, and does nothing if none does.

        Raises:
          HostLostError: one is.
        """
        self._lost.wait(within_s)
        self._raise_if_lost()

    def _raise_if_lost(self) -> None:
        if self.error is not None:
            raise self.error

    def _end(self) -> None:
        self._pulse.stop()
        self._listener.close()
        reason = str(self.error)[:MAX_ERROR_CHARS].encode()
        for follower in self._followers:
            with contextlib.suppress(HostLostError):  # it is the one, or knows already
                follower.channel.send_if_idle(Kind.FAILED, reason)
            follower.channel.close()
            follower.reports.put(None)

    def _read(self, follower: _Follower) -> None:
        def heard() -> None:
            follower.heard_at = self._pulse.now

        follower.channel.on_bytes = heard
        try:
            while True:
                kind, payload = follower.channel.receive()
                if kind == Kind.DIGEST:
                    self._take_digest(follower, *read_digest(payload))
                elif kind == Kind.REPORT:
                    follower.reports.put(self._report(follower, payload))
                elif kind == Kind.FAILED:
                    text = payload.decode(errors="replace")[:MAX_ERROR_CHARS]
                    raise HostLostError(f"process {follower.process_id} failed: {text}")
                elif kind != Kind.PULSE:
                    raise HostLostError(f"process {follower.process_id} sent a frame of kind {kind}")
        except HostLostError as error:
            self.lose(error)
        except Exception as error:
            log.exception("what process %d sent cannot be taken in", follower.process_id)
            self.lose(HostLostError(f"what process {follower.process_id} sent cannot be taken in: {error!r}"))
        finally:
            follower.channel.close()

    def _report(self, follower: _Follower, payload: bytes) -> dict[str, Any]:
        try:
            return read_json(payload)
        except HostLostError as error:
            message = f"process {follower.process_id} sent a message that cannot be read: {error}"
            raise HostLostError(message) from error

    def _take_digest(self, follower: _Follower, iteration: int, digest: bytes) -> None:
        with self._lock:
            if not follower.outstanding or follower.outstanding[0][0] != iteration:
                raise HostLostError(f"process {follower.process_id} tells of step {iteration} out of order")
            follower.outstanding.popleft()
            own = self._digests.get(iteration)
            if own is None:
                self._early.setdefault(iteration, []).append((follower.process_id, digest))
                return
            if own[1] == 1:
                del self._digests[iteration]
            else:
                self._digests[iteration] = own[0], own[1] - 1
        self._compare(iteration, follower.process_id, own[0], digest)

    def _compare(self, iteration: int, process_id: int, own: bytes, other: bytes) -> None:
        if own != other:
            self.lose(
                HostLostError(
                    f"process {process_id} has diverged: its plans or tokens up to iteration {iteration} are not the"
                    " leader's"
                )
            )

    def _beat(self) -> None:
        for follower in self._followers:
            try:
                follower.channel.send_if_idle(Kind.PULSE)
            except HostLostError as error:
                self.lose(error)
                return
            name = f"process {follower.process_id}"
            if self._pulse.lasted(follower.heard_at):
                self.lose(HostLostError(f"{name} gave no sign of life for {self._timeout_s:g} s (host_timeout_s)"))
            with self._lock:
                oldest = follower.outstanding[0] if follower.outstanding else None
            if oldest is not None and self._pulse.lasted(oldest[1]):
                self.lose(
                    HostLostError(
                        f"{name} has not ended iteration {oldest[0]} within {self._timeout_s:g} s (host_timeout_s)"
                    )
                )
