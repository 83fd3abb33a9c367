"""The TPU kernel through libtpu, for targets that are not at hand: it compiles, in place and within limits.

Each program is a step as a model takes it: a donated pool goes through a scan over layers that writes new
keys and values and attends. What is asserted is what the compiler reports; nothing is run.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.common.deviceless import TARGETS, compile_for
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention.mosaic_tpu import paged_attention_mosaic_tpu
from pallas_kernels.paged_attention.specs import SPECS, Spec

pytest.importorskip("libtpu")
pytestmark = pytest.mark.tpu_compile

TPUS = [name for name, target in TARGETS.items() if target.platform == "tpu"]
MIB = 2**20


def spec(name, heads, *, rows=64, tokens=0, width=128, dim=128, layers=4, pages=2048, **rest):
    """`heads` is (H, K); prefill when `tokens` are given."""
    sizes = dict(num_heads=heads[0], num_kv_heads=heads[1], head_dim=dim, num_layers=layers, num_pages=pages)
    return Spec(name, tokens or rows, rows, width, **sizes, prefill=tokens > 0, **rest)


BY_NAME = {one.name: one for one in SPECS}
MODELS = [BY_NAME["llama-3-8b decode"], BY_NAME["llama-3-8b prefill"]]
"""Compiled for every target; the rest for one target each, in turn."""

SHARDS = [
    spec("8b/4 decode", (8, 2), width=512),
    spec("70b/8 decode", (8, 1), width=1024),
    spec("70b/4 prefill", (16, 2), rows=8, tokens=512),
    spec("70b/8 prefill", (8, 1), rows=8, tokens=512),
    spec("smollm2 packed decode", (9, 3), dim=64, rows=8, width=16),
    spec("smollm2 packed prefill", (9, 3), dim=64, rows=8, tokens=512, width=32),
    spec("float32 decode", (32, 8), dtype="float32", pages=1024),
    spec("float32 prefill", (32, 8), rows=8, tokens=256, dtype="float32", pages=1024),
    spec("d256 decode", (16, 8), dim=256),
    spec("d256 prefill", (16, 8), rows=8, tokens=256, dim=256),
    spec("d96 padded decode", (32, 32), dim=96, pages=512),
    spec("d80 padded prefill", (8, 8), rows=8, tokens=256, dim=80, pages=512),
    spec("pages of 256 decode", (32, 8), page_size=256, width=16, pages=128),
    spec("wide table decode", (32, 8), rows=512, width=4096),
]
QUANTISED = [
    spec("int8 decode", (32, 8), page_size=128, width=16, pages=256, kv_dtype="int8"),
    spec("int8 prefill", (32, 8), rows=8, tokens=512, page_size=128, width=16, pages=256, kv_dtype="int8"),
    spec("float8 decode", (8, 1), page_size=128, width=16, pages=2048, kv_dtype="float8_e4m3fn"),
    spec("float8 prefill", (8, 2), rows=8, tokens=512, page_size=128, width=16, pages=1024, kv_dtype="float8_e4m3fn"),
]
WITH_OPTIONS = [spec("options decode", (40, 8)), spec("options prefill", (40, 8), rows=8, tokens=256)]
OPTIONS = {"sliding_window": 1024, "logit_softcap": 30.0}


def in_turn(specs):
    """Each spec with a target, so that every target gets some."""
    targets = [TPUS[n % len(TPUS)] for n in range(len(specs))]
    return [pytest.param(target, one, id=f"{target}-{one.name}") for target, one in zip(targets, specs, strict=True)]


def pool_shape(one):
    """In one of the forms that the kernel takes: packed for D = 64, padded to 128 below 128."""
    layers, pages, _, kv_heads, page_size, dim = one.pool_shape("mosaic_tpu")
    return (layers, pages, 1 if dim == 64 else 2, kv_heads, page_size, max(128, dim))


def write(pool, scales, layer, k, v, pages, offsets):
    """`write_kv`; by the same kind of scatter where keys and values share a row."""
    if pool.shape[2] == 2:
        lanes = ((0, 0), (0, 0), (0, pool.shape[-1] - k.shape[-1]))
        written = write_kv(pool, layer, jnp.pad(k, lanes), jnp.pad(v, lanes), pages, offsets, scales)
        return (written, None) if scales is None else written
    new = jnp.concatenate([k, v], axis=-1).astype(pool.dtype)
    return pool.at[layer, pages[:, None], 0, jnp.arange(pool.shape[3]), offsets[:, None]].set(new), scales


def step(options, pool, scales, q, table, context, starts, pages, offsets, sinks):
    """All layers: new K and V (of the queries, for want of a model) into the pool, then attention."""
    attend = partial(paged_attention_mosaic_tpu, scale=q.shape[-1] ** -0.5, sinks=sinks, **options)

    def one_layer(carry, layer):
        q, pool, scales = carry
        kv = q[:, : pool.shape[3]]
        pool, scales = write(pool, scales, layer, kv, kv, pages, offsets)
        return (attend(q, pool, layer, table, context, starts, scales=scales), pool, scales), None

    layers = jnp.arange(pool.shape[0], dtype=jnp.int32)
    return jax.lax.scan(one_layer, (q, pool, scales), layers)[0]


def compile_step(target, one, *, sinks=False, **options):
    """The compiled step, its pool and scales donated."""
    q, _, _, table, context, starts, scales = one.abstract_args("mosaic_tpu")
    pool = jax.ShapeDtypeStruct(pool_shape(one), one.pool_dtype)
    places = jax.ShapeDtypeStruct((one.num_tokens,), jnp.int32)
    logits = jax.ShapeDtypeStruct((one.num_heads,), jnp.float32) if sinks else None
    options = {"sliding_window": None, "logit_softcap": None} | options
    args = (pool, scales, q, table, context, starts, places, places, logits)
    return compile_for(TARGETS[target], partial(step, options), args, donate=(0, 1))


def assert_in_place(one, compiled):
    """The pool and its scales are updated where they are, and nothing as large is made on the way."""
    memory = compiled.memory_analysis()
    size = math.prod(pool_shape(one)) * one.pool_dtype.itemsize
    temp = memory.temp_size_in_bytes
    alias = memory.alias_size_in_bytes
    print(f"\n{one.name}: pool {size / MIB:.0f} MiB, aliased {alias / MIB:.0f}, temp {temp / MIB:.1f}")
    assert alias >= size
    assert temp < min(size // 3, 96 * MIB)


@pytest.mark.parametrize("target", TPUS)
@pytest.mark.parametrize("one", MODELS, ids=lambda one: one.name)
def test_llama_8b_step_compiles_in_place(target, one):
    assert_in_place(one, compile_step(target, one))


@pytest.mark.parametrize(("target", "one"), in_turn(SHARDS))
def test_other_shapes_compile_in_place(target, one):
    assert_in_place(one, compile_step(target, one))


@pytest.mark.parametrize(("target", "one"), in_turn(QUANTISED))
def test_quantised_pools_compile_in_place(target, one):
    assert_in_place(one, compile_step(target, one))


@pytest.mark.parametrize("one", WITH_OPTIONS, ids=lambda one: one.name)
def test_window_softcap_and_sinks_compile(one):
    assert_in_place(one, compile_step("v5e", one, sinks=True, **OPTIONS))


def test_a_pool_of_more_than_2_to_the_31_elements_compiles():
    one = spec("large pool", (8, 8), layers=32, pages=8192 * 3)
    assert one.num_layers * one.num_pages * 2 * 8 * 16 * 128 > 2**33
    assert_in_place(one, compile_step("v5p", one))
