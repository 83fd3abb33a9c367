"""Matrices kept in 16 bits beside float32: which are, and that they hold the checkpoint's numbers."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant
from safetensors.numpy import save_file

from jaxserve.loading import abstract_weights, load_model, resolve_model, save_orbax
from jaxserve.testing.tiny import tiny_config, tiny_weights, write_tiny_model
from pallas_kernels.matmul import QuantisedMatrix
from tests.loading.gguf_files import write_gguf

WIDE = dict(hidden_size=64, intermediate_size=96, vocab=288)
EMBED, DOWN = "model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"
DTYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}


def write(folder, kind, dtypes, **settings):
    """A checkpoint whose matrices are of `dtypes`, by name; "" is of all others."""
    config = tiny_config(**(WIDE | settings))
    tensors = {
        name: value.astype(DTYPES[dtypes.get(name, dtypes[""])]) if value.ndim == 2 else value
        for name, value in tiny_weights(config, seed=3).items()
    }
    if kind == "gguf":
        assert len(dtypes) == 1
        return write_gguf(folder / "m.gguf", config, tensors, quant=Quant[dtypes[""]])
    write_tiny_model(folder / "m", **(WIDE | settings))
    save_file(tensors, folder / "m" / "model.safetensors", metadata={"format": "pt"})
    return folder / "m"


def load(path, weight_dtype, dtype="float32", quantization=None):
    return load_model(resolve_model(str(path)), dtype, weight_dtype=weight_dtype, quantization=quantization).params


def matrices(params):
    """Those of the layers, and the embedding."""
    layers = [
        module["kernel"] for layer in params["layers"] for p in ("attention", "mlp") for module in layer[p].values()
    ]
    return layers, params["embed"]


def dtypes_of(params):
    layers, embed = matrices(params)
    return {leaf.dtype.name for leaf in layers}, embed.dtype.name


@pytest.mark.parametrize(("stored", "name"), [("BF16", "bfloat16"), ("F16", "float16")])
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_auto_keeps_what_is_stored_in_16_bits_without_rounding(tmp_path, kind, stored, name):
    path = write(tmp_path, kind, {"": stored})
    kept, wide = load(path, "auto"), load(path, None)
    assert dtypes_of(kept) == ({name}, name)
    assert dtypes_of(wide) == ({"float32"}, "float32")
    assert kept["final_norm"].dtype == kept["layers"][0]["input_norm"]["scale"].dtype == jnp.float32
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a, np.float32), b), kept, wide)


def test_auto_keeps_float32_as_it_is_and_other_dtypes_alone(tmp_path):
    path = write(tmp_path, "safetensors", {"": "F32"})
    assert dtypes_of(load(path, "auto")) == ({"float32"}, "float32")
    assert dtypes_of(load(path, "auto", "bfloat16")) == ({"bfloat16"}, "bfloat16")


def test_auto_keeps_layers_that_differ_in_float32_so_that_they_stay_one_call(tmp_path):
    path = write(tmp_path, "safetensors", {"": "BF16", DOWN: "F32"})
    assert dtypes_of(load(path, "auto")) == ({"float32"}, "bfloat16")


@pytest.mark.parametrize("tied", [True, False])
def test_auto_leaves_what_cannot_be_packed_unless_it_is_only_looked_up(tmp_path, tied):
    params = load(write(tmp_path, "safetensors", {"": "F16"}, tied=tied, vocab=264), "auto")
    assert dtypes_of(params) == ({"float16"}, "float32" if tied else "float16")
    assert tied or params["lm_head"].dtype == jnp.float32


def test_auto_beside_quantised_matrices(tmp_path):
    config = tiny_config(**WIDE)
    tensors = tiny_weights(config)
    path = write_gguf(tmp_path / "m.gguf", config, tensors, quant=Quant.Q8_0)
    params = load(path, "auto", quantization="gguf")
    assert all(isinstance(matrix, QuantisedMatrix) for matrix in matrices(params)[0])
    untied = write(tmp_path, "safetensors", {"": "BF16"}, tied=False)
    params = load(untied, "auto", quantization="int8")
    assert isinstance(params["lm_head"], QuantisedMatrix)
    assert params["embed"].dtype == jnp.bfloat16


@pytest.mark.parametrize("kind", ["gguf", "safetensors", "orbax"])
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_a_dtype_asked_for_is_that_of_every_matrix_rounded_once(tmp_path, kind, name):
    source = path = write(tmp_path, "gguf" if kind == "gguf" else "safetensors", {"": "F32"}, vocab=264)
    if kind == "orbax":
        path = save_orbax(tmp_path / "saved", tiny_config(**(WIDE | {"vocab": 264})), load(source, None))
    kept, wide = load(path, name), load(source, None)
    assert dtypes_of(kept) == ({name}, name)
    for found, whole in zip(*(jax.tree.leaves(matrices(params)) for params in (kept, wide)), strict=True):
        np.testing.assert_array_equal(found, whole.astype(name))


@pytest.mark.parametrize("kind", ["safetensors", "orbax"])
def test_numbers_too_large_for_float16_are_refused(tmp_path, kind):
    path = write(tmp_path, "safetensors", {"": "F32"})
    tensors = tiny_weights(tiny_config(**WIDE))
    tensors[DOWN][3, 5] = 70000.0
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    if kind == "orbax":
        path = save_orbax(tmp_path / "saved", tiny_config(**WIDE), load(path, None))
    with pytest.raises(ValueError, match=rf"{DOWN} has numbers that float16 does not hold, whose largest is 65504"):
        load(path, "float16")
    assert dtypes_of(load(path, "bfloat16")) == ({"bfloat16"}, "bfloat16")


@pytest.mark.parametrize("weight_dtype", [None, "auto", "float16"])
def test_shapes_are_known_before_loading(tmp_path, weight_dtype):
    path = write(tmp_path, "safetensors", {"": "BF16"}, tied=False, vocab=264)
    abstract = abstract_weights(resolve_model(str(path)), "float32", None, weight_dtype)
    params = load(path, weight_dtype)
    assert jax.tree.structure(abstract) == jax.tree.structure(params)
    for wanted, leaf in zip(jax.tree.leaves(abstract), jax.tree.leaves(params), strict=True):
        assert (wanted.shape, wanted.dtype) == (leaf.shape, leaf.dtype)
