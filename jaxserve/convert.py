"""`python -m jaxserve.convert`: a checkpoint of one format written as another.

    --model=M --output=PATH [--format=safetensors|orbax|gguf] [--dtype=...]

Tensors are read, changed and written one by one, so memory is bounded by a few of them. What is written has another
name until it is whole: a conversion that ends early leaves nothing that loads. docs/models.md tells what each format
keeps.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.config.convert_flags import CONVERT_DTYPES, FORMATS
from jaxserve.config.flags import exit_with, parse_flags
from jaxserve.core import JaxserveError
from jaxserve.loading import ResolvedModel, resolve_model
from jaxserve.loading.checkpoint import CheckpointReader, check_tensors
from jaxserve.loading.tokenizer_files import copy_tokenizer
from jaxserve.text import Tokenizer, load_tokenizer

Progress = Callable[[int, int, str], None]
_DTYPES = {
    "auto": None,
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


@dataclass(frozen=True, slots=True)
class Conversion:
    """What to write.

    Attributes:
      model: as the server's --model.
      output: a directory, or a .gguf file.
      format: one of `FORMATS`.
      dtype: of the weights; "auto": as they are stored. "q8_0" for GGUF alone.
      max_shard_bytes: of a safetensors file.
      overwrite: a checkpoint that is there already is replaced.
      tokenizer: "auto": the model's, if it has one; "none": leave it out.
    """

    model: str
    output: Path
    format: str = "safetensors"
    dtype: str = "auto"
    max_shard_bytes: int = 5_000_000_000
    overwrite: bool = False
    tokenizer: str = "auto"


def convert_checkpoint(conversion: Conversion, progress: Progress = lambda done, total, what: None) -> Path:
    """Writes a checkpoint.

    Args:
      progress: told of downloads and of each tensor: bytes done, bytes in all, text.

    Returns:
      The output.

    Raises:
      ValueError: what is asked for does not go together, or the output is there.
      CheckpointError: the source is damaged.
      UnsupportedModelError: the model is none that is known, or has no place in the format.
      OSError: the output cannot be written.
    """
    _check(conversion)
    resolved = resolve_model(conversion.model, progress)
    output = conversion.output
    if output.exists() and output.resolve() == resolved.path.resolve():
        raise ValueError(f"output {output} is the model itself; give another place")
    reader = _open(resolved)
    from jaxserve.loading.load import config_of
    from jaxserve.models.weights import ignorable, weights

    config = config_of(reader.name, reader.hf_config)
    check_tensors(reader, weights(config), [name for name in reader.names() if ignorable(config, name)])
    tokenizer = _tokenizer_of(resolved, conversion)
    with _unfinished(output) as place:
        if conversion.format == "gguf":
            _write_gguf(place, reader, config, tokenizer, conversion, progress)
        else:
            place.mkdir()
            write = _write_safetensors if conversion.format == "safetensors" else _write_orbax
            hf_config = write(place, reader, config, conversion, progress)
            _write_beside(place, resolved, reader, tokenizer, conversion)
            # The last: without it nothing loads.
            _write_json(place / "config.json", hf_config)
        _sync(place)
        _move(place, output)
    return output


def _check(conversion: Conversion) -> None:
    output = conversion.output
    if conversion.format not in FORMATS:
        raise ValueError(f"format is {conversion.format!r}; supported are {', '.join(FORMATS)}")
    kinds = CONVERT_DTYPES if conversion.format == "gguf" else tuple(_DTYPES)
    if conversion.dtype not in kinds:
        raise ValueError(f"dtype is {conversion.dtype} and format {conversion.format}; it has {', '.join(kinds)}")
    if (output.suffix == ".gguf") != (conversion.format == "gguf"):
        raise ValueError(f"output is {output} and format {conversion.format}; only gguf has names that end in .gguf")
    if not output.absolute().parent.is_dir():
        raise ValueError(f"output {output}: there is no directory {output.absolute().parent}")
    if not output.exists():
        return
    if not conversion.overwrite:
        raise ValueError(f"output {output} exists already; give another place, or set --overwrite")
    if output.is_dir() and any(output.iterdir()) and not (output / "config.json").is_file():
        raise ValueError(f"output {output} is a directory that holds no model; overwrite replaces models alone")
    if output.is_dir() == (conversion.format == "gguf"):
        kind = "directory" if output.is_dir() else "file"
        raise ValueError(f"output {output} is a {kind}, which overwrite does not replace by {conversion.format}")


def _open(resolved: ResolvedModel) -> CheckpointReader:
    if resolved.kind == "orbax":
        from jaxserve.loading.orbax_reader import OrbaxReader

        return OrbaxReader(resolved.path)
    from jaxserve.loading.load import open_checkpoint

    return open_checkpoint(resolved)


def _tokenizer_of(resolved: ResolvedModel, conversion: Conversion) -> Tokenizer | None:
    """The model's tokenizer, where files are not enough or cannot be copied."""
    if conversion.tokenizer == "none":
        return None
    if resolved.kind == "gguf":
        from jaxserve.loading.gguf_file import read_gguf

        has_one = "tokenizer.ggml.tokens" in read_gguf(resolved.path).metadata
    else:
        has_one = (resolved.path / "tokenizer.json").is_file()
    needed = resolved.kind == "gguf" or conversion.format == "gguf"
    return load_tokenizer(resolved) if has_one and needed else None


