"""The TPU kernel of write_kv: interpreted with race detection, and compiled in place for every TPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.deviceless import TARGETS, compile_for, missing
from pallas_kernels.kv_write import choose_write, write_kv

TPUS = [name for name, target in TARGETS.items() if target.platform == "tpu"]


def inputs(*, page_size, heads, dtype, form, places):
    """A pool with NaN where nothing is written, and K and V for `places` = (page ids, offsets)."""
    rng = np.random.default_rng(0)
    parts, width, dim = form
    pages, offsets = (np.asarray(x, np.int32) for x in places)
    pool = rng.normal(size=(2, 40, parts, heads, page_size, width))
    pool[0] = np.nan
    k, v = rng.normal(size=(2, pages.size, heads, dim))
    return (
        jnp.asarray(pool, dtype),
        jnp.asarray(k, dtype),
        jnp.asarray(v, dtype),
        jnp.asarray(pages),
        jnp.asarray(offsets),
    )


def assert_same_but_the_null_page(pool, args, starts):
    found = write_kv(pool, 1, *args, starts=starts, implementation="mosaic_tpu", interpret=True)
    wanted = write_kv(pool, 1, *args, implementation="xla")
    found, wanted = (np.asarray(x).astype(np.float32)[:, 1:] for x in (found, wanted))
    np.testing.assert_array_equal(found, wanted)


def one_token_each(page_size, count=13):
    rng = np.random.default_rng(1)
    pages = 1 + rng.permutation(39)[:count]
    pages[[0, 3, 7]] = 0
    return pages, rng.integers(0, page_size, count)


def runs(page_size, *lengths, padding=5):
    """(pages, offsets) of rows that begin at (position, length), each in pages of its own, and `starts`."""
    fresh = iter(1 + np.random.default_rng(2).permutation(39))
    pages, offsets = [], []
    for begin, length in lengths:
        table = {}
        for position in range(begin, begin + length):
            if position // page_size not in table:
                table[position // page_size] = next(fresh)
            pages.append(table[position // page_size])
            offsets.append(position % page_size)
    starts = np.cumsum([0, *(length for _, length in lengths)])
    return (pages + [0] * padding, offsets + [0] * padding), jnp.asarray(starts, jnp.int32)


FORMS = pytest.mark.parametrize("form", [(2, 128, 128), (2, 128, 96), (1, 128, 64)], ids=["plain", "padded", "packed"])


@FORMS
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("page_size", "heads"), [(16, 2), (64, 3)])
def test_one_token_of_each_sequence(form, dtype, page_size, heads):
    places = one_token_each(page_size)
    pool, *args = inputs(page_size=page_size, heads=heads, dtype=dtype, form=form, places=places)
    assert_same_but_the_null_page(pool, args, None)


@FORMS
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("page_size", [16, 32])
def test_tokens_that_follow_each_other(form, dtype, page_size):
    """Rows that begin and end inside, at and beyond aligned pieces of a page; one is empty."""
    edge = page_size - 1
    places, starts = runs(page_size, (5, 20), (0, 1), (edge, 2), (3, 37), (16, 0), (7, 16), (16, 16))
    pool, *args = inputs(page_size=page_size, heads=2, dtype=dtype, form=form, places=places)
    assert_same_but_the_null_page(pool, args, starts)


@pytest.mark.parametrize("starts", [None, jnp.zeros(3, jnp.int32)], ids=["tokens", "runs"])
def test_padding_alone_writes_nothing(starts):
    places = (np.zeros(9, np.int32), np.arange(9, dtype=np.int32))
    pool, *args = inputs(page_size=16, heads=2, dtype="bfloat16", form=(2, 128, 128), places=places)
    found = write_kv(pool, 1, *args, starts=starts, implementation="mosaic_tpu", interpret=True)
    np.testing.assert_array_equal(np.asarray(found[1]).astype(np.float32), np.asarray(pool[1]).astype(np.float32))


def test_what_the_kernel_lacks_is_refused():
    places = (np.ones(1, np.int32), np.zeros(1, np.int32))
    for page_size, form, dtype in (
        (8, (2, 128, 128), "bfloat16"),
        (16, (2, 64, 64), "bfloat16"),
        (16, (2, 128, 128), "float16"),
    ):
        pool, *args = inputs(page_size=page_size, heads=2, dtype=dtype, form=form, places=places)
        with pytest.raises(NotImplementedError, match="mosaic_tpu has bfloat16 and float32, pages of a multiple of 16"):
            write_kv(pool, 1, *args, implementation="mosaic_tpu", interpret=True)
    pool, *args = inputs(page_size=16, heads=2, dtype="bfloat16", form=(2, 128, 128), places=places)
    with pytest.raises(NotImplementedError, match="the pool is int8; mosaic_tpu has"):
        write_kv(pool.astype(jnp.int8), 1, *args, jnp.zeros(pool.shape[:5]), implementation="mosaic_tpu")
    with pytest.raises(ValueError, match="'scatter' does not exist; choose auto, xla or mosaic_tpu"):
        write_kv(pool, 1, *args, implementation="scatter")
    with pytest.raises(ValueError, match="xla is no Pallas kernel"):
        write_kv(pool, 1, *args, implementation="xla", interpret=True)


def test_the_kernel_writes_what_the_attention_kernel_reads():
    floats, ints = jax.ShapeDtypeStruct((1,), jnp.bfloat16), jax.ShapeDtypeStruct((1,), jnp.int8)
    assert choose_write(floats, "mosaic_tpu") == "mosaic_tpu"
    assert (
        choose_write(ints, "mosaic_tpu") == choose_write(floats, "cpu") == choose_write(floats, "mosaic_gpu") == "xla"
    )


@pytest.mark.tpu_compile
@pytest.mark.parametrize("target", TPUS)
@pytest.mark.parametrize(("tokens", "rows"), [(64, 0), (512, 8)])
def test_it_compiles_in_place(target, tokens, rows):
    """Llama-3.1-8B's pool of 2 GiB in the carry of a loop over layers."""
    if missing(TARGETS[target]):
        pytest.skip(missing(TARGETS[target]))
    pool = jax.ShapeDtypeStruct((32, 1025, 2, 8, 16, 128), jnp.bfloat16)
    new = jax.ShapeDtypeStruct((tokens, 8, 128), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    starts = jax.ShapeDtypeStruct((rows + 1,), jnp.int32) if rows else None

    def write(pool, k, pages, offsets, starts):
        def layer(index, pool):
            return write_kv(pool, index, k, k, pages, offsets, starts=starts, implementation="mosaic_tpu")

        return jax.lax.fori_loop(0, 32, layer, pool)

    program = compile_for(TARGETS[target], write, (pool, new, ids, ids, starts), donate=(0,))
    analysis = program.memory_analysis()
    assert analysis.alias_size_in_bytes >= 2 * pool.size
    assert analysis.temp_size_in_bytes < 16 << 20
