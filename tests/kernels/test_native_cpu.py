"""What native_cpu promises beyond the contract: the same bits whatever is computed beside a query."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention

LENGTH, PAGES = 300, 40


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def sequence(request):
    """Queries [T, 6, 16] of one sequence and its pool, with NaN where nothing is."""
    rng = np.random.default_rng(1)
    pool = rng.standard_normal((2, PAGES, 2, 2, 16, 16))
    table = 1 + np.arange(-(-LENGTH // 16))
    pool[:, len(table) + 1 :] = np.nan
    pool[:, table[-1], :, :, LENGTH % 16 :] = np.nan
    queries = rng.standard_normal((LENGTH, 6, 16))
    kind = jnp.dtype(request.param)
    return jnp.asarray(queries, kind), jnp.asarray(pool, kind), jnp.asarray(table[None], jnp.int32)


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


def test_decode_gives_the_bits_of_prefill(sequence):
    queries, pool, table = sequence
    whole = attend(sequence, [LENGTH])
    rows = jnp.asarray([0, 5, 127, 128, 299])
    alone = paged_attention(
        queries[rows], pool, 1, jnp.tile(table, (5, 1)), (rows + 1).astype(jnp.int32), implementation="native_cpu"
    )
    np.testing.assert_array_equal(np.asarray(alone.astype(jnp.float32)), whole[rows])


def test_missing_numba_names_the_extra(monkeypatch, sequence):
    monkeypatch.setattr("pallas_kernels.common.native.is_available", lambda: False)
    queries, pool, table = sequence
    with pytest.raises(ImportError, match=r"jaxserve\[cpu\]"):
        jax.eval_shape(
            lambda q: paged_attention(q, pool, 1, table, jnp.asarray([9]), implementation="native_cpu"), queries[:1]
        )
