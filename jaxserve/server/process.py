"""What every process over an engine does: waiting for it to load, ending without its threads."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, NoReturn

from jaxserve.core import write_last

if TYPE_CHECKING:  # it loads numpy, which the router does without
    from jaxserve.server.engine_api import EngineApi

STATE_PERIOD_S = 0.02


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


def end(status: int) -> NoReturn:
    """Ends the process with what its main function returned; one that has failed waits for nobody any more."""
    if status:
        flush_and_exit(status)
    sys.exit(0)


def flush_and_exit(status: int) -> NoReturn:
    """Ends the process without waiting for other threads, or for readers of its output; see `write_last`."""
    try:
        write_last()
    finally:
        os._exit(status)
