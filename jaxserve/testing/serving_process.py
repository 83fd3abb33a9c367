"""ServingProcess: a server or router as a user starts it, for tools and tests that signal and measure it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType

READY = re.compile(r"jaxserve (?:router )?ready http=(\S+)(?: grpc=(\S+))?")
"""Begins the line on stdout once requests are taken."""
OWN_FLAGS = {
    "jaxserve.server": ("--http_port=0", "--grpc_port=0", "--stats_interval_s=0", "--log_level=warning"),
    "jaxserve.router": ("--http_port=0", "--log_level=warning"),
}
TAIL = 50
"""Lines of stderr that are kept."""


class ServingProcess:
    """A process on free loopback ports, started by its constructor and ended with its context.

    Args:
      flags: its own; ports and logging are set here unless they are among them.
      environment: more variables of its environment.
      module: one of `OWN_FLAGS`, which is run.

    Attributes:
      url, grpc_address: where it listens, once `wait_until_ready` returned; a router has no gRPC.
      tail: the last lines of its stderr.
    """

    def __init__(
        self, flags: Sequence[str], environment: Mapping[str, str] | None = None, module: str = "jaxserve.server"
    ) -> None:
        words = [sys.executable, "-m", module, *OWN_FLAGS[module], *flags]
        self.url = self.grpc_address = ""
        self.tail: list[str] = []
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | dict(environment or {}),
        )
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def wait_until_ready(self) -> ServingProcess:
        """Itself, once it takes requests.

        Raises:
          RuntimeError: it ended first; with what it said last.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := READY.match(line):
                self.url, self.grpc_address = f"http://{found[1]}", found[2] or ""
                return self
        status = self._process.wait()
        self._reader.join(5)
        raise RuntimeError(f"the server ended with {status} before it was ready:\n{''.join(self.tail)}")

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Sends it a signal."""
        self._process.send_signal(number)

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int:
        """Its exit status, which comes within `seconds`, or a `subprocess.TimeoutExpired`."""
        return self._process.wait(seconds)

    def end(self) -> None:
        """Kills it where it runs, and closes its pipes."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join(5)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> ServingProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.tail = [*self.tail[1 - TAIL :], line]
