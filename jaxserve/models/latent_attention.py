"""Multi-head latent attention in absorbed form: heads attend over the cached latents, not over keys made of them.

Of a token are cached the latent c and the turned key part k_pe that all heads share. A head's key would be
[k_up c, k_pe] and its value v_up c; since q . (k_up c) = (q k_up) . c and values are summed linearly, queries are taken
to the latent's space before attention and outputs from it after (DeepSeek-V2, Liu et al. 2024, section 2.1.2).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.attention import Attend, AttentionOptions
from jaxserve.models.config import ModelConfig
from jaxserve.models.linear import HeadLinear, Linear
from jaxserve.models.norm import RMSNorm
from jaxserve.models.parameter import HeadRows, Parameter, linear_parameters, norm_parameter
from jaxserve.models.rope import apply_rope


class LatentAttention(nnx.Module):
    """Every query head attends over one KV head of rows [c, k_pe], whose values are c."""

    def __init__(self, config: ModelConfig) -> None:
        latent = config.latent
        assert latent is not None, f"{config.architecture} has no latent attention"
        hidden, heads = config.hidden_size, config.num_heads
        queries = heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
        self.latent = latent
        self.interleaved = config.rope_interleaved
        self.num_heads = heads
        self.scale = config.score_scale
        self.logit_softcap = config.attention_softcap
        if latent.q_lora_rank is None:
            self.q_proj = Linear(hidden, queries, bias=False)
        else:
            self.q_a_proj = Linear(hidden, latent.q_lora_rank, bias=config.qkv_bias)
            self.q_a_norm = RMSNorm(latent.q_lora_rank, latent.norm_eps)
            self.q_b_proj = Linear(latent.q_lora_rank, queries, bias=False)
        self.kv_a_proj = Linear(hidden, latent.row_dim, bias=config.qkv_bias)
        self.kv_a_norm = RMSNorm(latent.kv_lora_rank, latent.norm_eps)
        self.k_up = HeadLinear(heads, latent.qk_nope_head_dim, latent.kv_lora_rank)
        self.v_up = HeadLinear(heads, latent.kv_lora_rank, latent.v_head_dim)
        self.o_proj = Linear(heads * latent.v_head_dim, hidden, bias=config.o_bias)

    def __call__(
        self,
        x: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        layer: Any,
        attend: Attend,
        cache: Any,
        sliding_window: int | None,
    ) -> tuple[jax.Array, Any]:
        """[T, d] -> [T, d], and the cache after the tokens were added."""
        tokens, latent = x.shape[0], self.latent
        q = self.q_proj(x) if latent.q_lora_rank is None else self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        q = q.reshape(tokens, self.num_heads, -1)
        q_nope, q_pe = q[..., : latent.qk_nope_head_dim], q[..., latent.qk_nope_head_dim :]
        row = self.kv_a_proj(x)
        c, k_pe = self.kv_a_norm(row[:, : latent.kv_lora_rank]), row[:, None, latent.kv_lora_rank :]
        q_pe, k_pe = (apply_rope(each, *rope, interleaved=self.interleaved) for each in (q_pe, k_pe))
        q = jnp.concatenate([self.k_up(q_nope), q_pe], axis=-1)
        k = jnp.concatenate([c[:, None], k_pe], axis=-1)
        options = AttentionOptions(sliding_window, self.scale, self.logit_softcap, value_dim=latent.kv_lora_rank)
        out, cache = attend(layer, q, k, None, cache, options)
        return self.o_proj(self.v_up(out).reshape(tokens, -1)), cache


def latent_attention_parameters(config: ModelConfig) -> list[Parameter]:
    """The arrays of `LatentAttention`. `k_up` and `v_up` are rows of every head in one tensor, if they share one."""
    latent = config.latent
    assert latent is not None, f"{config.architecture} has no latent attention"
    hidden, heads = config.hidden_size, config.num_heads
    nope, value, rank = latent.qk_nope_head_dim, latent.v_head_dim, latent.kv_lora_rank
    queries = heads * (nope + latent.qk_rope_head_dim)

    def linear(
        name: str, sizes: tuple[int, int], axes: tuple[str | None, str | None], bias: bool = False
    ) -> list[Parameter]:
        return linear_parameters(("attention", name), sizes, axes, bias)

    def norm(name: str, size: int) -> Parameter:
        return norm_parameter(("attention", name), size, None)

    def per_head(name: str, sizes: tuple[int, int], rows: range) -> Parameter:
        path, axes = ("attention", name, "kernel"), ("heads", None, None)
        return Parameter(path, (heads, *sizes), axes, head_rows=HeadRows(heads, nope + value, rows))

    if latent.q_lora_rank is None:
        found = linear("q_proj", (hidden, queries), ("embed", "heads"))
    else:
        found = linear("q_a_proj", (hidden, latent.q_lora_rank), ("embed", None), config.qkv_bias)
        found.append(norm("q_a_norm", latent.q_lora_rank))
        found += linear("q_b_proj", (latent.q_lora_rank, queries), (None, "heads"))
    return [
        *found,
        *linear("kv_a_proj", (hidden, latent.row_dim), ("embed", None), config.qkv_bias),
        norm("kv_a_norm", rank),
        per_head("k_up", (nope, rank), range(nope)),
        per_head("v_up", (rank, value), range(nope, nope + value)),
        *linear("o_proj", (heads * value, hidden), ("heads", "embed"), config.o_bias),
    ]
