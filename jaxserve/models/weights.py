"""The weight table: every parameter of a model, its place in the tree and its name in a checkpoint.

Loaders, sharding and initialisation all walk this table, so a parameter exists in one place only. The
tree has the shape

    {"embed": [V, d], "layers": [layer 0, ...], "final_norm": [d], "lm_head": [d, V]}

with `lm_head` absent when the embedding is tied. A layer is the nested dict of its flax module's
parameters, e.g. `{"attention": {"q_proj": {"kernel": [d, H * D]}}}`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxserve.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter.

    Attributes:
      path: keys (and the layer's index) from the root of the tree.
      hf_name: tensor name in a Hugging Face checkpoint.
      shape: as it is here, after `transpose`.
      transpose: the checkpoint stores `[out, in]`, the tree `[in, out]`.
      axes: logical axis of each dimension, see `jaxserve.models.sharding`.
    """

    path: tuple[str | int, ...]
    hf_name: str
    shape: tuple[int, ...]
    transpose: bool
    axes: tuple[str | None, ...]


def weights(config: ModelConfig) -> list[Weight]:
    """All parameters, in a fixed order: embedding, layers, final norm, output projection."""
    vocab, hidden = config.vocab_size, config.hidden_size
    table = [Weight(("embed",), "model.embed_tokens.weight", (vocab, hidden), False, ("vocab", "embed"))]
    for index in range(config.num_layers):
        table += _layer(config, index)
    table.append(Weight(("final_norm",), "model.norm.weight", (hidden,), False, ("embed",)))
    if not config.tie_word_embeddings:
        table.append(Weight(("lm_head",), "lm_head.weight", (hidden, vocab), True, ("embed", "vocab")))
    return table


def ignorable(config: ModelConfig, hf_name: str) -> bool:
    """Whether a checkpoint tensor that is not in the table may be left unread: buffers and tied copies."""
    if hf_name.endswith((".rotary_emb.inv_freq", ".self_attn.bias", ".self_attn.masked_bias")):
        return True
    return hf_name == "lm_head.weight" and config.tie_word_embeddings


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
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    prefix = f"model.layers.{index}"

    def norm(name: str, hf_name: str) -> Weight:
        return Weight(("layers", index, name, "scale"), f"{prefix}.{hf_name}.weight", (hidden,), False, ("embed",))

    def linear(
        module: tuple[str, str], hf_module: str, sizes: tuple[int, int], axes: tuple[str, str], bias: bool
    ) -> list[Weight]:
        path, name = ("layers", index, *module), f"{prefix}.{hf_module}.{module[1]}"
        found = [Weight((*path, "kernel"), f"{name}.weight", sizes, True, axes)]
        if bias:
            found.append(Weight((*path, "bias"), f"{name}.bias", sizes[1:], False, axes[1:]))
        return found

    def attention(name: str, sizes: tuple[int, int], axes: tuple[str, str]) -> list[Weight]:
        return linear(("attention", name), "self_attn", sizes, axes, config.attention_bias)

    def mlp(name: str, sizes: tuple[int, int], axes: tuple[str, str]) -> list[Weight]:
        return linear(("mlp", name), "mlp", sizes, axes, config.mlp_bias)

    return [
        norm("input_norm", "input_layernorm"),
        *attention("q_proj", (hidden, queries), ("embed", "heads")),
        *attention("k_proj", (hidden, keys), ("embed", "kv_heads")),
        *attention("v_proj", (hidden, keys), ("embed", "kv_heads")),
        *attention("o_proj", (queries, hidden), ("heads", "embed")),
        norm("post_attention_norm", "post_attention_layernorm"),
        *mlp("gate_proj", (hidden, inner), ("embed", "mlp")),
        *mlp("up_proj", (hidden, inner), ("embed", "mlp")),
        *mlp("down_proj", (inner, hidden), ("mlp", "embed")),
    ]
