"""The model as functions of a parameter tree: `forward` over a flat batch of tokens, and `unembed`.

Tokens of any number of sequences lie in one flat batch; which token sees which is decided by the
caller's `attend`, so the same function serves prefill, decode, both at once and dense checks.

`params["layers"]` is either a list of per-layer dicts (each layer is traced: on CPU a scan would copy
every layer's weights) or one dict of arrays stacked over layers (one traced layer, `lax.scan` with the
cache in the carry, where a donated cache stays in place).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.models.attention import Attend
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder_layer import bind_layer
from jaxserve.models.linear import matmul
from jaxserve.models.lora import LoraColumns, LoraTokens, adapted, lora_columns
from jaxserve.models.norm import rms_norm
from jaxserve.models.rope import rope_tables
from jaxserve.models.weights import Weight, make_params
from pallas_kernels.matmul import can_pack, is_packed, pack, packed_columns

Params = dict[str, Any]


RunLayers = Callable[[Params, jax.Array, tuple[jax.Array, jax.Array], Any], tuple[jax.Array, Any]]
"""`run_layers(layers, x, rope, cache) -> (x, cache)`: all layers on x [T, d], with cos and sin of its tokens."""


def forward(
    config: ModelConfig,
    params: Params,
    token_ids: jax.Array,
    positions: jax.Array,
    attend: Attend,
    cache: Any,
    run_layers: RunLayers | None = None,
    lora: LoraTokens | None = None,
) -> tuple[jax.Array, Any]:
    """Runs all layers.

    Args:
      config: the model.
      params: its tree, layers as a list or stacked.
      token_ids: int32[T]; padding is any valid id.
      positions: int32[T], write indices.
      attend: see `jaxserve.models.attention.Attend`.
      cache: handed through `attend` layer by layer.
      run_layers: runs them instead, without `attend` and `lora`.
      lora: whose adapter each token has; `params["adapters"]` has them.

    Returns:
      (hidden [T, d], cache): hidden states before the final norm.
    """
    embed = params["embed"]
    dtype = params["final_norm"].dtype
    x = packed_columns(embed, token_ids, dtype) if is_packed(embed) else embed[token_ids]
    rope = rope_tables(config.rope, config.head_dim, config.max_position_embeddings, positions)
    layers = params["layers"]
    if run_layers is not None:
        return run_layers(layers, x, rope, cache)
    pairs, columns = [{}] * config.num_layers, None
    if lora is not None:
        pairs, columns = params["adapters"]["layers"], lora_columns(params["adapters"], lora)
    if isinstance(layers, dict):
        return _scan_layers(config, layers, pairs, columns, x, rope, attend, cache)

    # Traced and lowered once per kind of layer and inlined by the compiler: tracing 30 layers one by one
    # takes longer than loading the compiled program from the persistent cache.
    @partial(jax.jit, static_argnames="window")
    def run(
        layer_params: Params, layer_pairs: Params, x: jax.Array, index: jax.Array, cache: Any, window: int | None
    ) -> Any:
        return bind_layer(config, adapted(layer_params, layer_pairs, columns))(x, rope, index, attend, cache, window)

    for index, layer_params in enumerate(layers):
        x, cache = run(layer_params, pairs[index], x, jnp.int32(index), cache, window=config.sliding_windows[index])
    return x, cache


def unembed(config: ModelConfig, params: Params, hidden: jax.Array) -> jax.Array:
    """Logits of hidden states.

    Args:
      hidden: [N, d] as `forward` returns it.

    Returns:
      float32[N, V].
    """
    x = rms_norm(hidden, params["final_norm"], config.rms_norm_eps)
    if config.tie_word_embeddings:
        return matmul(x, params["embed"], transposed=True, out_dtype=jnp.float32)
    return matmul(x, params["lm_head"], out_dtype=jnp.float32)


def init_params(config: ModelConfig, key: jax.Array, dtype: Any = jnp.float32) -> Params:
    """Random parameters: kernels normal with variance 1 / fan-in, norms one, biases zero."""

    def leaf(weight: Weight) -> jax.Array:
        if len(weight.shape) == 1:
            return (jnp.zeros if weight.path[-1] == "bias" else jnp.ones)(weight.shape, dtype)
        nonlocal count
        count += 1
        scale = weight.shape[0] ** -0.5 if weight.transpose else weight.shape[1] ** -0.5
        return (jax.random.normal(jax.random.fold_in(key, count), weight.shape) * scale).astype(dtype)

    count = 0
    return make_params(config, leaf)


def abstract_params(config: ModelConfig, dtype: Any) -> Params:
    """The tree with a ShapeDtypeStruct at every place."""
    return make_params(config, lambda weight: jax.ShapeDtypeStruct(weight.shape, dtype))


def stack_layers(params: Params, *, consume: bool = False) -> Params:
    """The tree with its list of layers stacked to arrays `[L, ...]`.

    Args:
      consume: delete the layers' own arrays as they are stacked, so that one kind of them at most is there twice.
    """

    def stack(*leaves: jax.Array) -> jax.Array:
        stacked = jnp.stack(leaves)
        if consume:
            jax.block_until_ready(stacked)
            for leaf in leaves:
                leaf.delete()
        return stacked

    return {**params, "layers": jax.tree.map(stack, *params["layers"])}


def pack_kernels(config: ModelConfig, params: Params) -> Params:
    """The tree with its matrices packed for products on CPU (`pallas_kernels.matmul`), those that have such a form.

    An embedding that is the output layer too is packed as that; a separate one stays, and so does what is packed
    already, which quantised matrices are. Arrays of `params` are dropped one by one, so that no second copy of the
    model is in memory; `params` must not be used again.
    """

    def packed(holder: Params, name: str, *, transposed: bool = False) -> None:
        if is_packed(holder[name]):
            return
        matrix = holder[name].T if transposed else holder[name]
        if can_pack(matrix.shape, matrix.dtype):
            holder[name] = jax.block_until_ready(pack(matrix))

    def walk(holder: Params) -> None:
        for name, value in holder.items():
            if isinstance(value, dict):
                walk(value)
            elif name == "kernel":
                packed(holder, name)

    for layer in params["layers"]:
        walk(layer)
    if config.tie_word_embeddings:
        packed(params, "embed", transposed=True)
    else:
        packed(params, "lm_head")
    return params


def _scan_layers(
    config: ModelConfig,
    layers: Params,
    pairs: Any,
    columns: LoraColumns | None,
    x: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    attend: Attend,
    cache: Any,
) -> tuple[jax.Array, Any]:
    # The body holds one period of the window pattern: a window is static, the layer index is not.
    period = _window_period(config)
    groups = config.num_layers // period
    both = (layers, {} if columns is None else pairs)
    both = jax.tree.map(lambda leaf: leaf.reshape(groups, period, *leaf.shape[1:]), both)

    def body(
        carry: tuple[jax.Array, Any], group: tuple[jax.Array, tuple[Params, Params]]
    ) -> tuple[tuple[jax.Array, Any], None]:
        x, cache = carry
        number, group_params = group
        for offset in range(period):
            layer_params, layer_pairs = jax.tree.map(lambda leaf: leaf[offset], group_params)  # noqa: B023
            layer = bind_layer(config, adapted(layer_params, layer_pairs, columns))
            x, cache = layer(x, rope, number * period + offset, attend, cache, config.sliding_windows[offset])
        return (x, cache), None

    (x, cache), _ = jax.lax.scan(body, (x, cache), (jnp.arange(groups, dtype=jnp.int32), both))
    return x, cache


def _window_period(config: ModelConfig) -> int:
    windows = config.sliding_windows
    for period in range(1, config.num_layers):
        if config.num_layers % period == 0 and windows == windows[:period] * (config.num_layers // period):
            return period
    return config.num_layers
