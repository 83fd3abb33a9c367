"""Small AsyncEngines of the tests."""

import asyncio

from jaxserve.config import EngineConfig
from jaxserve.engine import AsyncEngine


def small_config(tiny_model_dir):
    """Settings of a small engine on the tiny model."""
    return EngineConfig(
        model=str(tiny_model_dir),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        num_pages=40,
        max_queue_requests=4,
        decode_buckets=(4,),
        prefill_buckets=(32,),
        table_width_buckets=(8,),
        compile_cache="",
    )


def start(config, **kwargs):
    engine = AsyncEngine(config, **kwargs)
    engine.start()
    return engine


async def wait_for(condition, seconds=60.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def idle(engine):
    scheduler = engine.engine.scheduler
    return not engine.engine.has_work and scheduler.idle and scheduler.pages_owned == 0
