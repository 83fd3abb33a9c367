"""What every process over an engine does."""

import asyncio
import gc

from jaxserve.server.process import wait_until_ready
from tests.server.fake_engine import FakeEngine


def test_what_is_loaded_when_the_engine_is_ready_is_left_out_of_garbage_collection():
    loaded = len(gc.get_objects())
    try:
        assert asyncio.run(wait_until_ready(FakeEngine(), asyncio.Event()))
        assert len(gc.get_objects()) < loaded // 10, "a collection goes through what was loaded"
        assert gc.get_freeze_count() > loaded // 2
    finally:
        gc.unfreeze()


def test_a_dead_engine_and_a_stop_end_the_wait():
    dead, stopped = FakeEngine(), FakeEngine()
    dead.state, stopped.state = "dead", "loading"
    stop = asyncio.Event()
    assert not asyncio.run(wait_until_ready(dead, stop))
    stop.set()
    assert not asyncio.run(wait_until_ready(stopped, stop))
    assert not gc.get_freeze_count()
