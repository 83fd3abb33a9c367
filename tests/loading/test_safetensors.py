"""Hugging Face directories: single and sharded, every dtype, placement, and damage that is named."""

import json
import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.core import CheckpointError, UnsupportedModelError
from jaxserve.loading import load_model, resolve_model
from jaxserve.testing.tiny import tiny_weights, write_tiny_model

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def model_dir(tmp_path):
    return write_tiny_model(tmp_path / "model", tied=False)


def load(directory, dtype="float32", **settings):
    return load_model(resolve_model(str(directory)), dtype, **settings)


def rewrite(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def split(directory):
    """Turns the single file into two shards with an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[:9], names[9:]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map.update(dict.fromkeys(part, file))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_every_weight_is_in_its_place_and_layout(model_dir):
    loaded = load(model_dir)
    stored = load_file(model_dir / "model.safetensors")
    np.testing.assert_array_equal(loaded.params["layers"][1]["mlp"]["up_proj"]["kernel"], stored[UP].T)
    np.testing.assert_array_equal(loaded.params["embed"], stored["model.embed_tokens.weight"])
    np.testing.assert_array_equal(loaded.params["lm_head"], stored["lm_head.weight"].T)
    assert loaded.generation_config["eos_token_id"] == [257, 259]
    assert sum(leaf.size for leaf in jax.tree.leaves(loaded.params)) == sum(value.size for value in stored.values())


def test_shards_load_as_one_file_does(model_dir):
    single = load(model_dir)
    split(model_dir)
    sharded = load(model_dir)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), single.params, sharded.params))


@pytest.mark.parametrize("stored", [np.float64, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_stored_dtypes_are_converted(model_dir, stored):
    original = load_file(model_dir / "model.safetensors")[UP].astype(stored)
    rewrite(model_dir, lambda tensors: tensors.update({UP: original}))
    for dtype in ("float32", "bfloat16"):
        kernel = load(model_dir, dtype).params["layers"][1]["mlp"]["up_proj"]["kernel"]
        assert kernel.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(kernel, original.T.astype(jnp.dtype(dtype)))


def test_a_bfloat16_checkpoint_loads_bit_for_bit(tmp_path):
    directory = write_tiny_model(tmp_path / "m", dtype="bfloat16")
    config = json.loads((directory / "config.json").read_text())
    expected = tiny_weights(config)[UP]
    np.testing.assert_array_equal(
        load(directory, "bfloat16").params["layers"][1]["mlp"]["up_proj"]["kernel"], expected.T
    )


def test_parameters_are_placed_by_the_sharding_rules(model_dir):
    mesh = jax.make_mesh((1, 1), ("data", "model"))
    kernel = load(model_dir, mesh=mesh).params["layers"][0]["attention"]["q_proj"]["kernel"]
    assert kernel.sharding.mesh == mesh and kernel.sharding.spec == jax.sharding.PartitionSpec(None, "model")


def test_progress_counts_every_byte_once(model_dir):
    seen = []
    load(model_dir, "bfloat16", progress=lambda *report: seen.append(report))
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert seen[-1][0] == seen[-1][1] == 2 * sum(v.size for v in load_file(model_dir / "model.safetensors").values())


def test_parameters_outlive_a_change_of_the_file(model_dir):
    """A view of the file would change with it, or crash the process when it shrinks."""
    params = load(model_dir).params
    before = np.array(params["embed"])
    file = model_dir / "model.safetensors"
    file.write_bytes(b"\0" * file.stat().st_size)
    np.testing.assert_array_equal(params["embed"], before)


def test_a_missing_tensor_is_named(model_dir):
    rewrite(model_dir, lambda tensors: tensors.pop(UP))
    with pytest.raises(CheckpointError, match=rf"lacks tensor {UP}, which its config asks for"):
        load(model_dir)


def test_a_tensor_without_use_is_named(model_dir):
    rewrite(model_dir, lambda tensors: tensors.update({"model.layers.7.extra": np.ones(2, np.float32)}))
    with pytest.raises(CheckpointError, match=r"holds tensor model.layers.7.extra, which the model of its config"):
        load(model_dir)


def test_many_missing_tensors_are_summed_up(model_dir):
    rewrite(model_dir, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.0" in name])
    with pytest.raises(CheckpointError, match=r"lacks tensors .* and 4 more"):
        load(model_dir)


def test_buffers_and_tied_copies_are_left_unread(tmp_path):
    directory = write_tiny_model(tmp_path / "tied")
    rewrite(
        directory,
        lambda tensors: tensors.update(
            {
                "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
                "lm_head.weight": tensors["model.embed_tokens.weight"].copy(),
            }
        ),
    )
    assert "lm_head" not in load(directory).params


def test_a_wrong_shape_is_named_with_both_shapes(model_dir):
    rewrite(model_dir, lambda tensors: tensors.update({UP: np.ones((128, 63), np.float32)}))
    with pytest.raises(CheckpointError, match=rf"{UP} has shape \[128, 63\]; its config asks for \[128, 64\]"):
        load(model_dir)


def test_an_integer_weight_is_refused(model_dir):
    rewrite(model_dir, lambda tensors: tensors.update({UP: np.ones((128, 64), np.int8)}))
    with pytest.raises(CheckpointError, match=rf"{UP} has dtype I8; weights must be one of"):
        load(model_dir)


def header_of(file):
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write_header(file, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def change_entry(**values):
    def change(file):
        header, data = header_of(file)
        header[UP].update(values)
        write_header(file, header, data)

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.write_bytes(b""), "0 bytes"),
        (lambda file: file.write_bytes(b"\xff" * 100), "header of"),
        (lambda file: file.write_bytes(file.read_bytes()[:-100]), r"tensor \S+ ends at \d+; the file is cut short"),
        (lambda file: write_header(file, b"{", b""), "no valid safetensors header"),
        (lambda file: write_header(file, b"[]", b""), "not a JSON object"),
        (lambda file: write_header(file, b"[" * 50_000, b""), "no valid safetensors header"),
        (change_entry(dtype="F12"), rf"{UP} has the unknown dtype 'F12'"),
        (change_entry(shape=[128, 65]), rf"{UP} of shape \[128, 65\] and dtype F32 does not fill its bytes"),
        (change_entry(data_offsets=[10, 5]), "does not fill its bytes"),
        (change_entry(data_offsets=[0]), f"entry of tensor {UP} is damaged"),
        (change_entry(data_offsets=[2**60, 2**60 + 128 * 64 * 4]), "the file is cut short"),
        (change_entry(shape=[-128, -64]), "does not fill its bytes"),
        (change_entry(shape="ab"), "does not fill its bytes|is damaged"),
    ],
)
def test_damage_is_refused_naming_file_and_tensor(model_dir, damage, message):
    damage(model_dir / "model.safetensors")
    with pytest.raises(CheckpointError, match=message) as caught:
        load(model_dir)
    assert "model.safetensors" in str(caught.value)


def test_an_index_that_does_not_fit_its_shards_is_refused(model_dir):
    weight_map = split(model_dir)
    index = model_dir / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map | {UP: "model-00001-of-00002.safetensors"}}))
    with pytest.raises(CheckpointError, match=rf"model-00001-of-00002.safetensors lacks tensor {UP}"):
        load(model_dir)
    index.write_text(json.dumps({"weight_map": {UP: "../model.safetensors"}}))
    with pytest.raises(CheckpointError, match="must be a plain file name"):
        load(model_dir)
    index.write_text(json.dumps({"weight_map": weight_map}))
    (model_dir / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002.safetensors cannot be read"):
        load(model_dir)


def test_a_missing_or_broken_config_is_named(model_dir):
    (model_dir / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json is not valid JSON"):
        load(model_dir)
    (model_dir / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        load(model_dir)


def test_an_unknown_architecture_is_refused_before_weights_are_read(model_dir):
    config = json.loads((model_dir / "config.json").read_text()) | {"architectures": ["MambaForCausalLM"]}
    (model_dir / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM is not supported"):
        load(model_dir)


def test_what_is_loaded_does_not_follow_the_file(model_dir):
    """Tensors are mapped while they are read; none that needs neither conversion nor transposition stays so."""
    loaded = load(model_dir)
    before = np.array(loaded.params["embed"])
    file = model_dir / "model.safetensors"
    with file.open("r+b") as stream:
        stream.seek(8 + int.from_bytes(stream.read(8), "little"))
        stream.write(b"\xff" * (file.stat().st_size - stream.tell()))
    np.testing.assert_array_equal(loaded.params["embed"], before)
    assert np.isfinite(before).all()
