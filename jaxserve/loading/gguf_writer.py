"""Writing a model as one GGUF file, as llama.cpp's converter does: names, order of rows, norms, metadata.

The file's header is read back and compared with the model before weights are written: what GGUF has no place for, or
what its reader would take otherwise, is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as Quant

from jaxserve.core import CheckpointError, UnsupportedModelError
from jaxserve.loading.checkpoint import CheckpointReader
from jaxserve.loading.gguf_architectures import ARCHITECTURES, GgufArchitecture
from jaxserve.loading.gguf_config import TOP_NAMES, WITHOUT_SUFFIX, hf_config
from jaxserve.loading.gguf_file import GgufFile, GgufTensor
from jaxserve.loading.gguf_metadata import Metadata, add_metadata, model_metadata, rope_tensors
from jaxserve.loading.named_tensors import NamedTensor, as_dtype, named_tensors
from jaxserve.models.config import ModelConfig
from jaxserve.models.registry import model_config_from_hf
from jaxserve.models.rope import inverse_frequencies

_KINDS = {
    np.dtype(np.float32): Quant.F32,
    np.dtype(np.float16): Quant.F16,
    np.dtype(ml_dtypes.bfloat16): Quant.BF16,
}
_FILE_TYPES = {Quant.F32: 0, Quant.F16: 1, Quant.Q8_0: 7, Quant.BF16: 32}
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_ALWAYS_FLOAT32 = re.compile(r".*(norm|ffn_gate_inp|attn_sinks)\.weight|.*\.bias")
_Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of the file; `read` gives it in float32 or in what it is stored in."""

    name: str
    shape: tuple[int, ...]
    kind: Quant
    read: Callable[[], _Array]

    @property
    def num_bytes(self) -> int:
        block, block_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // block * block_bytes

    def data(self) -> _Array:
        """What is written."""
        value = np.ascontiguousarray(self.read())
        if self.kind == Quant.BF16:
            return value.astype(ml_dtypes.bfloat16, copy=False).view(np.uint16)
        if self.kind == Quant.F16:
            return as_dtype(self.name, value, np.dtype(np.float16))
        value = value.astype(np.float32, copy=False)
        return value if self.kind == Quant.F32 else gguf.quantize(value, self.kind)


