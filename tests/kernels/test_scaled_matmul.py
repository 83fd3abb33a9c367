"""Scaled matrices: their numbers, their products on XLA, and what compilers for TPU make of them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.common.deviceless import TARGETS, compile_for, missing
from pallas_kernels.matmul import (
    QuantisedForm,
    ScaledForm,
    ScaledMatrix,
    abstract_scaled,
    can_scale,
    num_bytes,
    pack_quantised,
    packed_columns,
    put_columns,
    quantise,
    scale_columns,
    scaled_form,
    scaled_matmul,
    scaled_rows,
)
from pallas_kernels.matmul.scaled import widened

IN, OUT = 96, 160
COLUMNS = np.random.default_rng(0).normal(size=(OUT, IN)).astype(np.float32)
INT8, FP8 = ScaledForm("int8"), ScaledForm("float8_e4m3fn")
BLOCKS = [QuantisedForm(8), QuantisedForm(4, has_minimum=True)]
FORMS = [INT8, FP8, *map(scaled_form, BLOCKS)]
both_ways = pytest.mark.parametrize("transposed", [False, True], ids=["in_out", "out_in"])
all_forms = pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.numbers}.{form.block}")


def make(form, transposed=False):
    """COLUMNS as a scaled matrix, [out, in] if transposed."""
    shape, axis = ((OUT, IN), -1) if transposed else ((IN, OUT), -2)
    shapes = abstract_scaled(shape, form, in_axis=axis)
    whole = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), shapes)
    for part in (slice(0, 64), slice(64, OUT)):
        blocks = scale_columns(COLUMNS[part], form) if form.block is None else quantise(COLUMNS[part], form.bits)
        put_columns(whole, part, blocks, in_axis=axis)
    return jax.tree.map(jnp.asarray, whole)


@pytest.mark.parametrize("form", BLOCKS, ids=lambda form: form.name)
@both_ways
def test_numbers_in_blocks_are_those_of_packed_matrices(form, transposed):
    wide = np.asarray(widened(make(scaled_form(form), transposed), jnp.float32))
    packed = pack_quantised(quantise(COLUMNS, form.bits), form.bits)
    wanted = np.asarray(packed_columns(jax.tree.map(jnp.asarray, packed), jnp.arange(OUT)))
    np.testing.assert_allclose(wide if transposed else wide.T, wanted, rtol=1e-6, atol=1e-7)


def test_columns_are_rounded_to_the_nearest_number():
    """The largest of a column is exact; others are off by half a step of int8, half a last place of fp8's 3 bits."""
    largest = np.abs(COLUMNS).max(1, keepdims=True)
    errors = {form: np.abs(np.asarray(widened(make(form), jnp.float32)).T - COLUMNS) for form in (INT8, FP8)}
    assert (errors[INT8] <= largest / 254 * 1.001).all()
    assert (errors[FP8] <= np.maximum(np.abs(COLUMNS) / 16, largest / 448 * 2.0**-10) * 1.001).all()
    for error in errors.values():
        assert error.mean() > 1e-4
        np.testing.assert_allclose(np.take_along_axis(error, np.abs(COLUMNS).argmax(1)[:, None], 1), 0, atol=1e-6)


def test_a_column_of_zeros_stays_zero_and_what_is_not_finite_is_refused():
    for form in (INT8, FP8):
        zeros = scale_columns(np.zeros((2, 8), np.float32), form)
        assert not np.asarray(zeros.integers, np.float32).any()
        assert (zeros.scales > 0).all()
        with pytest.raises(ValueError, match="weights must be finite to be quantised"):
            scale_columns(np.array([[1.0, np.nan]], np.float32), form)


@all_forms
@both_ways
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.02)])
def test_products_are_those_of_the_values(form, transposed, dtype, tolerance):
    matrix = make(form, transposed)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(5, IN)), dtype)
    wide = np.asarray(widened(matrix, jnp.float32), np.float64)
    wanted = np.asarray(x, np.float64) @ (wide.T if transposed else wide)
    for out_dtype in (None, jnp.float32):
        found = jax.jit(lambda x, out=out_dtype: scaled_matmul(x, matrix, transposed=transposed, out_dtype=out))(x)
        assert found.dtype == (out_dtype or x.dtype)
        scale = np.abs(np.asarray(x, np.float64)) @ np.abs(wide.T if transposed else wide)
        assert (np.abs(np.asarray(found, np.float64) - wanted) <= tolerance * scale).all()


@all_forms
def test_rows_are_read_alone(form):
    matrix = make(form, transposed=True)
    rows = jnp.asarray([3, 0, OUT - 1])
    np.testing.assert_array_equal(scaled_rows(matrix, rows, jnp.float32), widened(matrix, jnp.float32)[rows])


