"""The contract of paged_attention, for every implementation, against a dense oracle in float64.

Every case holds poison wherever nothing may be read and has the pool's first and last page in use. Kernels
run in Pallas' interpreter here; what the interpreter would take long for is marked slow. KRN-1, KRN-3,
KRN-4 and KRN-7 are mistakes seen in other kernels.
"""

from __future__ import annotations

import itertools
import logging

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import KERNELS, choose_implementation, paged_attention
from tests.kernels.backends import BACKENDS, assert_close, parameters
from tests.kernels.cases import bfloat16, dense, make_case

SINKS = np.linspace(-2.0, 3.0, 4)
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 5},
    "window_of_one": {"sliding_window": 1},
    "window_beyond_context": {"sliding_window": 1000},
    "softcap": {"logit_softcap": 1.5},
    "sinks": {"sinks": SINKS},
    "no_sinks": {"sinks": np.full(4, -np.inf)},
    "scale": {"scale": 0.9},
    "all": {"sliding_window": 3, "logit_softcap": 2.0, "sinks": SINKS, "scale": 0.5},
}
HEADS = {"1": (2, 2), "2": (4, 2), "4": (8, 2), "5": (5, 1), "8": (8, 1)}
"""(query heads, KV heads) by their ratio."""

every_backend = pytest.mark.parametrize("backend", parameters())
"""Kernels, which are interpreted, are slow."""


def backends_and(values, quick):
    """Every backend with every value; a kernel with a value not in `quick` is slow."""
    return [
        pytest.param(
            *backend.values,
            value,
            id=f"{backend.id}-{value}",
            marks=[*backend.marks, *([pytest.mark.slow] if _is_slow(backend, value, quick) else [])],
        )
        for backend in parameters(slow=False)
        for value in values
    ]


def _is_slow(backend, value, quick):
    return backend.id in KERNELS and value not in quick


def lengths(size):
    """Context lengths around a page's end."""
    return (1, size - 1, size, size + 1, 3 * size + 2)


def case_of(backend, contexts, queries=None, **sizes):
    """A case of the backend's page size, head dimension and dtype unless `sizes` says otherwise."""
    own = {"page_size": backend.page_size, "dim": backend.dim, "dtype": jnp.dtype(backend.dtype)}
    return make_case(contexts, queries, **(own | sizes))


def ragged_prefill(size):
    """KRN-3: every context with every number of queries that it can end in, and a padding row."""
    pairs = [(context, count) for context, count in itertools.product(lengths(size), (1, 2, 5)) if count <= context]
    contexts, queries = zip(*pairs, strict=True)
    return [*contexts, 0], [*queries, 0]


@pytest.mark.parametrize(("backend", "option"), backends_and(OPTIONS, quick=()))
def test_krn_3_decode_of_ragged_rows_is_dense_attention(backend, option):
    case = case_of(backend, [*lengths(backend.page_size), 0], width=9)
    assert_close(backend.run(case, **OPTIONS[option]), dense(case, **OPTIONS[option]), case)


@pytest.mark.parametrize(("backend", "option"), backends_and(OPTIONS, quick=()))
def test_krn_3_prefill_of_ragged_rows_is_dense_attention(backend, option):
    case = case_of(backend, *ragged_prefill(backend.page_size), width=9, padding=3)
    assert_close(backend.run(case, **OPTIONS[option]), dense(case, **OPTIONS[option]), case)


@pytest.mark.parametrize(
    ("backend", "poison"), backends_and(itertools.product(("nan", "inf", "-inf"), ("k", "v", "kv")), [("nan", "kv")])
)
@pytest.mark.parametrize("queries", [None, 2], ids=["decode", "prefill"])
def test_krn_1_unused_slots_are_never_seen(backend, poison, queries):
    value, parts = poison
    contexts = lengths(backend.page_size) if backend.name in KERNELS else range(1, 2 * backend.page_size + 2)
    counts = None if queries is None else [min(queries, context) for context in contexts]
    case = case_of(
        backend,
        list(contexts),
        counts,
        poison=float(value),
        poisoned=parts,
        padding=0 if queries is None else 2,
    )
    out = backend.run(case)
    assert np.isfinite(out).all()
    assert_close(out, dense(case), case)


