"""What paged_attention refuses, and which implementation it takes."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import choose_implementation, paged_attention
from pallas_kernels.paged_attention.specs import SPECS
from tests.kernels.cases import make_case


def call(case, **options):
    q, pool, layer, table, context, starts = case.args()
    values = {"q": q, "page_table": table, "context_lens": context, "query_starts": starts, **options}
    return paged_attention(values.pop("q"), pool, layer, **values)


def test_auto_takes_the_cpu_form_on_cpu():
    assert choose_implementation("auto", "cpu") == "cpu"
    assert choose_implementation("auto", "tpu") == "mosaic_tpu"


def test_unknown_implementation_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'mosaic' does not exist; choose auto, reference, cpu, mosaic_gpu, mosaic_tpu"):
        call(make_case([3]), implementation="mosaic")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"q": jnp.zeros((2, 4, 16))}, "4 heads of 16 and the pool 2 of 8"),
        ({"q": jnp.zeros((2, 3, 8))}, "query heads a multiple of KV heads"),
        ({"q": jnp.zeros((2, 8))}, r"must be \[T, H, D\]"),
        ({"q": jnp.zeros((3, 4, 8))}, "q has 3 tokens for 2 rows"),
        ({"page_table": jnp.zeros((3, 2), jnp.int32)}, r"page_table is \(3, 2\) for 2 context lengths"),
        ({"query_starts": jnp.zeros(2, jnp.int32)}, r"query_starts is \(2,\) for 2 rows"),
        ({"sliding_window": 0}, "sliding_window is 0; it must be at least 1"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        call(make_case([3, 5]), **options)


def test_auto_computes():
    case = make_case([3, 5])
    np.testing.assert_allclose(call(case), call(case, implementation="reference"), atol=1e-5)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_the_cpu_form_needs_no_memory_in_the_size_of_the_pool(spec):
    compiled = jax.jit(partial(paged_attention, implementation="cpu")).lower(*spec.abstract_args()).compile()
    pool = spec.abstract_args()[1]
    assert compiled.memory_analysis().temp_size_in_bytes < pool.size * pool.dtype.itemsize / 8


def test_specs_are_told_apart_by_name():
    assert len({spec.name for spec in SPECS}) == len(SPECS)


def test_kv_bytes_of_a_spec_are_those_of_its_rows():
    assert SPECS[1].kv_bytes == 8 * 256 * 2 * 3 * 64 * 4
