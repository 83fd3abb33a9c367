"""Reads a server over HTTP: its metrics and its state, at one instant."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

from jaxserve.sim.metric_samples import MetricSamples
from jaxserve.sim.server_pages import ForbiddenError, ServerPages, ServerState, UnreadableServerError

TIMEOUT_S = 5.0
ITERATIONS = 48
"""Iterations that a sample asks for: as many as a slot's strip shows."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a server said.

    Attributes:
      at: instant of the reading, monotonic.
      told: of /ready; None of a server without it.
      state: of /debug/state; None where `hidden` says why it is not shown.
    """

    at: float
    told: ServerState | None
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
      UnreadableServerError: see `ServerPages`.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._pages = ServerPages(url, api_key, TIMEOUT_S)
        self.url = self._pages.url

    def read(self) -> Sample:
        """A sample now.

        Raises:
          UnreadableServerError: there is no answer, it neither is ready nor drains, the key is wrong, or it is no such
            server.
        """
        told = self._pages.state()
        if told is not None and not told.goes_on:
            raise UnreadableServerError(f"{self.url} is {told.text}")
        metrics = MetricSamples(self._pages.get("/metrics").decode("utf-8", "replace"))
        load = self._json("/load")
        if metrics.empty or not isinstance(load, dict):
            raise UnreadableServerError(f"{self.url} is no jaxserve server: it exports no metric named jaxserve:*")
        state, hidden = None, ""
        try:
            state = self._json(f"/debug/state?iterations={ITERATIONS}")
        except ForbiddenError as error:
            hidden = str(error)
        return Sample(time.monotonic(), told, metrics, load, state, hidden)

    def _json(self, path: str) -> Any:
        try:
            return json.loads(self._pages.get(path))
        except ValueError as error:
            raise UnreadableServerError(
                f"{self.url}{path} does not answer with JSON; is it a jaxserve server?"
            ) from error
