"""Quantised matrices and products with them, against their numbers in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numba import njit

from pallas_kernels.matmul import (
    Blocks,
    QuantisedForm,
    abstract_quantised,
    can_quantise,
    form_of,
    is_packed,
    pack_quantised,
    packed_columns,
    packed_matmul,
    quantise,
)
from pallas_kernels.matmul.quantised_tile import HAS_DECODING, make_quantised_tile
from pallas_kernels.matmul.tile import COLUMNS

FORMS = {
    "Q4_0": QuantisedForm(4),
    "Q4_1": QuantisedForm(4, has_minimum=True),
    "Q4_K": QuantisedForm(4, has_minimum=True, scale="float32"),
    "Q5_1": QuantisedForm(8, has_minimum=True),
    "Q6_K": QuantisedForm(8, block=16, scale="float32"),
    "Q8_0": QuantisedForm(8),
}
ROWS = [1, 7, 41]
"""Among them every tile's: 7 is 4, 2 and 1, 41 is three of 12, 4 and 1; the bits of others are those of one row."""


def draw_blocks(form, in_size, out_size):
    """Blocks with every integer that the form has, and float64[in, out] of their numbers."""
    rng = np.random.default_rng(in_size + out_size)
    low = -128 if form.bits == 8 else 0 if form.has_minimum else -8
    integers = rng.integers(low, low + 2**form.bits, (out_size, in_size)).astype(np.int8)
    shape = (out_size, in_size // form.block)
    # Subnormal as float16 too.
    scales = (10.0 ** rng.uniform(-6, -2, shape)).astype(form.scale)
    minima = (rng.standard_normal(shape) * 0.05).astype(form.scale) if form.has_minimum else None
    numbers = integers * np.repeat(scales.astype(np.float64), form.block, 1)
    if minima is not None:
        numbers += np.repeat(minima.astype(np.float64), form.block, 1)
    return Blocks(integers, scales, minima), numbers.T


def packed(blocks, form):
    return jax.tree.map(jnp.asarray, pack_quantised(blocks, form.bits))


def draw(*shape, dtype):
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "bfloat16") for name in FORMS), *((name, "float32") for name in ("Q4_0", "Q5_1", "Q6_K"))],
)
def test_product_is_that_of_the_numbers_for_any_number_of_rows(name, dtype):
    form = FORMS[name]
    for in_size, out_size in ((32, 32), (288, 96)):
        blocks, numbers = draw_blocks(form, in_size, out_size)
        matrix = packed(blocks, form)
        for rows in ROWS:
            x = draw(rows, in_size, dtype=dtype)
            wide = np.asarray(x, np.float64)
            found = np.asarray(packed_matmul(x, matrix, jnp.float32), np.float64)
            # What is summed: scaled integers and minima apart.
            scale = np.abs(wide) @ (np.abs(numbers) + 2 * np.abs(numbers).max())
            assert (np.abs(found - wide @ numbers) <= 1e-6 * scale).all()


def test_a_product_in_bfloat16_is_that_in_float32_rounded():
    form = FORMS["Q4_1"]
    x, matrix = draw(7, 288, dtype="bfloat16"), packed(draw_blocks(form, 288, 96)[0], form)
    rounded = packed_matmul(x, matrix)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        rounded.astype(jnp.float32), packed_matmul(x, matrix, jnp.float32).astype(jnp.bfloat16).astype(jnp.float32)
    )


@pytest.mark.parametrize(
    "has_decoding", [False, pytest.param(True, marks=pytest.mark.skipif(not HAS_DECODING, reason=""))]
)
@pytest.mark.parametrize("name", ["Q4_0", "Q5_1"])
def test_tile_of_bfloat16_with_and_without_the_instructions(name, has_decoding):
    form, tile = FORMS[name], make_quantised_tile(2, has_decoding=has_decoding)

    @njit
    def run(x, sums, integers, scales, blocks, out):
        tile(x[0, 0], form, x.ctypes.data, 2 * x.shape[1], sums.ctypes.data, 4 * blocks, integers.ctypes.data,
             scales.ctypes.data, blocks, out.ctypes.data)  # fmt: skip

    blocks, numbers = draw_blocks(form, 96, COLUMNS)
    x, out = draw(2, 96, dtype="bfloat16"), np.zeros((2, COLUMNS), np.float32)
    sums = np.asarray(x, np.float32).reshape(2, 3, 32).sum(-1)
    matrix = pack_quantised(blocks, form.bits)
    run(np.asarray(x).view(np.uint16), sums, matrix.integers, matrix.scales.view(np.uint16), 3, out)
    np.testing.assert_allclose(out, np.asarray(x, np.float32) @ numbers.astype(np.float32), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "dtype"), [("Q4_1", "bfloat16"), ("Q8_0", "bfloat16"), ("Q5_1", "float32")])
