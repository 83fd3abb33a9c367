"""Checkpoints are data: whatever is in their files, nothing of it is run, and nothing outside of their folder is read.

Hostile models are loaded in a process of their own, whose audit hook sees every file that is opened, every class that
a pickle names, every program and connection that is begun.
"""

import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jaxserve.loading import load_model, resolve_model, save_orbax
from jaxserve.testing.tiny import write_tiny_model
from jaxserve.testing.tiny_lora import write_tiny_lora

ROOT = Path(__file__).parents[2]
WATCHED = """
import json, os, sys
sys.path.insert(0, {root!r})
import jaxserve.engine, orbax.checkpoint
from jaxserve.core import JaxserveError
from jaxserve.loading import load_model, resolve_model
from jaxserve.loading.lora import read_lora
from jaxserve.text import load_tokenizer

def load(path, adapter):
    resolved = resolve_model(path)
    load_tokenizer(resolved).chat_template
    loaded = load_model(resolved, "float32")
    if adapter:
        read_lora(adapter, loaded.config, dtype="float32", rank=16, max_lora_rank=16, stacked=False)

*cases, good = json.load(sys.stdin)
for model in good:
    load(model, "")  # what is imported late is imported now
FORBIDDEN = ("pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork",
             "socket.connect", "socket.bind", "socket.getaddrinfo", "ctypes.dlopen")
OURS = (*filter(None, sys.path), sys.prefix, sys.base_prefix, "/proc", "/sys", "/dev")
OURS = tuple(os.path.realpath(each) for each in OURS)
events = []

def hook(event, arguments):
    if event in FORBIDDEN:
        events.append((event, repr(arguments)[:200]))
    if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if not path.startswith((folder, *OURS)):
            events.append((event, path))

sys.addaudithook(hook)
results = []
for folder, model, adapter in cases:
    folder, error = os.path.realpath(folder), ""
    try:
        load(model, adapter)
    except JaxserveError as caught:
        error = str(caught)
    results.append((error, list(events)))
    events.clear()
print(json.dumps(results))
"""


class Bomb:
    """What a pickle would run."""

    def __reduce__(self):
        return os.system, ("touch EXPLODED",)


def written(folder):
    """A good model, to be spoiled."""
    return write_tiny_model(folder / "model")


