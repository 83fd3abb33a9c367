"""Every paged-attention implementation against a dense oracle; no unused slot may reach the result."""

from __future__ import annotations

import itertools
import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import IMPLEMENTATIONS, KERNELS, choose_implementation, paged_attention
from tests.kernels.cases import bfloat16, dense, make_case

SIZE = 4
LENGTHS = (1, SIZE - 1, SIZE, SIZE + 1, 3 * SIZE + 2)
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 5},
    "window_of_one": {"sliding_window": 1},
    "window_beyond_context": {"sliding_window": 1000},
    "softcap": {"logit_softcap": 1.5},
    "sinks": {"sinks": np.linspace(-2.0, 3.0, 4)},
    "scale": {"scale": 0.9},
    "all": {"sliding_window": 3, "logit_softcap": 2.0, "sinks": np.linspace(-1.0, 1.0, 4), "scale": 0.5},
}

pytestmark = pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if name not in KERNELS])


def run(case, implementation, **options):
    if options.get("sinks") is not None:
        options["sinks"] = jnp.asarray(options["sinks"], jnp.float32)
    function = jax.jit(partial(paged_attention, implementation=implementation, **options))
    out = function(*case.args())
    assert out.dtype == case.q.dtype
    again = function(*case.args())
    np.testing.assert_array_equal(np.asarray(out), np.asarray(again))
    return np.asarray(out).astype(np.float64)


@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_decode_of_ragged_rows_is_dense_attention(implementation, option):
    case = make_case([*LENGTHS, 0], width=9)
    out = run(case, implementation, **OPTIONS[option])
    np.testing.assert_allclose(out, dense(case, **OPTIONS[option]), atol=1e-5)


@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_prefill_of_ragged_rows_is_dense_attention(implementation, option):
    pairs = [(context, count) for context, count in itertools.product(LENGTHS, (1, 2, 5)) if count <= context]
    contexts, queries = zip(*pairs, strict=True)
    case = make_case([*contexts, 0], [*queries, 0], width=9, padding=3)
    out = run(case, implementation, **OPTIONS[option])
    np.testing.assert_allclose(out, dense(case, **OPTIONS[option]), atol=1e-5)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("queries", [None, 1, 2])
def test_unused_slots_are_never_seen(implementation, poison, queries):
    contexts = list(range(1, 2 * SIZE + 2))
    counts = None if queries is None else [min(queries, context) for context in contexts]
    case = make_case(contexts, counts, poison=poison, padding=0 if queries is None else 2)
    out = run(case, implementation)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, dense(case), atol=1e-5)


def test_padding_rows_and_tokens_give_zeros(implementation):
    case = make_case([0, 6, 0], [0, 3, 0], padding=4)
    out = run(case, implementation)
    assert (out[3:] == 0).all()
    assert (out[:3] != 0).all()
    assert (run(make_case([0, 0]), implementation) == 0).all()
    assert (run(make_case([0, 0], [0, 0], padding=5), implementation) == 0).all()


def test_a_row_gives_the_same_alone_and_among_others(implementation):
    contexts, counts = [3, 14, 8, 1], [2, 5, 8, 1]
    out = run(make_case(contexts, counts, width=4), implementation)
    case = make_case(contexts, counts, width=4)
    at = 0
    for row, count in enumerate(counts):
        alone = make_case(contexts, counts, width=4)
        alone.context_lens = np.where(np.arange(4) == row, case.context_lens, 0)
        alone.query_starts = np.where(np.arange(5) > row, count, 0).astype(np.int32)
        alone.q = np.concatenate([case.q[at : at + count], np.full((at + sum(counts[row + 1 :]), 4, 8), np.nan)])
        alone.q = alone.q.astype(np.float32)
        np.testing.assert_allclose(run(alone, implementation)[:count], out[at : at + count], atol=1e-6)
        at += count


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_a_query_head_reads_its_own_kv_head(implementation, kv_heads):
    case = make_case([6, 9], [2, 3], heads=8, kv_heads=kv_heads)
    for head in range(kv_heads):
        case.pool[:, :, 1, head] = head
    out = run(case, implementation)
    wanted = np.arange(8) * kv_heads // 8
    np.testing.assert_allclose(out, np.broadcast_to(wanted[None, :, None], out.shape), atol=1e-6)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("queries", [None, [1, 30, 2]])
def test_long_rows_and_other_page_sizes(implementation, page_size, queries):
    case = make_case([200, 130, 33], queries, page_size=page_size, dim=16, heads=6, kv_heads=2)
    np.testing.assert_allclose(run(case, implementation), dense(case), atol=1e-5)


@pytest.mark.parametrize("sliding_window", [None, 40])
def test_whole_prompts_of_several_rows(implementation, sliding_window):
    counts = [150, 1, 70, 0, 129]
    case = make_case(counts, counts, page_size=16, padding=34, dim=8)
    out = run(case, implementation, sliding_window=sliding_window)
    np.testing.assert_allclose(out, dense(case, sliding_window=sliding_window), atol=1e-5)


@pytest.mark.parametrize("queries", [None, [1, 2, 5]])
def test_bfloat16_stays_within_its_rounding(implementation, queries):
    case = make_case([14, 40, 5], queries, dtype=bfloat16, dim=64)
    np.testing.assert_allclose(run(case, implementation), dense(case), atol=2e-2)


@pytest.mark.parametrize("chunk", [4, 8, 12, 32])
def test_chunks_larger_than_the_window_see_the_window_only(implementation, chunk):
    window, total = 8, 32
    whole = make_case([total], [total], width=9)
    wanted = dense(whole, sliding_window=window)
    for begin in range(0, total, chunk):
        end = min(begin + chunk, total)
        part = make_case([total], [total], width=9)
        part.context_lens = np.asarray([end], np.int32)
        part.query_starts = np.asarray([0, end - begin], np.int32)
        part.q = np.concatenate([whole.q[begin:end], np.zeros((chunk - (end - begin), 4, 8), np.float32)])
        # Pages that lie wholly before the window of the chunk's first token belong to others by now.
        for page in range(max(0, begin - window + 1) // SIZE):
            part.pool[:, part.page_table[0, page]] = np.nan
        out = run(part, implementation, sliding_window=window)
        np.testing.assert_allclose(out[: end - begin], wanted[begin:end], atol=1e-5)


def test_layer_may_be_a_number_or_traced(implementation):
    case = make_case([5, 9])
    q, pool, layer, table, context, _ = case.args()
    by_number = paged_attention(q, pool, 1, table, context, implementation=implementation)
    np.testing.assert_allclose(by_number, run(case, implementation), atol=1e-6)
    assert np.isnan(np.asarray(pool)[0]).all()
    assert int(layer) == 1


def test_choice_is_logged_once(implementation, caplog):
    choose_implementation.cache_clear()
    with caplog.at_level(logging.INFO, "pallas_kernels.paged_attention"):
        for _ in range(3):
            choose_implementation(implementation, "cpu")
    assert [record.message for record in caplog.records] == [
        f"paged attention: implementation {implementation} on backend cpu"
    ]
