"""Accelerators split among replicas."""

from __future__ import annotations

import pytest

from jaxserve.router.devices import device_environments


def test_cpu_replicas_see_the_same(tmp_path):
    assert device_environments("auto", 3, 1, {}, tmp_path) == [{}, {}, {}]


def test_gpus_are_split(tmp_path):
    for name in ("0000:01", "0000:02", "0000:03", "0000:04"):
        (tmp_path / "proc/driver/nvidia/gpus" / name).mkdir(parents=True)
    assert device_environments("auto", 2, 2, {}, tmp_path) == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]


def test_hidden_gpus_stay_hidden(tmp_path):
    seen = {"CUDA_VISIBLE_DEVICES": "GPU-a, 3"}
    found = device_environments("gpu", 2, 1, seen, tmp_path)
    assert found == [{"CUDA_VISIBLE_DEVICES": "GPU-a"}, {"CUDA_VISIBLE_DEVICES": "3"}]
    assert device_environments("auto", 2, 1, {"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == [{}, {}]


def test_tpu_chips_are_split_with_bounds_and_ports(tmp_path):
    (tmp_path / "dev").mkdir()
    for number in range(4):
        (tmp_path / "dev" / f"accel{number}").touch()
    one, other = device_environments("auto", 2, 2, {}, tmp_path)
    assert one["TPU_VISIBLE_CHIPS"] == "0,1" and other["TPU_VISIBLE_CHIPS"] == "2,3"
    assert one["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,2,1" and one["TPU_PROCESS_BOUNDS"] == "1,1,1"
    assert one["TPU_MESH_CONTROLLER_PORT"] != other["TPU_MESH_CONTROLLER_PORT"]


def test_too_few_devices_name_the_flags(tmp_path):
    with pytest.raises(
        ValueError, match=r"num_replicas is 2 with 2 devices each.*shows 3 of kind gpu.*replica_devices=none"
    ):
        device_environments("gpu", 2, 2, {"CUDA_VISIBLE_DEVICES": "0,1,2"}, tmp_path)
    with pytest.raises(ValueError, match="devices_per_replica is 3; of TPU chips it must be one of"):
        device_environments("tpu", 1, 3, {"TPU_VISIBLE_CHIPS": "0,1,2"}, tmp_path)