@pytest.mark.parametrize(("backend", "dtype"), backends_and(("int8", "float8_e4m3fn"), quick=()))
@pytest.mark.parametrize("queries", [None, "ragged"], ids=["decode", "prefill"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_krn_1_quantised_pages_are_dense_attention_of_what_they_stand_for(backend, dtype, queries, poison):
    contexts, counts = [*lengths(backend.page_size), 0], None
    if queries == "ragged":
        contexts, counts = ragged_prefill(backend.page_size)
    case = case_of(backend, contexts, counts, quantised=dtype, poison=poison, padding=3 if counts else 0)
    assert_close(backend.run(case), dense(case), case)


@every_backend
def test_padding_rows_and_tokens_give_zeros(backend):
    out = backend.run(case_of(backend, [0, 6, 0], [0, 3, 0], padding=4))
    assert (out[3:] == 0).all()
    assert (out[:3] != 0).any(axis=-1).all()
    assert (backend.run(case_of(backend, [0, 0]), sinks=SINKS) == 0).all()
    assert (backend.run(case_of(backend, [0, 0], [0, 0], padding=5)) == 0).all()


@every_backend
def test_krn_3_a_row_gives_the_same_alone_and_among_others(backend):
    contexts, counts = [3, 14, 8, 1], [2, 5, 8, 1]
    case = case_of(backend, contexts, counts, width=4)
    out = backend.run(case)
    at = 0
    for row, count in enumerate(counts):
        alone = case_of(backend, contexts, counts, width=4)
        alone.context_lens = np.where(np.arange(4) == row, case.context_lens, 0)
        alone.query_starts = np.where(np.arange(5) > row, count, 0).astype(np.int32)
        rest = np.full((len(case.q) - count, *case.q.shape[1:]), np.nan, case.q.dtype)
        alone.q = np.concatenate([case.q[at : at + count], rest])
        assert_close(backend.run(alone)[:count], out[at : at + count], alone)
        at += count


@pytest.mark.parametrize(("backend", "ratio"), backends_and(HEADS, quick=()))
@pytest.mark.parametrize("queries", [None, [2, 3]], ids=["decode", "prefill"])
def test_krn_4_a_query_head_reads_its_own_kv_head(backend, ratio, queries):
    heads, kv_heads = HEADS[ratio]
    case = case_of(backend, [6, 9], queries, heads=heads, kv_heads=kv_heads)
    assert_close(backend.run(case), dense(case), case)
    for head in range(kv_heads):
        case.pool[:, :, 1, head] = head
    wanted = np.arange(heads) * kv_heads // heads
    out = backend.run(case)
    np.testing.assert_allclose(out, np.broadcast_to(wanted[None, :, None], out.shape), atol=2e-2)


@every_backend
@pytest.mark.parametrize("queries", [None, [3, 5, 4]], ids=["decode", "prefill"])
def test_rows_may_share_pages(backend, queries):
    size = backend.page_size
    case = case_of(backend, [2 * size + 3, 2 * size + 1, 3 * size], queries, shared_pages=2)
    assert (case.page_table[:, :2] == case.page_table[0, :2]).all()
    assert_close(backend.run(case), dense(case), case)


@pytest.mark.parametrize(("backend", "page_size"), backends_and((16, 32, 64, 128), quick=()))
@pytest.mark.parametrize("queries", [None, [1, 30, 2]], ids=["decode", "prefill"])
def test_krn_3_long_rows_and_other_page_sizes(backend, page_size, queries):
    case = case_of(backend, [200, 130, 33], queries, page_size=page_size, heads=6, kv_heads=2)
    assert_close(backend.run(case), dense(case), case)


@pytest.mark.parametrize(("backend", "dim"), backends_and((64, 80, 96, 128, 256), quick=()))
@pytest.mark.parametrize("queries", [None, [1, 9]], ids=["decode", "prefill"])
def test_head_dimensions(backend, dim, queries):
    case = case_of(backend, [2 * backend.page_size + 1, 13], queries, dim=dim)
    assert_close(backend.run(case), dense(case), case)


@pytest.mark.parametrize(("backend", "sliding_window"), backends_and((None, 40), quick=()))
def test_whole_prompts_of_several_rows(backend, sliding_window):
    counts = [150, 1, 70, 0, 129]
    case = case_of(backend, counts, counts, page_size=16, padding=34)
    out = backend.run(case, sliding_window=sliding_window)
    assert_close(out, dense(case, sliding_window=sliding_window), case)


@every_backend
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("queries", [None, [1, 2, 5]], ids=["decode", "prefill"])
def test_error_stays_within_the_dtypes_rounding(backend, dtype, queries):
    dim = max(64, backend.dim)
    case = case_of(backend, [14, 40, 5], queries, dtype=jnp.dtype(dtype), dim=dim)
    assert_close(backend.run(case), dense(case), case)


@pytest.mark.parametrize(("backend", "chunk"), backends_and((4, 8, 12, 32), quick=()))
def test_krn_7_chunks_larger_than_the_window_see_the_window_only(backend, chunk):
    """Whatever the chunk, a token sees its window: pages before it belong to others by then."""
    size = backend.page_size
    window, total, chunk = 2 * size, 8 * size, chunk * size // 4
    whole = case_of(backend, [total], [total], width=9)
    wanted = dense(whole, sliding_window=window)
    for begin in range(0, total, chunk):
        end = min(begin + chunk, total)
        part = case_of(backend, [total], [total], width=9)
        part.context_lens = np.asarray([end], np.int32)
        part.query_starts = np.asarray([0, end - begin], np.int32)
        padding = np.zeros((chunk - (end - begin), *whole.q.shape[1:]), whole.q.dtype)
        part.q = np.concatenate([whole.q[begin:end], padding])
        for page in range(max(0, begin - window + 1) // size):
            part.pool[:, part.page_table[0, page]] = np.nan
        out = backend.run(part, sliding_window=window)
        assert_close(out[: end - begin], wanted[begin:end], part)


@pytest.mark.parametrize(("backend", "quantised"), backends_and((None, "int8"), quick=(None,)))
@pytest.mark.parametrize("queries", [None, [3, 5, 1]], ids=["decode", "prefill"])
def test_krn_7_the_null_page_stands_for_pages_before_the_window(backend, queries, quantised):
    """All that the first query of a row does not see was given back; neither that nor the null page is read."""
    size = backend.page_size
    window, contexts = size + size // 2, [4 * size + 1, 4 * size, 5 * size - 1]
    case = case_of(backend, contexts, queries, quantised=quantised, spare_pages=4)
    null = next(page for page in range(case.pool.shape[1]) if page not in case.page_table)  # full of poison
    for row, (context, count) in enumerate(zip(contexts, queries or [1] * 3, strict=True)):
        passed = (context - count + 1 - window) // size
        assert passed > 0
        case.page_table[row, :passed] = null
    assert_close(backend.run(case, sliding_window=window), dense(case, sliding_window=window), case)


@every_backend
def test_layer_may_be_a_number_or_traced(backend):
    case = case_of(backend, [5, 9])
    traced = backend.run(case)
    q, pool, _, table, context, _ = case.args()
    by_number = paged_attention(q, pool, 1, table, context, implementation=backend.name, interpret=backend.interpret)
    assert_close(np.asarray(by_number).astype(np.float64), traced, case)


@pytest.mark.parametrize("name", [backend.name for backend in BACKENDS])
def test_choice_is_logged_once(name, caplog):
    choose_implementation.cache_clear()
    with caplog.at_level(logging.INFO, "pallas_kernels.paged_attention"):
        for _ in range(3):
            choose_implementation(name, "cpu")
    assert [record.message for record in caplog.records] == [f"paged attention: implementation {name} on backend cpu"]


def test_the_oracle_is_a_softmax_weighted_mean():
    case = make_case([2], heads=1, kv_heads=1, dim=1, page_size=1, dtype=bfloat16)
    query, keys, values = (array.astype(float).ravel() for array in case.rows[0])
    odds = np.exp(query[0] * (keys[1] - keys[0]))
    np.testing.assert_allclose(dense(case).item(), (values[0] + odds * values[1]) / (1 + odds))
