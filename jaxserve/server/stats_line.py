"""The stats line: every few seconds while requests run, what the server does."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from jaxserve.core import EngineStuckError, EngineTotals, NotReadyError
from jaxserve.server.engine_api import EngineApi, LoadApi

log = logging.getLogger("jaxserve.server.stats")


@dataclass(frozen=True, slots=True)
class Stats:
    """An interval's figures; `prefix_cache_hit_rate` is None where no prompt was looked up."""

    running: int
    waiting: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    kv_cache_usage_perc: float
    prefix_cache_hit_rate: float | None
    preemptions: int

    @property
    def text(self) -> str:
        """The line."""
        rate = self.prefix_cache_hit_rate
        return (
            f"{self.running} running, {self.waiting} waiting;"
            f" prefill {self.prefill_tokens_per_s:.1f} tokens/s, decode {self.decode_tokens_per_s:.1f} tokens/s;"
            f" KV pages {100 * self.kv_cache_usage_perc:.1f} % used,"
            f" prefix cache hits {'none asked' if rate is None else f'{100 * rate:.1f} %'};"
            f" preemptions {self.preemptions}"
        )

    @property
    def fields(self) -> dict[str, Any]:
        """For a JSON record."""
        return {name: _rounded(getattr(self, name)) for name in self.__slots__}


def stats_between(before: EngineTotals, after: EngineTotals, load: LoadApi, seconds: float) -> Stats | None:
    """The figures of an interval; None when nothing ran in it and nothing is live."""
    if before.iterations == after.iterations and not load.running and not load.waiting:
        return None
    asked = after.prefix_cache_queries - before.prefix_cache_queries
    found = after.prefix_cache_hits - before.prefix_cache_hits
    return Stats(
        running=load.running,
        waiting=load.waiting,
        prefill_tokens_per_s=(after.prefill_tokens - before.prefill_tokens) / seconds,
        decode_tokens_per_s=(after.decode_tokens - before.decode_tokens) / seconds,
        kv_cache_usage_perc=load.kv_usage,
        prefix_cache_hit_rate=found / asked if asked else None,
        preemptions=after.preemptions - before.preemptions,
    )


class StatsReporter:
    """Logs a line per interval from a thread of its own, as a context manager; silent while the server is idle.

    Args:
      engine: may still be loading.
      interval_s: 0: never.
    """

    def __init__(self, engine: EngineApi, interval_s: float) -> None:
        self._engine = engine
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stats", daemon=True)

    def __enter__(self) -> Self:
        if self._interval_s:
            self._thread.start()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1)

    def _run(self) -> None:
        before, before_at = EngineTotals(), time.monotonic()
        while not self._ended.wait(self._interval_s):
            if self._engine.state not in ("ready", "draining"):
                continue
            try:
                after, load = self._engine.totals, self._engine.load
                now = time.monotonic()
                stats = stats_between(before, after, load, now - before_at)
                before, before_at = after, now
                if stats is not None:
                    log.info("%s", stats.text, extra={"fields": stats.fields})
            except (NotReadyError, EngineStuckError):
                continue
            except Exception:
                log.exception("the stats of an interval could not be told; the next one's will be tried")


def _rounded(value: float | None) -> float | None:
    return round(value, 4) if isinstance(value, float) else value
