"""Loading holds the model once, and a few tensors: measured in a process of its own."""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant

from jaxserve.models import stack_layers
from jaxserve.testing.tiny import tiny_config, tiny_weights, write_tiny_model
from tests.loading.gguf_files import write_gguf

SIZES = dict(hidden_size=1024, intermediate_size=2048, num_hidden_layers=5, num_attention_heads=16)

CHILD = """
import json, sys
import gguf.quants
import jax
from jaxserve.core import peak_memory_bytes
from jaxserve.loading import load_model, resolve_model
from jaxserve.runtime import make_mesh

def load(path, quantization):
    name, _, products = quantization.partition(" ")
    settings = dict(quantization=name or None, packed=products != "xla")
    loaded = load_model(resolve_model(path), "float32", mesh=make_mesh(1), **settings)
    return jax.block_until_ready(loaded.params)

small, large, quantization = sys.argv[1:]
load(small, "")  # what is imported along the way is no part of the model
before = peak_memory_bytes()
params = load(large, quantization)
num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
print(json.dumps([num_bytes, peak_memory_bytes() - before]))
"""


CONVERTING = """
import json, sys, tempfile
from pathlib import Path
from jaxserve.convert import Conversion, convert_checkpoint
from jaxserve.core import peak_memory_bytes
small, large, form = sys.argv[1:]
num_bytes = Path(large, "model.safetensors").stat().st_size
with tempfile.TemporaryDirectory() as folder:
    for number, model in enumerate((small, large)):
        before = peak_memory_bytes()
        output = Path(folder, f"{number}.gguf" if form == "gguf" else str(number))
        convert_checkpoint(Conversion(model, output, form, tokenizer="none"))
print(json.dumps([num_bytes, peak_memory_bytes() - before]))
"""


@pytest.fixture(scope="module")
def large_weights():
    return tiny_weights(tiny_config(**SIZES))


def measure(small, large, quantization="", child=CHILD):
    """Bytes of the parameters, and by how much the process' peak grew while they were loaded.

    The least of three processes: what a program holds it holds in each of them, while what the allocator keeps of freed
    memory depends on which threads happened to run. With a fixed threshold, large arrays are given back at once.
    """
    arguments = [sys.executable, "-c", child, small, large, quantization]
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "2"}
    found = []
    for _ in range(3):
        done = subprocess.run([*map(str, arguments)], capture_output=True, text=True, timeout=600, env=env)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout))
    return min(found, key=lambda pair: pair[1])


@pytest.mark.parametrize("form", ["float32", "bfloat16", "gguf"])
def test_loading_holds_no_second_copy_of_the_model(form, tiny_model_dir, large_weights, tmp_path):
    if form == "gguf":
        path = write_gguf(tmp_path / "model.gguf", tiny_config(**SIZES), large_weights, quant=Quant.Q8_0)
    else:
        path = write_tiny_model(tmp_path / "model", dtype=form, **SIZES)
    num_bytes, grown_bytes = measure(tiny_model_dir, path)
    assert num_bytes > 120e6
    assert grown_bytes < 1.7 * num_bytes


def test_blocks_are_kept_without_the_model_dequantised(tiny_model_dir, large_weights, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", tiny_config(**SIZES), large_weights, quant=Quant.Q8_0)
    num_bytes, grown_bytes = measure(tiny_model_dir, path, "gguf")
    assert num_bytes < 45e6
    # Of a few parts of matrices, a few numbers of each value; dequantised it would be 160 MB.
    assert grown_bytes < num_bytes + 70e6


@pytest.mark.parametrize("form", ["safetensors", "orbax", "gguf"])
def test_converting_holds_a_few_tensors(form, tiny_model_dir, tmp_path):
    path = write_tiny_model(tmp_path / "model", **SIZES)
    num_bytes, grown_bytes = measure(tiny_model_dir, path, form, child=CONVERTING)
    assert num_bytes > 120e6
    assert grown_bytes < 0.4 * num_bytes


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_a_model_is_quantised_some_columns_at_a_time(quantization, tiny_model_dir, tmp_path):
    path = write_tiny_model(tmp_path / "model", **SIZES)
    num_bytes, grown_bytes = measure(tiny_model_dir, path, f"{quantization} xla")
    assert num_bytes < 45e6
    # In float32 it would be 160 MB.
    assert grown_bytes < num_bytes + 70e6


def test_stacking_may_consume_the_layers():
    layers = [{"scale": jnp.full(3, float(layer))} for layer in range(4)]
    kept = stack_layers({"embed": jnp.ones(2), "layers": layers})
    assert not any(layer["scale"].is_deleted() for layer in layers)
    consumed = stack_layers({"embed": jnp.ones(2), "layers": layers}, consume=True)
    assert all(layer["scale"].is_deleted() for layer in layers)
    np.testing.assert_array_equal(consumed["layers"]["scale"], np.repeat(np.arange(4.0)[:, None], 3, 1))
    np.testing.assert_array_equal(kept["layers"]["scale"], consumed["layers"]["scale"])
    assert not consumed["embed"].is_deleted()
