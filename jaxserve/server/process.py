"""What every process over an engine does: room for files, waiting for it to load, ending without its threads."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import sys
import threading
import time
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:  # it loads numpy, which the router does without
    from jaxserve.server.engine_api import EngineApi

STATE_PERIOD_S = 0.02


def raise_open_files_limit() -> None:
    """Raises the soft limit to the hard one: each connection is an open file, and many systems begin at 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Some systems refuse what they say is the limit.
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def wait_until_ready(engine: EngineApi, stop: asyncio.Event) -> bool:
    """Whether the engine became ready; False when it died or `stop` was set first.

    What is loaded by then stays: the garbage collector is told to leave it out. Going through the hundreds of thousands
    of objects of compilers and libraries, which it would do every few thousand iterations, takes a fifth of a second,
    and every stream would wait for it.
    """
    while not stop.is_set():
        if engine.state == "ready":
            gc.collect()
            gc.freeze()
            return True
        if engine.state == "dead":
            return False
        await asyncio.sleep(STATE_PERIOD_S)
    return False


def exit_later(seconds: float, status: int) -> None:
    """Ends the process after so long, whatever its other threads do then; from any thread."""

    def end() -> None:
        time.sleep(seconds)
        flush_and_exit(status)

    threading.Thread(target=end, name="last-exit", daemon=True).start()


def flush_and_exit(status: int) -> NoReturn:
    """Ends the process without waiting for other threads."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
