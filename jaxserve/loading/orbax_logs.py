"""What Orbax logs beside raising it."""

from __future__ import annotations

import logging
from pathlib import Path


class _RaisedAnyway(logging.Filter):
    """Drops errors of Orbax' threads: their tracebacks come on top of the exception that is raised of them."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR or "orbax" not in Path(record.pathname).parts


_FILTER = _RaisedAnyway()


def silence_orbax() -> None:
    """Leaves out of the log what Orbax raises too; again changes nothing."""
    logging.getLogger("absl").addFilter(_FILTER)
