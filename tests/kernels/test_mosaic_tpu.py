"""The TPU kernel in Pallas' interpreter, with race detection: what the contract suite does not reach.

Blocks are made small here, so that rows of a few hundred tokens have several and the order of copies, which
runs through all rows of a core, is put to the test. Two cores are simulated where that matters.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import mosaic_tpu_plan as plan
from pallas_kernels.paged_attention.mosaic_tpu import paged_attention_mosaic_tpu
from tests.kernels.cases import bfloat16, dense, make_case

SINKS = np.linspace(-1.0, 2.0, 6)
ALL = {"sliding_window": 150, "logit_softcap": 1.5, "sinks": SINKS, "scale": 0.2}
"""The window begins inside a block that is otherwise seen whole."""
TWO_CORES = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
LENGTHS = [1, 15, 0, 16, 17, 0, 0, 50, 300, 128, 129]
"""Around a page's end and a block's end, with padding rows between, and an odd number of rows."""

PREFILL = ([300, 17, 0, 132, 40], [20, 17, 0, 12, 40])
"""Contexts and queries: chunks at the end of a longer context, one of them across the end of a block so that
only its later queries see the block whole; whole prompts; a padding row."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """128 tokens of K and V, and 16 rows of queries per KV head (32 with a group of 2)."""
    monkeypatch.setattr(plan, "BLOCK_BYTES", 1)
    monkeypatch.setattr(plan, "MAX_ROWS", 16)
    yield
    pltpu.reset_tpu_interpret_mode_state()


def run(case, *, pool=None, interpret=True, **options):
    """The result as float64, after a second run gave the same bits."""
    options = {"scale": case.q.shape[-1] ** -0.5, "sliding_window": None, "logit_softcap": None} | options
    options["sinks"] = None if options.get("sinks") is None else jnp.asarray(options["sinks"], jnp.float32)
    q, own_pool, *rest = case.args()
    scales = None if case.scales is None else jnp.asarray(case.scales)
    function = jax.jit(partial(paged_attention_mosaic_tpu, scales=scales, interpret=interpret, **options))
    args = (q, own_pool if pool is None else jnp.asarray(pool), *rest)
    out = function(*args)
    assert out.dtype == q.dtype
    np.testing.assert_array_equal(np.asarray(out), np.asarray(function(*args)))
    return np.asarray(out).astype(np.float64)


def check(case, *, pool=None, interpret=True, **options):
    """Against the oracle: 1e-5 in float32; in bfloat16 2e-3 of the value range beside the output's rounding."""
    wanted = dense(case, **options)
    atol, rtol = (1e-5, 0.0) if case.q.dtype == np.float32 else (2e-3 * case.value_range, 2.0**-9)
    np.testing.assert_allclose(run(case, pool=pool, interpret=interpret, **options), wanted, atol=atol, rtol=rtol)


def tpu_case(contexts, queries=None, **sizes):
    return make_case(contexts, queries, **({"page_size": 16, "heads": 6, "dim": 128} | sizes))


def packed(case):
    """The case's pool with keys and values side by side: [L, P, 1, K, S, 2 * D]."""
    return np.concatenate([case.pool[:, :, :1], case.pool[:, :, 1:]], axis=-1)


def padded(case, width):
    """The case's pool with zeros beyond the head dimension."""
    return np.pad(case.pool, [(0, 0)] * 5 + [(0, width - case.pool.shape[-1])])


def test_decode_of_rows_with_gaps_and_several_blocks():
    check(tpu_case(LENGTHS, dtype=bfloat16))


def test_decode_with_window_softcap_and_sinks_on_two_cores():
    check(tpu_case(LENGTHS), interpret=TWO_CORES, **ALL)


def test_prefill_of_rows_with_several_query_blocks():
    check(tpu_case(*PREFILL, padding=9))


def test_prefill_with_window_softcap_and_sinks_on_two_cores():
    check(tpu_case(*PREFILL, padding=9, dtype=bfloat16), interpret=TWO_CORES, **ALL)


@pytest.mark.parametrize("queries", [None, [20, 1]], ids=["decode", "prefill"])
def test_packed_pool_of_head_dimension_64(queries):
    case = tpu_case([150, 33], queries, dim=64, dtype=bfloat16)
    check(case, pool=packed(case))


