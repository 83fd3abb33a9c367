"""Steps of real models' shapes with the kernels inside, compiled for devices that this machine lacks."""

import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxserve.loading.quantised_weights import abstract_params_of, quantised_forms
from jaxserve.models import (
    abstract_params,
    group_layers,
    leaf_shardings,
    make_params,
    model_config_from_hf,
    param_shardings,
    stack_layers,
    weights,
)
from jaxserve.runtime.kv_pool import PoolLayout
from jaxserve.runtime.programs import ProgramTable, _check_in_place
from jaxserve.tables import Bucket
from pallas_kernels.common.deviceless import TARGETS, make_mesh, missing, without_compile_cache

MODELS = Path(__file__).parents[2] / "configs/models"
PAGES = 1025
BUCKETS = [Bucket(64, 0, 0, 128), Bucket(64, 512, 8, 128)]


@pytest.fixture(autouse=True)
def no_compile_cache():
    with without_compile_cache():
        yield


def make_programs(target, num_devices, model, page_size, kv_cache_dtype, windows=()):
    """The pool's layout and the programs, uncompiled; skips where the compiler is not installed."""
    target = TARGETS[target]
    if missing(target):
        pytest.skip(missing(target))
    mesh = make_mesh(target, num_devices)
    config = model_config_from_hf(json.loads((MODELS / f"{model}.json").read_text()))
    config = replace(config, sliding_windows=windows)
    shapes = jax.eval_shape(stack_layers, abstract_params(config, jnp.bfloat16))
    shardings = param_shardings(config, mesh, stacked=True)
    params = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, shardings)
    groups = group_layers(config.sliding_windows, config.max_position_embeddings, page_size)
    kv = PoolLayout(config, mesh, page_size, kv_cache_dtype, target.implementation, groups)
    return kv, ProgramTable(kv, params, max_num_seqs=64, dtype="bfloat16", max_decode_steps=16)


FORMS = [
    ("v5e", 4, "llama-3.1-8b", 16, "bfloat16"),
    ("v6e", 1, "llama-3.1-8b", 16, "bfloat16"),
    ("sm_90a", 1, "llama-3.1-8b", 16, "bfloat16"),
    ("v6e", 1, "llama-3.1-8b", 128, "int8"),
    ("sm_90a", 1, "llama-3.1-8b", 16, "fp8"),
    ("v5e", 1, "smollm2-135m", 16, "bfloat16"),
    ("sm_90a", 1, "smollm2-135m", 16, "bfloat16"),
]
"""Target, devices, model, page size, dtype of KV pages."""


def every_form(*, steps):
    """FORMS with their markers; the steps of a large model take minutes to compile."""

    def markers(target, model):
        yield pytest.mark.tpu_compile if TARGETS[target].platform == "tpu" else pytest.mark.gpu_compile
        if steps and model != "smollm2-135m":
            yield pytest.mark.slow

    forms = [pytest.param(*form, marks=tuple(markers(form[0], form[2]))) for form in FORMS]
    return pytest.mark.parametrize(("target", "num_devices", "model", "page_size", "kv_cache_dtype"), forms)


