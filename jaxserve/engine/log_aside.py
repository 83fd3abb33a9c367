"""A log record that holds up its writer for a second at most, though nobody reads the log."""

from __future__ import annotations

import threading
from typing import Any

from absl import logging

PATIENCE_S = 1.0
"""The writer goes on after so long; the record is written when it can be."""


def log_aside(level: int, message: str, *args: Any, exc_info: BaseException | None = None) -> None:
    """Logs on a thread of its own and waits for it, for `PATIENCE_S` at most.

    For what stands between a hang and its end, and comes a few times in a process's life. The server's own output is
    queued and never waits; an engine in somebody else's process has the log handlers that it finds there.
    """

    def write() -> None:
        logging.log(level, message, *args, exc_info=exc_info)

    writer = threading.Thread(target=write, name="log-aside", daemon=True)
    writer.start()
    writer.join(PATIENCE_S)
