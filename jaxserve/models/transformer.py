"""The model as functions of a parameter tree: `forward` over a flat batch of tokens, and `unembed`.

Tokens of any number of sequences lie in one flat batch; which token sees which is decided by the
caller's `attend`, so the same function serves prefill, decode, both at once and dense checks.

`params["layers"]` is either a list of per-layer dicts (each layer is traced: on CPU a scan would copy
every layer's weights) or one dict of arrays stacked over layers (one traced layer, `lax.scan` with the
cache in the carry, where a donated cache stays in place). Where kinds of MLP differ, it is a tuple of such
dicts, one for each kind in the order in which they come first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.models.adapted import LoraColumns, LoraTokens, adapted, lora_columns
from jaxserve.models.attention import Attend
from jaxserve.models.batch import ONE_DEVICE, Batch
from jaxserve.models.config import LayerKind, ModelConfig
from jaxserve.models.decoder_layer import bind_layer
from jaxserve.models.linear import embedding_rows, matmul
from jaxserve.models.norm import final_norm
from jaxserve.models.rope import rope_tables
from jaxserve.models.weights import Weight, make_params
from pallas_kernels.matmul import can_pack, is_packed, pack

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
    batch: Batch = ONE_DEVICE,
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
      batch: which tokens are live, and the devices.

    Returns:
      (hidden [T, d], cache): hidden states before the final norm.
    """
    x = embedding_rows(params["embed"], token_ids, params["final_norm"].dtype)
    if config.embedding_multiplier != 1.0:
        x = x * jnp.asarray(config.embedding_multiplier, x.dtype)
    longest = config.served_length or config.max_position_embeddings
    ropes = [rope_tables(rope, config.rope_head_dim, longest, positions) for rope in config.ropes]
    layers = params["layers"]
    if run_layers is not None:
        return run_layers(layers, x, ropes[0], cache)
    pairs, columns = [{}] * config.num_layers, None
    if lora is not None:
        pairs, columns = params["adapters"]["layers"], lora_columns(params["adapters"], lora)
    if isinstance(layers, dict | tuple):
        return _scan_layers(config, layers, pairs, columns, x, ropes, attend, cache, batch)

    # Traced and lowered once per kind of layer and inlined by the compiler: tracing 30 layers one by one
    # takes longer than loading the compiled program from the persistent cache.
    @partial(jax.jit, static_argnames="kind")
    def run(
        layer_params: Params, layer_pairs: Params, x: jax.Array, index: jax.Array, cache: Any, kind: LayerKind
    ) -> Any:
        layer = bind_layer(config, kind, adapted(layer_params, layer_pairs, columns))
        return layer(x, ropes[kind.rope], index, attend, cache, batch)

    for index, (layer_params, kind) in enumerate(zip(layers, config.layer_kinds, strict=True)):
        x, cache = run(layer_params, pairs[index], x, jnp.int32(index), cache, kind=kind)
    return x, cache


def unembed(config: ModelConfig, params: Params, hidden: jax.Array) -> jax.Array:
    """Logits of hidden states.

    Args:
      hidden: [N, d] as `forward` returns it.

    Returns:
      float32[N, V].
    """
    x = final_norm(config, params, hidden)
    if config.tie_word_embeddings:
        logits = matmul(x, params["embed"], transposed=True, out_dtype=jnp.float32)
    else:
        logits = matmul(x, params["lm_head"], out_dtype=jnp.float32)
    if config.logits_divisor != 1.0:
        logits = logits / config.logits_divisor
    if config.final_logit_softcap is not None:
        logits = jnp.tanh(logits / config.final_logit_softcap) * config.final_logit_softcap
    return logits


def init_params(config: ModelConfig, key: jax.Array, dtype: Any = jnp.float32) -> Params:
    """Random parameters: kernels normal with variance 1 / fan-in, norms that change nothing, biases zero."""

    def leaf(weight: Weight) -> jax.Array:
        own = jnp.float32 if weight.is_float32 else dtype
        if len(weight.shape) == 1 or weight.path[-1] == "biases":
            zero = weight.path[-1] not in ("scale", "final_norm") or config.norm_offset
            return (jnp.zeros if zero else jnp.ones)(weight.shape, own)
        nonlocal count
        count += 1
        scale = weight.shape[-2 if weight.transpose or len(weight.shape) == 3 else -1] ** -0.5
        return (jax.random.normal(jax.random.fold_in(key, count), weight.shape) * scale).astype(own)

    count = 0
    return make_params(config, leaf)


