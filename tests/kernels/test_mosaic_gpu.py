"""What is particular to the Mosaic GPU kernels; the contract they share with others is in `test_contract`.

Kernels run in the Mosaic GPU interpreter with race detection on, except for tests marked gpu. There `jnp.dot`
stands for mma and for P V of WGMMA, so those instructions are compiled (gpu_compile) and not run.
"""

from __future__ import annotations

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.mosaic_gpu import paged_attention_mosaic_gpu
from pallas_kernels.paged_attention.mosaic_gpu_tiles import gather_tiles, prefill_tiles, scatter_tiles
from pallas_kernels.paged_attention.mosaic_gpu_tuning import SMEM_PER_BLOCK_BYTES, tune_mma, tune_wgmma
from tests.kernels.cases import bfloat16, dense, make_case

SINKS = np.linspace(-1.0, 1.5, 4)


def run(case, *, interpret=True, repeat=False, sinks=None, **options):
    """The result as float64; with `repeat`, after checking that a second run gives the same bits."""
    function = jax.jit(
        partial(
            paged_attention_mosaic_gpu,
            scales=None if case.scales is None else jnp.asarray(case.scales),
            scale=case.q.shape[-1] ** -0.5,
            sinks=None if sinks is None else jnp.asarray(sinks, jnp.float32),
            interpret=interpret,
            **options,
        )
    )
    out = np.asarray(function(*case.args()))
    if repeat:
        np.testing.assert_array_equal(out, np.asarray(function(*case.args())))
    return out.astype(np.float64)


def assert_close(case, out, **options):
    """Within 1e-5 for float32, else 2e-3 of the value range beside what bfloat16 rounds off the result."""
    wanted = dense(case, **options)
    if case.q.dtype == np.float32:
        np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-5)
    else:
        np.testing.assert_allclose(out, wanted, rtol=2.0**-8, atol=2e-3 * case.value_range)


def test_splits_share_a_long_row_and_may_be_empty():
    case = make_case([300, 15, 0], page_size=64, dim=64, kv_heads=1, width=12, dtype=bfloat16)
    assert tune_mma(3, 12 * 64, jax.ShapeDtypeStruct(case.pool.shape, bfloat16), 16, bfloat16).splits == 3
    out = run(case, repeat=True, sinks=SINKS)
    assert_close(case, out, sinks=SINKS)
    assert (out[2] == 0).all()


