"""What a family's checkpoint may lack or have too much of, and tensors that several weights share."""

import numpy as np
import pytest

from jaxserve.core import CheckpointError
from jaxserve.loading import load_model, resolve_model
from jaxserve.loading.safetensors_reader import SafetensorsReader
from tests.models.tiny_models import FOLDER, changed


def load(path):
    return load_model(resolve_model(str(path)), "float32")


def test_rows_of_a_shared_tensor_are_read_and_nothing_else(monkeypatch):
    from jaxserve.loading import safetensors_reader

    mapped = []
    real = safetensors_reader.map_tensor

    def recording(file, name, dtype, shape, begin):
        mapped.append((name, shape))
        return real(file, name, dtype, shape, begin)

    monkeypatch.setattr(safetensors_reader, "map_tensor", recording)
    params = load(FOLDER / "phi3_fused").params
    name = "model.layers.0.self_attn.qkv_proj.weight"
    whole = SafetensorsReader(FOLDER / "phi3_fused").read(name)
    attention = params["layers"][0]["attention"]
    for matrix, rows in (("q_proj", slice(64)), ("k_proj", slice(64, 96)), ("v_proj", slice(96, 128))):
        np.testing.assert_array_equal(attention[matrix]["kernel"], whole[rows].T)
    assert [shape for found, shape in mapped if found == name] == [(64, 64), (32, 64), (32, 64), (128, 64)]


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
