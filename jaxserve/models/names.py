"""Names of a checkpoint's tensors, as a table from the modules of a parameter tree to the modules of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

_MODULES = {
    "input_norm": "input_layernorm",
    "attention.q_proj": "self_attn.q_proj",
    "attention.k_proj": "self_attn.k_proj",
    "attention.v_proj": "self_attn.v_proj",
    "attention.o_proj": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.q_a_proj": "self_attn.q_a_proj",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.q_b_proj": "self_attn.q_b_proj",
    "attention.kv_a_proj": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.k_up": "self_attn.kv_b_proj",
    "attention.v_up": "self_attn.kv_b_proj",
    "post_attention_norm": "post_attention_layernorm",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.experts.gate_proj": "mlp.experts.{}.gate_proj",
    "mlp.experts.up_proj": "mlp.experts.{}.up_proj",
    "mlp.experts.down_proj": "mlp.experts.{}.down_proj",
    "mlp.shared.gate_proj": "mlp.shared_experts.gate_proj",
    "mlp.shared.up_proj": "mlp.shared_experts.up_proj",
    "mlp.shared.down_proj": "mlp.shared_experts.down_proj",
    "attention": "self_attn",
}
_SUFFIXES = {
    "kernel": ".weight",
    "scale": ".weight",
    "bias": ".bias",
    "weight": ".weight",
    "correction": ".e_score_correction_bias",
    "sinks": ".sinks",
    "kernels": ".weight",
    "biases": ".bias",
}
_SUFFIXES_OF_ALL = {"kernels": "", "biases": "_bias"}


@dataclass(frozen=True, slots=True)
class Names:
    """A family's table; the defaults are Llama's.

    Attributes:
      embed, final_norm, final_norm_bias, lm_head: tensors outside of the layers.
      layer: what names of layer `{}` begin with.
      modules: pairs of a module within a layer (dots between its keys) and its name there. Modules with one name
        share a tensor: each has rows of it, in the order in which the parts of the model list them.
        Of experts, `{}` in the name stands for the expert: a tensor each. Without it one tensor is of all experts,
        has no `.weight` behind its name and `_bias` for `.bias`; modules with one name have columns of it in turns.
      in_out: modules whose matrices the checkpoint stores `[in, out]`.
    """

    embed: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    final_norm_bias: str = "model.norm.bias"
    lm_head: str = "lm_head.weight"
    layer: str = "model.layers.{}."
    modules: tuple[tuple[str, str], ...] = tuple(_MODULES.items())
    in_out: tuple[str, ...] = ("attention.k_up",)

    def with_modules(self, changes: Mapping[str, str], *, in_out: tuple[str, ...] = ()) -> Names:
        """The table with some modules named otherwise, or more of them, and more that are stored `[in, out]`."""
        modules = tuple({**dict(self.modules), **changes}.items())
        return replace(self, modules=modules, in_out=(*self.in_out, *in_out))

    def tensor(self, layer: int, path: tuple[str, ...]) -> str:
        """The tensor of a parameter.

        Args:
          path: within the layer, e.g. `("attention", "q_proj", "kernel")`.

        Returns:
          Its name, with `{}` for the expert where each has a tensor of its own.

        Raises:
          KeyError: the table does not name its module.
        """
        *module, leaf = path
        name = dict(self.modules)[".".join(module)]
        of_all = leaf in _SUFFIXES_OF_ALL and "{}" not in name
        return self.layer.format(layer) + name + (_SUFFIXES_OF_ALL if of_all else _SUFFIXES)[leaf]


LLAMA_NAMES = Names()
