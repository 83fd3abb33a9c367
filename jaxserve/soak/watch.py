"""Watchers of a soak: they look at the server all the while, and at rest more closely.

| rule | checked |
|---|---|
| conservation | /debug/state, always: offered = completed + rejected + expired + aborted + failed + running + waiting |
| pages | /debug/state, always: free + cached + owned = total |
| counters | /metrics, always: none falls, no value is negative or NaN |
| compiles | /metrics, always: as many as at the beginning |
| health | /health, always: 200, and within `Limits.health_s` |
| idle-clean | at rest, within 2 s: nothing runs or waits, no page is owned, gauges say so, and the metrics add up |
| held | at rest: threads, event loop tasks and open files are those of the first rest, give or take a few |
| memory | from a third of the time on: slope of a line through RSS x time, at most `Limits.growth_mib` |
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from jaxserve.soak.findings import Findings, quantile, slope_per_s

STATE_S, METRICS_S, HEALTH_S, HEARTBEAT_S = 0.5, 1.0, 0.25, 0.05
IDLE_S = 2.0
WARM_UP_SHARE = 1 / 3
"""Of the time, before memory is looked at."""
HELD = ("process_threads", "asyncio_tasks", "process_open_fds")
MIB = 2**20


class LackingError(RuntimeError):
    """The server's answer lacks a part, as that of an engine which dies at that moment may."""


class Answer(dict[str, Any]):
    """An object of an answer; asked for a member that it lacks, it raises LackingError."""

    def __missing__(self, key: str) -> Any:
        raise LackingError(f"the answer has no {key}, only {', '.join(self) or 'nothing'}"[:300])


_UNANSWERED = (aiohttp.ClientError, OSError, LackingError, json.JSONDecodeError)


@dataclass(frozen=True, slots=True)
class Limits:
    """What is tolerated.

    Attributes:
      health_s: of every answer of /health; `health_p99_s`: of 99 in 100.
      growth_mib: of memory over the time that is looked at.
      held: threads, tasks or files more than at the first rest.
    """

    health_s: float = 2.0
    health_p99_s: float = 0.5
    growth_mib: float = 32.0
    held: int = 8


