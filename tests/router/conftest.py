"""Scripted replicas and routers that end with their test."""

from __future__ import annotations

import pytest

from jaxserve.router.settings import RouterSettings
from tests.router.upstreams import RunningRouter, ScriptedReplica
from tests.server.running import until


@pytest.fixture
def make_replica():
    """`make_replica(script)`: a scripted replica."""
    made = []

    def make(script=None):
        made.append(ScriptedReplica(script))
        return made[-1]

    yield make
    for replica in made:
        replica.stop()


@pytest.fixture
def make_router():
    """`make_router(*replicas, up=..., settings=...)`: a router before them, once `up` of them are in rotation."""
    made = []

    def make(*replicas, up=None, settings=None):
        router = RunningRouter([replica.url for replica in replicas], settings or RouterSettings())
        made.append(router)
        router.until_up(len(replicas) if up is None else up)
        return router

    yield make
    for router in made:
        until(lambda router=router: router.call(lambda: router.pool.num_in_flight) == 0, 5, "no request counted")
        router.stop()
