"""Damaged checkpoints of every format, over a dense, an expert and a latent family: refused, naming what is wrong.

What a reader's own tests have of one format is not repeated: here is every kind of damage for every format.
"""

import json
import shutil
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve.convert import Conversion, convert_checkpoint
from jaxserve.core import CheckpointError, JaxserveError, UnsupportedModelError
from jaxserve.loading import load_model, resolve_model, save_orbax
from tests.loading.gguf_families import write_family
from tests.models.tiny_models import FOLDER, changed

TENSORS = {
    "llama_gqa_tied": "model.layers.1.mlp.up_proj.weight",
    "mixtral_moe": "model.layers.1.block_sparse_moe.experts.2.w1.weight",
    "deepseek_v3_mla": "model.layers.1.self_attn.kv_b_proj.weight",
}
FAMILIES = list(TENSORS)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def load(path):
    return load_model(resolve_model(str(path)), "float32")


def copied(tmp_path, name):
    return shutil.copytree(FOLDER / name, tmp_path / "model")


def rewritten(tmp_path, name, change):
    def with_change(tensors):
        change(tensors, TENSORS[name])
        return tensors

    return changed(tmp_path / "model", name, tensors=with_change)


def sharded(tmp_path, name):
    """The model in several files, the index, and the file that has the family's tensor."""
    convert_checkpoint(Conversion(str(FOLDER / name), tmp_path / "model", max_shard_bytes=100_000))
    index = json.loads((tmp_path / "model" / INDEX).read_text())
    return tmp_path / "model", index, tmp_path / "model" / index["weight_map"][TENSORS[name]]


def refused(path, *words, kind=CheckpointError):
    """Asserts that a model is refused with all these words, before anything is placed."""
    seen = []
    with pytest.raises(kind) as caught:
        load_model(resolve_model(str(path)), "float32", progress=lambda *report: seen.append(report))
    for word in words:
        assert str(word) in str(caught.value), caught.value
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    return seen


