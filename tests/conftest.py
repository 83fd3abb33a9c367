"""Fixtures shared by all tests."""

import pytest

from jaxserve.testing.tiny import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory):
    """A Hugging Face directory of the tiny random Llama with a byte-level tokenizer."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
