"""Every family from a GGUF file: the weights and logits of its safetensors, quantised ones kept too."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file

from jaxserve.core import CheckpointError, UnsupportedModelError
from jaxserve.loading import load_model, resolve_model
from jaxserve.loading.gguf_reader import GgufReader
from jaxserve.models import forward, unembed
from jaxserve.models.rope import inverse_frequencies
from pallas_kernels.matmul import QuantisedMatrix, packed_matmul
from tests.loading.gguf_families import write_family
from tests.models.tiny_models import FOLDER, NAMES, changed, dense_attend


def load(path, **settings):
    return load_model(resolve_model(str(path)), "float32", **settings)


@pytest.mark.parametrize("name", NAMES)
def test_weights_and_logits_are_those_of_the_safetensors(tmp_path, name):
    original, converted = load(FOLDER / name), load(write_family(tmp_path / "m.gguf", FOLDER / name))
    golden = json.loads((FOLDER / name / "golden.json").read_text())
    assert jax.tree.structure(original.params) == jax.tree.structure(converted.params)
    # A norm that holds 1 + w is rounded where it was made.
    atol = 2e-7 if converted.config.norm_offset else 0
    for left, right in zip(jax.tree.leaves(original.params), jax.tree.leaves(converted.params), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=atol)
    ids = jnp.asarray(golden["prompt_ids"], jnp.int32)
    hidden, _ = forward(converted.config, converted.params, ids, jnp.arange(ids.size), dense_attend, None)
    logits = unembed(converted.config, converted.params, hidden[-1:])[0]
    np.testing.assert_allclose(logits, golden["logits_last"], rtol=0, atol=1e-3)
    assert converted.config.sliding_windows == original.config.sliding_windows
    assert converted.config.layer_ropes == original.config.layer_ropes


@pytest.mark.parametrize("name", ["phi3_fused", "gemma2_softcap", "starcoder2_layernorm", "glm4_interleaved"])
def test_blocks_of_a_file_are_kept_also_of_shared_tensors(tmp_path, name):
    path = write_family(tmp_path / "m.gguf", FOLDER / name, quant=Quant.Q8_0)
    dense, kept = load(path), load(path, quantization="gguf")
    for module, matrix in (("attention", "k_proj"), ("mlp", "up_proj")):
        wanted = dense.params["layers"][1][module][matrix]["kernel"]
        quantised = kept.params["layers"][1][module][matrix]["kernel"]
        found = packed_matmul(jnp.eye(wanted.shape[0], dtype=jnp.float32), quantised, jnp.float32)
        np.testing.assert_allclose(found, wanted, atol=0.02 * float(jnp.abs(wanted).max()))


def test_experts_in_mxfp4_are_what_the_gguf_package_makes_of_them(tmp_path):
    path = write_family(tmp_path / "m.gguf", FOLDER / "gpt_oss_sinks", quant=Quant.MXFP4)
    stored = load_file(FOLDER / "gpt_oss_sinks" / "model.safetensors")
    down = stored["model.layers.2.mlp.experts.down_proj"].swapaxes(1, 2)
    wanted = dequantize(quantize(np.ascontiguousarray(down), Quant.MXFP4), Quant.MXFP4).swapaxes(1, 2)
    found = load(path).params["layers"][2]["mlp"]["experts"]["down_proj"]["kernels"]
    np.testing.assert_array_equal(found, wanted)


def test_blocks_are_kept_of_attention_and_not_of_experts(tmp_path):
    path = write_family(tmp_path / "m.gguf", FOLDER / "mixtral_moe", quant=Quant.Q8_0)
    layer = load(path, quantization="gguf").params["layers"][1]
    assert isinstance(layer["attention"]["q_proj"]["kernel"], QuantisedMatrix)
    assert isinstance(layer["mlp"]["experts"]["up_proj"]["kernels"], jax.Array)
    assert isinstance(layer["mlp"]["router"]["weight"], jax.Array)


def test_experts_of_another_architecture_are_refused(tmp_path):
    def edit(writer):
        writer.add_expert_count(8)

    with pytest.raises(
        UnsupportedModelError, match="experts of architecture qwen3 is not supported; those of llama, qwen3moe, gpt-oss"
    ):
        load(write_family(tmp_path / "m.gguf", FOLDER / "qwen3_qknorm", edit=edit))


def test_longrope_and_partial_rotation_are_read(tmp_path):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "short_factor": [1.0, 1.0, 1.5, 2.0],
    }
    folder = changed(tmp_path / "hf", "phi3_fused", rope_parameters=rope, original_max_position_embeddings=64)
    original, converted = load(folder).config, load(write_family(tmp_path / "m.gguf", folder)).config
    for config in (original, converted):
        np.testing.assert_allclose(
            inverse_frequencies(config.rope, config.head_dim, 512), [1 / 2, 0.1 / 3, 0.01 / 4, 0.001 / 5], rtol=1e-6
        )
    assert converted.rope.attention_factor == pytest.approx(original.rope.attention_factor)
    assert converted.rope.attention_factor == pytest.approx((1 + np.log(8) / np.log(64)) ** 0.5)


def test_score_scale_of_the_largest_gemma_follows_its_layers():
    from jaxserve.loading.gguf_architectures import ARCHITECTURES

    class Fields:
        def number(self, key, default):
            return default

        def raw(self, key):
            return None

    shared = {"hidden_size": 4608, "num_attention_heads": 32, "head_dim": 128, "sliding_window": 4096}
    for layers, scalar in ((46, 144), (42, 128)):
        found = ARCHITECTURES["gemma2"].extra(Fields(), {**shared, "num_hidden_layers": layers})
        assert found["query_pre_attn_scalar"] == scalar
        assert found["layer_types"][:2] == ["sliding_attention", "full_attention"]


def test_starcoder_2_has_its_window_where_the_file_has_none(tmp_path):
    folder = changed(tmp_path / "hf", "starcoder2_layernorm", sliding_window=None)
    assert load(folder).config.sliding_windows == (None, None)
    config = load(write_family(tmp_path / "m.gguf", folder)).config
    assert config.sliding_windows == (4096, 4096)
    assert config.qkv_bias and config.o_bias and config.mlp_bias


def test_biases_of_glm_4_are_told_by_its_tensors_and_several_positions_are_refused(tmp_path):
    folder = changed(
        tmp_path / "hf",
        "glm4_interleaved",
        tensors=lambda tensors: {name: value for name, value in tensors.items() if not name.endswith(".bias")},
        attention_bias=False,
    )
    assert not load(write_family(tmp_path / "m.gguf", folder)).config.qkv_bias

    def edit(writer):
        writer.add_rope_dimension_sections([2, 1, 1, 0])

    with pytest.raises(UnsupportedModelError, match=r"several dimensions \(mrope\) are not supported"):
        GgufReader(write_family(tmp_path / "other.gguf", folder, edit=edit))


def test_a_window_in_an_olmo_2_file_is_a_family_that_is_not_there(tmp_path):
    path = write_family(
        tmp_path / "m.gguf", FOLDER / "olmo2_postnorm", edit=lambda writer: writer.add_sliding_window(8)
    )
    with pytest.raises(UnsupportedModelError, match="Olmo3ForCausalLM is not supported"):
        load(path)


def test_a_pattern_of_windows_of_another_length_is_refused(tmp_path):
    def edit(writer):
        writer.add_array("gemma2.attention.sliding_window_pattern", [True, False])

    with pytest.raises(CheckpointError, match="sliding_window_pattern has 2 entries for 4 layers"):
        GgufReader(write_family(tmp_path / "m.gguf", FOLDER / "gemma2_softcap", edit=edit))


def test_an_architecture_of_llama_cpp_without_a_family_is_refused(tmp_path):
    path = write_family(tmp_path / "m.gguf", FOLDER / "olmo2_postnorm")
    path.write_bytes(path.read_bytes().replace(b"olmo2", b"olmo9"))
    with pytest.raises(UnsupportedModelError, match=r"'olmo9' is not supported; supported are llama, qwen2, .*granite"):
        GgufReader(path)
