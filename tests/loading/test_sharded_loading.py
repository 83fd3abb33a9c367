"""Loading onto several devices: each holds its part, and no more than the parts is read. In processes of their own."""

import json
import os
import socket
import subprocess
import sys

import pytest

from jaxserve.testing.tiny import write_tiny_model
from tests.models.tiny_models import FOLDER

COMMON = """
import collections, json, sys
from pathlib import Path
import jax, numpy as np
from jaxserve.convert import Conversion, convert_checkpoint
from jaxserve.loading import load_model, resolve_model, save_orbax
from jaxserve.loading import block_fp8, gguf_reader, mxfp4, safetensors_reader
from jaxserve.runtime import make_mesh

asked = collections.Counter()
for module, name in ((safetensors_reader, "SafetensorsReader"), (gguf_reader, "GgufReader")):
    def recording(self, name, part=(), read=getattr(module, name).read):
        value = read(self, name, part)
        asked[name] += value.size
        return value
    getattr(module, name).read = recording

def load(path, mesh=None):
    return load_model(resolve_model(str(path)), "float32", mesh=mesh).params

def parts_of(params):
    '''Numbers of the different parts that this process' devices hold.'''
    total = 0
    for leaf in jax.tree.leaves(params):
        shards = {str(shard.index): shard.data.size for shard in leaf.addressable_shards}
        total += sum(shards.values())
    return total

def assert_same(params, whole):
    assert jax.tree.structure(params) == jax.tree.structure(whole)
    for leaf, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(whole), strict=True):
        assert leaf.shape == wanted.shape
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, wanted[shard.index])
"""

PARTS = (
    COMMON
    + """
for name in sys.argv[2:]:
    whole = jax.tree.map(np.asarray, load(name))
    for devices in (1, 2, 3, 4, 8):
        asked.clear()
        params = load(name, make_mesh(devices))
        assert_same(params, whole)
        found, wanted = asked.total(), parts_of(params)
        # Weights of one tensor that have its rows or columns in turns read those of the others too.
        turns = 2 if "gpt_oss" in name or "deepseek" in name else 1
        assert wanted <= found <= turns * wanted, (name, devices, found, wanted)
        if turns == 1:
            assert found == wanted, (name, devices, found, wanted)
print(json.dumps(len(sys.argv[2:])))
"""
)

LARGEST = (
    COMMON
    + """
# One expert's part of one device at a time, or a device's rows or columns: never the whole of a stack.
name, devices = sys.argv[2], int(sys.argv[3])
largest = collections.Counter()
real = np.empty
made = []
np.empty = lambda shape, *args, **settings: made.append(int(np.prod(shape))) or real(shape, *args, **settings)
params = load(name, make_mesh(devices))
stacks = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim == 3]
parts = [leaf.addressable_shards[0].data.size for leaf in stacks]
print(json.dumps([max(made), max(leaf.size for leaf in stacks), max(parts)]))
"""
)

ORBAX = (
    COMMON
    + """
folder = Path(sys.argv[1])
for name in sys.argv[2:]:
    hf_config = json.loads((Path(name) / "config.json").read_text())
    whole = jax.tree.map(np.asarray, load(name))
    for saved_on in (1, 8):
        place = folder / f"{Path(name).name}-{saved_on}"
        save_orbax(place, hf_config, load(name, make_mesh(saved_on)))
        for devices in (1, 2, 4, 8):
            assert_same(load(place, make_mesh(devices)), whole)
    converted = convert_checkpoint(Conversion(str(folder / f"{Path(name).name}-8"), folder / f"{Path(name).name}-hf"))
    assert_same(load(converted), whole)
print(json.dumps(len(sys.argv[2:])))
"""
)

ORBAX_BYTES = (
    COMMON
    + """
import tensorstore
def bytes_read():
    found = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value.get("value", 0) for metric in found for value in metric["values"])
model, folder = sys.argv[2], Path(sys.argv[1])
source = load(model)
num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(source))
save_orbax(folder / "saved", json.loads((Path(model) / "config.json").read_text()), source)
convert_checkpoint(Conversion(model, folder / "converted", "orbax"))
found = []
for name in ("saved", "converted"):
    for devices in (1, 8):
        before = bytes_read()
        load(folder / name, make_mesh(devices))
        found.append((bytes_read() - before) / num_bytes)
print(json.dumps(found))
"""
)

