"""Huge pages: asked for, and nothing changes."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.runtime.huge_pages import use_huge_pages


def test_numbers_stay_and_only_whole_pages_count():
    large = jnp.arange(3 << 20, dtype=jnp.int32)
    before = np.array(large)
    done = use_huge_pages({"large": large, "small": jnp.zeros(10)})
    assert done % (1 << 21) == 0
    assert done <= large.nbytes
    np.testing.assert_array_equal(large, before)
    assert use_huge_pages([jnp.zeros(1000)]) == 0


def test_other_systems_are_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert use_huge_pages([jnp.zeros(3 << 20)]) == 0


@pytest.mark.parametrize("tree", [[], {"none": None}], ids=["empty", "none"])
def test_nothing_is_nothing(tree):
    assert use_huge_pages(tree) == 0
