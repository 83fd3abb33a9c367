"""Steps of a Llama-3.1-8B shape with the kernels inside, compiled for devices that this machine lacks."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxserve.models import abstract_params, model_config_from_hf, param_shardings, stack_layers
from jaxserve.runtime.kv_pool import PoolLayout
from jaxserve.runtime.programs import ProgramTable, _check_in_place
from jaxserve.tables import Bucket
from pallas_kernels.common.deviceless import TARGETS, make_mesh, missing

MODEL = Path(__file__).parents[2] / "configs/models/llama-3.1-8b.json"
PAGES = 1025


@pytest.mark.parametrize(
    ("target", "num_devices"),
    [
        pytest.param("v5e", 4, marks=pytest.mark.tpu_compile),
        pytest.param("v6e", 1, marks=pytest.mark.tpu_compile),
        pytest.param("sm_90a", 1, marks=pytest.mark.gpu_compile),
    ],
)
@pytest.mark.parametrize("bucket", [Bucket(64, 0, 0, 128), Bucket(64, 512, 8, 128)], ids=lambda bucket: bucket.name)
def test_a_step_of_llama_8b_compiles_with_kernels_and_does_not_copy_the_pool(target, num_devices, bucket):
    target = TARGETS[target]
    if missing(target):
        pytest.skip(missing(target))
    mesh = make_mesh(target, num_devices)
    config = model_config_from_hf(json.loads(MODEL.read_text()))
    shapes = jax.eval_shape(stack_layers, abstract_params(config, jnp.bfloat16))
    shardings = param_shardings(config, mesh, stacked=True)
    params = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, shardings)
    kv = PoolLayout(config, mesh, 16, "bfloat16", target.implementation)
    programs = ProgramTable(kv, params, max_num_seqs=64, dtype="bfloat16")
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program = programs.compile(bucket, PAGES)
    pool = kv.abstract(PAGES)
    _check_in_place(bucket.name, program, pool)
    pool_bytes = math.prod(pool.pages.sharding.shard_shape(pool.pages.shape)) * 2
    assert pool_bytes == 32 * PAGES * 2 * 8 * 16 * 128 * 2 // num_devices
    analysis = program.memory_analysis()
    assert analysis.alias_size_in_bytes >= pool_bytes
    assert analysis.temp_size_in_bytes < pool_bytes
    text = program.as_text()
    assert ("tpu_custom_call" if target.platform == "tpu" else "mosaic_gpu") in text