HOSTS = (
    COMMON
    + """
folder, process, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
mesh = jax.make_mesh((1, 8), ("data", "model"))
assert len(jax.local_devices()) == 4
found = []
for name in sys.argv[4:]:
    asked.clear()
    params = load(name, mesh)
    sharded = [leaf for leaf in jax.tree.leaves(params) if not leaf.sharding.is_fully_replicated]
    assert all(len(leaf.addressable_shards) == 4 for leaf in sharded) and sharded
    shards = [shard.data for leaf in sharded for shard in leaf.addressable_shards]
    found.append([asked.total(), parts_of(params), sum(leaf.size for leaf in jax.tree.leaves(params)),
                  sum(leaf.size for leaf in sharded), sum(float(np.abs(x).sum(dtype=np.float64)) for x in shards)])
print(json.dumps(found))
"""
)


def start(script, *args, devices=8):
    env = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", script, *map(str, args)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def answer(process):
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


def run(script, *args):
    return answer(start(script, *args))


@pytest.mark.parametrize(
    "names",
    [
        ("llama_gqa_tied", "qwen2_bias", "phi3_fused"),
        ("mixtral_moe", "qwen3_moe", "gpt_oss_sinks", "deepseek_v3_mla"),
    ],
    ids=lambda names: names[0],
)
def test_each_device_has_its_part_and_the_parts_alone_are_read(tmp_path, names):
    assert run(PARTS, tmp_path, *(FOLDER / name for name in names)) == len(names)


def test_parts_of_gguf_files_are_those_of_the_whole(tmp_path):
    from gguf import GGMLQuantizationType as Quant

    from tests.loading.gguf_families import write_family

    files = [
        write_family(tmp_path / "llama.gguf", FOLDER / "llama_gqa_tied", quant=Quant.Q8_0),
        write_family(tmp_path / "mixtral.gguf", FOLDER / "mixtral_moe", quant=Quant.Q8_0),
        write_family(tmp_path / "qwen3_moe.gguf", FOLDER / "qwen3_moe"),
        write_family(tmp_path / "latents.gguf", FOLDER / "deepseek_v3_mla"),
        write_family(tmp_path / "deepseek_fused.gguf", FOLDER / "deepseek_v3_mla", latents="fused"),
    ]
    assert run(PARTS, tmp_path, *files) == len(files)


@pytest.mark.parametrize(("name", "devices"), [("mixtral_moe", 4), ("mixtral_moe", 3), ("qwen3_moe", 8)])
def test_experts_are_put_together_device_by_device(tmp_path, name, devices):
    made, whole, part = run(LARGEST, tmp_path, FOLDER / name, devices)
    assert part == whole // devices
    assert made == part


def test_orbax_checkpoints_go_from_one_mesh_to_another(tmp_path):
    names = ("llama_gqa_tied", "mixtral_moe", "qwen3_moe", "deepseek_v3_mla")
    assert run(ORBAX, tmp_path, *(FOLDER / name for name in names)) == len(names)


def test_devices_read_their_own_chunks_of_an_orbax_checkpoint(tmp_path):
    """Were a weight one chunk, each of 8 devices would read all of it. Random numbers hardly compress."""
    model = write_tiny_model(
        tmp_path / "model", hidden_size=1024, intermediate_size=4096, head_dim=128, num_attention_heads=8,
        num_key_value_heads=8, vocab=4096,
    )  # fmt: skip
    for share in run(ORBAX_BYTES, tmp_path, model):
        assert 0.5 < share < 1.5


def test_each_of_several_hosts_reads_what_its_devices_hold(tmp_path):
    names = ("qwen3_moe", "qwen2_bias")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        start(HOSTS, tmp_path, process, port, *(FOLDER / name for name in names), devices=4) for process in (0, 1)
    ]
    first, second = map(answer, processes)
    for (read, held, whole, sharded, mine), (other_read, other_held, _, _, yours) in zip(first, second, strict=True):
        assert read == held and other_read == other_held
        assert read == other_read == whole - sharded // 2
        assert mine != yours
