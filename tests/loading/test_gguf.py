"""LDR-1, GGUF: the same model as its safetensors, every quantisation as the gguf package reads it, damage refused."""

import struct
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant

from jaxserve.core import CheckpointError, UnsupportedModelError
from jaxserve.loading import load_model, resolve_model
from jaxserve.loading.gguf_reader import GgufReader, unpermute
from jaxserve.models.rope import inverse_frequencies
from jaxserve.testing.tiny import tiny_config, tiny_weights, write_tiny_model
from tests.loading.gguf_files import gguf_name, permute, write_gguf

WIDE = dict(hidden_size=256, intermediate_size=256, head_dim=64, num_hidden_layers=1)


def tiny(**settings):
    config = tiny_config(**settings)
    return config, tiny_weights(config, seed=3)


@pytest.mark.parametrize("tied", [True, False])
def test_float32_parameters_equal_those_of_safetensors(tmp_path, tied):
    directory = write_tiny_model(tmp_path / "hf", seed=3, tied=tied)
    file = write_gguf(tmp_path / "model.gguf", *tiny(tied=tied))
    original, converted = (load_model(resolve_model(str(path)), "float32") for path in (directory, file))
    assert converted.config.tie_word_embeddings == tied
    assert converted.config.rope == original.config.rope
    assert ("lm_head" in converted.params) != tied
    assert jax.tree.structure(original.params) == jax.tree.structure(converted.params)
    for left, right in zip(jax.tree.leaves(original.params), jax.tree.leaves(converted.params), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("quant", [Quant.F16, Quant.BF16, Quant.Q8_0, Quant.Q4_0, Quant.Q4_1, Quant.Q5_0, Quant.Q5_1])
def test_quantised_tensors_are_close_to_their_originals(tmp_path, quant):
    config, tensors = tiny(**WIDE)
    reader = GgufReader(write_gguf(tmp_path / "m.gguf", config, tensors, quant=quant))
    for name, value in tensors.items():
        read = reader.read(name)
        assert read.shape == value.shape and read.dtype == np.float32
        assert np.abs(read - value).max() < 0.15 * np.abs(value).max()


@pytest.mark.parametrize("quant", [Quant.Q8_0, Quant.Q2_K, Quant.Q3_K, Quant.Q4_K, Quant.Q5_K, Quant.Q6_K])
def test_dequantised_values_are_bit_for_bit_those_of_the_gguf_package(tmp_path, quant):
    config, tensors = tiny(**WIDE)
    path = write_gguf(tmp_path / "m.gguf", config, tensors, quant=quant)
    reader = GgufReader(path)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name in tensors:
        tensor = theirs[gguf_name(name)]
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        if ".q_proj." in name or ".k_proj." in name:
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            np.testing.assert_array_equal(permute(reader.read(name), heads), expected)
        else:
            np.testing.assert_array_equal(reader.read(name), expected)


def test_unpermuting_puts_pairs_of_neighbours_half_a_head_apart():
    rows = np.arange(2 * 6)[:, None]
    assert unpermute(rows, 2)[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_only_llama_files_are_unpermuted(tmp_path):
    config, tensors = tiny()
    name = "model.layers.0.self_attn.q_proj.weight"
    for arch in ("llama", "qwen2"):
        reader = GgufReader(write_gguf(tmp_path / f"{arch}.gguf", config, tensors, arch=arch))
        np.testing.assert_array_equal(reader.read(name), tensors[name])


def test_biases_of_queries_and_keys_are_unpermuted_too(tmp_path):
    config, tensors = tiny(attention_bias=True)
    rng = np.random.default_rng(0)
    for layer in range(config["num_hidden_layers"]):
        for module, size in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32), ("o_proj", 64)):
            tensors[f"model.layers.{layer}.self_attn.{module}.bias"] = rng.normal(size=size).astype(np.float32)
    file = write_gguf(tmp_path / "m.gguf", config, tensors)
    params = load_model(resolve_model(str(file)), "float32").params
    bias = params["layers"][1]["attention"]["k_proj"]["bias"]
    np.testing.assert_array_equal(bias, tensors["model.layers.1.self_attn.k_proj.bias"])


