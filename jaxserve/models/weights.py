"""The weight table: every parameter of a model, its place in the tree and its name in a checkpoint.

Loaders, sharding and initialisation all walk this table, so a parameter exists in one place only. The
tree has the shape

    {"embed": [V, d], "layers": [layer 0, ...], "final_norm": [d], "lm_head": [d, V]}

with `lm_head` absent when the embedding is tied. A layer is the nested dict of its flax module's
parameters, e.g. `{"attention": {"q_proj": {"kernel": [d, H * D]}}}`. Which there are, the parts of a layer say
(`layer_parameters`); what a checkpoint calls them, `ModelConfig.names`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder_layer import layer_parameters
from jaxserve.models.parameter import HeadRows


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter.

    Attributes:
      path: keys (and the layer's index) from the root of the tree.
      hf_name: tensor name in a Hugging Face checkpoint.
      rows: of that tensor, if it holds other weights too; None: all.
      shape: as it is here, after `transpose`.
      transpose: the checkpoint stores `[out, in]`, the tree `[in, out]`.
      axes: logical axis of each dimension, see `jaxserve.models.sharding`.
      head_rows: of that tensor, if it holds other weights of every head too.
    """

    path: tuple[str | int, ...]
    hf_name: str
    shape: tuple[int, ...]
    transpose: bool
    axes: tuple[str | None, ...]
    rows: range | None = None
    head_rows: HeadRows | None = None

    def arranged(self, tensor: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The tensor (only `rows` of it) as it is here, without a copy."""
        if self.head_rows is not None:
            num_heads, size, rows = self.head_rows
            tensor = tensor.reshape(num_heads, size, -1)[:, rows.start : rows.stop]
        return tensor.swapaxes(-1, -2) if self.transpose else tensor


def weights(config: ModelConfig) -> list[Weight]:
    """All parameters, in a fixed order: embedding, layers, final norm, output projection."""
    vocab, hidden, names = config.vocab_size, config.hidden_size, config.names
    table = [Weight(("embed",), names.embed, (vocab, hidden), False, ("vocab", "embed"))]
    for index in range(config.num_layers):
        table += _layer(config, index)
    table.append(Weight(("final_norm",), names.final_norm, (hidden,), False, ("embed",)))
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
    for tensor, (path, shape, axes, head_rows) in zip(tensors, parameters, strict=True):
        first, ends[tensor] = ends[tensor], ends[tensor] + shape[-1]
        rows = range(first, ends[tensor]) if tensors.count(tensor) > 1 and head_rows is None else None
        transpose = path[-1] == "kernel" and ".".join(path[:-1]) not in names.in_out
        assert rows is None or transpose or len(shape) == 1, (
            f"{tensor} is shared and [in, out]: it has no rows to share"
        )
        found.append(Weight(("layers", index, *path), tensor, shape, transpose, axes, rows, head_rows))
    return found
