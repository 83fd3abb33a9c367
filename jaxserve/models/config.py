"""ModelConfig: everything about a model that shapes its computation, frozen and hashable.

Family modules fill it from a checkpoint's own configuration; from there on nothing asks which family a
model came from: modules and weight table follow these fields alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.models.names import LLAMA_NAMES, Names

NORM_KINDS = ("rms", "layer")
NORM_PLACEMENTS = ("pre", "post", "sandwich")
QK_NORMS = (None, "head", "full")
MLP_KINDS = ("dense", "plain", "experts")
SCORINGS = ("softmax", "softmax_of_chosen", "sigmoid")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: angles; which dimensions turn together, `ModelConfig.rope_interleaved` says.

    Attributes:
      kind: `default`, `linear`, `dynamic`, `llama3`, `yarn`, `longrope` or `frequency_factors` (each
        frequency divided by its own factor, as GGUF files store it).
      theta: base of the frequencies.
      factor: context extension factor.
      original_max_position: context length before the extension.
      attention_factor: multiplies cos and sin.
      low_freq_factor, high_freq_factor: llama3.
      beta_fast, beta_slow, truncate: yarn.
      short_factors, long_factors: longrope; `frequency_factors` keeps its factors in `long_factors`.
      partial_rotary_factor: share of the head dimension that turns; 0: nothing does (`NO_ROPE`).
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    partial_rotary_factor: float = 1.0


NO_ROPE = RopeConfig(partial_rotary_factor=0.0)
"""Of layers that do not see positions."""


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, Liu et al. 2024, section 2.1).

    Attributes:
      q_lora_rank: width of the queries' latent; None: queries are projected at once.
      kv_lora_rank: width of the latent of keys and values, which is cached.
      qk_nope_head_dim, qk_rope_head_dim: numbers of a query or key head that do not turn, and that do.
      v_head_dim: of a value head.
      norm_eps: of the latents' norms.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; latent attention needs a positive integer")

    @property
    def row_dim(self) -> int:
        """Numbers that are cached per token: the latent, then the turning part of the key, which all heads share."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A mixture of experts (Shazeer et al. 2017): a router chooses a few of many MLPs for every token.

    Attributes:
      num_experts: of a layer.
      num_chosen: experts of a token.
      inner_size: width of one expert.
      scoring: a token's scores are the softmax or the sigmoid of the router's logits; `softmax_of_chosen`: the
        largest logits choose, and the softmax is over theirs alone.
      normalise: scores of the chosen are divided by their sum.
      scale: of the scores of the chosen, after that.
      num_groups, num_groups_chosen: experts lie in groups of equal size, and only those of the chosen groups may be
        chosen: the groups whose two best experts have the largest sum.
      correction: a number per expert is added to the scores that choose, not to those that weigh.
      router_bias, bias: the router, the experts have biases.
      swiglu_limit, swiglu_alpha: an expert mixes `(min(max(up, -limit), limit) + 1) * g * sigmoid(alpha * g)` with
        `g = min(gate, limit)`; limit None: `act(gate) * up`.
      shared_size: width of an MLP that every token goes through beside its experts; 0: there is none.
    """

    num_experts: int
    num_chosen: int
    inner_size: int
    scoring: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    num_groups: int = 1
    num_groups_chosen: int = 1
    correction: bool = False
    router_bias: bool = False
    bias: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702
    shared_size: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.num_chosen <= self.num_experts or self.inner_size < 1:
            raise ValueError(
                f"a token has {self.num_chosen} of {self.num_experts} experts of width {self.inner_size};"
                " each must be positive, and no more chosen than there are"
            )
        if self.scoring not in SCORINGS:
            raise ValueError(f"scoring is {self.scoring!r}; supported are {', '.join(SCORINGS)}")
        groups, chosen = self.num_groups, self.num_groups_chosen
        per_group = self.num_experts // max(groups, 1)
        if not 1 <= chosen <= groups or self.num_experts % groups or (groups > 1 and per_group < 2):
            raise ValueError(
                f"{chosen} of {groups} groups of {self.num_experts} experts: groups must divide experts, hold at"
                " least two, and no more be chosen than there are"
            )
        if self.num_chosen > chosen * per_group:
            raise ValueError(f"{self.num_chosen} experts are chosen from {chosen} groups of {per_group}")

    def split(self, num_devices: int) -> str | None:
        """The logical axis that devices share: "expert", or "expert_mlp" where experts do not divide; None: neither."""
        if self.num_experts % num_devices == 0:
            return "expert"
        return "expert_mlp" if self.inner_size % num_devices == 0 else None


class LayerKind(NamedTuple):
    """What one layer may have otherwise than the next; layers of a kind are traced once.

    Attributes:
      sliding_window: tokens a query sees, itself included; None: all.
      rope: index into `ModelConfig.ropes`.
      mlp: a name in `MLP_KINDS`.
    """

    sliding_window: int | None
    rope: int
    mlp: str


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer.

    Attributes:
      architecture: class name in the checkpoint, e.g. `LlamaForCausalLM`.
      vocab_size: rows of the embedding.
      hidden_size, intermediate_size: widths of the residual stream and of the MLP.
      num_layers, num_heads, num_kv_heads, head_dim: counts and size of attention, as its kernels see it: with
        `latent`, one KV head of `latent.row_dim`.
      rms_norm_eps: added to the mean square, or to the variance.
      rope: rotary embedding.
      rope_interleaved: in the checkpoint's order dimension 2 * i turns with 2 * i + 1, not i with i + rotary_dim / 2.
      max_position_embeddings: context length in tokens.
      tie_word_embeddings: the output projection is the embedding.
      qkv_bias, o_bias, mlp_bias: these linear layers carry a bias.
      hidden_act: activation of the MLP's gate.
      sliding_windows: per layer, the number of latest tokens a query sees, itself included; None: all.
      other_ropes: rotary embeddings that some layers have instead of `rope`.
      layer_ropes: per layer, an index into `ropes`.
      mlp_kinds: per layer, a name in `MLP_KINDS`.
      experts: of the layers whose MLP is `experts`.
      norm_kind: of the norms of the residual stream: `rms`: root mean square; `layer`: mean and variance, with a bias.
      norm_placement: `pre`: norms before attention and MLP; `post`: after them, before they are added to the
        residual stream; `sandwich`: both.
      norm_offset: norms multiply by 1 + their weight.
      qk_norm: queries and keys are normalised before they turn: `head`: each head by itself; `full`: all heads of a
        token together; None: not.
      latent: attention over latents; None: grouped-query attention.
      attention_scale: of the scores; None: 1 / sqrt(head_dim).
      attention_sinks: every query head has a logit of its own without a value (`AttentionOptions.sinks`).
      attention_softcap, final_logit_softcap: scores and logits become `cap * tanh(x / cap)`; None: off.
      embedding_multiplier: of looked-up embeddings; rounded to the weights' dtype.
      residual_multiplier: of what attention and MLP add to the residual stream.
      logits_divisor: logits are divided by it, before the cap.
      names: of the checkpoint's tensors.
      unused_layers: how many layers the checkpoint may hold beyond `num_layers`, which nothing reads.
      served_length: longest context in tokens that is served, which `dynamic` and `longrope` follow; None:
        `max_position_embeddings`.
      bos_token_id, pad_token_id, eos_token_ids: special ids of the checkpoint.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    rope_interleaved: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    other_ropes: tuple[RopeConfig, ...] = ()
    layer_ropes: tuple[int, ...] = ()
    mlp_kinds: tuple[str, ...] = ()
    experts: ExpertsConfig | None = None
    norm_kind: str = "rms"
    norm_placement: str = "pre"
    norm_offset: bool = False
    qk_norm: str | None = None
    latent: LatentConfig | None = None
    attention_scale: float | None = None
    attention_sinks: bool = False
    attention_softcap: float | None = None
    final_logit_softcap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    names: Names = LLAMA_NAMES
    unused_layers: int = 0
    served_length: int | None = None
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; a model's {name} must be a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads} and num_kv_heads is {self.num_kv_heads};"
                " query heads must be a multiple of KV heads"
            )
        if self.latent is not None and (self.num_kv_heads, self.head_dim) != (1, self.latent.row_dim):
            raise ValueError(
                f"num_kv_heads is {self.num_kv_heads} and head_dim {self.head_dim};"
                f" latent attention has one KV head of {self.latent.row_dim}"
            )
        if self.rope_head_dim % 2:
            name = "head_dim" if self.latent is None else "qk_rope_head_dim"
            raise ValueError(f"{name} is {self.rope_head_dim}; rotary embedding needs an even number")
        for name, value in (("sliding_windows", None), ("layer_ropes", 0), ("mlp_kinds", "dense")):
            if not getattr(self, name):
                object.__setattr__(self, name, (value,) * self.num_layers)
            if len(getattr(self, name)) != self.num_layers:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {self.num_layers} layers")
        if not all(0 <= index < len(self.ropes) for index in self.layer_ropes):
            raise ValueError(f"layer_ropes is {self.layer_ropes} and there are {len(self.ropes)} ropes")
        choices = [("norm_placement", self.norm_placement, NORM_PLACEMENTS), ("qk_norm", self.qk_norm, QK_NORMS)]
        choices.append(("norm_kind", self.norm_kind, NORM_KINDS))
        choices += [("mlp_kinds", kind, MLP_KINDS) for kind in self.mlp_kinds]
        for name, value, known in choices:
            if value not in known:
                raise ValueError(f"{name} is {value!r}; supported are {', '.join(map(str, known))}")

        if "experts" in self.mlp_kinds and self.experts is None:
            raise ValueError("mlp_kinds has experts and nothing says how many there are")

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """Every rotary embedding of the model, `rope` first."""
        return (self.rope, *self.other_ropes)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Of each layer."""
        return tuple(map(LayerKind, self.sliding_windows, self.layer_ropes, self.mlp_kinds))

    @property
    def rope_head_dim(self) -> int:
        """Numbers of a head that `rope` is given; of these, `partial_rotary_factor` turn."""
        return self.head_dim if self.latent is None else self.latent.qk_rope_head_dim

    @property
    def value_dim(self) -> int | None:
        """Of a latent pool, see `pallas_kernels.common.pool`; None: keys and values are apart."""
        return None if self.latent is None else self.latent.kv_lora_rank

    @property
    def score_scale(self) -> float:
        """What attention scores are multiplied by."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
