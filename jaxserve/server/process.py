"""What every process over an engine does: wait for it to load, and end without waiting for its threads."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import NoReturn

from jaxserve.server.engine_api import EngineApi

STATE_PERIOD_S = 0.02


async def wait_until_ready(engine: EngineApi, stop: asyncio.Event) -> bool:
    """Whether the engine became ready; False when it died or `stop` was set first."""
    while not stop.is_set():
        if engine.state == "ready":
            return True
        if engine.state == "dead":
            return False
        await asyncio.sleep(STATE_PERIOD_S)
    return False


def flush_and_exit(status: int) -> NoReturn:
    """Ends the process without waiting for other threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
