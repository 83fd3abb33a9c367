"""Follower: a process that holds a part of the model and repeats what the leader's runner does.

The reading thread takes the leader's frames; the caller's thread runs them, one after the other; the collecting thread
waits for steps to end and tells the leader what they came to. So the next step is started while the last one runs, as
on the leader. When the leader is gone, or gives no sign of life, the reading thread or the pulse calls `on_lost`: the
caller's thread may be inside a collective that never ends.
"""

from __future__ import annotations

import json
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxserve.core import HostLostError
from jaxserve.hosts.channel import Channel, join_leader
from jaxserve.hosts.messages import (
    Kind,
    RunChain,
    StepReader,
    read_arrays,
    read_json,
    step_digest,
    write_digest,
)
from jaxserve.hosts.pulse import Pulse
from jaxserve.runtime import ModelRunner, StepHandle
from jaxserve.runtime.programs import Progress

log = logging.getLogger(__name__)

_RETRY_S = 0.2
_MOST_REFUSALS, _REFUSED_S = 3, 1.0
"""Handshakes that may fail, and the wait between: the leader may be beset by strangers."""
_EXPLAIN_S = 1.0
_MAX_WAITING = 64
"""Frames that were read and not run yet; then the leader's own sends wait."""


class Follower:
    """One process's connection to the leader.

    Args:
      address: the leader's.
      process_id: of this process.
      token: shared with the leader.
      timeout_s: without a sign of life from the leader.
      on_lost: called on any thread, once; should end the process.
      within_s: to connect.

    Raises:
      HostLostError: there is no leader, or it does not take this process in.
    """

    def __init__(
        self,
        address: tuple[str, int],
        process_id: int,
        token: bytes,
        timeout_s: float,
        on_lost: Callable[[HostLostError], None],
        within_s: float,
    ) -> None:
        self._channel = _connect(address, process_id, token, timeout_s, within_s)
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._frames: queue.Queue[tuple[int, bytes]] = queue.Queue(_MAX_WAITING)
        self._steps: queue.SimpleQueue[tuple[bytes, StepHandle, int, int] | None] = queue.SimpleQueue()
        self._chain = RunChain()
        self._ended = threading.Event()
        self._losing = threading.Lock()
        self._pulse = Pulse(timeout_s, self._beat)
        self._heard_at = 0
        self._is_full = False  # the reading thread waits for the caller's, so nothing can be heard
        self._channel.on_bytes = self._hear
        threading.Thread(target=self._read, name="leader", daemon=True).start()
        self._pulse.start()

    def report(self, report: dict[str, Any]) -> None:
        """Tells the leader something at the start."""
        self._channel.send(Kind.REPORT, json.dumps(report).encode())

    def decision(self) -> dict[str, Any]:
        """What the leader decides next; waits for it."""
        kind, payload = self._frames.get()
        if kind != Kind.DECISION:
            raise HostLostError(f"the leader sent a frame of kind {kind}; a decision was due")
        return read_json(payload)

    def run(
        self, runner: ModelRunner, adapter_like: Any, progress: Progress | None, on_ready: Callable[[], None]
    ) -> None:
        """Repeats what the leader does until it says stop.

        Args:
          runner: as the leader's.
          adapter_like: host arrays of any adapter, or None where there are none.
          progress: of warm-up.
          on_ready: called when it has ended.
        """
        threading.Thread(target=self._collect, name="digests", daemon=True).start()
        reader, handle, rows = StepReader(), None, [0, 0]
        adapter: list[bytes] = []
        while True:
            kind, payload = self._frames.get()
            if kind == Kind.STOP:
                break
            chain = self._chain.add(Kind(kind), (payload,))
            if kind == Kind.STEP:
                prepared, *rows = reader.read(payload)
                handle = runner.dispatch(prepared)
                if handle.outputs is not None:
                    self._steps.put((chain, handle, *rows))
            elif kind == Kind.SAMPLE:
                _, masks = read_arrays(payload)
                assert handle is not None, "the leader samples a step that it never sent"
                runner.sample(handle, masks[0] if masks else None)
                self._steps.put((chain, handle, *rows))
            elif kind == Kind.ADAPTER_PART:
                adapter.append(payload)
            elif kind == Kind.ADAPTER:
                about, leaves = read_arrays(b"".join(adapter))
                adapter.clear()
                runner.place_adapter(jax.tree.unflatten(jax.tree.structure(adapter_like), leaves), about["place"])
            elif kind == Kind.WARM_UP:
                runner.warm_up(progress)
                self.report({})
                on_ready()
            else:
                raise HostLostError(f"the leader sent a frame of kind {kind}")
        self._ended.set()
        self._steps.put(None)
        self._pulse.stop()

    def fail(self, error: BaseException) -> None:
        """Tells the leader why this process ends, if it can be told; `on_lost` is not called any more."""
        if isinstance(error, jax.errors.JaxRuntimeError):
            time.sleep(_EXPLAIN_S)  # the end of another process breaks collectives first; then `on_lost` tells why
        self._ended.set()
        try:
            self._channel.send(Kind.FAILED, f"{type(error).__name__}: {error}".encode())
        except HostLostError as lost:
            log.warning("the leader cannot be told: %s", lost)

    def _read(self) -> None:
        try:
            while True:
                kind, payload = self._channel.receive()
                if kind == Kind.FAILED:
                    text = payload.decode(errors="replace")
                    raise HostLostError(f"the leader (process 0) has given the engine up: {text}")
                if kind != Kind.PULSE:
                    self._is_full = True
                    self._frames.put((kind, payload))
                    self._hear()
                    self._is_full = False
                if kind == Kind.STOP:
                    return
        except HostLostError as error:
            self._lose(error)
        except Exception as error:
            log.exception("what the leader sent cannot be taken in")
            self._lose(HostLostError(f"what the leader (process 0) sent cannot be taken in: {error!r}"))

    def _hear(self) -> None:
        self._heard_at = self._pulse.now

    def _collect(self) -> None:
        try:
            while (step := self._steps.get()) is not None:
                chain, handle, num_decode, num_prefill = step
                digest = step_digest(chain, handle, num_decode, num_prefill)
                self._channel.send(Kind.DIGEST, write_digest(handle.plan.iteration, digest))
        except HostLostError as error:
            self._lose(error)
        except Exception as error:  # of the device: the next step would fail too
            self.fail(error)
            self._on_lost(HostLostError(f"a step failed: {error}"))

    def _beat(self) -> None:
        if self._ended.is_set():
            return
        try:
            self._channel.send_if_idle(Kind.PULSE)
        except HostLostError as error:
            self._lose(error)
        if self._pulse.lasted(self._heard_at) and not self._is_full:
            self._lose(
                HostLostError(f"the leader (process 0) gave no sign of life for {self._timeout_s:g} s (host_timeout_s)")
            )

    def _lose(self, error: HostLostError) -> None:
        with self._losing:
            if self._ended.is_set():
                return
            self._ended.set()
        self._on_lost(error)


def _connect(address: tuple[str, int], process_id: int, token: bytes, timeout_s: float, within_s: float) -> Channel:
    end, refusals = time.monotonic() + within_s, 0
    while True:
        try:
            connection = socket.create_connection(address, timeout=within_s)
        except OSError as error:
            if time.monotonic() > end:
                raise HostLostError(
                    f"the leader does not answer at {address[0]}:{address[1]} (control_address): {error}"
                ) from error
            time.sleep(_RETRY_S)
            continue
        try:
            return join_leader(connection, token, process_id, timeout_s)
        except HostLostError as error:
            refusals += 1
            if refusals == _MOST_REFUSALS or time.monotonic() > end:
                raise
            log.warning("%s; tries again", error)
            time.sleep(_REFUSED_S)