CHANGES = {
    "missing": (lambda t, n: t.pop(n), "lacks tensor"),
    "extra": (lambda t, n: t.update({n + ".more": np.ones(3, np.float32)}), "holds tensor"),
    "short": (lambda t, n: t.update({n: np.ascontiguousarray(t[n][:-1])}), "has shape"),
    "turned": (lambda t, n: t.update({n: np.ascontiguousarray(t[n].T[:, :-1])}), "has shape"),
    "flat": (lambda t, n: t.update({n: t[n].reshape(-1)}), "has shape"),
    "empty": (lambda t, n: t.update({n: np.zeros((0, 4), np.float32)}), "has shape"),
    "integers": (lambda t, n: t.update({n: t[n].astype(np.int32)}), "has dtype I32"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", FAMILIES)
def test_tensors_of_safetensors_that_do_not_fit_are_named(tmp_path, name, change):
    edit, words = CHANGES[change]
    path = rewritten(tmp_path, name, edit)
    refused(path, path, TENSORS[name], words)


@pytest.mark.parametrize("kept", [0, 4, 8, 200, -1, -40_000])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_safetensors_file_that_ends_early_is_named(tmp_path, name, kept):
    file = copied(tmp_path, name) / SINGLE
    file.write_bytes(file.read_bytes()[:kept])
    assert not refused(file.parent, file, "cut short")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_flipped_bit_of_a_header_is_refused_or_changes_nothing(tmp_path, name):
    file = copied(tmp_path, name) / SINGLE
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    wanted = jax.tree.map(np.asarray, load(file.parent).params)
    random, num_refused = np.random.default_rng(0), 0
    for _ in range(60):
        data = bytearray(whole)
        data[random.integers(0, 8 + length)] ^= 1 << random.integers(8)
        file.write_bytes(data)
        try:
            found = load(file.parent).params
        except JaxserveError as error:
            assert str(file.parent) in str(error)
            num_refused += 1
        else:
            jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert num_refused > 50


@pytest.mark.parametrize("name", FAMILIES)
def test_shards_that_are_lost_cut_or_empty_are_named(tmp_path, name):
    path, index, file = sharded(tmp_path, name)
    whole = file.read_bytes()
    for data, words in ((whole[:-3], "cut short"), (b"", "0 bytes"), (None, "cannot be read")):
        file.unlink() if data is None else file.write_bytes(data)
        refused(path, file, words)
    file.write_bytes(whole)
    others = {**index["weight_map"], TENSORS[name]: "model-00099-of-00099.safetensors"}
    (path / INDEX).write_text(json.dumps({"weight_map": others}))
    refused(path, path / "model-00099-of-00099.safetensors", "cannot be read")
    for text, words in (
        ("{", "not valid JSON"),
        ("[]", "JSON object"),
        ("{}", "has no weight_map"),
        ("", "valid JSON"),
    ):
        (path / INDEX).write_text(text)
        refused(path, path / INDEX, words)
    del others[TENSORS[name]]
    (path / INDEX).write_text(json.dumps({"weight_map": others}))
    assert load(path).config.num_layers > 1, "what the index forgets is in its file all the same"


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[1]", "\0\0", '{"a": 1', "[" * 100_000], ids=lambda text: text[:5] or "-")
def test_json_that_is_damaged_is_named(tmp_path, file, text):
    path = copied(tmp_path, "llama_gqa_tied")
    (path / file).write_text(text)
    refused(path, path / file)


ODD_VALUES = (None, "x", "", -1, 0, 1.5, 10**12, [], [1], {}, {"a": None}, True, float("inf"), float("nan"))


@pytest.mark.parametrize("name", ["llama3_rope", "gemma3_dual_rope", "mixtral_moe", "gpt_oss_sinks", "deepseek_v3_mla"])
def test_every_field_of_a_config_may_be_anything(tmp_path, name):
    """None ends otherwise than by an error that names the checkpoint, or by a model of the same shapes."""
    path = copied(tmp_path, name)
    config = json.loads((path / "config.json").read_text())
    fields = [[key] for key in config]
    fields += [[key, inner] for key, value in config.items() if isinstance(value, dict) for inner in value]
    for field in fields:
        for value in ODD_VALUES:
            edited = json.loads(json.dumps(config))
            node = edited
            for key in field[:-1]:
                node = node[key]
            node[field[-1]] = value
            (path / "config.json").write_text(json.dumps(edited))
            try:
                load(path)
            except CheckpointError as error:
                assert str(path) in str(error), (field, value, error)
            except UnsupportedModelError:
                pass


def gguf_of(tmp_path, name):
    return write_family(tmp_path / "model.gguf", FOLDER / name)


IN_GGUF = {"llama_gqa_tied": "blk.1.ffn_up.weight", "mixtral_moe": "blk.1.ffn_gate_exps.weight"}


@pytest.mark.parametrize("kept", [0, 3, 24, 300, 0.5, -1])
@pytest.mark.parametrize("name", IN_GGUF)
def test_a_gguf_file_that_ends_early_is_named(tmp_path, name, kept):
    file = gguf_of(tmp_path, name)
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * kept) if isinstance(kept, float) else kept])
    assert not refused(file, file)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data, name: data.replace(name, name[:-8] + b"q.weight"), "lacks tensor"),
        (lambda data, name: data.replace(b"GGUF", b"GGJT", 1), "is not a GGUF file"),
        (lambda data, name: shape_of(data, name, 0), "is empty"),
        (lambda data, name: shape_of(data, name, 32), "has shape"),
        (lambda data, name: shape_of(data, name, 2**40), "cut short"),
        (lambda data, name: kind_of(data, name, 24), "is quantised as I8"),
        (lambda data, name: kind_of(data, name, 77), "unknown type 77"),
    ],
)
@pytest.mark.parametrize("name", IN_GGUF)
def test_damage_inside_a_gguf_file_is_named(tmp_path, name, change, words):
    file = gguf_of(tmp_path, name)
    file.write_bytes(change(file.read_bytes(), IN_GGUF[name].encode()))
    refused(file, file, words, kind=JaxserveError)


def shape_of(data, name, first):
    """The first number of a tensor's shape changed."""
    at = data.index(name) + len(name) + 4
    return data[:at] + first.to_bytes(8, "little") + data[at + 8 :]


def kind_of(data, name, kind):
    at = data.index(name) + len(name)
    at += 4 + 8 * int.from_bytes(data[at : at + 4], "little")
    return data[:at] + kind.to_bytes(4, "little") + data[at + 4 :]


