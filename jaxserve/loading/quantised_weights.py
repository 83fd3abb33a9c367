"""Weights kept quantised in memory: which of a model's matrices, in what form, and how they are made.

A matrix is quantised along `in`, which are the rows of a checkpoint's tensor, linear layers and embeddings alike. The
embedding is packed as the output layer that it may be too; looking it up dequantises the rows that are asked for.

Packed matrices are for the native products of one CPU device; for all others the same numbers are kept as plain arrays
(`ScaledMatrix`), and so are those with a scale per column, which only these have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxserve.loading.checkpoint import CheckpointReader
from jaxserve.models.config import ModelConfig
from jaxserve.models.weights import Weight
from pallas_kernels.matmul import (
    Blocks,
    QuantisedForm,
    QuantisedMatrix,
    ScaledForm,
    ScaledMatrix,
    abstract_quantised,
    abstract_scaled,
    can_quantise,
    can_scale,
    num_bytes,
    pack_quantised,
    put_columns,
    quantise,
    scale_columns,
    scaled_form,
)

if TYPE_CHECKING:
    from jaxserve.loading.gguf_reader import GgufReader

Form = QuantisedForm | ScaledForm
Forms = dict[tuple[str | int, ...], Form]
"""The form of every weight that is kept quantised, by path."""

_INT8, _INT4 = QuantisedForm(8), QuantisedForm(4, has_minimum=True)
_OF_COLUMNS = {"int8_channel": ScaledForm("int8"), "fp8": ScaledForm("float8_e4m3fn")}
_VALUES_AT_ONCE = 1 << 20


def matrix_shape(weight: Weight) -> tuple[int, int]:
    """(in, out) of a weight of two dimensions as a product has it."""
    first, second = weight.shape
    return (first, second) if weight.transpose else (second, first)


def quantised_forms(
    quantization: str | None,
    config: ModelConfig,
    table: Sequence[Weight],
    reader: CheckpointReader | None,
    *,
    packed: bool = True,
) -> Forms:
    """Which weights are kept quantised, and how.

    "int8", "int4", "int8_channel" and "fp8" take every matrix of the layers and the output layer; one that is the
    embedding too has 8 bits in both. "gguf" takes the file's own. Experts have forms for XLA's products alone.

    Args:
      quantization: as the flag has it; None: no weight.
      reader: of the checkpoint; None for one without.
      packed: for native products; those of XLA otherwise.

    Raises:
      ValueError: "gguf" of something else, or of a file that has no such tensor.
    """
    if quantization is None:
        return {}
    if quantization == "gguf":
        return _gguf_forms(table, reader, packed)
    found: Forms = {}
    for weight in table:
        is_embedding = weight.path == ("embed",)
        if _is_product(weight, packed) and (config.tie_word_embeddings or not is_embedding):
            blocks = _INT4 if quantization == "int4" and not is_embedding else _INT8
            _keep(found, weight, _OF_COLUMNS.get(quantization, blocks), packed)
    return found


def _is_product(weight: Weight, packed: bool) -> bool:
    """Whether it is the matrix of a product that may be of quantised numbers, or experts' matrices."""
    return weight.is_matrix or (not packed and weight.path[-1] == "kernels")


def _keep(found: Forms, weight: Weight, form: Form, packed: bool) -> None:
    """Adds a weight's form if it can have that."""
    if isinstance(form, QuantisedForm) and packed:
        if can_quantise(matrix_shape(weight), form.block):
            found[weight.path] = form
        return
    scaled = scaled_form(form) if isinstance(form, QuantisedForm) else form
    if can_scale(weight.shape[_in_axis(weight)], scaled):
        found[weight.path] = scaled


def abstract_params_of(weight: Weight, forms: Mapping[tuple[str | int, ...], Form], dtype: Any) -> Any:
    """Shapes and dtypes of a weight in memory."""
    form = forms.get(weight.path)
    if isinstance(form, ScaledForm):
        return abstract_scaled(weight.shape, form, in_axis=_in_axis(weight))
    if form is not None:
        return abstract_quantised(matrix_shape(weight), form)
    return jax.ShapeDtypeStruct(weight.shape, np.float32 if weight.is_float32 else dtype)


def quantised_weight(weight: Weight, form: Form, reader: CheckpointReader, quantization: str) -> Any:
    """Reads a weight as a `QuantisedMatrix` or `ScaledMatrix` of numpy arrays, experts one by one."""
    if weight.has_experts:
        return _made_of_experts(weight, form, _of_experts(weight, form, reader, quantization))
    if quantization == "gguf":
        return _made(weight, form, _gguf(reader).blocks(weight.hf_name, weight.rows))
    part = () if weight.rows is None else (slice(weight.rows.start, weight.rows.stop),)
    return _made(weight, form, _rounding(reader.read(weight.hf_name, part), form))


def quantised_array(weight: Weight, value: np.ndarray[Any, Any], form: Form) -> QuantisedMatrix | ScaledMatrix:
    """Quantises a weight that is in the tree's layout; `form` is none of those that only files have."""
    columns = value.swapaxes(-1, -2) if _in_axis(weight) == -2 else value
    if weight.has_experts:
        return _made_of_experts(weight, form, (_rounding(each, form) for each in columns))
    return _made(weight, form, _rounding(columns, form))