def test_rope_freqs_divide_the_frequencies(tmp_path):
    config, tensors = tiny()
    factors = np.linspace(1.0, 8.0, config["head_dim"] // 2).astype(np.float32)
    file = write_gguf(tmp_path / "m.gguf", config, tensors, extra={"rope_freqs.weight": factors})
    loaded = load_model(resolve_model(str(file)), "float32")
    expected = 10000.0 ** -(np.arange(0, 16, 2) / 16) / factors
    np.testing.assert_allclose(inverse_frequencies(loaded.config.rope, 16, 256), expected, rtol=1e-6)


def scaling(kind, **values):
    def edit(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(values.get("factor", 4.0))
        if "original" in values:
            writer.add_rope_scaling_orig_ctx_len(values["original"])

    return edit


def test_linear_and_yarn_scaling_are_read(tmp_path):
    config, tensors = tiny()
    linear = GgufReader(write_gguf(tmp_path / "l.gguf", config, tensors, edit=scaling("linear", factor=2.0)))
    assert linear.hf_config["rope_parameters"] == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    yarn = GgufReader(write_gguf(tmp_path / "y.gguf", config, tensors, edit=scaling("yarn", original=64)))
    rope = yarn.hf_config["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4.0, 64)
    assert rope["attention_factor"] == pytest.approx(0.1 * np.log(4.0) + 1.0)


def test_longrope_factors_are_read(tmp_path):
    config, tensors = tiny()
    extra = {"rope_factors_long.weight": np.full(8, 4.0), "rope_factors_short.weight": np.ones(8)}
    edit = scaling("longrope", original=64)
    loaded = load_model(
        resolve_model(str(write_gguf(tmp_path / "m.gguf", config, tensors, extra=extra, edit=edit))), "float32"
    )
    assert loaded.config.rope.kind == "longrope" and loaded.config.rope.long_factors == (4.0,) * 8


def test_a_sliding_window_in_the_metadata_is_honoured(tmp_path):
    config, tensors = tiny()
    file = write_gguf(tmp_path / "m.gguf", config, tensors, edit=lambda writer: writer.add_sliding_window(32))
    assert load_model(resolve_model(str(file)), "float32").config.sliding_windows == (32, 32)


def test_a_model_split_into_files_is_read_whole(tmp_path):
    config, tensors = tiny()
    names = list(tensors)
    for number, part in enumerate((names[:7], names[7:]), 1):
        chosen = {name: tensors[name] for name in part}
        write_gguf(
            tmp_path / f"m-{number:05d}-of-00002.gguf",
            config,
            chosen,
            edit=lambda writer: writer.add_uint16("split.count", 2),
        )
    reader = GgufReader(tmp_path / "m-00001-of-00002.gguf")
    assert set(reader.names()) == set(names)
    np.testing.assert_array_equal(reader.read(names[-1]), tensors[names[-1]])
    with pytest.raises(CheckpointError, match="give the first"):
        GgufReader(tmp_path / "m-00002-of-00002.gguf")
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002.gguf is missing"):
        GgufReader(tmp_path / "m-00001-of-00002.gguf")


def test_an_unknown_architecture_names_those_that_can_be_served(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"'mamba' is not supported; supported are llama, qwen2, "):
        GgufReader(write_gguf(tmp_path / "m.gguf", *tiny(), arch="mamba"))


def test_experts_of_unknown_choice_and_uneven_layers_are_refused(tmp_path):
    config, tensors = tiny()
    with pytest.raises(CheckpointError, match=r"lacks the metadata llama\.expert_used_count"):
        GgufReader(write_gguf(tmp_path / "e.gguf", config, tensors, edit=lambda writer: writer.add_expert_count(4)))
    uneven = write_gguf(
        tmp_path / "u.gguf", config, tensors, edit=lambda writer: writer.add_array("llama.rope.scale_linear", [1, 2])
    )
    with pytest.raises(UnsupportedModelError, match="differs from layer to layer"):
        GgufReader(uneven)


def test_a_quantisation_that_cannot_be_dequantised_is_named(tmp_path):
    config, tensors = tiny()
    name = "model.layers.0.mlp.up_proj.weight"
    path = write_gguf(tmp_path / "m.gguf", config, tensors)
    patch_tensor(path, gguf_name(name), type_id=Quant.Q8_1)
    with pytest.raises(UnsupportedModelError, match=r"up_proj.weight is quantised as Q8_1"):
        GgufReader(path).read(name)


def patch_tensor(path: Path, name: str, type_id: int | None = None, offset: int | None = None) -> None:
    """Changes the type or the offset in a tensor's table entry."""
    data = bytearray(path.read_bytes())
    at = data.index(name.encode()) + len(name)
    num_dimensions = struct.unpack_from("<I", data, at)[0]
    at += 4 + 8 * num_dimensions
    if type_id is not None:
        struct.pack_into("<I", data, at, type_id)
    if offset is not None:
        struct.pack_into("<Q", data, at + 4, offset)
    path.write_bytes(data)


def damaged(tmp_path, change):
    path = write_gguf(tmp_path / "m.gguf", *tiny())
    data = bytearray(path.read_bytes())
    path.write_bytes(change(data))
    return path


def set_version(number):
    return lambda data: data[:4] + struct.pack("<I", number) + data[8:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "cannot be read as GGUF"),
        (lambda data: b"GGML" + data[4:], "is not a GGUF file"),
        (set_version(1), "has GGUF version 1"),
        (set_version(0x03000000), "little-endian"),
        (lambda data: data[:50], "header goes on"),
        (lambda data: data[:-1000], r"tensor blk\.\d\.\w+\.weight ends at \d+; the file is cut short"),
        (lambda data: data[:8] + struct.pack("<Q", 2**60) + data[16:], "header goes on|is damaged|unknown type"),
        (lambda data: data[:16] + struct.pack("<Q", 2**60) + data[24:], "header goes on|is damaged|unknown type"),
        (lambda data: data[:24] + struct.pack("<Q", 2**63) + data[32:], "header goes on"),
    ],
)
def test_damage_is_refused_naming_the_file(tmp_path, change, message):
    path = damaged(tmp_path, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        GgufReader(path)
    assert str(path) in str(caught.value)


def test_a_tensor_beyond_the_file_and_an_unknown_type_are_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", *tiny())
    patch_tensor(path, "blk.1.ffn_up.weight", offset=2**40)
    with pytest.raises(CheckpointError, match=r"tensor blk.1.ffn_up.weight ends at"):
        GgufReader(path)
    patch_tensor(path, "blk.1.ffn_up.weight", offset=0, type_id=250)
    with pytest.raises(CheckpointError, match=r"blk.1.ffn_up.weight has the unknown type 250"):
        GgufReader(path)


def test_random_bytes_after_the_header_never_crash_the_parser(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", *tiny())
    whole = path.read_bytes()
    header = whole.index(b"output_norm")
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(200):
        data = bytearray(whole)
        for at in rng.integers(4, header + 200, 3):
            data[at] = rng.integers(256)
        path.write_bytes(data)
        try:
            GgufReader(path)
        except (CheckpointError, UnsupportedModelError) as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 50


def test_missing_metadata_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", *tiny())
    path.write_bytes(path.read_bytes().replace(b"llama.block_count", b"llama.block_cxunt"))
    with pytest.raises(CheckpointError, match=r"lacks the metadata llama.block_count"):
        GgufReader(path)


def test_an_extra_tensor_is_an_error_that_names_it(tmp_path):
    file = write_gguf(tmp_path / "m.gguf", *tiny(), extra={"blk.0.attn_sinks.weight": np.ones(4)})
    with pytest.raises(CheckpointError, match=r"holds tensor blk.0.attn_sinks.weight, which the model"):
        load_model(resolve_model(str(file)), "float32")
