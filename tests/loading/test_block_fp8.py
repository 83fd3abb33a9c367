"""Checkpoints in fp8 with a scale per block of a matrix."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.core import CheckpointError
from jaxserve.loading import load_model, resolve_model
from jaxserve.loading.load import open_checkpoint
from tests.models.tiny_models import FOLDER, changed

BLOCK = (16, 40)
"""Neither the rows nor the columns of every matrix divide by it."""
QUANTISED = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}


def scales_of(matrix):
    """Each block's own: 1, 2, 3 ... 512ths."""
    blocks = [-(-size // block) for size, block in zip(matrix.shape, BLOCK, strict=True)]
    return (1 + np.arange(np.prod(blocks), dtype=np.float32)).reshape(blocks) / 512


def in_fp8(tensors):
    """Layer matrices as float8, each beside its scales."""
    for name in [name for name, x in tensors.items() if x.ndim == 2 and ".layers." in name]:
        scales = scales_of(tensors[name])
        wide = np.kron(scales, np.ones(BLOCK, np.float32))[: tensors[name].shape[0], : tensors[name].shape[1]]
        tensors[name] = (tensors[name] / wide).astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
    return tensors


@pytest.fixture
def stored():
    """What is in the file: safetensors' own reading has no float8."""
    return in_fp8(load_file(FOLDER / "phi3_fused/model.safetensors"))


@pytest.fixture
def directory(tmp_path, stored):
    return changed(tmp_path / "m", "phi3_fused", tensors=lambda _: stored, quantization_config=QUANTISED)


def test_weights_are_stored_numbers_times_their_blocks_scales(directory, stored):
    params = load_model(resolve_model(str(directory)), "float32").params
    for module, matrix in (("self_attn.o_proj", ("attention", "o_proj")), ("mlp.down_proj", ("mlp", "down_proj"))):
        name = f"model.layers.1.{module}.weight"
        kernel = params["layers"][1][matrix[0]][matrix[1]]["kernel"]
        for row, column in ((0, 0), (15, 39), (16, 40), (63, 63)):
            block = row // BLOCK[0], column // BLOCK[1]
            wanted = stored[name][row, column].astype(np.float32) * stored[f"{name}_scale_inv"][block]
            assert kernel[column, row] == wanted


def test_rows_of_a_shared_tensor_have_the_scales_of_their_place(directory):
    reader = open_checkpoint(resolve_model(str(directory)))
    name = "model.layers.0.self_attn.qkv_proj.weight"
    np.testing.assert_array_equal(reader.read(name, (slice(70, 101),)), reader.read(name)[70:101])
    part = (slice(70, 101), slice(33, 60))
    np.testing.assert_array_equal(reader.read(name, part), reader.read(name)[part])
    assert not any(name.endswith("_scale_inv") for name in reader.names())


def test_scales_that_do_not_fit_and_sizes_that_are_none_are_named(directory, stored):
    name = "model.layers.0.self_attn.o_proj.weight"
    wrong = stored | {f"{name}_scale_inv": np.ones((4, 1), np.float32)}
    save_file(wrong, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"o_proj.weight_scale_inv \[4, 1\]; there must be .* 16 by 40"):
        load_model(resolve_model(str(directory)), "float32")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [128]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"weight_block_size is \[128\]; it must be two positive"):
        load_model(resolve_model(str(directory)), "float32")
