"""ReplicaPool: the replicas, what is known of each, and which of them are in rotation.

It joins three things that know nothing of each other: the chooser, a breaker per replica, and the clock.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from jaxserve.router.metrics import RouterMetrics
from jaxserve.router.settings import RouterSettings
from jaxserve.routing import Breaker, BreakerState, Choice, ReplicaChooser, RouteRequest

log = logging.getLogger("jaxserve.router")

_UP = {BreakerState.UP: 1.0, BreakerState.HALF_OPEN: 0.5, BreakerState.DOWN: 0.0}


@dataclass(slots=True)
class Replica:
    """One of them.

    Attributes:
      number: in the chooser.
      name: host and port; of logs, metrics and errors.
      url: without a path.
      models: that it serves, as far as it told.
      reported: what it last said of its load.
      probe_now: set to have it probed at once.
      changed_at: when it last entered or left rotation, monotonic.
      up_since: when it first entered rotation in its process's life, monotonic; None: not yet.
      waits: of requests there that the client has no byte of.
    """

    number: int
    name: str
    url: str
    breaker: Breaker
    models: tuple[str, ...] = ()
    reported: dict[str, Any] = field(default_factory=dict)
    probe_now: asyncio.Event = field(default_factory=asyncio.Event)
    changed_at: float = field(default_factory=time.monotonic)
    up_since: float | None = None
    waits: set[asyncio.Timeout] = field(default_factory=set)


class ReplicaPool:
    """All replicas.

    Args:
      urls: of each, without a path.

    Attributes:
      replicas: by number.
      draining: no request is taken any more.
    """

    def __init__(self, urls: Collection[str], settings: RouterSettings, metrics: RouterMetrics) -> None:
        self.replicas = tuple(
            Replica(number, url.partition("://")[2], url, Breaker(settings.breaker)) for number, url in enumerate(urls)
        )
        self.metrics = metrics
        self.draining = False
        self._chooser = ReplicaChooser(len(self.replicas), settings.routing)
        for replica in self.replicas:
            self._show(replica)

    @property
    def in_rotation(self) -> list[Replica]:
        """Those that get requests."""
        return [each for each in self.replicas if each.breaker.state is not BreakerState.DOWN]

    @property
    def num_in_flight(self) -> int:
        """Requests at all replicas, of this router."""
        return sum(self._chooser.load(each.number).in_flight for each in self.replicas)

    def choose(self, route: RouteRequest, excluded: Collection[int]) -> tuple[Replica, Choice] | None:
        """The replica for a request, None when there is none but those excluded."""
        choice = self._chooser.choose(route, excluded)
        if choice is None:
            return None
        self.metrics.choices.labels(choice.reason).inc()
        if not excluded:  # a prompt counts once, however often it is given to another replica
            self.metrics.prompt_bytes.inc(route.prompt.num_bytes)
            if choice.num_matched:
                self.metrics.matched_bytes.inc(route.prompt.ends[choice.num_matched - 1])
        return self.replicas[choice.replica], choice

    @contextmanager
    def lent(self, replica: Replica, route: RouteRequest) -> Iterator[None]:
        """While a request is at a replica."""
        self._chooser.begin(replica.number, route)
        self.metrics.in_flight.labels(replica.name).inc()
        try:
            yield
        finally:
            self._chooser.end(replica.number, route)
            self.metrics.in_flight.labels(replica.name).dec()
            self.metrics.blocks.labels(replica.name).set(self._chooser.load(replica.number).num_blocks)

    def answered(self, replica: Replica) -> None:
        """It answered a request."""
        with self._change(replica):
            replica.breaker.request_succeeded()

    def failed(self, replica: Replica, error: BaseException) -> None:
        """It did not answer a request, or not to the end."""
        with self._change(replica):
            if refused(error):
                replica.breaker.gone("nothing listens there")
            else:
                replica.breaker.request_failed(time.monotonic(), cause(error))
        replica.probe_now.set()

    def unready(self, replica: Replica, reason: str) -> None:
        """It says that it takes no requests."""
        with self._change(replica):
            replica.breaker.gone(reason)

    def turned_away(self, replica: Replica, *, for_all: bool) -> None:
        """It answered a request with 503: the next probe tells more.

        Args:
          for_all: it said that it takes no requests at all.
        """
        if for_all:
            self.unready(replica, "it answered 503")
        replica.probe_now.set()

    def ready(self, replica: Replica) -> None:
        """A probe found it ready."""
        with self._change(replica):
            replica.breaker.probe_succeeded(time.monotonic())

    def unanswered(self, replica: Replica, error: BaseException) -> None:
        """A probe got no answer.

        Requests that wait for a replica which is out of rotation for that are ended, to be given to another: a process
        that hangs closes no connection.
        """
        with self._change(replica):
            if refused(error):
                replica.breaker.gone("nothing listens there")
            else:
                replica.breaker.probe_failed(f"probes got no answer: {cause(error)}")
        if replica.breaker.state is BreakerState.DOWN:
            now = asyncio.get_running_loop().time()
            for wait in replica.waits:
                wait.reschedule(now)
            replica.waits.clear()

    def tells(self, replica: Replica, *, models: Collection[str], load: dict[str, Any]) -> None:
        """What it serves and how loaded it is, where it told."""
        if models:
            replica.models = tuple(models)
            self._chooser.set_models(replica.number, replica.models)
        count = load.get("server_load")
        if isinstance(count, int):
            replica.reported = load
            self._chooser.report_load(replica.number, count)
            self.metrics.from_others.labels(replica.name).set(self._chooser.load(replica.number).from_others)

    def forget_prompts(self, replica: Replica) -> None:
        """Its prefix cache is empty."""
        self._chooser.forget(replica.number)
        self._show(replica)

    def view(self) -> list[dict[str, Any]]:
        """Every replica, for operators."""
        now, found = time.monotonic(), []
        for each in self.replicas:
            load = self._chooser.load(each.number)
            found.append(
                {
                    "replica": each.name,
                    "url": each.url,
                    "state": str(each.breaker.state),
                    "reason": each.breaker.reason if each.breaker.state is not BreakerState.UP else None,
                    "since_s": round(now - each.changed_at, 3),
                    "models": list(each.models),
                    "requests_in_flight": load.in_flight,
                    "tokens_in_flight": load.tokens,
                    "requests_from_others": load.from_others,
                    "requests_routed": load.routed,
                    "cache_table_blocks": load.num_blocks,
                    "reported": each.reported or None,
                }
            )
        return found

    @contextmanager
    def _change(self, replica: Replica) -> Iterator[None]:
        """Around whatever may move a replica's breaker."""
        before = replica.breaker.state
        yield
        state = replica.breaker.state
        if state is before:
            return
        replica.changed_at = time.monotonic()
        if state is BreakerState.DOWN:
            log.warning("replica %s is out of rotation: %s", replica.name, replica.breaker.reason)
            # Whatever it was, it may be another process when it comes back.
            self._chooser.forget(replica.number)
        elif before is BreakerState.DOWN:
            replica.up_since = replica.up_since or replica.changed_at
            trial = ", one request at a time until one succeeds" if state is BreakerState.HALF_OPEN else ""
            log.info("replica %s is in rotation%s", replica.name, trial)
        limit = 1 if state is BreakerState.HALF_OPEN else None
        self._chooser.set_available(replica.number, state is not BreakerState.DOWN, limit)
        self._show(replica)

    def _show(self, replica: Replica) -> None:
        load = self._chooser.load(replica.number)
        self.metrics.up.labels(replica.name).set(_UP[replica.breaker.state])
        self.metrics.blocks.labels(replica.name).set(load.num_blocks)
        self.metrics.from_others.labels(replica.name).set(load.from_others)
        self.metrics.in_flight.labels(replica.name).set(load.in_flight)


def refused(error: BaseException) -> bool:
    """Whether a connection was refused: nothing listens there."""
    return isinstance(error, OSError) and error.errno == errno.ECONNREFUSED


def cause(error: BaseException) -> str:
    """A few words on what went wrong with a connection."""
    if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError):
        return "its connection broke off"
    return str(error)[:200] or type(error).__name__
