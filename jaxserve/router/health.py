"""Probes: asks each replica, over and over, whether it is ready, what it serves and how loaded it is.

`/ready` decides, or `/health` of servers without it. `/load` and `/v1/models` are asked of ready replicas, and a server
that has them not, or wants a key for them, is routed to all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import orjson

from jaxserve.router.pool import Replica, ReplicaPool
from jaxserve.router.settings import HealthSettings
from jaxserve.router.upstream import FAILURES, Upstream

log = logging.getLogger("jaxserve.router")

_DOWN_INTERVAL_S = 0.25
"""Between probes of a replica that is out of rotation, at most: a refusal costs nothing, and it is back sooner."""


class HealthChecker:
    """Probes every replica until it is cancelled. A probe that fails in itself counts as one without an answer."""

    def __init__(self, pool: ReplicaPool, upstream: Upstream, settings: HealthSettings) -> None:
        self._pool = pool
        self._upstream = upstream
        self._settings = settings
        self._told: set[tuple[int, str, int]] = set()

    async def run(self) -> None:
        """Never returns."""
        async with asyncio.TaskGroup() as group:
            for replica in self._pool.replicas:
                group.create_task(self._watch(replica))

    async def _watch(self, replica: Replica) -> None:
        is_told = False
        while True:
            replica.probe_now.clear()
            try:
                await self.probe(replica)
                is_told = False
            except Exception as error:
                if not is_told:
                    log.exception("replica %s could not be probed; this is tried again", replica.name)
                is_told = True
                self._pool.unanswered(replica, error)
            down = replica not in self._pool.in_rotation
            wait_s = min(self._settings.interval_s, _DOWN_INTERVAL_S) if down else self._settings.interval_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await replica.probe_now.wait()

    async def probe(self, replica: Replica) -> None:
        """One round."""
        try:
            status, body = await self._get(replica, "/ready")
            if status == 404:
                status, body = await self._get(replica, "/health")
        except FAILURES as error:
            self._pool.unanswered(replica, error)
            return
        if status != 200:
            self._pool.unready(replica, f"it is not ready: {status}{_state(body)}")
            return
        models = model_names(await self._ask(replica, "/v1/models"))
        self._pool.tells(replica, models=models, load=await self._ask(replica, "/load"))
        self._pool.ready(replica)

    async def _ask(self, replica: Replica, path: str) -> dict[str, Any]:
        """A JSON object, empty where the replica does not give one."""
        try:
            status, body = await self._get(replica, path)
            found = orjson.loads(body) if status == 200 else {}
        except (*FAILURES, orjson.JSONDecodeError):
            return {}
        seen = (replica.number, path, status)
        if status != 200 and seen not in self._told:
            self._told.add(seen)
            log.warning("replica %s answers %s with %d; routing goes on without it", replica.name, path, status)
        return found if isinstance(found, dict) else {}

    async def _get(self, replica: Replica, path: str) -> tuple[int, bytes]:
        return await self._upstream.get(replica.url + path, self._settings.timeout_s, self._settings.api_key)


def model_names(listed: dict[str, Any]) -> list[str]:
    """The names in an answer of `/v1/models`; what is none is left out."""
    data = listed.get("data")
    cards = data if isinstance(data, list) else []
    names = [card.get("id") for card in cards if isinstance(card, dict)]
    return [name for name in names if isinstance(name, str)]


def _state(body: bytes) -> str:
    """What a replica says of its state, in brackets."""
    try:
        state = orjson.loads(body)["state"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ""
    return f" ({str(state)[:50]})"
