"""ServerProcess: a server that a measurement starts, waits for and ends."""

from __future__ import annotations

import http.client
import json
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from types import TracebackType
from typing import Any

from jaxserve.bench.report import MeasurementError

PORT = "{port}"


class ServerProcess:
    """A server on a free port, from entering to leaving.

    Args:
      command: flags of `python -m jaxserve.server` (begins with a dash), or a whole command line, with `{port}` where
        the port stands.
      api_key: for asking it; None: none is sent.
      start_timeout_s: most seconds until it is ready.

    Attributes:
      url: of the server.

    Raises:
      ValueError: the command has no `{port}`, or is not found.
      MeasurementError: it ended or was not ready in time; what it wrote is on stderr.
    """

    def __init__(self, command: str, *, api_key: str | None, start_timeout_s: float) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        if command.lstrip().startswith("-"):
            own = ["--http_port={port}", "--grpc_port=0", "--log_level=warning"]
            words = [sys.executable, "-m", "jaxserve.server", *own, *shlex.split(command)]
        else:
            words = shlex.split(command)
            if not any(PORT in word for word in words):
                raise ValueError(f"the server command {command!r} has no {PORT}; put it where the port stands")
        self.url = f"http://127.0.0.1:{port}"
        self._words = [word.replace(PORT, str(port)) for word in words]
        self._api_key, self._start_timeout_s = api_key, start_timeout_s

    def __enter__(self) -> ServerProcess:
        try:
            # Its output goes to stderr: a table on stdout stays a table.
            self._process = subprocess.Popen(self._words, stdout=2, stdin=subprocess.DEVNULL)
        except OSError as error:
            raise ValueError(f"{self._words[0]} cannot be started: {error.strerror}") from None
        try:
            self._wait()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _wait(self) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        while time.monotonic() < deadline:
            status = self._process.poll()
            if status is not None:
                raise MeasurementError(f"the server ended with {status} before it was ready: {shlex.join(self._words)}")
            if _ready(self.url, self._api_key):
                return
            time.sleep(0.2)
        raise MeasurementError(
            f"the server was not ready within {self._start_timeout_s:g} s (start_timeout_s): {shlex.join(self._words)}"
        )

    def _end(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def served_model(url: str, api_key: str | None) -> str:
    """The first model that a server lists.

    Raises:
      ValueError: it cannot be asked, or lists none.
    """
    try:
        document = json.loads(_get(f"{url}/v1/models", api_key))
        return str(document["data"][0]["id"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{url}/v1/models names no model ({error}); is it an OpenAI-compatible server?") from None


def _ready(url: str, api_key: str | None) -> bool:
    """Whether requests would be answered. `/ready` where a server has it, else `/health` (vLLM, llama.cpp)."""
    for path in ("/ready", "/health"):
        try:
            _get(url + path, api_key)
            return True
        except urllib.error.HTTPError as error:
            if error.code != 404:
                return False
        except (OSError, http.client.HTTPException):  # the latter: something else has the port
            return False
    return False


def _get(url: str, api_key: str | None) -> Any:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read()
