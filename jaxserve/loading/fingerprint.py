"""A checkpoint in 16 bytes, so that several hosts can tell whether theirs are the same one."""

from __future__ import annotations

import hashlib
from pathlib import Path

from jaxserve.loading.resolve import ResolvedModel

_SAMPLES, _SAMPLE_BYTES = 32, 4096
_WEIGHT_SUFFIXES = frozenset((".safetensors", ".gguf"))


def checkpoint_fingerprint(resolved: ResolvedModel) -> str:
    """Of names, sizes and samples of the files that hold weights, and of the whole config.json.

    Some blocks of each file are read, evenly spread, not all of it: another checkpoint differs in most of them.
    """
    path = resolved.path
    digest = hashlib.blake2b(digest_size=16)
    if path.is_file():
        _add(digest, "", path)
        return digest.hexdigest()
    for file in sorted(path.rglob("*")):
        if file.is_file() and (
            resolved.kind == "orbax" or file.suffix in _WEIGHT_SUFFIXES or file.name in ("config.json",)
        ):
            _add(digest, file.relative_to(path).as_posix(), file)
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, name: str, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{name}\0{size}\0".encode())
    with path.open("rb") as file:
        if size <= _SAMPLES * _SAMPLE_BYTES:
            digest.update(file.read())
            return
        for index in range(_SAMPLES):
            file.seek((size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
