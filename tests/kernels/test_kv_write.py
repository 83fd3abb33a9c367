"""write_kv: what is written where, and that a donated pool is updated in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import quantise, write_kv
from pallas_kernels.paged_attention import paged_attention

SHAPE = (3, 7, 2, 2, 4, 8)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_only_the_named_slots_change(kv_heads):
    rng = np.random.default_rng(0)
    pool = rng.normal(size=(*SHAPE[:3], kv_heads, *SHAPE[4:])).astype(np.float32)
    k, v = rng.normal(size=(2, 4, kv_heads, 8)).astype(np.float32)
    page_ids, offsets = [5, 2, 5, 6], [0, 3, 1, 3]
    wanted = pool.copy()
    for token, (page, offset) in enumerate(zip(page_ids, offsets, strict=True)):
        wanted[1, page, 0, :, offset] = k[token]
        wanted[1, page, 1, :, offset] = v[token]
    found = write_kv(jnp.asarray(pool), 1, k, v, jnp.asarray(page_ids, jnp.int32), jnp.asarray(offsets, jnp.int32))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("form", [(2, 128), (1, 16)], ids=["padded", "packed"])
@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_other_forms_of_the_pool_hold_the_same(form, quantised, implementation):
    rng = np.random.default_rng(0)
    k, v, q = (jnp.asarray(rng.normal(size=(5, heads, 8)), jnp.float32) for heads in (2, 2, 4))
    table, context = jnp.asarray([[3, 5]], jnp.int32), jnp.asarray([5], jnp.int32)
    outputs = []
    for parts, width in ((2, 8), form):
        pool = jnp.zeros((*SHAPE[:2], parts, *SHAPE[3:5], width), jnp.int8 if quantised else jnp.float32)
        scales = jnp.zeros(SHAPE[:5]) if quantised else None
        pool = write_kv(pool, 1, k, v, jnp.repeat(table[0], 4)[:5], jnp.arange(5, dtype=jnp.int32) % 4, scales)
        pool, scales = pool if quantised else (pool, None)
        outputs.append(paged_attention(q[:1], pool, 1, table, context, scales=scales, implementation=implementation))
    np.testing.assert_allclose(*outputs, atol=1e-6)


def test_padding_may_collide_on_the_null_page():
    pool = jnp.zeros(SHAPE)
    k = jnp.ones((3, 2, 8))
    found = np.asarray(write_kv(pool, 0, k, k, jnp.asarray([0, 0, 4], jnp.int32), jnp.asarray([0, 0, 2], jnp.int32)))
    assert (found[0, 4, :, :, 2] == 1).all()
    assert found[:, 1:].sum() == 2 * 2 * 8


def test_values_are_rounded_to_the_pools_dtype():
    pool = jnp.zeros(SHAPE, jnp.bfloat16)
    k = jnp.full((1, 2, 8), 1.001)
    found = write_kv(pool, 0, k, k, jnp.asarray([1], jnp.int32), jnp.asarray([0], jnp.int32))
    assert found.dtype == jnp.bfloat16
    assert (found[0, 1, :, :, 0] == 1.0).all()


def test_shapes_that_do_not_fit_are_refused():
    k = jnp.zeros((2, 2, 8))
    with pytest.raises(ValueError, match=r"must be \[L, P, 2, K, S, D\], \[T, K, D\]"):
        write_kv(jnp.zeros(SHAPE), 0, k, k, jnp.zeros(3, jnp.int32), jnp.zeros(3, jnp.int32))


def test_a_pool_beyond_int32_rows_is_refused():
    pool = jax.ShapeDtypeStruct((80, 2**20, 2, 8, 16, 64), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, 8, 64), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1,), jnp.int32)
    with pytest.raises(ValueError, match="int32 index"):
        jax.eval_shape(lambda pool, k, ids: write_kv(pool, 0, k, k, ids, ids), pool, k, ids)


@pytest.mark.parametrize("layers", ["unrolled", "scanned"])
@pytest.mark.parametrize("tokens", [8, 64])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_donated_pool_is_not_copied(kv_heads, layers, tokens):
    shape = (4, 257, 2, kv_heads, 16, 32)
    pool = jax.ShapeDtypeStruct(shape, jnp.float32)
    pool_bytes = 4 * int(np.prod(shape))

    def layer(index, pool, q, page_ids):
        pool = write_kv(pool, index, q[:, :kv_heads], q[:, -kv_heads:], page_ids, page_ids % 16)
        if tokens == 8:
            table, starts = jnp.broadcast_to(page_ids[:4], (8, 4)), None
        else:
            table, starts = page_ids[None, :4], jnp.asarray([0, tokens], jnp.int32)
        context = jnp.full(table.shape[0], 64, jnp.int32)
        return paged_attention(q, pool, index, table, context, starts, implementation="cpu"), pool

    def step(pool, q, page_ids):
        if layers == "unrolled":
            for index in range(4):
                q, pool = layer(index, pool, q, page_ids)
            return pool, q
        body = lambda index, carry: layer(index, carry[1], carry[0], page_ids)  # noqa: E731
        q, pool = jax.lax.fori_loop(0, 4, body, (q, pool))
        return pool, q

    q = jax.ShapeDtypeStruct((tokens, 4, 32), jnp.float32)
    page_ids = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    analysis = jax.jit(step, donate_argnums=0).lower(pool, q, page_ids).compile().memory_analysis()
    assert analysis.alias_size_in_bytes == pool_bytes
    assert analysis.temp_size_in_bytes < pool_bytes / 8


def one_token(k, dtype):
    """What a page of `dtype` gives back for one token's `k`, as float32[K, D]; its V is 2 k."""
    pool, scales = jnp.zeros(SHAPE, dtype), jnp.full(SHAPE[:5], jnp.nan)
    place = jnp.asarray([3], jnp.int32), jnp.asarray([1], jnp.int32)
    pool, scales = write_kv(pool, 2, k[None], 2 * k[None], *place, scales=scales)
    assert (pool.dtype, scales.dtype) == (jnp.dtype(dtype), jnp.float32)
    read = np.asarray(pool).astype(np.float32) * np.asarray(scales)[..., None]
    assert np.isfinite(np.asarray(scales)).sum() <= 2 * SHAPE[3]  # no other token's scale was written
    np.testing.assert_array_equal(read[2, 3, 1, :, 1], 2 * read[2, 3, 0, :, 1])
    return read[2, 3, 0, :, 1]


