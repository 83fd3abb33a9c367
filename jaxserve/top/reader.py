"""Reads a server over HTTP: its metrics and its state, at one instant."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from jaxserve.sim.metric_samples import MetricSamples

TIMEOUT_S = 5.0
ITERATIONS = 48
"""Iterations that a sample asks for: as many as a slot's strip shows."""


class UnreadableServerError(Exception):
    """The server cannot be looked at; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a server said.

    Attributes:
      at: instant of the reading, monotonic.
      state: of /debug/state; None where `hidden` says why it is not shown.
    """

    at: float
    metrics: MetricSamples
    load: dict[str, Any]
    state: dict[str, Any] | None
    hidden: str = ""


class ServerReader:
    """Asks one server.

    Args:
      url: as http://127.0.0.1:8000.
      api_key: sent when it is not None.

    Raises:
      UnreadableServerError: `url` is no HTTP address.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise UnreadableServerError(f"--url is {url!r}; it must begin with http:// or https://")
        self.url = url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def read(self) -> Sample:
        """A sample now.

        Raises:
          UnreadableServerError: there is no answer, it is not ready, the key is wrong, or it is another program.
        """
        metrics = MetricSamples(self._get("/metrics").decode("utf-8", "replace"))
        load = self._json("/load")
        if metrics.empty or not isinstance(load, dict):
            raise UnreadableServerError(f"{self.url} is no jaxserve server: it exports no metric named jaxserve:*")
        state, hidden = None, ""
        try:
            state = self._json(f"/debug/state?iterations={ITERATIONS}")
        except _ForbiddenError as error:
            hidden = str(error)
        return Sample(time.monotonic(), metrics, load, state, hidden)

    def _json(self, path: str) -> Any:
        try:
            return json.loads(self._get(path))
        except ValueError as error:
            raise UnreadableServerError(
                f"{self.url}{path} does not answer with JSON; is it a jaxserve server?"
            ) from error

    def _get(self, path: str) -> bytes:
        address = self.url + path
        try:
            with urllib.request.urlopen(
                urllib.request.Request(address, headers=self._headers), timeout=TIMEOUT_S
            ) as answer:
                body: bytes = answer.read()
                return body
        except urllib.error.HTTPError as error:
            with error:
                raise _told(address, error.code, _message(error.read())) from error
        except (urllib.error.URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise UnreadableServerError(
                f"{self.url} does not answer: {reason}; is the server running there?"
            ) from error


class _ForbiddenError(UnreadableServerError):
    """The key is right and does not open this."""


def _told(address: str, status: int, message: str) -> UnreadableServerError:
    match status:
        case 401:
            return UnreadableServerError(
                f"{address}: {message or 'a key is needed'}; set --api_key or JAXSERVE_API_KEY"
            )
        case 403:
            return _ForbiddenError(message)
        case 503:
            return UnreadableServerError(f"{address} is not ready: {message}")
    return UnreadableServerError(f"{address} answers {status}; it must answer 200; is it a jaxserve server?")


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
