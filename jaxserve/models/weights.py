"""The weight table: every parameter of a model, its place in the tree and its name in a checkpoint.

Loaders, sharding and initialisation all walk this table, so a parameter exists in one place only. The
tree has the shape

    {"embed": [V, d], "layers": [layer 0, ...], "final_norm": [d], "final_norm_bias": [d], "lm_head": [d, V]}

with `final_norm_bias` for layer norms only and `lm_head` absent when the embedding is tied. A layer is the nested dict
of its flax module's parameters, e.g. `{"attention": {"q_proj": {"kernel": [d, H * D]}}}`. Which there are, the parts
of a layer say (`layer_parameters`); what a checkpoint calls them, `ModelConfig.names`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder_layer import layer_parameters
from jaxserve.models.parameter import HeadRows

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter.

    Attributes:
      path: keys (and the layer's index) from the root of the tree.
      hf_name: tensor name in a Hugging Face checkpoint; with `{}` for the index along the first axis where each has
        a tensor of its own, see `tensors`.
      rows: of that tensor, if it holds other weights too; None: all.
      shape: as it is here, after `transpose`.
      transpose: the checkpoint stores `[out, in]`, the tree `[in, out]`; the last two axes of experts.
      axes: logical axis of each dimension, see `jaxserve.models.sharding`.
      columns: of that tensor's last axis, if other weights have the columns between; None: all.
      is_float32: whatever dtype the model has.
      head_rows: of that tensor, if it holds other weights of every head too.
    """

    path: tuple[str | int, ...]
    hf_name: str
    shape: tuple[int, ...]
    transpose: bool
    axes: tuple[str | None, ...]
    rows: range | None = None
    columns: slice | None = None
    is_float32: bool = False
    head_rows: HeadRows | None = None

    @property
    def is_matrix(self) -> bool:
        """Whether it is the [in, out] of one product, which packed and quantised forms are for."""
        return len(self.shape) == 2 and self.path[-1] in ("kernel", "embed", "lm_head")

    @property
    def has_experts(self) -> bool:
        """Whether its first axis is that of experts."""
        return self.path[-1] in ("kernels", "biases")

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the checkpoint's tensors it is made of."""
        return tuple(map(self.hf_name.format, range(self.shape[0]))) if "{}" in self.hf_name else (self.hf_name,)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of each of them, as far as this weight reaches."""
        if self.head_rows is not None:
            num_heads, size, _ = self.head_rows
            return num_heads * size, self.shape[-2 if self.transpose else -1]
        shape = list(self.shape[1:] if "{}" in self.hf_name else self.shape)
        if self.transpose:
            shape[-2:] = shape[:-3:-1]
        if self.columns is not None:
            shape[-1] *= self.columns.step
        if self.rows is not None:
            shape[0] = self.rows.stop
        return tuple(shape)

    def read(
        self, read: Callable[[str, tuple[slice, ...]], Array], dtype: np.dtype[Any], index: tuple[slice, ...] = ()
    ) -> Array:
        """Its value, or a part of it, in the tree's layout; experts one by one, so that one at most is there twice.

        Args:
          read: gives a part of a tensor, as `CheckpointReader.read` does; no more is asked than the result holds, but
            for tensors whose rows or columns other weights have in turns.
          index: what is wanted of each dimension, as `jax.make_array_from_callback` asks; (): all.
        """
        bounds = bounds_of(self.shape, index)
        if self.has_experts:
            return self._read_experts(read, dtype, bounds)
        if self.head_rows is not None:
            _, size, rows = self.head_rows
            (first, end), *inner = bounds
            within, columns = inner[::-1] if self.transpose else inner
            value = read(self.hf_name, (slice(first * size, end * size), slice(*columns)))
            is_own = value.flags.writeable
            value = value.reshape(end - first, size, -1)[:, rows.start + within[0] : rows.start + within[1]]
        else:
            own = _turned(bounds) if self.transpose else bounds
            if self.rows is not None:
                own = [(self.rows.start + own[0][0], self.rows.start + own[0][1]), *own[1:]]
            value = read(self.hf_name, tuple(slice(*each) for each in own))
            # Views of a file are copied even if nothing else is to be done; see `map_tensor`.
            is_own = value.flags.writeable
        value = value.swapaxes(-1, -2) if self.transpose else value
        return np.array(value, dtype, order="C", copy=None if is_own else True)

    def _read_experts(
        self, read: Callable[[str, tuple[slice, ...]], Array], dtype: np.dtype[Any], bounds: list[tuple[int, int]]
    ) -> Array:
        part = np.empty([end - first for first, end in bounds], dtype)
        for place, value in zip(part, self.experts(read, bounds), strict=True):
            place[...] = value
        return part

    def experts(
        self, read: Callable[[str, tuple[slice, ...]], Array], bounds: list[tuple[int, int]] | None = None
    ) -> Iterator[Array]:
        """The matrices [in, out], or biases, of every expert in turn; `read` as in `read`.

        Args:
          bounds: first and end of each dimension of what is wanted; None: all.
        """
        bounds = bounds_of(self.shape, ()) if bounds is None else bounds
        own = _turned(bounds[1:]) if self.transpose else bounds[1:]
        if self.columns is not None:
            step = self.columns.step
            own = [*own[:-1], (own[-1][0] * step, own[-1][1] * step)]
        inner = tuple(slice(*each) for each in own)
        for expert in range(*bounds[0]):
            if "{}" in self.hf_name:
                value = read(self.hf_name.format(expert), inner)
            else:
                value = read(self.hf_name, (slice(expert, expert + 1), *inner))[0]
            value = value if self.columns is None else value[..., self.columns]
            yield value.T if self.transpose else value

    def put(self, tensor: Array, value: Array) -> None:
        """The inverse of `read`: writes its value to the place that it has in a tensor.

        Args:
          tensor: one of `tensors`, whole; what other weights have of it stays.
          value: of the tree's layout; one expert's, without the first axis, where each has a tensor of its own.
        """
        value = value.swapaxes(-1, -2) if self.transpose else value
        if self.head_rows is not None:
            num_heads, size, rows = self.head_rows
            tensor.reshape(num_heads, size, -1)[:, rows.start : rows.stop] = value
        elif self.rows is not None:
            tensor[self.rows.start : self.rows.stop] = value
        elif self.columns is not None:
            tensor[..., self.columns] = value
        else:
            tensor[...] = value


def bounds_of(shape: tuple[int, ...], index: tuple[slice, ...]) -> list[tuple[int, int]]:
    """First and end of each dimension of a part; what `index` does not name is whole."""
    whole = (*index, *[slice(None)] * (len(shape) - len(index)))
    return [each.indices(size)[:2] for each, size in zip(whole, shape, strict=True)]


def _turned(bounds: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [*bounds[:-2], bounds[-1], bounds[-2]]


def weights(config: ModelConfig) -> list[Weight]:
    """All parameters, in a fixed order: embedding, layers, final norm, output projection."""
    vocab, hidden, names = config.vocab_size, config.hidden_size, config.names
    table = [Weight(("embed",), names.embed, (vocab, hidden), False, ("vocab", "embed"))]
    for index in range(config.num_layers):
        table += _layer(config, index)
    table.append(Weight(("final_norm",), names.final_norm, (hidden,), False, ("embed",)))
    if config.norm_kind == "layer":
        table.append(Weight(("final_norm_bias",), names.final_norm_bias, (hidden,), False, ("embed",)))
    if not config.tie_word_embeddings:
        table.append(Weight(("lm_head",), names.lm_head, (hidden, vocab), True, ("embed", "vocab")))
    return table


def ignorable(config: ModelConfig, hf_name: str) -> bool:
    """Whether a checkpoint tensor that is not in the table may be left unread: buffers, tied copies, unused layers."""
    if hf_name.endswith((".rotary_emb.inv_freq", ".self_attn.bias", ".self_attn.masked_bias")):
        return True
    unused = range(config.num_layers, config.num_layers + config.unused_layers)
    if hf_name.startswith(tuple(config.names.layer.format(index) for index in unused)):
        return True
    return hf_name == config.names.lm_head and config.tie_word_embeddings


def make_params(config: ModelConfig, leaf: Callable[[Weight], Any]) -> dict[str, Any]:
    """The parameter tree with `leaf(weight)` at every place, layers as a list."""
    params: dict[str, Any] = {"layers": [{} for _ in range(config.num_layers)]}
    for weight in weights(config):
        node: Any = params
        for key in weight.path[:-1]:
            node = node[key] if isinstance(key, int) else node.setdefault(key, {})
        node[weight.path[-1]] = leaf(weight)
    return params


def _layer(config: ModelConfig, index: int) -> list[Weight]:
    names = config.names
    parameters = layer_parameters(config, config.layer_kinds[index])
    tensors = [names.tensor(index, parameter.path) for parameter in parameters]
    found, ends = [], dict.fromkeys(tensors, 0)
    for tensor, (path, shape, axes, is_float32, head_rows) in zip(tensors, parameters, strict=True):
        sharers = tensors.count(tensor)
        of_experts = path[-1] in ("kernels", "biases")
        transpose = path[-1] in ("kernel", "kernels", "weight") and ".".join(path[:-1]) not in names.in_out
        rows = columns = None
        if sharers > 1 and of_experts:
            assert not transpose and "{}" not in tensor, f"{tensor} is shared: columns of all experts are, in turns"
            columns, ends[tensor] = slice(ends[tensor], None, sharers), ends[tensor] + 1
        elif sharers > 1 and head_rows is None:
            assert transpose or len(shape) == 1, f"{tensor} is shared and [in, out]: it has no rows to share"
            rows = range(ends[tensor], ends[tensor] + shape[-1])
            ends[tensor] = rows.stop
        where = ("layers", index, *path)
        head_rows = head_rows if sharers > 1 else None
        found.append(Weight(where, tensor, shape, transpose, axes, rows, columns, is_float32, head_rows))
    return found
