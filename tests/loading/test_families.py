"""What a family's checkpoint may lack or have too much of, and tensors that several weights share."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant
from safetensors.numpy import load_file

from jaxserve.core import CheckpointError, UnsupportedModelError
from jaxserve.loading import load_model, resolve_model
from jaxserve.loading.load import open_checkpoint
from jaxserve.loading.safetensors_reader import SafetensorsReader
from tests.loading.gguf_families import write_family
from tests.models.tiny_models import FOLDER, changed


def load(path):
    return load_model(resolve_model(str(path)), "float32")


def test_rows_of_a_shared_tensor_are_read_and_nothing_else(monkeypatch):
    from jaxserve.loading import mapped_file

    mapped = []
    real = mapped_file.map_tensor

    def recording(file, name, dtype, shape, begin, **settings):
        mapped.append((name, shape))
        return real(file, name, dtype, shape, begin, **settings)

    monkeypatch.setattr(mapped_file, "map_tensor", recording)
    params = load(FOLDER / "phi3_fused").params
    name = "model.layers.0.self_attn.qkv_proj.weight"
    whole = SafetensorsReader(FOLDER / "phi3_fused").read(name)
    attention = params["layers"][0]["attention"]
    for matrix, rows in (("q_proj", slice(64)), ("k_proj", slice(64, 96)), ("v_proj", slice(96, 128))):
        np.testing.assert_array_equal(attention[matrix]["kernel"], whole[rows].T)
    assert [shape for found, shape in mapped if found == name] == [(64, 64), (32, 64), (32, 64), (128, 64)]


MXFP4 = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}}
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def mxfp4(tensors):
    """Experts of random values that MXFP4 holds, and what they are unpacked, by name."""
    random, stored, wanted = np.random.default_rng(0), dict(tensors), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, rows, columns = tensors[name].shape
        codes = random.integers(0, 16, (experts, columns, rows), dtype=np.uint8)
        exponents = random.integers(120, 130, (experts, columns, rows // 32), dtype=np.uint8)
        value = np.asarray(E2M1, np.float32)[codes] * np.repeat(
            2.0 ** (exponents.astype(np.float32) - 127), 32, axis=-1
        )
        wanted[name] = value.swapaxes(1, 2)
        del stored[name]
        packed = codes[..., 0::2] | codes[..., 1::2] << 4
        stored[name + "_blocks"] = packed.reshape(experts, columns, rows // 32, 16)
        stored[name + "_scales"] = exponents
    return stored, wanted


def test_mxfp4_blocks_are_dequantised_exactly(tmp_path):
    folder = changed(tmp_path / "hf", "gpt_oss_sinks", tensors=lambda tensors: mxfp4(tensors)[0], **MXFP4)
    wanted = mxfp4(load_file(FOLDER / "gpt_oss_sinks" / "model.safetensors"))[1]
    params = load(folder).params
    for index, layer in enumerate(params["layers"]):
        experts, prefix = layer["mlp"]["experts"], f"model.layers.{index}.mlp.experts."
        np.testing.assert_array_equal(experts["gate_proj"]["kernels"], wanted[prefix + "gate_up_proj"][..., 0::2])
        np.testing.assert_array_equal(experts["up_proj"]["kernels"], wanted[prefix + "gate_up_proj"][..., 1::2])
        np.testing.assert_array_equal(experts["down_proj"]["kernels"], wanted[prefix + "down_proj"])


@pytest.mark.parametrize("kind", ["mxfp4", "gguf", "safetensors"])
def test_a_part_of_a_tensor_is_that_part_of_the_whole(tmp_path, kind):
    if kind == "mxfp4":
        folder = changed(tmp_path / "hf", "gpt_oss_sinks", tensors=lambda tensors: mxfp4(tensors)[0], **MXFP4)
    else:
        folder = FOLDER / "mixtral_moe"
    if kind == "gguf":
        folder = write_family(tmp_path / "m.gguf", folder, quant=Quant.Q8_0)
    reader = open_checkpoint(resolve_model(str(folder)))
    random, num_parts = np.random.default_rng(0), 0
    for name in reader.names():
        whole = reader.read(name)
        for axes in range(1, whole.ndim + 1):
            bounds = [sorted(random.integers(0, size, 2)) for size in whole.shape[:axes]]
            part = tuple(slice(int(first), int(last) + 1) for first, last in bounds)
            np.testing.assert_array_equal(reader.read(name, part), whole[part], err_msg=name)
            num_parts += 1
        one = (slice(1, 2), *(slice(size // 3, size // 2 + 1) for size in whole.shape[1:]))
        np.testing.assert_array_equal(reader.read(name, one), whole[one], err_msg=name)
    assert num_parts > 50


def test_mxfp4_blocks_without_scales_or_with_others_are_named(tmp_path):
    lost = "model.layers.1.mlp.experts.down_proj_scales"

    def without(tensors):
        return {name: value for name, value in mxfp4(tensors)[0].items() if name != lost}

    def cut(tensors):
        return {name: value[..., :1] if name == lost else value for name, value in mxfp4(tensors)[0].items()}

    with pytest.raises(CheckpointError, match=rf"lacks tensor {lost}, which .*down_proj_blocks needs"):
        load(changed(tmp_path / "a", "gpt_oss_sinks", tensors=without, **MXFP4))
    with pytest.raises(CheckpointError, match=rf"{lost} \[4, 64, 1\]; MXFP4 needs \[experts, out, in / 32, 16\]"):
        load(changed(tmp_path / "b", "gpt_oss_sinks", tensors=cut, **MXFP4))


def test_other_quantised_checkpoints_are_refused():
    from jaxserve.models import model_config_from_hf

    with pytest.raises(UnsupportedModelError, match=r"quantised \(gptq\); supported are float .*, mxfp4 and fp8"):
        model_config_from_hf(
            {
                "architectures": ["GptOssForCausalLM"],
                "num_hidden_layers": 1,
                "num_local_experts": 4,
                "intermediate_size": 8,
                "quantization_config": {"quant_method": "gptq"},
            }
        )


@pytest.mark.parametrize("expert", [0, 3])
def test_a_missing_expert_and_one_of_another_shape_are_named(tmp_path, expert):
    name = f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight"

    def without(tensors):
        return {key: value for key, value in tensors.items() if key != name}

    def cut(tensors):
        return {**tensors, name: np.ascontiguousarray(tensors[name][:, :-1])}

    with pytest.raises(CheckpointError, match=rf"lacks tensor {name}, which its config asks for"):
        load(changed(tmp_path / "a", "mixtral_moe", tensors=without))
    with pytest.raises(CheckpointError, match=rf"{name} has shape \[64, 95\]; its config asks for \[64, 96\]"):
        load(changed(tmp_path / "b", "mixtral_moe", tensors=cut))


@pytest.mark.parametrize(
    ("name", "module"), [("phi3_fused", "qkv_proj"), ("olmo2_postnorm", "q_norm"), ("gemma3_dual_rope", "k_norm")]
)
def test_a_missing_and_an_unused_tensor_are_named(tmp_path, name, module):
    lost = f"model.layers.1.self_attn.{module}.weight"
    extra = "model.layers.0.self_attn.k_norm.bias"

    def without(tensors):
        return {key: value for key, value in tensors.items() if key != lost}

    with pytest.raises(CheckpointError, match=rf"lacks tensor {lost}, which its config asks for"):
        load(changed(tmp_path / "a", name, tensors=without))
    with pytest.raises(CheckpointError, match=rf"holds tensor {extra}, which the model of its config has no use for"):
        load(changed(tmp_path / "b", name, tensors=lambda tensors: {**tensors, extra: np.zeros(16, np.float32)}))


def test_a_shared_tensor_of_the_wrong_height_is_named(tmp_path):
    name = "model.layers.0.mlp.gate_up_proj.weight"

    def cut(tensors):
        return {**tensors, name: tensors[name][:-1]}

    with pytest.raises(CheckpointError, match=rf"{name} has shape \[191, 64\]; its config asks for \[192, 64\]"):
        load(changed(tmp_path / "hf", "phi3_fused", tensors=cut))