def _rounding(columns: np.ndarray[Any, Any], form: Form) -> Callable[[slice], Blocks]:
    """What gives the blocks of some of the columns [out, in]."""
    if isinstance(form, ScaledForm) and form.block is None:
        return lambda part: scale_columns(columns[part], form)
    return lambda part: quantise(columns[part], form.bits)


def _of_experts(
    weight: Weight, form: Form, reader: CheckpointReader, quantization: str
) -> Iterator[Callable[[slice], Blocks]]:
    """What gives the blocks of some columns, for every expert in turn."""
    if quantization == "gguf":
        yield from map(_gguf(reader).blocks, weight.tensors)
        return
    for matrix in weight.experts(reader.read):
        yield _rounding(matrix.T, form)


def _gguf(reader: CheckpointReader | None) -> GgufReader:
    from jaxserve.loading.gguf_reader import GgufReader

    assert isinstance(reader, GgufReader), f"{reader} is no GGUF file"
    return reader


def _made(weight: Weight, form: Form, blocks_of: Callable[[slice], Blocks]) -> QuantisedMatrix | ScaledMatrix:
    """A weight from blocks of some of its columns at a time."""
    if isinstance(form, QuantisedForm):
        return in_parts(matrix_shape(weight), form, blocks_of)
    whole = _empty(weight, form)
    _fill(whole, blocks_of, axis=_in_axis(weight))
    return whole


def _made_of_experts(weight: Weight, form: Form, experts: Iterable[Callable[[slice], Blocks]]) -> ScaledMatrix:
    assert isinstance(form, ScaledForm), weight
    whole = _empty(weight, form)
    for index, blocks_of in enumerate(experts):
        _fill(ScaledMatrix(*(None if leaf is None else leaf[index] for leaf in whole)), blocks_of, axis=-2)
    return whole


def _empty(weight: Weight, form: ScaledForm) -> ScaledMatrix:
    shapes = abstract_scaled(weight.shape, form, in_axis=_in_axis(weight))
    return jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), shapes)


def _fill(whole: ScaledMatrix, blocks_of: Callable[[slice], Blocks], *, axis: int) -> None:
    """Writes one matrix some columns at a time."""
    in_size, out_size = whole.shape[axis], whole.shape[-3 - axis]
    at_once = max(1, _VALUES_AT_ONCE // in_size)
    for first in range(0, out_size, at_once):
        part = slice(first, min(out_size, first + at_once))
        put_columns(whole, part, blocks_of(part), in_axis=axis)


def _in_axis(weight: Weight) -> int:
    """The axis of a weight that is `in`: rows of an embedding are the columns of the output layer that it is too."""
    return -1 if weight.path == ("embed",) else -2


def in_parts(shape: tuple[int, ...], form: QuantisedForm, blocks_of: Callable[[slice], Blocks]) -> QuantisedMatrix:
    """Packs a matrix (in, out) some columns at a time: what lies between takes several times their memory."""
    in_size, out_size = shape
    whole = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), abstract_quantised((in_size, out_size), form))
    groups = whole.integers.shape[0]
    group_size = out_size // groups
    at_once = max(1, _VALUES_AT_ONCE // (in_size * group_size))
    for first in range(0, groups, at_once):
        end = min(groups, first + at_once)
        part = pack_quantised(blocks_of(slice(first * group_size, end * group_size)), form.bits)
        for array, piece in zip(whole, part, strict=True):
            array[first:end] = piece
    return QuantisedMatrix(*whole)


def description(forms: Forms, table: Sequence[Weight]) -> str:
    """What is kept quantised, for the log."""
    matrices = [weight for weight in table if weight.is_matrix or weight.path[-1] == "kernels"]
    others = [weight.hf_name for weight in matrices if weight.path not in forms]
    kinds = ", ".join(f"{bits} bits: {sum(form.bits == bits for form in forms.values())}" for bits in (4, 8))
    more = f"; not quantised: {', '.join(others[:5])}{' ...' if len(others) > 5 else ''}" if others else ""
    return f"{len(forms)} of {len(matrices)} matrices are kept quantised ({kinds}){more}"


def bytes_of(value: Any) -> int:
    """Of a weight's arrays or shapes, as they will be on devices."""
    return sum(num_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(value))


def _gguf_forms(table: Sequence[Weight], reader: CheckpointReader | None, packed: bool) -> Forms:
    from jaxserve.loading.gguf_blocks import FORMS
    from jaxserve.loading.gguf_reader import GgufReader

    if not isinstance(reader, GgufReader):
        raise ValueError("quantization gguf keeps the blocks of a .gguf file; this model is none: use int8 or int4")
    found: Forms = {}
    for weight in table:
        form = FORMS.get(reader.quantisation(weight.tensors[0])) if _is_product(weight, packed) else None
        if form is not None:
            _keep(found, weight, form, packed)
    if not found:
        kept = ", ".join(kind.name for kind in FORMS)
        raise ValueError(
            f"quantization is gguf and {reader.name} has no matrix that can be kept quantised:"
            f" {kept} with outputs in 32s; leave quantization out, or use int8 or int4"
        )
    return found
