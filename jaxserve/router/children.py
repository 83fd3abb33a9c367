"""Children: replicas that the router starts itself, watches, starts again, and ends.

Each is a `jaxserve.server` on a free loopback port that it keeps for life, so its name stays the same. One that dies is
started again after `restart_backoff_s`, twice as long each time up to `MAX_BACKOFF_S`, at most `max_restarts` times in
a row; one that was in rotation for `STEADY_S` counts as new. On Linux a child ends with its
router, whatever ended that.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

log = logging.getLogger("jaxserve.router")

MAX_BACKOFF_S = 60.0
STEADY_S = 60.0
KILL_AFTER_S = 5.0
"""Beyond its own drain, which has nothing left to drain by then."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class ChildSettings:
    """How replicas are started.

    Attributes:
      command: of one; `{port}` stands for its port.
      environments: of each, beside this process's own.
      max_restarts: in a row.
      restart_backoff_s: before the first.
    """

    command: tuple[str, ...]
    environments: tuple[Mapping[str, str], ...]
    max_restarts: int = 5
    restart_backoff_s: float = 1.0


def server_command(flags: Sequence[str]) -> tuple[str, ...]:
    """A `jaxserve.server` with these flags; HTTP on the child's port, gRPC on any free one, both on loopback."""
    own = ("--host=127.0.0.1", "--http_port={port}", "--grpc_port=0")
    return (sys.executable, "-m", "jaxserve.server", *flags, *own)


class Children:
    """All children.

    Args:
      on_end: told of each that ended by itself: its number, how, and whether it is started again.
      up_since: when this life of a number's entered rotation, monotonic; None: it has not.

    Attributes:
      urls: of each.
    """

    def __init__(
        self,
        settings: ChildSettings,
        on_end: Callable[[int, str, bool], None],
        up_since: Callable[[int], float | None],
    ) -> None:
        self._settings = settings
        self._on_end = on_end
        self._up_since = up_since
        ports = _free_ports(len(settings.environments))
        self.urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
        self._ports = ports
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._ending = False

    def pids(self) -> dict[str, int]:
        """Of those that live, by name."""
        return {_name(self._ports[number]): process.pid for number, process in self._running.items()}

    async def run(self) -> None:
        """Starts all and keeps them running; returns when none may be started again."""
        async with asyncio.TaskGroup() as group:
            for number in range(len(self._ports)):
                group.create_task(self._keep(number))

    def kill(self) -> None:
        """Ends all at once."""
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def stop(self, grace_s: float) -> None:
        """Ends all: SIGTERM, and SIGKILL for those that live on after `grace_s`."""
        self._ending = True
        ends = []
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            ends.append(asyncio.create_task(process.wait()))
        if not ends:
            return
        _, late = await asyncio.wait(ends, timeout=grace_s)
        if late:
            log.warning("%d replicas did not end within %g s and are killed", len(late), grace_s)
            self.kill()
            await asyncio.wait(late)

    async def _keep(self, number: int) -> None:
        settings, name = self._settings, _name(self._ports[number])
        failures = 0
        while not self._ending:
            began = time.monotonic()
            ended = await self._live(number)
            if self._ending:
                return
            now = time.monotonic()
            lived_s, up_since = now - began, self._up_since(number)
            failures = 1 if up_since is not None and now - up_since >= STEADY_S else failures + 1
            again = failures <= settings.max_restarts
            self._on_end(number, ended, again)
            if not again:
                log.error("replica %s ended with %s and is given up: max_restarts is reached", name, ended)
                return
            wait_s = min(settings.restart_backoff_s * 2 ** (failures - 1), MAX_BACKOFF_S)
            log.error(
                "replica %s ended with %s after %.1f s; it is started again in %g s (%d of %d)",
                *(name, ended, lived_s, wait_s, failures, settings.max_restarts),
            )
            await asyncio.sleep(wait_s)

    async def _live(self, number: int) -> str:
        """Starts one and waits for its end; how that was. One that cannot be started has ended."""
        port = self._ports[number]
        words = [word.replace("{port}", str(port)) for word in self._settings.command]
        # Its output goes to stderr, as the router's own log: stdout has the router's one line. In a session of its own
        # it does not get the terminal's Ctrl-C, so that it is the router who drains.
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,
                env={**os.environ, **self._settings.environments[number]},
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        except OSError as error:
            return f"no process: {error}"
        self._running[number] = process
        log.info("replica %s is starting (pid %d)", _name(port), process.pid)
        try:
            status = await process.wait()
            return f"signal {-status}" if status < 0 else f"status {status}"
        finally:
            if process.returncode is not None:
                del self._running[number]


_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _end_with_parent() -> None:
    """In the child before it becomes a server: the kernel sends it SIGTERM when its parent is no more."""
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _name(port: int) -> str:
    return f"127.0.0.1:{port}"


def _free_ports(count: int) -> tuple[int, ...]:
    """Ports that nothing listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return tuple(each.getsockname()[1] for each in sockets)
