"""Processes that tests start, and adapters they serve."""

import pytest

from jaxserve.testing.tiny_lora import write_tiny_lora
from tests.hosts.processes import Processes


@pytest.fixture
def processes(tmp_path):
    started = Processes(tmp_path)
    yield started
    started.end()


@pytest.fixture(scope="session")
def adapters(tmp_path_factory, tiny_model_dir):
    """A folder with the adapters a and b of the tiny model."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("ab"):
        write_tiny_lora(folder / name, tiny_model_dir, seed=seed)
    return folder