def test_a_window_begins_and_ends_within_blocks():
    options = {"sliding_window": 70, "logit_softcap": 2.0}
    case = make_case([200, 64, 71], page_size=32, dim=64, kv_heads=1, dtype=bfloat16, poison=np.inf)
    for page in range((200 - 70) // 32):  # Pages before the window are others' by now.
        case.pool[:, case.page_table[0, page]] = np.nan
    assert_close(case, run(case, sinks=SINKS, **options), sinks=SINKS, **options)


@pytest.mark.parametrize(("dim", "heads"), [(80, 1), (64, 3), (64, 20), (64, 33)])
def test_a_group_of_any_size_fills_a_tile_of_16_32_or_64_rows(dim, heads):
    case = make_case([17, 3], page_size=16, dim=dim, heads=heads, kv_heads=1)
    assert_close(case, run(case))


@pytest.mark.parametrize(("dtype", "quantised"), [(np.float32, "int8"), (bfloat16, "float8_e4m3fn")])
def test_quantised_pages_do_not_lose_the_scales_precision(dtype, quantised):
    case = make_case([1, 33, 0], page_size=16, dim=64, kv_heads=1, dtype=dtype, quantised=quantised)
    assert_close(case, run(case))


@pytest.mark.parametrize("dtype", [bfloat16, np.float32], ids=["wgmma", "mma"])
def test_prefill_tiles_cross_blocks_pages_and_rows(dtype):
    options = {"sliding_window": 100, "logit_softcap": 2.0}
    case = make_case([150, 0, 9], [43, 0, 9], page_size=16, dim=64, kv_heads=1, padding=5, dtype=dtype)
    assert_close(case, run(case, sinks=SINKS, **options), sinks=SINKS, **options)


def test_blocks_that_every_query_sees_are_not_masked_and_still_right():
    case = make_case([300], [3], page_size=64, dim=64, heads=2, kv_heads=1, dtype=bfloat16)
    assert_close(case, run(case, repeat=True))


@pytest.mark.parametrize("counts", [[5, 0, 1, 9], [0, 0], [4, 4]])
@pytest.mark.parametrize("tile_tokens", [4, 25])
def test_tiles_hold_every_token_once(counts, tile_tokens):
    starts = jnp.asarray(np.concatenate([[0], np.cumsum(counts)]), jnp.int32)
    contexts = jnp.asarray([count + 7 if count else 0 for count in counts], jnp.int32)
    num_tokens = sum(counts) + 3
    tiles = prefill_tiles(num_tokens, contexts, starts, tile_tokens, None)
    q = jnp.arange(num_tokens * 6, dtype=jnp.float32).reshape(num_tokens, 6, 1) + 1
    back = scatter_tiles(gather_tiles(q, tiles.tokens, 2, 3 * tile_tokens + 1), tiles, 6)
    np.testing.assert_array_equal(back, jnp.where(jnp.arange(num_tokens)[:, None, None] < sum(counts), q, 0))
    ends = np.asarray(tiles.bounds)[:, 2]
    assert ends.max(initial=0) == max(contexts)
    assert (ends > 0).sum() == sum(-(-count // tile_tokens) for count in counts)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dim": 48}, "head dimension is 48; mosaic_gpu has 64, 80, 96, 128, 256"),
        ({"dim": 256}, "head dimension is 256 in float32; mosaic_gpu has up to 128"),
        ({"page_size": 8}, "page size is 8; mosaic_gpu has 16, 32 and multiples of 64"),
        ({"dtype": np.float16}, "q is float16; mosaic_gpu has bfloat16, float32"),
        ({"heads": 64, "kv_heads": 1, "dim": 128}, "fewer query heads to a KV head"),
        ({"heads": 65, "kv_heads": 1}, "65 query heads share 1 KV heads; mosaic_gpu has at most 64 to one"),
    ],
)
def test_what_no_kernel_has_is_refused_by_name(sizes, message):
    case = make_case([3], **({"page_size": 16, "dim": 64} | sizes))
    with pytest.raises(NotImplementedError, match=message):
        run(case)


@pytest.mark.parametrize(("dtype", "rows"), [("bfloat16", 16), ("bfloat16", 64), ("int8", 16), ("float32", 16)])
@pytest.mark.parametrize("dim", [64, 128])
def test_tuning_stays_within_shared_memory(dtype, rows, dim):
    pool = jax.ShapeDtypeStruct((1, 9, 2, 8, 16, dim), jnp.dtype(dtype))
    tuning = tune_mma(64, 2048, pool, rows, jnp.bfloat16)
    assert 2 <= tuning.stages <= 4
    assert tuning.splits == 1
    assert 2 * tuning.stages * tuning.block * dim * pool.dtype.itemsize < SMEM_PER_BLOCK_BYTES
    assert tune_mma(1, 2048, pool, rows, jnp.bfloat16).splits == 8
    wgmma = tune_wgmma(dim)
    assert 4 * wgmma.stages * wgmma.block * dim < SMEM_PER_BLOCK_BYTES


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [None, [70, 1, 0, 130]], ids=["decode", "prefill"])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("quantised", [None, "int8", "float8_e4m3fn"])
def test_on_a_gpu_mma_and_wgmma_agree_with_the_oracle(queries, dim, quantised):
    options = {"sliding_window": 100, "logit_softcap": 20.0}
    case = make_case([1000, 17, 0, 130], queries, page_size=16, dim=dim, heads=8, dtype=bfloat16, quantised=quantised)
    sinks = np.linspace(-1.0, 1.0, 8)
    assert_close(case, run(case, interpret=False, repeat=True, sinks=sinks, **options), sinks=sinks, **options)


@pytest.mark.gpu_compile
@pytest.mark.parametrize("prefill", [False, True], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    ("dim", "dtype", "pool_dtype"),
    [(dim, "bfloat16", dtype) for dim in (64, 80, 96, 128, 256) for dtype in ("bfloat16", "int8", "float8_e4m3fn")]
    + [(64, "float32", "float32"), (128, "float32", "float32"), (128, "float32", "int8")],
)
def test_compiles_for_hopper_without_spills(prefill, dim, dtype, pool_dtype, tmp_path, monkeypatch):
    deviceless = pytest.importorskip("pallas_kernels.common.deviceless")
    target = deviceless.TARGETS["sm_90a"]
    if deviceless.missing(target):
        pytest.skip(deviceless.missing(target))
    for name, value in (("PTXAS", "1"), ("TO", os.fspath(tmp_path))):
        monkeypatch.setenv(f"MOSAIC_GPU_DUMP_{name}", value)

    def shape(dims, dtype):
        return jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))

    tokens, pool = (512, 8)[not prefill], (4, 2049, 2, 8, 16, dim)
    args = [shape((tokens, 32, dim), dtype), shape(pool, pool_dtype), shape((), "int32"), shape((8, 128), "int32")]
    args += [shape((8,), "int32"), shape((9,), "int32") if prefill else None]
    args += [shape(pool[:5], "float32") if pool_dtype in ("int8", "float8_e4m3fn") else None]

    def attend(*args):
        return paged_attention_mosaic_gpu(*args[:6], scales=args[6], scale=dim**-0.5, sliding_window=1024)

    memory = deviceless.compile_for(target, attend, tuple(args)).memory_analysis()
    assert memory.temp_size_in_bytes < np.prod(pool)  # No copy of the pool, whose bytes are at least that.
    dumps = [path.read_text(errors="replace") for path in tmp_path.glob("*.ptxas")]
    assert dumps
    assert all(" 0 bytes spill stores" in text for text in dumps)
