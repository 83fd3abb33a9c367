"""CrashDump: what is left of an engine that died: its last iterations as a trace, and what it died of.

    python -m jaxserve.replay --trace=crash-....jsonl
    python -m jaxserve.doctor --trace=crash-....jsonl

The file is a trace (docs/tracing.md). Its header has one member more, `died`: the exception with its traceback, the
versions and the engine's settings. Like every trace it holds ids, counts and instants, and no prompt and no output.
"""

from __future__ import annotations

import os
import platform
import time
import traceback
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from absl import logging

from jaxserve import __version__
from jaxserve.config import EngineConfig
from jaxserve.engine.engine_lock import EngineLock
from jaxserve.engine.log_aside import log_aside
from jaxserve.scheduler import Scheduler
from jaxserve.scheduler.trace import TraceWriter
from jaxserve.scheduler.trace_ring import TraceRing

LOCK_S = 2.0
"""So long the dump of an engine whose thread does not come back waits for its lock; then what is recorded must do."""
_MAX_TEXT = 20_000


class CrashDump:
    """Keeps the last records, and writes them when the engine has died.

    Args:
      folder: made when it is needed.
      model: its name.

    Attributes:
      ring: a sink of the scheduler's trace.

    Raises:
      ValueError: nothing can be written there.
    """

    def __init__(self, folder: str, model: str) -> None:
        self._folder = Path(folder)
        self._model = model
        self.ring = TraceRing()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"crash_dump_dir {folder} cannot be made: {os.strerror(error.errno or 0)}") from None
        if not os.access(self._folder, os.W_OK):
            raise ValueError(f"crash_dump_dir {folder} cannot be written")

    def write(self, error: BaseException, config: EngineConfig, scheduler: Scheduler, lock: EngineLock) -> None:
        """Writes the dump; what goes wrong with it is logged and no more."""
        try:
            with lock.within(LOCK_S) as taken:
                if taken:
                    scheduler.flush_trace()
            path = self._folder / time.strftime(f"crash-%Y%m%dT%H%M%SZ-{os.getpid()}.jsonl", time.gmtime())
            died = _died(error, config)
            writer = TraceWriter(path, model=self._model, config=scheduler.config, died=died)
            for line in self.ring.lines:
                writer(line)
            writer.close()
        except Exception as failure:
            log_aside(logging.ERROR, "the last iterations could not be written", exc_info=failure)
            return
        if not writer.num_errors:
            say = "the last iterations are in %s; python -m jaxserve.replay --trace=%s"
            log_aside(logging.ERROR, say, path, path)


def _died(error: BaseException, config: EngineConfig) -> dict[str, Any]:
    """What the header says of the death."""
    return {
        "error": f"{type(error).__name__}: {error}"[:_MAX_TEXT],
        "traceback": "".join(traceback.format_exception(error))[-_MAX_TEXT:],
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {
            "jaxserve": __version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("jax", "jaxlib", "numpy")},
        },
        "settings": asdict(config),
    }
