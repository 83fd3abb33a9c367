"""Processes of one engine, on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

TOKEN = "a token of these tests"


def free_ports():
    """A port whose successor is free too, for jax's coordinator and the leader's channel."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port


def as_flags(settings):
    """Settings as a server's flags."""
    return [
        f"--{name}={','.join(map(str, value)) if isinstance(value, tuple) else value}"
        for name, value in settings.items()
    ]


class Processes:
    """Starts processes and ends what is left of them; output goes to files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *words: str, devices: int = 1, **environment: str) -> subprocess.Popen[bytes]:
        """`python -m WORDS`, in a session of its own."""
        env = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "JAXSERVE_HOST_TOKEN": TOKEN,
            **environment,
        }
        with (self._folder / name).open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *words], env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._running[name] = process
        return process

    def log(self, name: str) -> str:
        """What it has written."""
        return (self._folder / name).read_text(errors="replace")

    def wait(self, name: str, seconds: float) -> int:
        """Its exit status."""
        try:
            return self._running[name].wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} has not ended in {seconds} s:\n{self.log(name)[-3000:]}") from None

    def until_logged(self, name: str, text: str, seconds: float) -> str:
        """The line of its log that has `text`."""
        end = time.monotonic() + seconds
        while True:
            for line in self.log(name).splitlines():
                if text in line:
                    return line
            status = self._running[name].poll()
            assert status is None, f"{name} ended with {status}:\n{self.log(name)[-3000:]}"
            assert time.monotonic() < end, f"{name} has not said {text!r}:\n{self.log(name)[-3000:]}"
            time.sleep(0.05)

    def end(self) -> None:
        """Kills what runs."""
        for process in self._running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(20)
