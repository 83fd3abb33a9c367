"""What Orbax logs beside raising it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb
from types import TracebackType
from typing import Any


class _RaisedAnyway(logging.Filter):
    """Drops errors of Orbax' threads and tasks: their tracebacks come on top of the exception that is raised of them.

    Of several arrays that cannot be read Orbax raises one's error; asyncio tells of the other tasks'.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return True
        trace = record.exc_info[2] if record.exc_info else None
        return not (_is_orbax(record.pathname) or _passes_orbax(trace))


class _UnraisableAnyway:
    """Drops what is left of reads when one has failed: coroutines that nobody awaits, and TensorStore's threads that
    find Orbax' event loop closed, which have no object to name.

    Args:
      others: told of everything else.
    """

    def __init__(self, others: Callable[[Any], object]) -> None:
        self._others = others

    def __call__(self, unraisable: Any) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        is_late_read = unraisable.object is None and str(unraisable.exc_value) == "Event loop is closed"
        if is_late_read or _passes_orbax(unraisable.exc_traceback) or (code and _is_orbax(code.co_filename)):
            return
        self._others(unraisable)


def _is_orbax(file: str) -> bool:
    return "orbax" in Path(file).parts


def _passes_orbax(trace: TracebackType | None) -> bool:
    return any(_is_orbax(frame.f_code.co_filename) for frame, _ in walk_tb(trace))


_FILTER = _RaisedAnyway()


def silence_orbax() -> None:
    """Leaves out of log and stderr what Orbax raises too; again changes nothing."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_FILTER)
    if not isinstance(sys.unraisablehook, _UnraisableAnyway):
        sys.unraisablehook = _UnraisableAnyway(sys.unraisablehook)