class Watch:
    """Looks at a server until it is stopped.

    Args:
      session: of the server, for the watchers alone.
      findings: that are told.
      limits: of what is tolerated.

    Attributes:
      samples: of memory, (seconds after the beginning, bytes).
      rests: what the process held at each rest, by metric.
      first, last: metrics at the beginning, and the last ones read.
      totals: of requests since the server's start, by their ends; the last ones read.
      faults: that the server's fault plan struck, by place and kind; the last ones read.
    """

    def __init__(self, session: aiohttp.ClientSession, findings: Findings, limits: Limits) -> None:
        self._session, self._findings, self._limits = session, findings, limits
        self.samples: list[tuple[float, float]] = []
        self.rests: list[dict[str, float]] = []
        self.first = self.last = self.totals = Answer()
        self.faults: dict[str, float] = {}
        self._pauses: list[float] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begins; the server has answered something before."""
        self.first = self.last = await self._metrics()
        loops = ((self._state, STATE_S), (self._read_metrics, METRICS_S), (self._health, HEALTH_S))
        self._tasks = [asyncio.create_task(self._every(look, seconds)) for look, seconds in loops]
        self._tasks.append(asyncio.create_task(self._beat()))

    async def stop(self) -> None:
        """Ends, and judges what can be judged at the end only."""
        for task in self._tasks:
            task.cancel()
        for end in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(end, Exception):
                raise end
        p99 = quantile(self._findings.latencies_s["health"], 99)
        if p99 > self._limits.health_p99_s:
            self._findings.breach("health", f"p99 is {p99:.3f} s; the limit is {self._limits.health_p99_s:g} s")
        growth = self.growth_mib
        if growth > self._limits.growth_mib:
            what = (
                f"memory grew by {growth:.1f} MiB in {self.looked_at_s:.0f} s; the limit is {self._limits.growth_mib:g}"
            )
            self._findings.breach("memory", what)

    @property
    def _looked_at(self) -> list[tuple[float, float]]:
        if not self.samples:
            return []
        begin = self.samples[-1][0] * WARM_UP_SHARE
        return [(at, value) for at, value in self.samples if at >= begin]

    @property
    def looked_at_s(self) -> float:
        """Seconds over which memory is looked at."""
        points = self._looked_at
        return points[-1][0] - points[0][0] if points else 0.0

    @property
    def growth_mib(self) -> float:
        """Slope of memory x those seconds."""
        return slope_per_s(self._looked_at) * self.looked_at_s / MIB

    async def rest(self) -> None:
        """The server has nothing to do: it must be clean within `IDLE_S`."""
        end = time.monotonic() + IDLE_S
        try:
            while (problem := await self._unclean()) and time.monotonic() < end:
                await asyncio.sleep(0.1)
            held = {name: self.last[name] for name in HELD}
        except _UNANSWERED as error:
            self._missed("rest", error)
            return
        if problem:
            self._findings.breach("idle-clean", problem)
        self.rests.append(held)
        for name, value in held.items():
            if value > self.rests[0][name] + self._limits.held:
                self._findings.breach("held", f"{name} is {value:g}, at the first rest {self.rests[0][name]:g}")

    async def _unclean(self) -> str:
        state = await self._get("/debug/state")
        self.totals, kv = state["totals"], state["kv"]
        if live := state["num_requests_running"] + state["num_requests_waiting"]:
            return f"{live} requests are live"
        if kv["pages_owned"] or kv["pages_free"] + kv["pages_cached"] != kv["pages_total"]:
            return f"pages at rest: {kv}"
        await self._read_metrics()
        metrics = self.last
        if metrics["num_requests_running"] or metrics["num_requests_waiting"] or metrics["kv_cache_usage_perc"]:
            return "a gauge is not 0 at rest"
        # These have no line for a label that nobody had yet.
        ended = metrics.get("request_success_total", 0.0) + metrics.get("requests_rejected_total", 0.0)
        if metrics["requests_offered_total"] != ended:
            return f"{metrics['requests_offered_total']:g} requests arrived, {ended:g} ended or were refused"
        return ""

    async def _state(self) -> None:
        state = await self._get("/debug/state")
        totals, kv = state["totals"], state["kv"]
        live = state["num_requests_running"] + state["num_requests_waiting"]
        ended = sum(totals[name] for name in ("completed", "rejected", "expired", "aborted", "failed"))
        if totals["offered"] != ended + live:
            self._findings.breach("conservation", f"{totals} and {live} live do not add up")
        if kv["pages_free"] + kv["pages_cached"] + kv["pages_owned"] != kv["pages_total"]:
            self._findings.breach("pages", f"they do not add up: {kv}")

    async def _read_metrics(self) -> None:
        before, now = self.last, await self._metrics()
        if gone := before.keys() - now.keys():
            raise LackingError(f"/metrics lacks {', '.join(sorted(gone))}"[:300])
        for name, value in now.items():
            if math.isnan(value) or value < 0:
                self._findings.breach("counters", f"{name} is {value}")
            if name.endswith(("_total", "_count")) and value < before.get(name, 0.0):
                self._findings.breach("counters", f"{name} fell from {before[name]:g} to {value:g}")
        resident_bytes = now["process_resident_memory_bytes"]
        if now["compiles_total"] != before["compiles_total"]:
            self._findings.breach("compiles", f"from {before['compiles_total']:g} to {now['compiles_total']:g}")
        self.samples.append((time.monotonic() - self._findings.began_at, resident_bytes))
        self.last = now

    async def _health(self) -> None:
        began = time.monotonic()
        async with self._session.get("/health") as response:
            await response.read()
        took = time.monotonic() - began
        if response.status != 200 and not self._findings.faults_allowed:
            self._findings.breach("health", f"/health is {response.status}")
        if self._paused_since(began):
            return  # this process, and with it what it measures, stood still
        self._findings.latencies_s["health"].append(took)
        if took > self._limits.health_s:
            self._findings.breach("health", f"/health took {took:.2f} s")

    async def _beat(self) -> None:
        """Notes when this process did not run, as when the machine was asleep."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            now = time.monotonic()
            if now - last > 10 * HEARTBEAT_S:
                self._pauses.append(now)
            last = now

    def _paused_since(self, began: float) -> bool:
        return bool(self._pauses) and self._pauses[-1] >= began

    async def _every(self, look: Any, seconds: float) -> None:
        while True:
            await self._look(look)
            await asyncio.sleep(seconds)

    async def _look(self, look: Any) -> None:
        try:
            await look()
        except _UNANSWERED as error:
            self._missed(look.__name__.strip("_"), error)

    def _missed(self, look: str, error: Exception) -> None:
        """The server did not answer, or not with all of it, which may be while a fault lasts."""
        if self._findings.faults_allowed:
            self._findings.count("watch", "not answered")
        else:
            self._findings.breach("watch", f"{look}: the server did not answer: {error!r}")

    async def _get(self, path: str) -> Answer:
        async with self._session.get(path) as response:
            response.raise_for_status()
            found = json.loads(await response.text(), object_hook=Answer)
        if not isinstance(found, Answer):
            raise LackingError(f"{path} is no object")
        return found

    async def _metrics(self) -> Answer:
        async with self._session.get("/metrics") as response:
            response.raise_for_status()
            text = await response.text()
        self.faults = faults_by_place(text)
        return Answer(sums_by_name(text))


def faults_by_place(text: str) -> dict[str, float]:
    """Strikes of a fault plan in /metrics, by "place: kind"."""
    found = re.findall(r'^jaxserve:faults_injected_total\{.*at="([^"]*)",do="([^"]*)".*\} (\S+)$', text, re.M)
    return {f"{place}: {kind}": float(count) for place, kind, count in found}


def sums_by_name(text: str) -> dict[str, float]:
    """Values of /metrics by name without the prefix, summed over labels; buckets are left out."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("jaxserve:"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0].removeprefix("jaxserve:")
            if not name.endswith("_bucket"):
                found[name] = found.get(name, 0.0) + float(value)
    return found