def abstract_params(config: ModelConfig, dtype: Any) -> Params:
    """The tree with a ShapeDtypeStruct at every place."""
    return make_params(
        config, lambda weight: jax.ShapeDtypeStruct(weight.shape, jnp.float32 if weight.is_float32 else dtype)
    )


def stack_layers(params: Params, *, consume: bool = False) -> Params:
    """The tree with its list of layers stacked to arrays `[L, ...]`, those of each shape for themselves.

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

    stacks = tuple(jax.tree.map(stack, *alike) for alike in _alike(params["layers"]))
    return {**params, "layers": stacks[0] if len(stacks) == 1 else stacks}


def _alike(layers: Sequence[Params]) -> list[list[Params]]:
    """Layers of one tree each, in the order in which the trees come first."""
    groups: dict[Any, list[Params]] = {}
    for layer in layers:
        groups.setdefault(jax.tree.structure(layer), []).append(layer)
    return list(groups.values())


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
        if matrix.ndim == 2 and can_pack(matrix.shape, matrix.dtype):
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


class LayerRun(NamedTuple):
    """Layers that are one body, repeated.

    Attributes:
      first: index of the first layer.
      period: layers of the body.
      repeats: of the body.
    """

    first: int
    period: int
    repeats: int


def layer_runs(kinds: Sequence[LayerKind]) -> list[LayerRun]:
    """Layers in order as few runs: from each layer on the run that reaches farthest, of those the shortest period.

    So layers of one kind are one run, patterns of windows one with what is left over behind it, and layers of
    another kind at the beginning a run of their own.
    """
    runs: list[LayerRun] = []
    first = 0
    while first < len(kinds):
        best = LayerRun(first, 1, 1)
        for period in range(1, (len(kinds) - first) // 2 + 1):
            repeats, end = 1, first + period
            while kinds[end : end + period] == kinds[first : first + period]:
                repeats, end = repeats + 1, end + period
            if repeats > 1 and end - first > best.period * best.repeats:
                best = LayerRun(first, period, repeats)
        runs.append(best)
        first += best.period * best.repeats
    return runs


def _scan_layers(
    config: ModelConfig,
    layers: Params | tuple[Params, ...],
    pairs: Any,
    columns: LoraColumns | None,
    x: jax.Array,
    ropes: list[tuple[jax.Array, jax.Array]],
    attend: Attend,
    cache: Any,
    batch: Batch,
) -> tuple[jax.Array, Any]:
    # A body holds one period of kinds: a kind is static, the layer index is not. Layers are taken from the whole
    # arrays, as a scan over a part of them would copy it.
    mlps = config.mlp_kinds
    stacks = dict(zip(dict.fromkeys(mlps), layers if isinstance(layers, tuple) else (layers,), strict=True))

    def run_one(x: jax.Array, cache: Any, index: Any, place: Any, kind: LayerKind) -> tuple[jax.Array, Any]:
        own = _layer_of(stacks[kind.mlp], place)
        own_pairs = {} if columns is None else _layer_of(pairs, index)
        layer = bind_layer(config, kind, adapted(own, own_pairs, columns))
        return layer(x, ropes[kind.rope], index, attend, cache, batch)

    for first, period, repeats in layer_runs(config.layer_kinds):
        kinds = config.layer_kinds[first : first + period]

        def body(carry: tuple[jax.Array, Any], repeat: jax.Array) -> tuple[tuple[jax.Array, Any], None]:
            for offset, kind in enumerate(kinds):  # noqa: B023
                layer = first + offset  # noqa: B023
                # The layer's place among those of its kind of MLP.
                place = mlps[:layer].count(kind.mlp) + repeat * sum(each.mlp == kind.mlp for each in kinds)  # noqa: B023
                carry = run_one(*carry, layer + repeat * period, place, kind)  # noqa: B023
            return carry, None

        if repeats == 1:
            (x, cache), _ = body((x, cache), jnp.int32(0))
        else:
            (x, cache), _ = jax.lax.scan(body, (x, cache), jnp.arange(repeats, dtype=jnp.int32))
    return x, cache


def _layer_of(stacked: Any, place: Any) -> Any:
    """One layer's tree of a stacked one."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, place, keepdims=False), stacked)
