"""Which mesh axes split a model, and how many devices hold one KV head."""

from dataclasses import replace

import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxserve.models import axis_size, kv_copies, model_axes, model_config_from_hf, partition_spec
from jaxserve.plan.targets import AbsentDevice
from jaxserve.runtime import mesh_of

CONFIG = model_config_from_hf(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "vocab_size": 100,
    }
)


def devices(count):
    return [AbsentDevice(number, "tpu") for number in range(count)]


@pytest.mark.parametrize(
    ("kv_heads", "heads", "num_devices", "copies"),
    [
        (4, 16, 1, 1),
        (4, 16, 4, 1),
        (4, 16, 8, 2),
        (4, 16, 16, 4),
        (4, 16, 32, 1),  # query heads do not divide
        (4, 12, 8, 1),
        (4, 16, 6, 1),  # KV heads do not divide the devices
        (1, 16, 8, 1),  # replicated without an axis
        (8, 16, 4, 1),
    ],
)
def test_devices_that_hold_one_kv_head(kv_heads, heads, num_devices, copies):
    config = replace(CONFIG, num_kv_heads=kv_heads, num_heads=heads)
    assert kv_copies(config, num_devices) == copies
    assert mesh_of(devices(num_devices), config).shape.get("copies", 1) == copies


def test_kv_heads_are_split_over_one_axis_and_all_else_over_both():
    mesh = mesh_of(devices(8), CONFIG)
    assert mesh.shape == {"data": 1, "model": 4, "copies": 2}
    assert axis_size(mesh, model_axes(mesh)) == 8
    both = ("model", "copies")
    assert partition_spec(CONFIG, ("embed", "heads"), mesh) == PartitionSpec(None, both)
    assert partition_spec(CONFIG, ("embed", "kv_heads"), mesh) == PartitionSpec(None, "model")
    assert partition_spec(CONFIG, ("mlp", None), mesh) == PartitionSpec(both, None)
    assert partition_spec(CONFIG, ("vocab", None), mesh) == PartitionSpec(None, None)  # 100 over 8
    # The query heads of a device are of the KV head that it holds.
    places = {device.id: (model, copy) for (_, model, copy), device in np.ndenumerate(mesh.devices)}
    assert all(number * 2 // 4 == places[number][0] for number in range(8))


def test_without_a_model_there_are_no_copies():
    assert mesh_of(devices(8)).shape == {"data": 1, "model": 8}
    assert model_axes(Mesh(np.array(devices(2), dtype=object).reshape(1, 2), ("data", "model"))) == "model"