def pickled(folder):
    """Weights as a pickle, in the two containers that others read, with an index that says so."""
    model = written(folder)
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with zipfile.ZipFile(model / "model.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Bomb()))
    return model, "has weights in another format; only safetensors, GGUF and Orbax are read"


def pickled_under_another_name(folder):
    model = written(folder)
    (model / "model.safetensors").write_bytes(pickle.dumps(Bomb()))
    return model, "damaged or cut short"


def code_beside_it(folder):
    """`auto_map` and code, which other loaders run when told to trust it."""
    model = written(folder)
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_x.X", "AutoTokenizer": ["modeling_x.X", None]}
    (model / "config.json").write_text(json.dumps(config))
    for name in ("modeling_x.py", "conftest.py", "sitecustomize.py", "jaxserve.py"):
        (model / name).write_text("import os\nos.system('touch EXPLODED')\n")
    return model, ""


def index_of(folder, place):
    model = written(folder)
    (model / "model.safetensors").rename(model / "a.safetensors")
    index = {"weight_map": {"model.embed_tokens.weight": place}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return model, "it must be a plain file name"


def index_that_climbs(folder):
    return index_of(folder, "../../../../../../etc/passwd")


def index_with_a_path(folder):
    return index_of(folder, "/etc/passwd")


def link_out(folder):
    """A file of the model that is a link to something that is no checkpoint."""
    model = written(folder)
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(__file__)
    return model, "damaged or cut short"


def header_of(folder, length, header=b"{}"):
    model = written(folder)
    (model / "model.safetensors").write_bytes(struct.pack("<Q", length) + header)
    return model


def header_of_absurd_size(folder):
    return header_of(folder, 2**63), "damaged or cut short"


def tensor_of_absurd_size(folder):
    entry = {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 2**82]}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    return header_of(folder, len(header), header), "cut short"


def nested_header(folder):
    header = b"[" * 500_000
    return header_of(folder, len(header), header), "no valid safetensors header"


def gguf_with(folder, *words):
    model = folder / "model.gguf"
    model.write_bytes(b"GGUF" + b"".join(words))
    return model, "GGUF"


def gguf_of_absurd_counts(folder):
    return gguf_with(folder, struct.pack("<IQQ", 3, 2**63, 2**63))[0], ""


def gguf_with_a_string_of_absurd_size(folder):
    return gguf_with(folder, struct.pack("<IQQQ", 3, 0, 1, 2**62))[0], ""


def gguf_with_nested_arrays(folder):
    words = [struct.pack("<IQQQ", 3, 0, 1, 1), b"k", struct.pack("<I", 9)] + [struct.pack("<IQ", 9, 1)] * 100_000
    return gguf_with(folder, *words)[0], ""


def gguf_of_absurd_parts(folder):
    key, model = b"split.count", folder / "model-00001-of-99999.gguf"
    words = struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + struct.pack("<II", 4, 99999)
    model.write_bytes(b"GGUF" + words)
    return model, "is missing"


def zip_for_gguf(folder):
    model = folder / "model.gguf"
    with zipfile.ZipFile(model, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(100_000_000))
    return model, "does not start with GGUF"


def config_of_absurd_sizes(folder):
    model = written(folder)
    config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": 10**9}
    (model / "config.json").write_text(json.dumps(config))
    return model, ""


def tokenizer_that_is_code(folder):
    model = written(folder)
    (model / "tokenizer.json").write_bytes(pickle.dumps(Bomb()))
    return model, "is not a readable tokenizer"


def template_that_reads(folder):
    model = written(folder)
    (model / "chat_template.jinja").write_text(
        "{% include '/etc/passwd' %}{{ cycler.__init__.__globals__.os.system('x') }}"
    )
    return model, ""


def orbax_of_a_pickle(folder):
    """A list of arrays that is a pickle."""
    model = saved_orbax(folder)
    (model / "params" / "_METADATA").write_bytes(pickle.dumps(Bomb()))
    return model, "cannot be restored"


def orbax_that_points_out(folder):
    """A list of arrays whose storage is elsewhere."""
    model = saved_orbax(folder)
    described = json.loads((model / "params" / "_METADATA").read_text())
    elsewhere = {"driver": "file", "path": "/etc/passwd"}
    described |= {"use_ocdbt": True, "ts_context": {"kvstore": elsewhere}, "kvstore": elsewhere}
    (model / "params" / "_METADATA").write_text(json.dumps(described))
    return model, ""


def saved_orbax(folder):
    good = written(folder)
    hf_config = json.loads((good / "config.json").read_text())
    params = load_model(resolve_model(str(good)), "float32").params
    return save_orbax(folder / "orbax", hf_config, params, tokenizer_directory=good)


def adapter_of_a_pickle(folder):
    model = written(folder)
    adapter = write_tiny_lora(folder / "adapter", model)
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps(Bomb()))
    return model, "adapter_model.bin among them, must be converted first"


HOSTILE = [
    pickled,
    pickled_under_another_name,
    code_beside_it,
    index_that_climbs,
    index_with_a_path,
    link_out,
    header_of_absurd_size,
    tensor_of_absurd_size,
    nested_header,
    gguf_of_absurd_counts,
    gguf_with_a_string_of_absurd_size,
    gguf_with_nested_arrays,
    gguf_of_absurd_parts,
    zip_for_gguf,
    config_of_absurd_sizes,
    tokenizer_that_is_code,
    template_that_reads,
    orbax_of_a_pickle,
    orbax_that_points_out,
    adapter_of_a_pickle,
]
LOADS = (code_beside_it, template_that_reads, orbax_that_points_out)
"""What is hostile in these is not looked at while a model loads."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """By case: its folder, the message it should have, what the loader said, and what it did that it must not."""
    made = []
    for make in HOSTILE:
        folder = tmp_path_factory.mktemp(make.__name__)
        made.append((folder, *make(folder)))
    good = tmp_path_factory.mktemp("good")
    cases = [
        (str(folder), str(model), str(folder / "adapter") if (folder / "adapter").exists() else "")
        for folder, model, _ in made
    ]
    asked = [*cases, [str(saved_orbax(good)), str(good / "model")]]
    done = subprocess.run(
        [sys.executable, "-c", WATCHED.replace("{root!r}", repr(str(ROOT)))],
        input=json.dumps(asked),
        cwd=good,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    return {
        make: (folder, message, *result)
        for make, (folder, _, message), result in zip(HOSTILE, made, results, strict=True)
    }


@pytest.mark.parametrize("make", HOSTILE)
def test_a_hostile_model_is_data(loaded, make):
    folder, message, error, events = loaded[make]
    allowed = [["open", os.path.realpath(__file__)]] if make is link_out else []
    assert [each for each in events if each not in allowed] == []
    assert message in error and bool(error) == (make not in LOADS)
    assert not list(folder.rglob("EXPLODED")) and not list(ROOT.glob("EXPLODED"))
