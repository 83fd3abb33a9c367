"""What native_cpu promises beyond the contract: the same bits whatever is computed beside a query."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numba import njit

from pallas_kernels.matmul.tile import COLUMNS, HAS_BF16_DOT
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.native_cpu_few import KEYS, make_scores, make_sums

LENGTH, PAGES = 300, 40


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def sequence(request):
    return make_sequence(request.param)


def make_sequence(dtype, heads=6, kv_heads=2, dim=16, pool_dtype=None):
    """Queries [T, H, D] of one sequence and its pool, with NaN where nothing is."""
    rng = np.random.default_rng(1)
    pool = rng.standard_normal((2, PAGES, 2, kv_heads, 16, dim))
    table = 1 + np.arange(-(-LENGTH // 16))
    pool[:, len(table) + 1 :] = np.nan
    pool[:, table[-1], :, :, LENGTH % 16 :] = np.nan
    queries = rng.standard_normal((LENGTH, heads, dim))
    pool = jnp.asarray(pool, jnp.dtype(pool_dtype or dtype))
    return jnp.asarray(queries, jnp.dtype(dtype)), pool, jnp.asarray(table[None], jnp.int32)


def attend(sequence, chunks, **options):
    """All queries, computed chunk by chunk."""
    queries, pool, table = sequence
    outs, first = [], 0
    for size in chunks:
        last = first + size
        context, starts = jnp.asarray([last], jnp.int32), jnp.asarray([0, size], jnp.int32)
        call = (queries[first:last], pool, 1, table, context, starts)
        outs.append(paged_attention(*call, implementation="native_cpu", **options))
        first = last
    assert first == LENGTH
    return np.asarray(jnp.concatenate(outs).astype(jnp.float32))


@pytest.mark.parametrize("options", [{}, {"sliding_window": 70}, {"logit_softcap": 5.0}], ids=str)
def test_chunks_do_not_change_a_bit(sequence, options):
    whole = attend(sequence, [LENGTH], **options)
    assert np.isfinite(whole).all()
    np.testing.assert_array_equal(whole, attend(sequence, [7] * 42 + [6], **options))
    np.testing.assert_array_equal(whole, attend(sequence, [1, 127, 128, 44], **options))


SHAPES = {"1": (2, 2, 64), "2": (4, 2, 96), "3": (6, 2, 16), "4": (4, 1, 128), "5": (5, 1, 32)}
"""(query heads, KV heads, head dimension) by the first two's ratio: up to 4 are not packed."""


@pytest.mark.parametrize("options", [{}, {"sliding_window": 133}], ids=str)
@pytest.mark.parametrize("dtypes", [("float32", None), ("bfloat16", None), ("bfloat16", "float32")], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_decode_gives_the_bits_of_prefill(shape, dtypes, options):
    sequence = make_sequence(dtypes[0], *shape, dtypes[1])
    queries, pool, table = sequence
    whole = attend(sequence, [LENGTH], **options)
    rows = jnp.asarray([0, 5, 127, 128, 161, 299])
    tables, contexts = jnp.tile(table, (len(rows), 1)), (rows + 1).astype(jnp.int32)
    alone = paged_attention(queries[rows], pool, 1, tables, contexts, implementation="native_cpu", **options)
    assert np.isfinite(whole).all()
    np.testing.assert_array_equal(np.asarray(alone.astype(jnp.float32)), whole[rows])


@pytest.mark.parametrize(
    "dtype",
    ["float32", pytest.param("bfloat16", marks=pytest.mark.skipif(not HAS_BF16_DOT, reason="no instruction for it"))],
)
def test_few_queries_with_and_without_the_instruction(dtype):
    count, dim = 3, 64
    scores, sums = make_scores(count), make_sums(count, 2)

    @njit
    def run(q, rows, keys, weights, out, added):
        for first in range(0, COLUMNS, KEYS):
            to = out.ctypes.data + 4 * first
            at = rows[first:].ctypes.data
            scores(q[0, 0], keys[0, 0], at, 2 * dim, q.ctypes.data, to, 4 * COLUMNS, at)
        of = (rows.ctypes.data, 0, 0, keys.shape[0], weights.ctypes.data, weights.strides[0])
        sums(q[0, 0], keys[0, 0], *of, added.ctypes.data, 4 * dim, rows.ctypes.data)

    def as_factors(x):
        return np.asarray(x).view(np.uint16).copy() if dtype == "bfloat16" else np.asarray(x, np.float32)

    rng = np.random.default_rng(0)
    q, keys, weights = (jnp.asarray(rng.standard_normal((n, dim)), jnp.bfloat16) for n in (count, COLUMNS, count))
    weights = weights[:, :COLUMNS]
    bits = np.asarray(keys).view(np.uint16)
    rows = bits.ctypes.data + 2 * dim * rng.permutation(COLUMNS)
    out, added = np.zeros((count, COLUMNS), np.float32), np.zeros((count, dim), np.float32)
    run(as_factors(q), rows, bits, as_factors(weights), out, added)
    lying = np.asarray(keys, np.float32)[(rows - bits.ctypes.data) // (2 * dim)]
    np.testing.assert_allclose(out, np.asarray(q, np.float32) @ lying.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(added, np.asarray(weights, np.float32) @ lying, rtol=1e-4, atol=1e-4)


def test_missing_numba_names_the_extra(monkeypatch, sequence):
    monkeypatch.setattr("pallas_kernels.common.native.is_available", lambda: False)
    queries, pool, table = sequence
    with pytest.raises(ImportError, match=r"jaxserve\[cpu\]"):
        jax.eval_shape(
            lambda q: paged_attention(q, pool, 1, table, jnp.asarray([9]), implementation="native_cpu"), queries[:1]
        )
