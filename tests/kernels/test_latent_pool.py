"""Latent pools, whose values are the first numbers of the keys: attention, writing, choice of the implementation."""

from __future__ import annotations

import logging
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.pool import pool_shape
from pallas_kernels.kv_write import write_kv
from pallas_kernels.paged_attention import (
    IMPLEMENTATIONS,
    LATENT_IMPLEMENTATIONS,
    choose_implementation,
    paged_attention,
)
from tests.kernels.backends import assert_close, parameters
from tests.kernels.cases import bfloat16, dense, make_case

VALUE_DIM, DIM = 16, 24
CONTEXTS = (1, 3, 4, 5, 14, 0)
OPTIONS = {"plain": {}, "all": {"sliding_window": 3, "logit_softcap": 2.0, "scale": 0.5}}

every_backend = pytest.mark.parametrize("backend", parameters(*LATENT_IMPLEMENTATIONS))


def latent_case(queries=None, **options):
    return make_case(CONTEXTS, queries, heads=4, kv_heads=1, dim=DIM, value_dim=VALUE_DIM, width=9, **options)


@every_backend
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("queries", [None, (1, 2, 4, 1, 9, 0)], ids=["decode", "prefill"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_attention_is_dense_attention_and_sees_no_unused_slot(backend, option, queries, poison):
    case = latent_case(queries, poison=poison, padding=3 if queries else 0)
    out = backend.run(case, **OPTIONS[option])
    assert out.shape == (len(case.q), 4, VALUE_DIM)
    assert_close(out, dense(case, **OPTIONS[option]), case)


@every_backend
@pytest.mark.parametrize("form", ["int8", "float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize("queries", [None, (1, 2, 4, 1, 9, 0)], ids=["decode", "prefill"])
def test_attention_over_rounded_rows_is_dense_attention_of_what_they_stand_for(backend, form, queries):
    options = {"dtype": bfloat16} if form == "bfloat16" else {"quantised": form}
    case = latent_case(queries, **options)
    assert_close(backend.run(case), dense(case), case)


@every_backend
@pytest.mark.parametrize("quantised", [None, "int8"])
def test_padded_rows_hold_the_same(backend, quantised):
    case = latent_case((1, 2, 4, 1, 9, 0), quantised=quantised)
    padding = np.full((*case.pool.shape[:-1], 128 - DIM), 127 if quantised else np.nan, case.pool.dtype)
    padded = replace(case, pool=np.concatenate([case.pool, padding], axis=-1))
    np.testing.assert_array_equal(backend.run(padded), backend.run(case))


def test_a_row_is_padded_where_it_is_written_to_a_padded_pool():
    pool, ids = jnp.full((1, 3, 1, 1, 4, 128), jnp.nan), jnp.asarray([2], jnp.int32)
    found = write_kv(pool, 0, jnp.ones((1, 1, DIM)), None, ids, ids, value_dim=VALUE_DIM)
    np.testing.assert_array_equal(found[0, 2, 0, 0, 2], [1.0] * DIM + [0.0] * (128 - DIM))
    assert pool_shape(1, 3, 1, 4, DIM, "cpu", latent=True, platform="tpu") == pool.shape
    assert pool_shape(1, 3, 1, 4, DIM, "cpu", latent=True, platform="gpu") == (1, 3, 1, 1, 4, DIM)


@pytest.mark.parametrize("dtype", ["float32", "int8", "float8_e4m3fn"])
def test_a_written_row_is_key_and_value(dtype):
    """With two scales: numbers of the value and of the rest are of their own sizes."""
    rng = np.random.default_rng(0)
    quantised = dtype != "float32"
    pool = jnp.zeros((2, 5, 1, 1, 4, DIM), dtype)
    scales = jnp.zeros((2, 5, 2, 1, 4)) if quantised else None
    rows = rng.normal(size=(3, 1, DIM)) * np.where(np.arange(DIM) < VALUE_DIM, 1.0, 100.0)
    page_ids, offsets = jnp.asarray([3, 1, 3], jnp.int32), jnp.asarray([0, 2, 3], jnp.int32)
    found = write_kv(pool, 1, jnp.asarray(rows, jnp.float32), None, page_ids, offsets, scales, value_dim=VALUE_DIM)
    pool, scales = (np.asarray(x) for x in (found if quantised else (found, jnp.ones((2, 5, 2, 1, 4)))))
    stored = pool[1, page_ids, 0, :, offsets].astype(np.float64)
    own = scales[1, page_ids, :, :, offsets]
    stored = stored * np.where(np.arange(DIM) < VALUE_DIM, own[:, 0, :, None], own[:, 1, :, None])
    error = np.abs(stored - rows)
    allowed = {"float32": 1e-5, "int8": 3 / 254, "float8_e4m3fn": 0.2}[dtype]
    assert error[..., :VALUE_DIM].max() < allowed and error[..., VALUE_DIM:].max() < 100 * allowed
    assert not pool[0].astype(np.float32).any() and np.count_nonzero(pool.astype(np.float32).any(axis=(-1))) == 3


def test_a_donated_latent_pool_is_not_copied():
    pool = jax.ShapeDtypeStruct((4, 300, 1, 1, 16, DIM), jnp.float32)
    rows = jax.ShapeDtypeStruct((8, 1, DIM), jnp.float32)
    ids = jax.ShapeDtypeStruct((8,), jnp.int32)

    def write(pool, rows, ids):
        return write_kv(pool, 1, rows, None, ids, ids % 16, value_dim=VALUE_DIM)

    analysis = jax.jit(write, donate_argnums=0).lower(pool, rows, ids).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < 10_000


@pytest.mark.parametrize("name", sorted(set(IMPLEMENTATIONS) - set(LATENT_IMPLEMENTATIONS)))
def test_implementations_without_latent_pools_say_so_and_who_has_them(name):
    message = f"{name} does not take the latent pool of multi-head latent attention; choose auto, reference, cpu"
    with pytest.raises(NotImplementedError, match=message):
        choose_implementation(name, "cpu", latent=True)
    q, pool, layer, table, context, _ = latent_case().args()
    with pytest.raises(NotImplementedError, match=message):
        paged_attention(q, pool, layer, table, context, value_dim=VALUE_DIM, implementation=name)


@pytest.mark.parametrize(("backend", "level"), [("cpu", "INFO"), ("tpu", "WARNING"), ("gpu", "WARNING")])
def test_auto_takes_plain_xla_for_a_latent_pool_and_says_why(backend, level, caplog):
    choose_implementation.cache_clear()
    with caplog.at_level(logging.INFO, "pallas_kernels.paged_attention"):
        assert choose_implementation("auto", backend, "bfloat16", latent=True) == "cpu"
    assert (caplog.records[0].levelname, caplog.records[0].message) == (
        level,
        "paged attention: no kernel takes a latent pool (multi-head latent attention); using plain XLA",
    )


def test_what_does_not_fit_a_latent_pool_is_refused():
    q, pool, layer, table, context, _ = latent_case().args()
    with pytest.raises(ValueError, match=r"keys of 24 numbers with values of 24.*with 0 < value_dim < D"):
        paged_attention(q, pool, layer, table, context, value_dim=DIM)
    with pytest.raises(ValueError, match=r"must be \[L, P, 2, K, S, D\]"):
        paged_attention(q, pool, layer, table, context)
    ids, row = jnp.zeros(2, jnp.int32), jnp.zeros((2, 1, DIM))
    with pytest.raises(ValueError, match="v is given and value_dim 16; a latent pool has no v"):
        write_kv(pool, 1, row, row, ids, ids, value_dim=VALUE_DIM)
    with pytest.raises(NotImplementedError, match="the pool is latent, which mosaic_tpu lacks; xla has it"):
        write_kv(pool, 1, row, None, ids, ids, value_dim=VALUE_DIM, implementation="mosaic_tpu")