def test_a_row_has_the_same_bits_whatever_is_beside_it(name, dtype):
    form = FORMS[name]
    matrix = packed(draw_blocks(form, 288, 96)[0], form)
    x = draw(47, 288, dtype=dtype)  # three tiles of 12, one of 8, 2 and 1
    together = np.asarray(packed_matmul(x, matrix, jnp.float32))
    for row in (0, 7, 11, 12, 35, 36, 43, 44, 45, 46):
        alone = np.asarray(packed_matmul(x[row : row + 1], matrix, jnp.float32))[0]
        np.testing.assert_array_equal(alone, together[row])


@pytest.mark.parametrize("name", FORMS)
def test_columns_are_those_numbers(name):
    form = FORMS[name]
    blocks, numbers = draw_blocks(form, 64, 96)
    matrix, columns = packed(blocks, form), jnp.asarray([0, 95, 31, 32, 64, 0])
    np.testing.assert_allclose(packed_columns(matrix, columns), numbers.T[columns], rtol=1e-6, atol=1e-8)
    assert packed_columns(matrix, columns, jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize("name", FORMS)
def test_form_and_shape_are_told_by_the_arrays(name):
    form = FORMS[name]
    matrix = packed(draw_blocks(form, 64, 96)[0], form)
    assert is_packed(matrix)
    assert form_of(matrix) == form
    assert matrix.shape == (64, 96)
    abstract = abstract_quantised((64, 96), form)
    for leaf, wanted in zip(matrix, abstract, strict=True):
        assert (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype)
    assert matrix.integers.nbytes == 3 * (64 // form.block) * form.integer_bytes
    assert matrix.scales.nbytes == 3 * (64 // form.block) * form.scale_bytes
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), matrix)
    assert form_of(stacked) == form
    assert stacked.shape == (64, 96)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantising_takes_the_nearest_integers_of_the_kept_scale(bits):
    columns = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32) * 0.02
    columns[3] = 0
    columns[5, :32] = 3e-8
    blocks = quantise(columns, bits)
    steps = np.repeat(blocks.scales.astype(np.float32), 32, 1)
    found = blocks.integers * steps
    if bits == 4:
        found += np.repeat(blocks.minima.astype(np.float32), 32, 1)
    # Half a step; the ends of the range may be off by what rounding the scale takes away.
    assert (np.abs(found - columns) <= (0.5 + 15 * 2.0**-10) * steps + 1e-7).all()
    assert (found[3] == 0).all()
    assert form_of(pack_quantised(blocks, bits)) == FORMS["Q8_0" if bits == 8 else "Q4_1"]


@pytest.mark.parametrize("bad", [np.nan, np.inf, 7e4])
def test_what_has_no_scale_is_not_quantised(bad):
    columns = np.zeros((32, 32), np.float32)
    columns[1, 2] = bad
    with pytest.raises(ValueError, match="must be finite and at most 65504"):
        quantise(columns, 8)


def test_what_cannot_be_packed_is_refused():
    assert can_quantise((64, 96))
    assert can_quantise((48, 96), 16)
    assert not can_quantise((48, 96))
    assert not can_quantise((64, 90))
    integers = np.zeros((32, 64), np.int8)
    scales = np.ones((32, 2), np.float16)
    with pytest.raises(ValueError, match="cannot be packed: they must be"):
        pack_quantised(Blocks(integers[:30], scales[:30]), 8)
    with pytest.raises(ValueError, match="cannot be packed: they must be"):
        pack_quantised(Blocks(integers, scales[:, :1]), 8)
    with pytest.raises(ValueError, match="of 4 bits must be -8 to 7, not 0 to 15"):
        pack_quantised(Blocks(np.repeat(np.arange(16, dtype=np.int8), 4)[None] + integers, scales), 4)


def test_what_does_not_fit_is_refused_before_memory_is_read():
    form = FORMS["Q4_1"]
    matrix = packed(draw_blocks(form, 64, 96)[0], form)
    for x in (jnp.zeros((2, 32), jnp.float32), jnp.zeros((64,), jnp.float32), jnp.zeros((2, 64), jnp.float16)):
        with pytest.raises(ValueError, match="the quantised matrix"):
            packed_matmul(x, matrix)
    with pytest.raises(ValueError, match="do not fit together"):
        packed_matmul(jnp.zeros((2, 64), jnp.float32), matrix._replace(scales=matrix.scales[1:]))