@every_form(steps=True)
@pytest.mark.parametrize("bucket", BUCKETS, ids=lambda bucket: bucket.name)
def test_a_step_compiles_with_kernels_and_does_not_copy_the_pool(
    target, num_devices, model, page_size, kv_cache_dtype, bucket
):
    kv, programs = make_programs(target, num_devices, model, page_size, kv_cache_dtype)
    with jax.sharding.use_abstract_mesh(kv.mesh.abstract_mesh):
        program = programs.compile(bucket, PAGES)
    _check_in_place(bucket.name, program, kv.abstract(PAGES))
    pool_bytes = kv.bytes_on_a_device(PAGES)
    if (model, kv_cache_dtype) == ("llama-3.1-8b", "bfloat16"):
        assert pool_bytes == 32 * PAGES * 2 * 8 * 16 * 128 * 2 // num_devices
    analysis = program.memory_analysis()
    assert analysis.alias_size_in_bytes >= pool_bytes
    assert analysis.temp_size_in_bytes < pool_bytes
    text = program.as_text()
    assert ("tpu_custom_call" if TARGETS[target].platform == "tpu" else "mosaic_gpu") in text


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize(
    "target",
    [pytest.param("v5e", marks=pytest.mark.tpu_compile), pytest.param("sm_90a", marks=pytest.mark.gpu_compile)],
)
@pytest.mark.parametrize("bucket", [*BUCKETS, None], ids=lambda bucket: bucket.name if bucket else "loop")
def test_layers_in_groups_do_not_copy_the_pool(target, bucket, kv_cache_dtype):
    """Five layers with a window to one without, as in Gemma 3: six groups of five in one scan."""
    windows = ((512,) * 5 + (None,)) * 5
    page_size = 128 if kv_cache_dtype == "int8" else 16
    kv, programs = make_programs(target, 1, "smollm2-135m", page_size, kv_cache_dtype, windows)
    assert kv.groups.windows == (0, *(512,) * 5) and kv.groups.size == 5
    num_pages = 6 * PAGES
    with jax.sharding.use_abstract_mesh(kv.mesh.abstract_mesh):
        program = programs.compile(bucket, num_pages) if bucket else programs.compile_loop(BUCKETS[0], num_pages)
    _check_in_place("the program", program, kv.abstract(num_pages))
    analysis, pool_bytes = program.memory_analysis(), kv.bytes_on_a_device(num_pages)
    assert analysis.alias_size_in_bytes >= pool_bytes
    assert analysis.temp_size_in_bytes < pool_bytes
    assert ("tpu_custom_call" if TARGETS[target].platform == "tpu" else "mosaic_gpu") in program.as_text()


@every_form(steps=True)
def test_a_decode_loop_compiles_with_kernels_and_does_not_copy_the_pool(
    target, num_devices, model, page_size, kv_cache_dtype
):
    kv, programs = make_programs(target, num_devices, model, page_size, kv_cache_dtype)
    with jax.sharding.use_abstract_mesh(kv.mesh.abstract_mesh):
        program = programs.compile_loop(BUCKETS[0], PAGES)
    _check_in_place("the decode loop", program, kv.abstract(PAGES))
    analysis, pool_bytes = program.memory_analysis(), kv.bytes_on_a_device(PAGES)
    state_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in programs._state)
    assert analysis.alias_size_in_bytes >= pool_bytes + state_bytes
    # Arrays of the logits' size, and weights that v5e lays out anew before the loop; no second pool.
    logits_bytes = BUCKETS[0].decode_rows * kv.config.vocab_size * 4
    assert analysis.temp_size_in_bytes < min(8 * logits_bytes, pool_bytes)
    assert ("tpu_custom_call" if TARGETS[target].platform == "tpu" else "mosaic_gpu") in program.as_text()


@every_form(steps=False)
def test_swaps_write_pages_in_place(target, num_devices, model, page_size, kv_cache_dtype):
    kv, programs = make_programs(target, num_devices, model, page_size, kv_cache_dtype)
    programs.compile_swaps(PAGES)  # raises if the pool is not aliased, or copied
    assert programs.scatter.memory_analysis().temp_size_in_bytes < kv.bytes_on_a_device(PAGES) / 8


@pytest.mark.tpu_compile
@pytest.mark.parametrize("quantization", ["int8_channel", "fp8"])
def test_a_step_with_quantised_weights_keeps_no_widened_matrix(quantization):
    """The embedding, which is the output layer too, is the largest matrix of this model by far."""
    kv, plain = make_programs("v5e", 1, "smollm2-135m", 16, "bfloat16")
    forms = quantised_forms(quantization, kv.config, weights(kv.config), None, packed=False)
    assert ("embed",) in forms
    tree = make_params(kv.config, lambda weight: abstract_params_of(weight, forms, jnp.dtype(jnp.bfloat16)))
    shapes = jax.eval_shape(stack_layers, tree)
    shardings = jax.tree.map(leaf_shardings, param_shardings(kv.config, kv.mesh, stacked=True), shapes)
    params = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, shardings)
    quantised = ProgramTable(kv, params, max_num_seqs=64, dtype="bfloat16")
    with jax.sharding.use_abstract_mesh(kv.mesh.abstract_mesh):
        temps = [each.compile(BUCKETS[1], PAGES).memory_analysis().temp_size_in_bytes for each in (plain, quantised)]
    assert temps[1] < temps[0] + kv.config.vocab_size * kv.config.hidden_size / 4, temps
