"""Packed matrices and products with them, against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numba import njit

from pallas_kernels.common.cpu_calls import source_version
from pallas_kernels.matmul import can_pack, is_packed, pack, packed_columns, packed_matmul
from pallas_kernels.matmul.tile import COLUMNS, HAS_BF16_DOT, make_tile

SHAPES = [(64, 32), (6, 96), (576, 192), (1536, 64)]
ROWS = [1, 2, 3, 5, 8, 12, 21, 40]


def draw(*shape, dtype):
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_is_that_of_the_matrix_for_any_number_of_rows(shape, dtype):
    matrix = draw(*shape, dtype=dtype)
    for rows in ROWS:
        x = draw(rows, shape[0], dtype=dtype)
        wanted = np.asarray(x, np.float64) @ np.asarray(matrix, np.float64)
        scale = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(matrix, np.float64))
        found = np.asarray(packed_matmul(x, pack(matrix), jnp.float32), np.float64)
        assert (np.abs(found - wanted) <= 1e-6 * scale + 1e-30).all()
        if dtype == "bfloat16":
            rounded = packed_matmul(x, pack(matrix))
            assert rounded.dtype == jnp.bfloat16
            np.testing.assert_array_equal(
                np.asarray(rounded.astype(jnp.float32)),
                np.asarray(jnp.asarray(found, jnp.float32).astype(jnp.bfloat16).astype(jnp.float32)),
            )


NEEDS_DOT = pytest.mark.skipif(not HAS_BF16_DOT, reason="the processor has no instruction for products of bfloat16")


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=NEEDS_DOT)])
def test_tile_of_bfloat16_with_and_without_the_instruction(dtype, adds):
    tile = make_tile(2, adds=adds)

    @njit
    def run(x, packed, out):
        places = (x.ctypes.data, x.strides[0], packed.ctypes.data, x.shape[1] // 2, out.ctypes.data, 4 * COLUMNS)
        tile(x[0, 0], packed[0, 0, 0, 0], *places, packed.ctypes.data, 0)

    x, matrix = draw(2, 40, dtype="bfloat16"), draw(40, COLUMNS, dtype="bfloat16")
    out = np.ones((2, COLUMNS), np.float32)
    x_bits = np.asarray(x).view(np.uint16) if dtype == "bfloat16" else np.asarray(x, np.float32)
    run(x_bits, np.asarray(pack(matrix)).view(np.uint16), out)
    wanted = np.asarray(x, np.float32) @ np.asarray(matrix, np.float32) + adds
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 32)], ids=str)
def test_a_matrix_of_16_bits_gives_float32_rows_the_bits_of_its_numbers_as_float32(shape, dtype):
    least = jnp.finfo(dtype).smallest_normal
    matrix = draw(*shape, dtype=dtype).at[0, 0].set(least).at[1, 1].set(-jnp.finfo(dtype).max)
    if dtype == "float16":
        matrix = matrix.at[0, 2].set(least / 8)
    kept, wide = pack(matrix), pack(matrix.astype(jnp.float32))
    for rows in ROWS:
        x = draw(rows, shape[0], dtype="float32")
        np.testing.assert_array_equal(packed_matmul(x, kept), packed_matmul(x, wide))


@pytest.mark.parametrize(
    "dtypes",
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float32", "float16")],
    ids=str,
)
def test_a_row_has_the_same_bits_whatever_is_beside_it(dtypes):
    matrix = pack(draw(576, 96, dtype=dtypes[1]))
    x = draw(40, 576, dtype=dtypes[0])
    together = np.asarray(packed_matmul(x, matrix, jnp.float32))
    for row in (0, 7, 11, 12, 35, 36, 39):
        alone = np.asarray(packed_matmul(x[row : row + 1], matrix, jnp.float32))[0]
        np.testing.assert_array_equal(alone, together[row])


def test_many_products_at_once_in_one_program_are_each_right():
    matrices = [draw(64, 32 * (1 + n % 3), dtype="float32") for n in range(40)]
    x = draw(9, 64, dtype="float32")
    products = jax.jit(lambda x, packed: [packed_matmul(x, each) for each in packed])
    for _ in range(20):
        for found, matrix in zip(products(x, [pack(each) for each in matrices]), matrices, strict=True):
            np.testing.assert_allclose(found, np.asarray(x) @ np.asarray(matrix), rtol=1e-4, atol=1e-4)


def test_nan_and_infinity_stay_what_they_are():
    matrix = pack(draw(64, 32, dtype="bfloat16"))
    x = draw(2, 64, dtype="bfloat16").at[1, 3].set(jnp.nan)
    found = np.asarray(packed_matmul(x, matrix).astype(jnp.float32))
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1]).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_columns_come_back_as_they_were(dtype):
    matrix = draw(64, 96, dtype=dtype)
    columns = jnp.asarray([0, 95, 31, 32, 64, 0])
    np.testing.assert_array_equal(
        packed_columns(pack(matrix), columns).astype(jnp.float32), matrix.T[columns].astype(jnp.float32)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_packing_keeps_every_number_and_no_more(dtype):
    matrix = draw(6, 96, dtype=dtype)
    packed = pack(matrix)
    assert is_packed(packed)
    assert not is_packed(matrix)
    assert packed.nbytes == matrix.nbytes


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((64, 40), "float32"), ((63, 32), "bfloat16"), ((63, 32), "float16"), ((64, 32), "float8_e4m3fn")],
    ids=str,
)
def test_what_has_no_packed_form_is_refused(shape, dtype):
    assert not can_pack(shape, jnp.dtype(dtype))
    with pytest.raises(ValueError, match="cannot be packed"):
        pack(jnp.zeros(shape, dtype))


@pytest.mark.parametrize(
    ("x", "out_dtype"),
    [
        (jnp.zeros((2, 63), jnp.bfloat16), None),
        (jnp.zeros((2, 64), jnp.float16), None),
        (jnp.zeros((64,), jnp.bfloat16), None),
        (jnp.zeros((2, 64), jnp.bfloat16), jnp.float16),
    ],
    ids=["inner size", "dtype", "rank", "result"],
)
def test_what_does_not_fit_is_refused_before_memory_is_read(x, out_dtype):
    with pytest.raises(ValueError, match=r"x is|a product of"):
        packed_matmul(x, pack(jnp.zeros((64, 32), jnp.bfloat16)), out_dtype)


def test_code_kept_on_disk_is_another_when_a_source_changes(tmp_path):
    source = tmp_path / "kernel.py"
    source.write_text("one")
    before = source_version(str(source))
    assert source_version(str(source)) == before
    source.write_text("two")
    assert source_version(str(source)) != before
