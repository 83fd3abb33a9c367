"""ModelConfig: everything about a model that shapes its computation, frozen and hashable.

Family modules fill it from a checkpoint's own configuration; from there on nothing asks which family a
model came from: modules and weight table follow these fields alone.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding, half-split (dimension i turns with dimension i + rotary_dim / 2).

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
      partial_rotary_factor: share of the head dimension that turns.
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


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer.

    Attributes:
      architecture: class name in the checkpoint, e.g. `LlamaForCausalLM`.
      vocab_size: rows of the embedding.
      hidden_size, intermediate_size: widths of the residual stream and of the MLP.
      num_layers, num_heads, num_kv_heads, head_dim: counts and size of attention.
      rms_norm_eps: added to the mean square.
      rope: rotary embedding.
      max_position_embeddings: context length in tokens.
      tie_word_embeddings: the output projection is the embedding.
      attention_bias, mlp_bias: linear layers carry a bias.
      hidden_act: activation of the MLP's gate.
      sliding_windows: per layer, the number of latest tokens a query sees, itself included; None: all.
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
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    sliding_windows: tuple[int | None, ...] = ()
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
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embedding needs an even number")
        if not self.sliding_windows:
            object.__setattr__(self, "sliding_windows", (None,) * self.num_layers)
        if len(self.sliding_windows) != self.num_layers:
            raise ValueError(f"sliding_windows has {len(self.sliding_windows)} entries for {self.num_layers} layers")

    @property
    def widest_window(self) -> int | None:
        """The number of latest tokens beyond which no layer sees any; None: some layer sees all."""
        windows = [window for window in self.sliding_windows if window is not None]
        return max(windows) if len(windows) == self.num_layers else None
