"""A prefill and a decode engine in one process, joined over a real connection."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.core import NO_TERMS, SamplingParams, Submission
from jaxserve.disaggregation import PrefillServer, PrefillSettings, RemotePrefill, RemotePrefillSettings
from jaxserve.disaggregation.kv_layout import KVLayout
from jaxserve.disaggregation.metrics import DecodeMetrics, PrefillMetrics
from jaxserve.disaggregation.pull import Puller, Wanted
from jaxserve.engine import AsyncEngine
from tests.server.running import until

PAGE = 4
SETTINGS: dict[str, Any] = dict(
    dtype="float32",
    compile_cache="",
    max_model_len=96,
    max_num_seqs=4,
    max_num_batched_tokens=24,
    page_size=PAGE,
    num_pages=200,
    decode_buckets=(4,),
    prefill_buckets=(24,),
    table_width_buckets=(24,),
)


GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
LENGTHS = (3, 5, 9, 40, 41, 61, 33)


def prompts(seed: int, lengths: tuple[int, ...] = LENGTHS, vocab_size: int = 250) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(length)] for length in lengths]


def make_engine(path: str, role: str, **settings: Any) -> AsyncEngine:
    """A ready engine."""
    engine = AsyncEngine(EngineConfig(model=str(path), disaggregation=role, **(SETTINGS | settings)))
    engine.start()
    until(lambda: engine.state in ("ready", "dead"), 900, "engine ready")
    assert engine.state == "ready", engine.error
    return engine


class Pair:
    """Two engines, the prefill server of one and the other's questions to it.

    Args:
      prefill, decode: ready engines.
      server, remote: settings beside ports.
    """

    def __init__(
        self,
        prefill: AsyncEngine,
        decode: AsyncEngine,
        *,
        server: dict[str, Any] | None = None,
        remote: dict[str, Any] | None = None,
    ) -> None:
        self.prefill, self.decode = prefill, decode
        self.server = PrefillServer(PrefillSettings(port=0, **(server or {})))
        self.server.start(prefill, _metrics(prefill, PrefillMetrics))
        workers = {"workers": (("127.0.0.1", self.server.port),)}
        self.remote = RemotePrefill(RemotePrefillSettings(**(workers | {"min_tokens": PAGE} | (remote or {}))))
        self.remote.start(decode, _metrics(decode, DecodeMetrics))

    def close(self) -> None:
        """Ends the connections; the engines stay."""
        self.remote.stop()
        self.server.stop()

    def generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        remotely: bool = True,
        adapter: str = "",
    ) -> list[list[int]]:
        """Token ids of the outputs, all prompts at once, each choice in turn."""
        return asyncio.run(self._generate(prompts, params, remotely, adapter))

    async def _generate(
        self, prompts: list[list[int]], params: SamplingParams, remotely: bool, adapter: str
    ) -> list[list[int]]:
        submissions = [
            Submission(prompt, params, f"r{index}-{remotely}", NO_TERMS, adapter=adapter)
            for index, prompt in enumerate(prompts)
        ]
        if remotely:
            submissions = await self.remote.fetch(submissions)
        streams = self.decode.submit_all(submissions)
        outputs = await asyncio.gather(*(stream.collect() for stream in streams))
        return [choice.token_ids for output in outputs for choice in output.outputs]

    def count(self, name: str, **labels: str) -> float:
        """A metric of the decode engine."""
        return _sample(self.decode, name, labels)

    def prefill_count(self, name: str, **labels: str) -> float:
        """A metric of the prefill engine."""
        return _sample(self.prefill, name, labels)


_MADE: dict[tuple[int, type], Any] = {}


def _metrics(engine: AsyncEngine, kind: type) -> Any:
    """Those of an engine, which may have several pairs one after another."""
    registry = engine.metrics.registry
    key = (id(registry), kind)
    if key not in _MADE:
        _MADE[key] = kind(registry, engine.model_name)
    return _MADE[key]


def _sample(engine: AsyncEngine, name: str, labels: dict[str, str]) -> float:
    found = engine.metrics.registry.get_sample_value(
        f"jaxserve:{name}", {"model_name": engine.model_name, "engine": "0", **labels}
    )
    assert found is not None, name
    return float(found)


def pull_raw(pair: Pair, prompt: list[int], token: str = "", **others: Any) -> list[Any]:
    layout = KVLayout.of(pair.decode.engine)
    puller = Puller(("127.0.0.1", pair.server.port), layout, token)
    return puller.pull(Wanted("raw", tuple(prompt), **others), 20.0, threading.Event())