def test_blocks_divide_a_column():
    assert can_scale(96, scaled_form(QuantisedForm(8)))
    assert not can_scale(80, scaled_form(QuantisedForm(8)))
    assert can_scale(7, INT8)
    assert scaled_form(QuantisedForm(4)).numbers == "int4"
    assert scaled_form(QuantisedForm(4, has_minimum=True)).numbers == "uint4"


def test_numbers_of_4_bits_take_half_a_byte():
    assert num_bytes((3, 5), ml_dtypes.uint4) == 8
    assert num_bytes((3, 5), jnp.bfloat16) == 30
    shapes = jax.ShapeDtypeStruct((1024,), jnp.uint4)
    compiled = jax.jit(lambda x: x.astype(jnp.int32)).lower(shapes).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == num_bytes((1024,), jnp.uint4)


LAYERS, HIDDEN, INNER = 4, 2048, 8192


def stacked_mlp(x, layers):
    def body(x, index):
        own = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), layers)
        gate, up = (scaled_matmul(x, own[name]) for name in ("gate", "up"))
        return x + scaled_matmul(jax.nn.silu(gate) * up, own["down"]), None

    return jax.lax.scan(body, x, jnp.arange(LAYERS))[0]


def compiled_temp_bytes(target, form, rows):
    """Of a scan over MLPs whose matrices have a form; and that its arguments have the bytes they should."""
    target = TARGETS[target]
    if missing(target):
        pytest.skip(missing(target))
    up, down = (abstract_scaled((LAYERS, *shape), form) for shape in ((HIDDEN, INNER), (INNER, HIDDEN)))
    x = jax.ShapeDtypeStruct((rows, HIDDEN), jnp.bfloat16)
    program = compile_for(target, stacked_mlp, (x, {"gate": up, "up": up, "down": down}))
    analysis = program.memory_analysis()
    wanted = sum(num_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves([x, up, up, down]))
    assert wanted <= analysis.argument_size_in_bytes < 1.02 * wanted + 1e5
    return analysis.temp_size_in_bytes


WIDENED_BYTES = HIDDEN * INNER * 2


@pytest.mark.tpu_compile
@pytest.mark.parametrize("rows", [16, 512])
@pytest.mark.parametrize("form", [INT8, FP8], ids=lambda form: form.numbers)
@pytest.mark.parametrize("target", ["v5e", "v6e"])
def test_no_tpu_program_keeps_a_widened_matrix_with_scales_per_column(target, form, rows):
    assert compiled_temp_bytes(target, form, rows) < WIDENED_BYTES / 4


@pytest.mark.tpu_compile
@pytest.mark.parametrize("rows", [16, 512])
@pytest.mark.parametrize("form", FORMS[2:], ids=lambda form: form.numbers)
def test_v5e_keeps_no_widened_matrix_with_scales_per_block_either(form, rows):
    assert compiled_temp_bytes("v5e", form, rows) < WIDENED_BYTES


@pytest.mark.gpu_compile
@pytest.mark.parametrize("form", [INT8, FP8], ids=lambda form: form.numbers)
def test_a_gpu_program_holds_a_layer_s_numbers_and_no_widened_matrix(form):
    """XLA takes the layer's three matrices out of the stack first, of whatever dtype."""
    assert compiled_temp_bytes("sm_90a", form, 16) < 3 * WIDENED_BYTES / 2 * 1.2


def test_a_scaled_matrix_goes_through_a_scan_and_keeps_its_form():
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), make(FORMS[3]), make(FORMS[3]))
    assert isinstance(stacked, ScaledMatrix)
    assert stacked.numbers.dtype == jnp.uint4
    own = jax.tree.map(lambda leaf: leaf[1], stacked)
    np.testing.assert_array_equal(widened(own, jnp.float32), widened(make(FORMS[3]), jnp.float32))


def test_a_column_of_one_block_keeps_its_minimum():
    shapes = abstract_scaled((32, OUT), FORMS[3])
    whole = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), shapes)
    put_columns(whole, slice(0, OUT), quantise(COLUMNS[:, :32], 4))
    matrix = jax.tree.map(jnp.asarray, whole)
    x = jnp.ones((2, 32), jnp.float32)
    np.testing.assert_allclose(scaled_matmul(x, matrix), x @ widened(matrix, jnp.float32), rtol=1e-5, atol=1e-5)
    assert np.abs(widened(matrix, jnp.float32) - COLUMNS[:, :32].T).max() < 0.3
