"""What Orbax logs beside raising it."""

from __future__ import annotations

import logging
from pathlib import Path
from traceback import walk_tb


class _RaisedAnyway(logging.Filter):
    """Drops errors of Orbax' threads and tasks: their tracebacks come on top of the exception that is raised of them.

    Of several arrays that cannot be read Orbax raises one's error; asyncio tells of the other tasks'.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return True
        trace = record.exc_info[2] if record.exc_info else None
        files = [record.pathname, *(frame.f_code.co_filename for frame, _ in walk_tb(trace))]
        return not any("orbax" in Path(file).parts for file in files)


_FILTER = _RaisedAnyway()


def silence_orbax() -> None:
    """Leaves out of the log what Orbax raises too; again changes nothing."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_FILTER)