@pytest.mark.parametrize("dim", [80, 96])
def test_padded_pool(dim):
    case = tpu_case([150, 33], dim=dim)
    check(case, pool=padded(case, 128))


@pytest.mark.parametrize(("quantised", "queries"), [("int8", [20, 1, 5]), ("float8_e4m3fn", None)])
def test_quantised_pages_of_the_size_that_compiles(quantised, queries):
    check(tpu_case([130, 127, 257], queries, page_size=128, dtype=bfloat16, quantised=quantised))


def test_packed_int8_pool():
    case = tpu_case([130, 5], dim=64, page_size=128, quantised="int8")
    check(case, pool=packed(case))


def test_more_heads_than_are_unrolled():
    check(tpu_case([40, 3], heads=9, kv_heads=9))


def test_pool_and_queries_of_different_dtypes():
    case = tpu_case([40, 130], dtype=bfloat16)
    case.q = case.q.astype(np.float32)
    check(case)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 64}, r"head_dim 64 make the pool \[L, P, 1, K, S, 2 \* D\]"),
        ({"dim": 96}, r"head_dim 96 make the pool \[L, P, 2, K, S, D rounded up to 128\]"),
        ({"page_size": 8}, "page_size is 8; on TPU it must be a multiple of 16"),
        ({"quantised": "int8"}, "page_size is 16 in a pool of int8; on TPU it must be a multiple of 128"),
        ({"dtype": np.float16}, "q is float16; on TPU queries must be bfloat16 or float32"),
        ({"page_size": 4096, "kv_heads": 6, "dtype": np.float32}, "6 KV heads with pages of 4096 need .* of VMEM"),
    ],
    ids=lambda value: "_".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_what_tpu_lacks_is_refused_by_name(changes, message):
    with pytest.raises(NotImplementedError, match=message):
        run(tpu_case([3], **changes), interpret=False)


def test_a_pool_of_another_width_is_refused():
    case = tpu_case([3], dim=64)
    with pytest.raises(NotImplementedError, match=r"queries of 64; on TPU it must be \[L, P, 2, K, S, D\]"):
        run(case, pool=padded(case, 192))


class TestPlan:
    def test_blocks_fill_registers_and_stay_in_bounds(self):
        for page_size in (16, 32, 48, 64, 128, 256):
            for kv_heads in (1, 2, 8, 32):
                blocks = plan.choose_blocks(
                    num_queries=1,
                    group=5,
                    kv_heads=kv_heads,
                    page_size=page_size,
                    width=128,
                    compute_bytes=2,
                    page_bytes=1 << 20,
                )
                assert blocks.pages * page_size % 128 == 0
                assert blocks.pages * page_size <= max(plan.MAX_DECODE_TOKENS, page_size * 8)
                assert (blocks.queries, blocks.rows) == (1, 16)

    def test_decode_items_skip_rows_without_tokens(self):
        items = plan.decode_items(jnp.asarray([0, 5, 0, 7, 9], jnp.int32), sliding_window=6)
        assert items.count == 6
        assert items.end.tolist() == [0, 5, 0, 7, 9, 0]
        assert items.begin.tolist()[1:5:2] == [0, 1] and items.begin[4] == 3
        # Core 0 has items 0, 2, 4; core 1 has 1, 3, 5; 6 is the end.
        assert items.next_live.tolist() == [4, 1, 4, 3, 4, 6, 6, 6, 6]

    def test_every_prefill_token_has_a_place_of_its_own(self):
        context = jnp.asarray([40, 0, 9, 3], jnp.int32)
        starts = jnp.asarray([0, 33, 33, 36, 39], jnp.int32)
        items, tokens = plan.prefill_items(42, context, starts, None, block_queries=16)
        assert items.row.tolist()[:5] == [0, 0, 0, 2, 3]
        assert items.position.tolist()[:5] == [7, 23, 39, 6, 0]
        assert items.end.tolist() == [23, 39, 40, 9, 3, 0]
        assert items.block.tolist() == [0, 1, 2, 3, 4, items.count + 1]
        place = np.asarray(tokens.place)
        assert (place[39:] == -1).all()
        assert np.asarray(tokens.of_block).reshape(-1)[place[:39]].tolist() == list(range(39))