@pytest.mark.parametrize(("dtype", "relative", "steps"), [("int8", 0.0, 0.5), ("float8_e4m3fn", 1 / 16, 2**-10)])
def test_quantised_rows_come_back_within_half_a_step(dtype, relative, steps):
    rng = np.random.default_rng(0)
    k = jnp.asarray(rng.normal(size=(2, 8)) * [[1e-6], [1e6]], jnp.float32)
    scale = np.abs(k).max(axis=-1, keepdims=True) / (127 if dtype == "int8" else 448)
    error = np.abs(one_token(k, dtype) - k)
    assert (error <= np.maximum(np.abs(k) * relative, scale * steps) * 1.0001).all()
    largest = np.abs(k).argmax(axis=-1)
    np.testing.assert_allclose(one_token(k, dtype)[[0, 1], largest], k[np.asarray([0, 1]), largest], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_zeros_stay_zeros_and_what_is_not_finite_stays_in_its_row(dtype):
    k = np.zeros((2, 8), np.float32)
    k[1] = np.arange(8)
    out = one_token(jnp.asarray(k), dtype)
    assert (out[0] == 0).all()
    assert out[1, 7] == 7
    for bad in (np.nan, np.inf, -np.inf):
        k[0, 3] = bad
        out = one_token(jnp.asarray(k), dtype)
        assert not np.isfinite(out[0]).any()
        assert out[1, 7] == 7
    assert (one_token(jnp.full((2, 8), 1e-44), dtype) == 0).all()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_quantising_what_was_quantised_changes_nothing(dtype):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(5, 2, 16)), jnp.float32)
    stored, scales = quantise(x, dtype)
    again, same = quantise(stored.astype(jnp.float32) * scales[..., None], dtype)
    np.testing.assert_array_equal(np.asarray(stored).astype(np.float32), np.asarray(again).astype(np.float32))
    np.testing.assert_allclose(scales, same, rtol=1e-6)


def test_scales_and_eight_bit_pools_come_together():
    k, place = jnp.zeros((1, 2, 8)), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="int8 without scales; int8 and float8_e4m3fn pools have scales"):
        write_kv(jnp.zeros(SHAPE, jnp.int8), 0, k, k, place, place)
    with pytest.raises(ValueError, match="float32 with scales"):
        write_kv(jnp.zeros(SHAPE), 0, k, k, place, place, jnp.zeros(SHAPE[:5]))
    with pytest.raises(ValueError, match=r"scales is float32\[3, 7, 2, 2, 8\]"):
        write_kv(jnp.zeros(SHAPE, jnp.int8), 0, k, k, place, place, jnp.zeros((*SHAPE[:4], 8)))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_donated_int8_pool_and_its_scales_are_not_copied(kv_heads):
    shape = (4, 257, 2, kv_heads, 16, 32)
    pool, scales = jax.ShapeDtypeStruct(shape, jnp.int8), jax.ShapeDtypeStruct(shape[:5], jnp.float32)
    k, ids = jax.ShapeDtypeStruct((8, kv_heads, 32), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32)

    def step(pool, scales, k, ids):
        def body(layer, carry):
            return write_kv(carry[0], layer, k, k, ids, ids % 16, carry[1])

        return jax.lax.fori_loop(0, 4, body, (pool, scales))

    analysis = jax.jit(step, donate_argnums=(0, 1)).lower(pool, scales, k, ids).compile().memory_analysis()
    assert analysis.alias_size_in_bytes == pool.size + 4 * scales.size
    assert analysis.temp_size_in_bytes < 4 * scales.size / 8