def _write_safetensors(
    place: Path, reader: CheckpointReader, config: Any, conversion: Conversion, progress: Progress
) -> dict[str, Any]:
    from jaxserve.loading.hf_config_writer import config_to_write, with_dtype
    from jaxserve.loading.named_tensors import named_tensors
    from jaxserve.loading.safetensors_writer import write_safetensors
    from jaxserve.models.registry import model_config_from_hf

    hf_config = config_to_write(reader.hf_config)
    tensors = named_tensors(reader, config, model_config_from_hf(hf_config), _DTYPES[conversion.dtype])
    total, done = sum(tensor.num_bytes for tensor in tensors), 0

    def written(tensor: Any) -> None:
        nonlocal done
        done += tensor.num_bytes
        progress(done, total, tensor.name)

    write_safetensors(place, tensors, conversion.max_shard_bytes, written)
    return with_dtype(hf_config, tensors)


def _write_orbax(
    place: Path, reader: CheckpointReader, config: Any, conversion: Conversion, progress: Progress
) -> dict[str, Any]:
    from jaxserve.loading.hf_config_writer import config_to_write, with_dtype
    from jaxserve.loading.named_tensors import NamedTensor, as_dtype, stored_dtype
    from jaxserve.loading.orbax_writer import write_orbax_params
    from jaxserve.models.weights import Weight, weights

    asked = _DTYPES[conversion.dtype]

    def tensor_of(weight: Weight) -> NamedTensor:
        kind, stored = (stored_dtype(weight, reader, each) for each in (asked, None))

        def read() -> np.ndarray[Any, Any]:
            return as_dtype(weight.hf_name, weight.read(reader.read, stored), kind)

        return NamedTensor(weight.hf_name, weight.shape, kind, read)

    tensors = {weight.path: tensor_of(weight) for weight in weights(config)}
    total, done = sum(tensor.num_bytes for tensor in tensors.values()), 0

    def written(tensor: NamedTensor) -> None:
        nonlocal done
        done += tensor.num_bytes
        progress(done, total, tensor.name)

    write_orbax_params(place, config, lambda weight: tensors[weight.path], written)
    return with_dtype(config_to_write(reader.hf_config), list(tensors.values()))


