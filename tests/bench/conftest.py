"""Fixtures of the measurements' tests."""

import jax
import pytest


@pytest.fixture(scope="session")
def bench_cache(tmp_path_factory):
    """A cache folder for the session: measurements of one shape compile once."""
    return tmp_path_factory.mktemp("bench_cache")


@pytest.fixture
def own_cache(bench_cache, monkeypatch):
    """Compiled programs go to a folder of the tests; the process's own setting comes back after each."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(bench_cache))
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)
