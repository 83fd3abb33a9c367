"""Weights kept quantised: GGUF's numbers as they are, int8 and int4 made at load, what is refused."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant

from jaxserve.loading import abstract_weights, load_model, quantised_weights, resolve_model, save_orbax
from jaxserve.loading.gguf_blocks import FORMS
from jaxserve.loading.gguf_reader import GgufReader
from jaxserve.testing.tiny import tiny_config, tiny_weights, write_tiny_model
from pallas_kernels.matmul import QuantisedForm, QuantisedMatrix, form_of, packed_columns, quantise
from tests.loading.gguf_files import write_gguf

WIDE = dict(hidden_size=256, intermediate_size=512, head_dim=64, num_hidden_layers=1, vocab=288)
QUERY, DOWN, EMBED = (
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.embed_tokens.weight",
)
INT8, INT4 = QuantisedForm(8), QuantisedForm(4, has_minimum=True)


def write(path, quant, **settings):
    config = tiny_config(**(WIDE | settings))
    return write_gguf(path / "m.gguf", config, tiny_weights(config, seed=3), quant=quant)


def columns_of(matrix):
    """float32[out, in] of a quantised matrix."""
    return np.asarray(packed_columns(matrix, jnp.arange(matrix.shape[1])))


def load(path, quantization, dtype="float32"):
    return load_model(resolve_model(str(path)), dtype, quantization=quantization)


def layer_kernels(params):
    layer = params["layers"][0]
    return [module["kernel"] for part in ("attention", "mlp") for module in layer[part].values()]


@pytest.mark.parametrize("quant", FORMS, ids=lambda quant: quant.name)
def test_blocks_of_a_gguf_file_are_bit_for_bit_its_numbers(tmp_path, quant):
    reader = GgufReader(write(tmp_path, quant))
    for name in (QUERY, DOWN, EMBED):
        integers, scales, minima = reader.blocks(name)(slice(None))
        block = FORMS[quant].block
        found = integers.astype(np.float32) * np.repeat(scales.astype(np.float32), block, 1)
        if minima is not None:
            found = found + np.repeat(minima.astype(np.float32), block, 1)
        np.testing.assert_array_equal(found, reader.read(name))


@pytest.mark.parametrize("quant", [Quant.Q4_1, Quant.Q6_K], ids=lambda quant: quant.name)
def test_a_gguf_file_is_loaded_as_it_is(tmp_path, monkeypatch, quant):
    monkeypatch.setattr(quantised_weights, "_VALUES_AT_ONCE", 1 << 14)  # several parts of a matrix
    path = write(tmp_path, quant)
    params, reader = load(path, "gguf").params, GgufReader(path)
    for matrix in (params["embed"], *layer_kernels(params)):
        assert form_of(matrix) == FORMS[quant]
    layer = params["layers"][0]
    for name, matrix in (
        (QUERY, layer["attention"]["q_proj"]["kernel"]),
        (DOWN, layer["mlp"]["down_proj"]["kernel"]),
        (EMBED, params["embed"]),
    ):
        np.testing.assert_allclose(columns_of(matrix), reader.read(name), rtol=1e-6, atol=1e-9)
    assert params["final_norm"].dtype == jnp.float32


@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_of_its_own_is_quantised_only_as_the_file_has_it(tmp_path, tied):
    params = load(write(tmp_path, Quant.Q8_0, tied=tied), "gguf").params
    assert isinstance(params["embed"], QuantisedMatrix)
    assert tied or isinstance(params["lm_head"], QuantisedMatrix)
    directory = write_tiny_model(tmp_path / "hf", tied=tied, **WIDE)
    for quantization, form in (("int8", INT8), ("int4", INT4)):
        params = load(directory, quantization, "bfloat16").params
        assert all(form_of(matrix) == form for matrix in layer_kernels(params))
        if tied:
            assert form_of(params["embed"]) == INT8
        else:
            assert (params["embed"].dtype, form_of(params["lm_head"])) == (jnp.bfloat16, form)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_what_is_made_at_load_is_the_same_from_every_format(tmp_path, quantization):
    directory = write_tiny_model(tmp_path / "hf", seed=3, **WIDE)
    config = tiny_config(**WIDE)
    tensors = tiny_weights(config, seed=3)
    save_orbax(tmp_path / "orbax", config, load(directory, None).params)
    paths = (directory, write(tmp_path, Quant.F32), tmp_path / "orbax")
    first, *others = (load(path, quantization).params for path in paths)
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)
    bits = 8 if quantization == "int8" else 4
    integers, scales, minima = quantise(tensors[DOWN], bits)
    wanted = integers * np.repeat(scales.astype(np.float32), 32, 1)
    wanted += 0 if minima is None else np.repeat(minima.astype(np.float32), 32, 1)
    np.testing.assert_allclose(columns_of(first["layers"][0]["mlp"]["down_proj"]["kernel"]), wanted, rtol=1e-6)


def test_matrices_that_do_not_divide_stay_as_they_are_and_the_log_says_so(tmp_path, caplog):
    path = write(tmp_path, Quant.Q4_0, vocab=264)
    with caplog.at_level(logging.INFO):
        params = load(path, "gguf", "bfloat16").params
    assert params["embed"].dtype == jnp.bfloat16
    assert "7 of 8 matrices are kept quantised (4 bits: 7, 8 bits: 0); not quantised: model.embed_tokens.weight" in (
        caplog.text
    )


@pytest.mark.parametrize("quantization", [None, "gguf", "int8", "int4"])
def test_shapes_are_known_before_loading(tmp_path, quantization):
    path = write(tmp_path, Quant.Q4_K, tied=False)
    abstract = abstract_weights(resolve_model(str(path)), "bfloat16", quantization)
    params = load(path, quantization, "bfloat16").params
    assert jax.tree.structure(abstract) == jax.tree.structure(params)
    for wanted, leaf in zip(jax.tree.leaves(abstract), jax.tree.leaves(params), strict=True):
        assert (wanted.shape, wanted.dtype) == (leaf.shape, leaf.dtype)


def test_gguf_blocks_need_a_gguf_file_that_has_some(tmp_path, tiny_model_dir):
    with pytest.raises(ValueError, match=r"keeps the blocks of a \.gguf file; this model is none: use int8 or int4"):
        load(tiny_model_dir, "gguf")
    with pytest.raises(ValueError, match=r"no matrix that can be kept quantised: Q4_0, .* leave quantization out"):
        load(write(tmp_path, Quant.F16), "gguf")