@pytest.mark.parametrize("name", IN_GGUF)
def test_flipped_bits_of_a_gguf_header_are_refused_or_give_a_model(tmp_path, name):
    """A flip in a number such as the rope's base cannot be told from another model."""
    file = gguf_of(tmp_path, name)
    whole = file.read_bytes()
    end = whole.rindex(b".weight") + 40
    random, num_refused = np.random.default_rng(0), 0
    for _ in range(150):
        data = bytearray(whole)
        data[random.integers(0, end)] ^= 1 << random.integers(8)
        file.write_bytes(data)
        try:
            load(file)
        except JaxserveError as error:
            assert isinstance(error, UnsupportedModelError) or str(file) in str(error), error
            num_refused += 1
    assert num_refused > 100


@pytest.fixture(scope="module")
def orbax_models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("orbax")
    for name in FAMILIES:
        hf_config = json.loads((FOLDER / name / "config.json").read_text())
        save_orbax(folder / name, hf_config, load(FOLDER / name).params)
    return folder


ORBAX = """
import json, os, shutil, sys
from pathlib import Path
import jax, numpy as np
from jaxserve.loading import load_model, resolve_model
source, folder = Path(sys.argv[1]), Path(sys.argv[2])
whole = sorted(file.relative_to(source) for file in source.rglob("*") if file.is_file())
others = ("_sharding", "commit_success.txt", "process_0", "_CHECKPOINT_METADATA")
needed = [file for file in whole if file.name not in others]
def cut(file): file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
def flip(file):
    data = bytearray(file.read_bytes()); data[len(data) // 2] ^= 255; file.write_bytes(data)
def empty(file): file.write_bytes(b"")
def lose(file): file.unlink()
whole = load_model(resolve_model(str(source)), "float32").params
found = []
for file in needed:
    for damage in (lose, empty, cut, flip):
        copy = folder / f"copy{len(found)}"
        shutil.copytree(source, copy)
        damage(copy / file)
        try:
            params = load_model(resolve_model(str(copy)), "float32").params
            same = jax.tree.map(lambda a, b: bool((a == b).all()), params, whole)
            found.append([str(file), damage.__name__, str(copy), "same" if jax.tree.all(same) else "other", ""])
        except Exception as error:
            found.append([str(file), damage.__name__, str(copy), type(error).__name__, str(error)])
print(json.dumps(found))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize("name", FAMILIES)
def test_an_orbax_checkpoint_with_a_file_lost_emptied_or_cut_is_refused_or_whole(orbax_models, tmp_path, name):
    """In a process of its own: reads that Orbax had begun still fail in the background after the error."""
    done = subprocess.run(
        [sys.executable, "-c", ORBAX, str(orbax_models / name), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    num_refused = 0
    for file, damage, copy, kind, message in found:
        # Files that a later one has replaced are not read; numbers have no checksum that a flip would break.
        assert kind in ("CheckpointError", "same", *(("other",) if damage == "flip" else ())), (file, damage, message)
        if kind == "CheckpointError":
            assert copy in message, (file, message)
            num_refused += 1
    assert num_refused >= 12, found
    assert {damage for file, damage, _, kind, _ in found if file.endswith("_METADATA") and kind != "same"} >= {
        "lose",
        "empty",
        "cut",
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_an_orbax_checkpoint_of_another_model_is_refused(orbax_models, tmp_path, name):
    other = FAMILIES[(FAMILIES.index(name) + 1) % len(FAMILIES)]
    path = shutil.copytree(orbax_models / name, tmp_path / "model")
    shutil.copy(FOLDER / other / "config.json", path / "config.json")
    refused(path, path)
    (path / "config.json").write_text("{")
    refused(path, path / "config.json", "valid JSON")


def test_a_dtype_that_is_no_float_is_refused_in_orbax(orbax_models, tmp_path):
    name = "llama_gqa_tied"
    params = load(FOLDER / name).params
    params["final_norm"] = params["final_norm"].astype(np.int32)
    path = save_orbax(tmp_path / "model", json.loads((FOLDER / name / "config.json").read_text()), params)
    refused(path, path, "final_norm has dtype int32")


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("name", FAMILIES)
def test_other_floats_are_no_damage(tmp_path, name, stored):
    path = rewritten(tmp_path, name, lambda tensors, n: tensors.update({n: tensors[n].astype(stored)}))
    if stored is ml_dtypes.bfloat16:
        assert load_file(path / SINGLE)[TENSORS[name]].dtype == ml_dtypes.bfloat16
    assert load(path).config == load(FOLDER / name).config
