"""Huge pages: asked for, and nothing changes."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models import ModelConfig, RopeConfig
from jaxserve.runtime import kv_pool, make_mesh
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


def test_the_pool_of_one_cpu_is_put_on_them(monkeypatch):
    asked = []
    monkeypatch.setattr(kv_pool, "use_huge_pages", asked.append)
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        max_position_embeddings=100,
    )
    layout = kv_pool.PoolLayout(config, make_mesh(1), 16, "float32", "cpu")
    pool = layout.make(3)
    assert [pages is pool for pages in asked] == [True]
    assert (np.asarray(pool.pages) == 0).all()
