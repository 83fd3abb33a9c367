"""Fixtures shared by all tests."""

from __future__ import annotations

import pytest
from hypothesis import settings

from jaxserve.testing.tiny import write_tiny_model

# A machine may stand still for as long as it likes; what hangs is ended by pytest's own limit.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory):
    """A Hugging Face directory of the tiny random Llama with a byte-level tokenizer."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session", autouse=True)
def compile_cache(tmp_path_factory):
    """A compilation cache for the session: engines of one shape compile once."""
    import jax

    from jaxserve.runtime.compile_cache import enable_compile_cache

    yield str(enable_compile_cache(str(tmp_path_factory.mktemp("xla"))))
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(scope="session")
def make_tiny_engine(tiny_model_dir):
    """`make_tiny_engine(**settings)`: a ready AsyncEngine on the tiny model, with a gate; one bucket of each kind."""
    from jaxserve.config import EngineConfig
    from jaxserve.engine import AsyncEngine
    from tests.server.gated_engine import GatedEngine
    from tests.server.running import until

    engines = []

    def make(**settings):
        defaults = dict(
            dtype="float32",
            max_model_len=128,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            page_size=16,
            num_pages=80,
            decode_buckets=(4,),
            prefill_buckets=(64,),
            table_width_buckets=(8,),
            served_model_name="tiny",
            compile_cache="",
        )
        config = EngineConfig(model=str(tiny_model_dir), **(defaults | settings))
        engine = AsyncEngine(config, factory=GatedEngine)
        engine.start()
        engines.append(engine)
        until(lambda: engine.state in ("ready", "dead"), 120, "engine ready")
        assert engine.state == "ready", engine.error
        return engine

    yield make
    for engine in engines:
        engine.engine.gate.set()
        engine.shutdown()


@pytest.fixture(scope="session")
def tiny_server(make_tiny_engine):
    """HTTP and gRPC fronts over the tiny model, shared by the session; see `tests.server.conftest.server`."""
    from tests.server.running import RunningServer

    engine = make_tiny_engine()
    server = RunningServer(lambda: engine)
    yield server
    server.stop()