def _write_gguf(
    place: Path,
    reader: CheckpointReader,
    config: Any,
    tokenizer: Tokenizer | None,
    conversion: Conversion,
    progress: Progress,
) -> None:
    from jaxserve.loading.gguf_writer import write_gguf

    vocabulary: dict[str, Any] = {}
    ends = reader.generation_config.get("eos_token_id", list(config.eos_token_ids))
    if tokenizer is not None:
        from jaxserve.text.gguf_vocabulary import gguf_vocabulary

        vocabulary = gguf_vocabulary(tokenizer, reader.name, config.vocab_size)
        ends = list(tokenizer.eos_ids) or ends
        if tokenizer.bos_id is not None:
            vocabulary["tokenizer.ggml.bos_token_id"] = tokenizer.bos_id
    write_gguf(
        place, reader, config, conversion.dtype, ends if isinstance(ends, list) else [ends], vocabulary, progress
    )


def _write_beside(
    place: Path, resolved: ResolvedModel, reader: CheckpointReader, tokenizer: Tokenizer | None, conversion: Conversion
) -> None:
    """Generation config and tokenizer: the source's files, or made from what a GGUF file holds."""
    generation = dict(reader.generation_config)
    if resolved.kind == "gguf":
        if tokenizer is not None:
            from jaxserve.text.write_tokenizer import write_tokenizer

            write_tokenizer(tokenizer, place)
            # A file's own list may lack the end of a turn, which the tokenizer knows.
            generation["eos_token_id"] = list(tokenizer.eos_ids)
    elif conversion.tokenizer != "none":
        copy_tokenizer(resolved.path, place)
    if generation:
        _write_json(place / "generation_config.json", generation)


@contextmanager
def _unfinished(output: Path) -> Iterator[Path]:
    """A name beside the output for what is not whole yet; gone afterwards."""
    # Hidden and without the suffix of a model, so that nothing takes it for one.
    place = output.absolute().parent / f".{output.name}.unfinished-{os.getpid()}"
    try:
        yield place
    finally:
        _remove(place)


def _remove(place: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place, ignore_errors=True)
    else:
        place.unlink(missing_ok=True)


def _sync(place: Path) -> None:
    """Has the disk hold it all, so that a whole name never has half a content."""
    for file in [place, *place.rglob("*")] if place.is_dir() else [place]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _move(place: Path, output: Path) -> None:
    if not output.is_dir():
        os.replace(place, output)
        return
    # A directory is not replaced in one step: the old one steps aside, and comes back if the new one cannot come.
    old = place.with_name(f"{place.name}.old")
    os.rename(output, old)
    try:
        os.rename(place, output)
    except BaseException:  # a signal too
        os.rename(old, output)
        raise
    shutil.rmtree(old)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(dict(value), ensure_ascii=False, indent=1) + "\n", "utf-8")


def _show(done: int, total: int, what: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{100 * done // max(total, 1):3d} % {what}", end="", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> None:
    """Converts what the flags name.

    Raises:
      SystemExit: 1 if the source cannot be read or the output not written, 2 on a mistake in flags.
    """
    flags = parse_flags("convert", argv)
    for name in ("model", "output"):
        if not flags[name].value:
            exit_with(f"--{name} is missing; give the checkpoint to read as --model and what to write as --output")
    output = Path(flags.output).expanduser()
    kind = flags.format or ("gguf" if output.suffix == ".gguf" else "safetensors")
    conversion = Conversion(
        flags.model,
        output,
        kind,
        flags.dtype,
        int(flags.max_shard_gb * 1e9),
        flags.overwrite,
        flags.tokenizer,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what is unfinished goes away
    try:
        convert_checkpoint(conversion, _show)
    except ValueError as error:
        exit_with(f"--{error}")
    except JaxserveError as error:
        raise SystemExit(f"error: {error}") from None
    except OSError as error:
        raise SystemExit(f"error: {output} could not be written: {error}; nothing was left of it") from None
    except KeyboardInterrupt:
        raise SystemExit("interrupted; nothing was left of the output") from None
    finally:
        if sys.stderr.isatty():
            print(file=sys.stderr)
    print(f"wrote {output} ({kind})", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv)
