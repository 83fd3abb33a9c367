"""One soak, from the first probe to the last rest."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from jaxserve.soak.findings import Findings
from jaxserve.soak.grpc_clients import GrpcClients
from jaxserve.soak.http_clients import HttpClients, storm
from jaxserve.soak.kinds import Action, Sizes
from jaxserve.soak.probes import PROBES, Probes
from jaxserve.soak.schedule import Round, Shape, make_round
from jaxserve.soak.watch import Limits, Watch

PROBE_S = 1.0
"""Between probes."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The server that is soaked.

    Attributes:
      url, grpc_address: where.
      alive: whether its process runs.
    """

    url: str
    grpc_address: str
    alive: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Soaked:
    """What a soak gives.

    Attributes:
      seconds: that it took.
      num_rounds, num_actions: that were run.
    """

    findings: Findings
    watch: Watch
    seconds: float
    num_rounds: int
    num_actions: int


async def soak(subject: Subject, seed: int, shape: Shape, sizes: Sizes, limits: Limits, faults: bool) -> Soaked:
    """Runs rounds until `shape.seconds` have passed, or the server's process has ended.

    Raises:
      RuntimeError: the server gives no fixed answers when nothing else runs.
    """
    findings = Findings(faults_allowed=faults)
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(subject.url, timeout=timeout) as looking,
        aiohttp.ClientSession(subject.url, timeout=timeout) as probing,
    ):
        probes, watch = Probes(probing, findings), Watch(looking, findings, limits)
        await probes.learn()
        await watch.start()
        num_rounds = num_actions = 0
        while time.monotonic() - findings.began_at < shape.seconds and subject.alive():
            played = make_round(seed, num_rounds, num_actions, shape, sizes)
            await _play(subject, played, random.Random(f"{seed}:storm:{num_rounds}"), shape, findings, probes)
            num_rounds, num_actions = num_rounds + 1, num_actions + len(played.actions)
            if subject.alive():
                await watch.rest()
        if not subject.alive():
            findings.breach("process", "the server's process has ended")
        else:
            for number in range(len(PROBES)):
                await probes.check(number, must_answer=True)
        if not watch.rests:
            findings.breach("idle-clean", "the server has not answered at any rest")
        await watch.stop()
    return Soaked(findings, watch, time.monotonic() - findings.began_at, num_rounds, num_actions)


async def _play(
    subject: Subject, played: Round, rng: random.Random, shape: Shape, findings: Findings, probes: Probes
) -> None:
    """All actions of a round, probes beside them; returns when the last has ended."""
    began = time.monotonic()
    async with HttpClients(subject.url, findings) as http, GrpcClients(subject.grpc_address, findings) as grpc:

        async def at(seconds: float) -> None:
            await asyncio.sleep(max(began + seconds - time.monotonic(), 0.0))

        async def act(action: Action) -> None:
            await at(action.at)
            clients = grpc if action.kind.startswith("grpc") else http
            await clients.do(action)

        async def come_and_go() -> None:
            await at(played.storm_at)
            await storm(subject.url, rng, shape.storm, findings)

        async def probe() -> None:
            number = 0
            while True:
                await probes.check(number)
                number += 1
                await asyncio.sleep(PROBE_S)

        probing = asyncio.create_task(probe())
        await asyncio.gather(come_and_go(), *map(act, played.actions))
        probing.cancel()
        ended = await asyncio.gather(probing, return_exceptions=True)
        if isinstance(ended[0], Exception):
            raise ended[0]
