"""How log records are written: as text lines, or as one JSON object a line.

A record may carry `fields`, a dict of plain values, by `extra={"fields": {...}}`: JSON has them as keys beside
`time`, `level`, `logger` and `message`, text as what the message says of them.

Lines that native libraries (XLA, gRPC) write to stderr by themselves are no log records; under JSON they are turned off
where that can be done.
"""

from __future__ import annotations

import datetime
import logging
import os
import sys
import threading
from typing import Any

import orjson
from absl import logging as absl_logging
from rich.console import Console

from jaxserve.core import queue_output

_QUIET_NATIVE = {"GRPC_VERBOSITY": "NONE", "TF_CPP_MIN_LOG_LEVEL": "3"}


class JsonFormatter(logging.Formatter):
    """One JSON object a record, without a line break inside."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        instant = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": instant.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields: dict[str, Any] = getattr(record, "fields", {})
        line |= {name: value for name, value in fields.items() if name not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def set_log_format(log_format: str) -> None:
    """Sets the format of every record of the process, warnings included; call it before jax is imported.

    A thread that ends by an exception is a record too.

    Args:
      log_format: "text" or "json".
    """
    threading.excepthook = _log_end_of_thread
    if log_format == "text":
        return
    for name, value in _QUIET_NATIVE.items():
        os.environ.setdefault(name, value)
    absl_logging.get_absl_handler().setFormatter(JsonFormatter())
    logging.captureWarnings(True)


def queue_logs(*names: str) -> None:
    """`queue_output`, for absl's handler of log records too; call it before jax is imported."""
    queue_output(*names)
    absl_logging.get_absl_handler().python_handler.setStream(sys.stderr)


def _log_end_of_thread(about: threading.ExceptHookArgs) -> None:
    if about.exc_value is not None and not isinstance(about.exc_value, SystemExit):
        name = "one" if about.thread is None else about.thread.name
        logging.getLogger("jaxserve").error("the thread %r has ended", name, exc_info=about.exc_value)


class LogLines:
    """A text file whose lines become log records."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line.strip():
                self._logger.info("%s", line.strip())
        return len(text)

    def flush(self) -> None:
        """What is written is out."""

    def error(self, text: str) -> None:
        """One record of a failure."""
        self._logger.error("%s", text)


def operator_console(log_format: str) -> Console:
    """Where the operator's notes go: stderr as text, or log records."""
    if log_format == "text":
        return Console(stderr=True)
    lines: Any = LogLines(logging.getLogger("jaxserve.server"))
    return Console(file=lines, force_terminal=False, color_system=None, width=10_000)


def tell_failure(console: Console, text: str) -> None:
    """The line, or the record, that ends a program."""
    if isinstance(console.file, LogLines):
        console.file.error(text)
    else:
        console.print(f"jaxserve: {text}", highlight=False, markup=False, soft_wrap=True)
