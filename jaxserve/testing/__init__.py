"""Builders and fakes for tests."""

from jaxserve.testing.tiny import write_tiny_model

__all__ = ["write_tiny_model"]
