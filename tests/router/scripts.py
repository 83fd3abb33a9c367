"""What scripted replicas do, and what is asked of them."""

from __future__ import annotations

import asyncio

from jaxserve.router.settings import RouterSettings
from jaxserve.routing import RoutingSettings
from tests.router.upstreams import EVENT

BODY = {"model": "m", "prompt": "The sea is wide", "max_tokens": 4, "stream": True}
ROUND_ROBIN = RouterSettings(routing=RoutingSettings(policy="round_robin"))


def refuse(status, body=b'{"error": {"message": "no"}}', *headers):
    async def script(exchange):
        await exchange.answer(body, status, *headers)

    return script


async def reset(exchange):
    exchange.reset()


async def headers_then_reset(exchange):
    await exchange.begin_stream()
    exchange.reset()


async def half_a_stream(exchange):
    await exchange.begin_stream()
    await exchange.chunk(EVENT)
    await exchange.chunk(EVENT + EVENT[:20])
    await asyncio.sleep(0.1)  # a reset may overtake what was sent just before it
    exchange.reset()