def write_gguf(
    path: Path,
    reader: CheckpointReader,
    config: ModelConfig,
    kind: str,
    end_tokens: list[int],
    vocabulary: Mapping[str, Any],
    progress: Callable[[int, int, str], None],
) -> None:
    """Writes a file.

    Args:
      reader, config: the model.
      kind: of matrices: "float32", "float16", "bfloat16", "q8_0" or "auto", as they are stored. Vectors, routers and
        biases are float32.
      end_tokens: ids that end a text.
      vocabulary: metadata of the tokenizer; empty: none.
      progress: called after each tensor with the bytes written, those in all and its name.

    Raises:
      UnsupportedModelError: the model cannot be said in GGUF.
    """
    metadata = model_metadata(config, end_tokens) | dict(vocabulary)
    arch = ARCHITECTURES[metadata["general.architecture"]]
    tensors = _tensors(reader, config, arch, kind)
    matrices = [tensor.kind for tensor in tensors if len(tensor.shape) > 1]
    metadata["general.file_type"] = _FILE_TYPES[max(set(matrices), key=matrices.count)]
    _check(path, config, metadata, tensors)
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    try:
        add_metadata(writer, metadata)
        for tensor in tensors:
            # The shape in bytes is what the writer asks of a quantised tensor.
            shape = tensor.shape
            if tensor.kind == Quant.Q8_0:
                shape = gguf.quant_shape_to_byte_shape(shape, tensor.kind)
            dtype = np.dtype(np.uint8) if tensor.kind == Quant.Q8_0 else np.dtype(np.float32)
            writer.add_tensor_info(tensor.name, shape, dtype, tensor.num_bytes, tensor.kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        total, done = sum(tensor.num_bytes for tensor in tensors), 0
        for tensor in tensors:
            writer.write_tensor_data(tensor.data())
            done += tensor.num_bytes
            progress(done, total, tensor.name)
        writer.flush()
    finally:
        writer.close()


def _tensors(reader: CheckpointReader, config: ModelConfig, arch: GgufArchitecture, kind: str) -> list[_Tensor]:
    """The file's tensors, experts of a matrix in one."""
    target = model_config_from_hf({**reader.hf_config, "expert_tensors": "separate", "latent_tensors": "separate"})
    stacks: dict[str, list[NamedTensor]] = {}
    for tensor in named_tensors(reader, config, target, None):
        stacks.setdefault(_EXPERT.sub(".experts.{}.", tensor.name), []).append(tensor)
    found = [_tensor(name, parts, config, arch, kind) for name, parts in stacks.items()]
    extra = [_Tensor(name, value.shape, Quant.F32, value.copy) for name, value in rope_tensors(config).items()]
    return [*extra, *found]


def _tensor(hf_name: str, parts: list[NamedTensor], config: ModelConfig, arch: GgufArchitecture, kind: str) -> _Tensor:
    name = gguf_name(hf_name, arch)
    is_stack = "{}" in hf_name
    shape = (len(parts), *parts[0].shape) if is_stack else parts[0].shape

    def read() -> _Array:
        if not is_stack:
            return _changed(parts[0].read())
        whole = np.empty(shape, parts[0].dtype)
        for place, part in zip(whole, parts, strict=True):
            place[...] = part.read()
        return whole

    def _changed(value: _Array) -> _Array:
        if arch.norms_hold_one and name.endswith("norm.weight"):
            return value.astype(np.float32) + 1
        for part, heads in ((".attn_q.", config.num_heads), (".attn_k.", config.num_kv_heads)):
            if arch.permuted and part in name:
                return permute(value, heads)
        return value

    return _Tensor(name, shape, _kind_of(name, shape, parts[0].dtype, kind), read)


def _kind_of(name: str, shape: tuple[int, ...], stored: np.dtype[Any], kind: str) -> Quant:
    if len(shape) == 1 or _ALWAYS_FLOAT32.fullmatch(name):
        return Quant.F32
    if kind == "auto":
        return _KINDS.get(stored, Quant.F32)
    if kind == "q8_0":
        return Quant.Q8_0 if shape[-1] % gguf.GGML_QUANT_SIZES[Quant.Q8_0][0] == 0 else Quant.F16
    return {"float32": Quant.F32, "float16": Quant.F16, "bfloat16": Quant.BF16}[kind]


def gguf_name(hf_name: str, arch: GgufArchitecture) -> str:
    """The name in GGUF of a tensor, with `{}` for the expert; the inverse of `gguf_config.hf_name`."""
    top = {name: own for own, name in TOP_NAMES.items()}
    if hf_name in top:
        return top[hf_name]
    _, _, layer, rest = hf_name.split(".", 3)
    module, suffix = (rest, WITHOUT_SUFFIX[rest]) if rest in WITHOUT_SUFFIX else rest.rsplit(".", 1)
    if (own := arch.gguf_module(module)) is not None:
        return f"blk.{layer}.{own}.{suffix}"
    raise UnsupportedModelError(f"tensor {hf_name} has no name in GGUF architecture {arch.model_type}")


def permute(value: _Array, num_heads: int) -> _Array:
    """llama.cpp's order of query and key rows: the inverse of `gguf_reader.unpermute`."""
    halves = value.reshape(num_heads, 2, -1, *value.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(value.shape)


def _check(path: Path, config: ModelConfig, metadata: Metadata, tensors: list[_Tensor]) -> None:
    """Compares what a reader would make of the file with the model."""
    table = {each.name: GgufTensor(path, each.kind, each.shape, 0, each.num_bytes) for each in tensors}
    factors = {name: value.tolist() for name, value in rope_tensors(config).items()}
    as_stored = {
        key: float(np.float32(value)) if isinstance(value, float) else value for key, value in metadata.items()
    }
    try:
        found = model_config_from_hf(hf_config(GgufFile(path, as_stored, table), factors))
    except (CheckpointError, UnsupportedModelError) as error:
        raise UnsupportedModelError(f"the model cannot be written as GGUF: {error}") from error
    differing = differences(config, found)
    if differing:
        raise UnsupportedModelError(
            f"the model cannot be written as GGUF, whose architecture {metadata['general.architecture']} would have"
            f" another {', '.join(differing)}; write safetensors or orbax"
        )


_OF_CHECKPOINTS = ("architecture", "names", "unused_layers", "served_length", "eos_token_ids")
"""What says how a model is stored, not what it computes; and end tokens, which the generation config may have."""


def differences(one: ModelConfig, other: ModelConfig) -> list[str]:
    """Fields in which two models differ by more than rounding to float32."""
    found = []
    for field in fields(ModelConfig):
        if field.name in (*_OF_CHECKPOINTS, "rope", "other_ropes", "layer_ropes", "attention_scale"):
            continue
        if not _is_near(getattr(one, field.name), getattr(other, field.name)):
            found.append(field.name)
    if not _is_near(*(each.attention_scale or each.head_dim**-0.5 for each in (one, other))):
        found.append("attention_scale")
    if one.num_layers == other.num_layers and one.rope_head_dim == other.rope_head_dim:
        length = one.max_position_embeddings
        for mine, yours in set(zip(one.layer_ropes, other.layer_ropes, strict=True)):
            ropes = one.ropes[mine], other.ropes[yours]
            shorter = {length, *(rope.original_max_position for rope in ropes)} - {0}
            if not _is_near(*(rope.attention_factor for rope in ropes)) or any(
                not np.allclose(
                    *(inverse_frequencies(rope, one.rope_head_dim, size) for rope in ropes), rtol=1e-5, atol=0
                )
                for size in shorter
            ):
                found.append("rope")
    return found


def _is_near(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=1e-6)
    if hasattr(one, "__dataclass_fields__") and type(one) is type(other):
        return all(_is_near(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    return bool(one == other)
