"""What paged_attention refuses, and which implementation it takes."""

from __future__ import annotations

import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common import native
from pallas_kernels.paged_attention import check_page_table, choose_implementation, paged_attention
from pallas_kernels.paged_attention.specs import SPECS
from tests.kernels.cases import make_case


def call(case, **options):
    q, pool, layer, table, context, starts = case.args()
    values = {"q": q, "page_table": table, "context_lens": context, "query_starts": starts, **options}
    return paged_attention(values.pop("q"), pool, layer, **values)


def test_auto_takes_the_kernel_of_the_backend(monkeypatch):
    assert choose_implementation("auto", "tpu") == "mosaic_tpu"
    assert choose_implementation("auto", "cpu", "bfloat16") == "native_cpu"
    assert choose_implementation("auto", "cpu", "int8") == "cpu"
    choose_implementation.cache_clear()
    monkeypatch.setattr(native, "is_available", lambda: False)
    assert choose_implementation("auto", "cpu", "bfloat16") == "cpu"
    choose_implementation.cache_clear()


def test_unknown_implementation_is_refused_with_the_known_ones():
    with pytest.raises(
        ValueError, match="'mosaic' does not exist; choose auto, reference, cpu, native_cpu, mosaic_gpu, mosaic_tpu"
    ):
        call(make_case([3]), implementation="mosaic")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"q": jnp.zeros((2, 4, 16))}, r"pool is \(2, 6, 2, 2, 4, 8\) for heads of 16"),
        ({"q": jnp.zeros((2, 3, 8))}, "3 heads and the pool 2; query heads must be a multiple"),
        ({"q": jnp.zeros((2, 8))}, r"must be \[T, H, D\]"),
        ({"q": jnp.zeros((3, 4, 8))}, "q has 3 tokens for 2 rows"),
        ({"page_table": jnp.zeros((3, 2), jnp.int32)}, r"page_table is \(3, 2\) for 2 context lengths"),
        ({"query_starts": jnp.zeros(2, jnp.int32)}, r"query_starts is \(2,\) for 2 rows"),
        ({"sliding_window": 0}, "sliding_window is 0; it must be at least 1"),
        ({"sinks": jnp.zeros(2)}, r"sinks is \(2,\) for 4 query heads"),
        ({"scales": jnp.zeros((2, 6, 2, 2, 4))}, "pool is float32 with scales"),
        ({"interpret": True}, "cpu is no Pallas kernel; interpret=True is for mosaic_gpu and mosaic_tpu"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        call(make_case([3, 5]), **options)


def test_a_pool_whose_rows_an_int32_cannot_number_is_refused():
    pool = jax.ShapeDtypeStruct((80, 2**20, 2, 8, 16, 64), jnp.bfloat16)
    args = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (((1, 8, 64), jnp.bfloat16), ((1, 4), jnp.int32)))
    context = jax.ShapeDtypeStruct((1,), jnp.int32)
    with pytest.raises(ValueError, match="int32 index"):
        jax.eval_shape(lambda q, table, context: paged_attention(q, pool, 0, table, context), *args, context)


@pytest.mark.parametrize("bad", [-1, 8, 2**31 - 1])
def test_page_ids_out_of_range_are_refused_on_the_host_with_their_place(bad):
    table = np.zeros((3, 4), np.int32)
    table[0] = [0, 7, 3, 7]
    check_page_table(table, 8)
    table[2, 1] = bad
    with pytest.raises(ValueError, match=rf"page_table\[2, 1\] is {bad}; page ids must be in \[0, 8\)"):
        check_page_table(table, 8)


def test_kernel_modules_are_loaded_when_chosen_only():
    code = (
        "import sys, pallas_kernels.paged_attention, pallas_kernels.kv_write;"
        "print([name for name in sys.modules if 'mosaic' in name and 'pallas' in name])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_auto_computes():
    case = make_case([3, 5])
    np.testing.assert_allclose(call(case), call(case, implementation="reference"), atol=1e-5)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if "float8" not in spec.kv_dtype], ids=lambda spec: spec.name)
def test_the_cpu_form_needs_no_memory_in_the_size_of_the_pool(spec):
    # Not float8_e4m3fn: XLA for CPU widens such a pool before it gathers (README.md).
    compiled = jax.jit(spec.attend("cpu")).lower(*spec.abstract_args("cpu")).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < spec.pool_bytes("cpu") / 8


def test_a_spec_has_a_pool_of_more_elements_than_an_int32_numbers():
    assert any(math.prod(spec.pool_shape("mosaic_gpu")) > 2**31 for spec in SPECS)


def test_specs_are_told_apart_by_name():
    assert len({spec.name for spec in SPECS}) == len(SPECS)


def test_kv_bytes_of_a_spec_are_those_of_its_rows():
    assert SPECS[1].kv_bytes == 8 * 256 * 2 * 3 * 64 * 4
