"""LoRA adapters from disk: PEFT's directories, read as data and checked against the model.

`adapter_config.json` says rank and scale, `adapter_model.safetensors` has a pair of tensors per adapted matrix:

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight    [rank, in]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight    [out, rank]

What would change the model in another way than by such pairs is refused by name. Files may change while they are read:
bytes are copied, never mapped.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxserve.core import AdapterNotFoundError, CheckpointError, UnsupportedModelError
from jaxserve.loading.json_file import read_json_object
from jaxserve.loading.safetensors_reader import FLOATS, Entry, read_header
from jaxserve.models import LORA_TARGETS, LoraPair, ModelConfig, Weight, lora_tree, lora_weights

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 16 << 20
_PREFIX = "base_model.model."
_HALVES = ("lora_A", "lora_B")
_MUST_BE_UNSET = (
    *("use_dora", "modules_to_save", "fan_in_fan_out", "lora_bias", "layer_replication", "trainable_token_indices"),
    *("target_parameters", "use_qalora", "alora_invocation_tokens", "arrow_config", "use_bdlora"),
)
_TARGETS = (*LORA_TARGETS, "qkv_proj", "gate_up_proj", "c_fc", "c_proj")
"""What adapters call the modules: two names of one tensor for several, and two of MLPs without a gate."""
_SUPPORTED = f"LoRA pairs of {', '.join(_TARGETS)} without bias are supported"


@dataclass(frozen=True, slots=True)
class LoraScale:
    """What `adapter_config.json` says of a matrix.

    Attributes:
      rank: of its pair.
      scale: factor of their product.
    """

    rank: int
    scale: float


class LoraConfig:
    """`adapter_config.json`.

    Args:
      file: its path, for messages.
      fields: as parsed.

    Raises:
      CheckpointError: a field is missing or damaged.
      UnsupportedModelError: it asks for what this version lacks.
    """

    def __init__(self, file: Path, fields: Mapping[str, Any]) -> None:
        self._file = file
        kind = fields.get("peft_type")
        if kind != "LORA":
            raise UnsupportedModelError(f"{file}: peft_type is {kind!r}; LORA is supported")
        for name in _MUST_BE_UNSET:
            if fields.get(name):
                raise UnsupportedModelError(f"{file}: {name} is {_shown(fields[name])}; {_SUPPORTED}")
        if fields.get("bias", "none") != "none":
            raise UnsupportedModelError(f"{file}: bias is {_shown(fields['bias'])}; {_SUPPORTED}")
        targets = fields.get("target_modules")
        for target in targets if isinstance(targets, list) else ():
            if not isinstance(target, str) or target.rpartition(".")[2] not in _TARGETS:
                raise UnsupportedModelError(f"{file}: target_modules has {_shown(target)}; {_SUPPORTED}")
        self._rank = self._whole("r", fields.get("r"))
        self._alpha = self._number("lora_alpha", fields.get("lora_alpha"))
        self._is_rank_stabilised = bool(fields.get("use_rslora"))
        self._ranks = self._pattern("rank_pattern", fields, self._whole)
        self._alphas = self._pattern("alpha_pattern", fields, self._number)

    def of(self, module: str) -> LoraScale:
        """Rank and scale of a module, as `model.layers.0.self_attn.q_proj`."""
        rank = next((value for key, value in self._ranks.items() if _is_meant(module, key)), self._rank)
        alpha = next((value for key, value in self._alphas.items() if _is_meant(module, key)), self._alpha)
        return LoraScale(rank, alpha / (math.sqrt(rank) if self._is_rank_stabilised else rank))

    def _whole(self, name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{self._file}: {name} is {_shown(value)}; it must be a positive integer")
        return value

    def _number(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise CheckpointError(f"{self._file}: {name} is {_shown(value)}; it must be a number")
        return float(value)

    def _pattern(self, name: str, fields: Mapping[str, Any], parse: Any) -> dict[str, Any]:
        pattern = fields.get(name) or {}
        if not isinstance(pattern, dict):
            raise CheckpointError(f"{self._file}: {name} is {_shown(pattern)}; it must be an object")
        for key in pattern:
            if not key.removeprefix("^").replace(".", "").replace("_", "").isalnum():
                raise UnsupportedModelError(
                    f"{self._file}: {name} has {_shown(key)}; names of modules are supported, other expressions are not"
                )
        return {key: parse(f"{name} of {key}", value) for key, value in pattern.items()}


def read_lora(path: str, config: ModelConfig, *, dtype: str, rank: int, max_lora_rank: int, stacked: bool) -> Any:
    """An adapter as `models.place_lora` takes it: ranks filled up with zeros, the scale in `b`.

    Args:
      path: PEFT's directory.
      config: of the model.
      dtype: of the result.
      rank: columns of a place.
      max_lora_rank: largest rank allowed.
      stacked: arrays are stacked over layers.

    Raises:
      AdapterNotFoundError: there is none.
      CheckpointError: a file is damaged, short, too large or does not fit the model.
      UnsupportedModelError: it has something that this version lacks.
    """
    directory = Path(path)
    lora = _read_config(directory)
    file = directory / TENSORS
    _check_size(file, config, max_lora_rank)
    header = read_header(file, MAX_HEADER_BYTES)
    modules: dict[str, list[Weight]] = {}
    for weight in lora_weights(config):
        modules.setdefault(weight.hf_name.removesuffix(".weight"), []).append(weight)
    # Rows of a tensor that several modules share: each has its own rows of B, and the whole A.
    heights = {module: max(w.rows.stop if w.rows else w.shape[1] for w in found) for module, found in modules.items()}
    entries = _by_module(file, header, heights)
    kind = jnp.dtype(dtype)

    def pair_of(weight: Weight) -> LoraPair:
        rows, out = weight.shape
        a, b = np.zeros((rows, rank), kind), np.zeros((rank, out), kind)
        module = weight.hf_name.removesuffix(".weight")
        if module in entries:
            told = lora.of(module)
            if told.rank > max_lora_rank:
                raise UnsupportedModelError(
                    f"{file}: {module} has rank {told.rank}; the limit is {max_lora_rank} (max_lora_rank)"
                )
            (name_a, entry_a), (name_b, entry_b) = entries[module]
            a[:, : told.rank] = _read(name_a, entry_a, (told.rank, rows), kind).T
            whole = _read(name_b, entry_b, (heights[module], told.rank), kind, told.scale)
            b[: told.rank] = whole[weight.rows.start : weight.rows.stop].T if weight.rows else whole.T
        return LoraPair(a, b)  # type: ignore[arg-type]

    return lora_tree(config, pair_of, stacked=stacked)


def _read_config(directory: Path) -> LoraConfig:
    file = directory / CONFIG
    if not file.is_file():
        raise AdapterNotFoundError(f"{directory} holds no LoRA adapter: {CONFIG} is missing")
    size = file.stat().st_size
    if size > MAX_CONFIG_BYTES:
        raise CheckpointError(f"{file} has {size} bytes; the limit is {MAX_CONFIG_BYTES}")
    if not (directory / TENSORS).is_file():
        raise AdapterNotFoundError(
            f"{directory} holds no LoRA adapter: {TENSORS} is missing; other formats, adapter_model.bin among them,"
            " must be converted first"
        )
    return LoraConfig(file, read_json_object(file))


def _check_size(file: Path, config: ModelConfig, max_lora_rank: int) -> None:
    """Raises CheckpointError if a file has more bytes than the largest adapter that fits."""
    size, widest = file.stat().st_size, max(kind.itemsize for kind in FLOATS.values())
    limit = MAX_HEADER_BYTES + widest * max_lora_rank * sum(sum(weight.shape) for weight in lora_weights(config))
    if size > limit:
        raise CheckpointError(
            f"{file} has {size} bytes; an adapter of this model has at most {limit} (max_lora_rank {max_lora_rank})"
        )


def _by_module(file: Path, header: Mapping[str, Entry], modules: Collection[str]) -> dict[str, list[tuple[str, Entry]]]:
    """The two tensors of each adapted module, with their names.

    Raises:
      CheckpointError: a tensor is of no module, or half of a pair is missing.
    """
    found: dict[str, dict[str, tuple[str, Entry]]] = {}
    for name, entry in header.items():
        module, half = _place_of(name)
        if module not in modules or half not in _HALVES:
            raise CheckpointError(f"{file}: tensor {name} has no use in this model; {_SUPPORTED}")
        if half in found.setdefault(module, {}):
            raise CheckpointError(f"{file}: tensor {name} is there twice, also as {found[module][half][0]}")
        found[module][half] = (name, entry)
    if not found:
        raise CheckpointError(f"{file} has no tensors; {_SUPPORTED}")
    for module, halves in found.items():
        for half in _HALVES:
            if half not in halves:
                raise CheckpointError(f"{file} lacks {half} of {module}; a pair is {' and '.join(_HALVES)}")
    return {module: [halves[half] for half in _HALVES] for module, halves in found.items()}


def _place_of(name: str) -> tuple[str, str]:
    """Module and half that a tensor's name tells; PEFT writes the adapter's name, `default`, in some files."""
    module, _, rest = name.removeprefix(_PREFIX).rpartition(".lora_")
    half, _, last = rest.partition(".")
    return module, f"lora_{half}" if last in ("weight", "default.weight") else ""


def _read(
    name: str, entry: Entry, shape: tuple[int, int], kind: np.dtype[Any], scale: float = 1.0
) -> np.ndarray[Any, Any]:
    """A tensor times `scale`.

    Raises:
      CheckpointError: it is damaged, has another shape, or numbers that are not finite in `kind`.
    """
    if entry.shape != shape:
        raise CheckpointError(f"{entry.file}: tensor {name} has shape {list(entry.shape)}; it must be {list(shape)}")
    stored = FLOATS.get(entry.dtype)
    if stored is None:
        raise CheckpointError(
            f"{entry.file}: tensor {name} has dtype {entry.dtype}; it must be one of {', '.join(FLOATS)}"
        )
    length = math.prod(shape) * stored.itemsize
    try:
        with entry.file.open("rb") as stream:
            stream.seek(entry.begin)
            data = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{entry.file}: tensor {name} cannot be read: {error}") from error
    if len(data) != length:
        raise CheckpointError(f"{entry.file} ends inside tensor {name}; the file is damaged or cut short")
    with np.errstate(over="ignore"):
        values = (np.frombuffer(data, stored).reshape(shape).astype(np.float32) * np.float32(scale)).astype(kind)
    if not np.isfinite(values.astype(np.float32)).all():
        raise CheckpointError(f"{entry.file}: tensor {name} has numbers that are not finite in {kind.name}")
    return values


def _is_meant(module: str, key: str) -> bool:
    """Whether a key of PEFT's patterns is of a module: its name, or its last parts."""
    if key.startswith("^"):
        return module == key[1:]
    return module == key or module.endswith(f".{key}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
