"""The decoder layers of a model over a paged pool, as one call that XLA makes on CPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common import native
from pallas_kernels.matmul.api import can_multiply, packed_shape
from pallas_kernels.matmul.quantised import GROUP, QuantisedForm, QuantisedMatrix, abstract_quantised, form_of

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu")

_MATRICES = (
    ("attention", "q_proj"),
    ("attention", "k_proj"),
    ("attention", "v_proj"),
    ("attention", "o_proj"),
    ("mlp", "gate_proj"),
    ("mlp", "up_proj"),
    ("mlp", "down_proj"),
)


class StackTables(NamedTuple):
    """Which token of a flat batch is whose: B rows of one token, then R rows that share the other tokens.

    Attributes:
      decode_position: int32[B], write index of the row's token; below 0: padding.
      decode_pages: int32[G, B, W], page table of each group of layers.
      prefill_starts: int32[R + 1]: row r has tokens B + starts[r] to B + starts[r + 1]; tokens from starts[R] on are
        padding.
      prefill_context: int32[R], tokens of the row with these; 0: padding, without tokens.
      prefill_pages: int32[G, R, W].
      page_ids: int32[G, B + T], pages that each token's K and V go to; not looked at for padding.
      offsets: int32[B + T], likewise, the place in the page.
    """

    decode_position: jax.Array
    decode_pages: jax.Array
    prefill_starts: jax.Array
    prefill_context: jax.Array
    prefill_pages: jax.Array
    page_ids: jax.Array
    offsets: jax.Array


def is_stack(layers: Any) -> bool:
    """Whether parameters of layers have the form that `decoder_stack` takes: packed and stacked."""
    return isinstance(layers, dict) and jax.tree.leaves(layers["attention"]["o_proj"]["kernel"])[0].ndim in (5, 6)


def decoder_stack(
    x: jax.Array,
    layers: dict[str, Any],
    pool: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    tables: StackTables,
    *,
    sliding_windows: tuple[int | None, ...],
    rms_norm_eps: float,
    activation: str,
    places: tuple[tuple[int, int], ...] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs pre-norm layers: `x += o(attention(rope(q, k), v))`, then `x += down(act(gate) * up)`, norms before each.

    Args:
      x: [B + T, d], float32 or bfloat16.
      layers: parameters as `jaxserve.models.weights` names them, stacked over L layers: matrices packed
        [L, out / 32, in / p, 32, p], all of one dtype that `packed_matmul` multiplies x with, or all quantised in one
        form ([L, ...] of a `QuantisedMatrix`); norms [L, d], biases, where there are any, [L, out], of x's dtype.
      pool: [places, P, 2, K, S, D], float32 or bfloat16; updated in place where it is donated.
      rope: cos and sin, float32[B + T, R / 2].
      tables: see `StackTables`.
      sliding_windows: of each layer, see `paged_attention`.
      rms_norm_eps: of the norms.
      activation: a name in `ACTIVATIONS`.
      places: of each layer its group and its place in the pool; None: one group, in order.

    Returns:
      (x after the layers, zero where it is padding; pool).

    Raises:
      ImportError: numba is missing.
      ValueError: shapes or dtypes do not fit together.
    """
    native.require()
    from pallas_kernels.decoder_stack.layout import scratch_bytes
    from pallas_kernels.decoder_stack.native_cpu import call_name

    kept = _kept(layers)
    if places is None:
        places = tuple((0, layer) for layer in range(len(sliding_windows)))
    _check(x, layers, pool, rope, tables, sliding_windows, activation, kept, places)
    none = jnp.zeros(0, x.dtype)
    weights = [layers["input_norm"]["scale"], layers["post_attention_norm"]["scale"]]
    matrices = [_arrays(layers[part][name]["kernel"]) for part, name in _MATRICES]
    weights += [matrix[0] for matrix in matrices]
    weights += [layers[part][name].get("bias", none) for part, name in _MATRICES]
    weights += [none if isinstance(kept, str) else matrix[1] for matrix in matrices]
    of_layers = zip(sliding_windows, places, strict=True)
    windows = jnp.asarray([(window or 2**30, group, place) for window, (group, place) in of_layers], jnp.int32)
    options = jnp.asarray([rms_norm_eps, pool.shape[5] ** -0.5, ACTIVATIONS.index(activation)], jnp.float32)
    shapes = (
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        jax.ShapeDtypeStruct((scratch_bytes(x, *_columns(layers), kept),), jnp.uint8),
    )
    name = call_name(x.dtype.name, pool.dtype.name, kept)
    call = jax.ffi.ffi_call(name, shapes, input_output_aliases={1: 1})
    x, pool, _ = call(x, pool, *rope, *(table.astype(jnp.int32) for table in tables), windows, options, *weights)
    return x, pool


def _arrays(kernel: jax.Array | QuantisedMatrix) -> tuple[jax.Array, ...]:
    """Its own array, or integers and scales."""
    return tuple(kernel) if isinstance(kernel, QuantisedMatrix) else (kernel,)


def _columns(layers: dict[str, Any]) -> tuple[int, int, int]:
    """Of q, of k and of the MLP."""
    kernels = (layers[part][name]["kernel"] for part, name in (_MATRICES[0], _MATRICES[1], _MATRICES[4]))
    queries, keys, inner = (_arrays(kernel)[0].shape[1] * GROUP for kernel in kernels)
    return queries, keys, inner


def _kept(layers: dict[str, Any]) -> str | QuantisedForm:
    """The one dtype or form of all matrices.

    Raises:
      ValueError: they have several.
    """
    kernels = [layers[part][name]["kernel"] for part, name in _MATRICES]
    found = {form_of(kernel) if isinstance(kernel, QuantisedMatrix) else kernel.dtype.name for kernel in kernels}
    if len(found) > 1:
        raise ValueError(f"the layers' matrices are of {len(found)} dtypes or forms; all must be of one")
    return found.pop()


def _check(
    x: jax.Array,
    layers: dict[str, Any],
    pool: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    tables: StackTables,
    sliding_windows: tuple[int | None, ...],
    activation: str,
    kept: str | QuantisedForm,
    places: tuple[tuple[int, int], ...],
) -> None:
    """Raises ValueError unless everything fits: the call reads memory by these shapes."""
    num_tokens, hidden = x.shape
    if pool.ndim != 6 or pool.shape[2] != 2 or {x.dtype.name, pool.dtype.name} - set(native.NATIVE_DTYPES):
        raise ValueError(
            f"x is {x.dtype} and the pool {pool.dtype}{list(pool.shape)}; a plain pool [L, P, 2, K, S, D] and"
            f" {' or '.join(native.NATIVE_DTYPES)} are supported"
        )
    if isinstance(kept, str) and not can_multiply(x.dtype, kept):
        raise ValueError(f"x is {x.dtype} and the layers' matrices {kept}, which are not multiplied with each other")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    num_layers, num_groups = layers["input_norm"]["scale"].shape[0], tables.decode_pages.shape[0]
    num_places, _, _, kv_heads, _, dim = pool.shape
    if not all(0 <= group < num_groups and 0 <= place < num_places for group, place in places):
        raise ValueError(f"places are {places}; there are {num_groups} groups of {num_places} places")
    queries, _, inner = _columns(layers)
    keys = kv_heads * dim
    sizes = ((hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden), (hidden, inner), (hidden, inner))
    wanted = {("x",): (num_tokens, hidden), ("windows",): (num_layers,), ("places",): (num_layers,)}
    found = {("x",): x.shape, ("windows",): (len(sliding_windows),), ("places",): (len(places),)}
    for (part, name), (rows, columns) in zip(_MATRICES, (*sizes, (inner, hidden)), strict=True):
        linear = layers[part][name]
        if isinstance(kept, str):
            wanted[part, name] = (num_layers, *packed_shape((rows, columns), kept))
            found[part, name] = linear["kernel"].shape
        else:
            wanted[part, name], found[part, name] = (rows, columns), linear["kernel"].shape
            abstract = abstract_quantised((rows, columns), kept)
            for field, array, leaf in zip(abstract._fields, abstract, linear["kernel"], strict=True):
                wanted[part, name, field], found[part, name, field] = (num_layers, *array.shape), leaf.shape
                if leaf.dtype != array.dtype:
                    raise ValueError(f"{part} {name} {field} is {leaf.dtype}; it must be {array.dtype}")
        if "bias" in linear:
            wanted[part, name, "bias"], found[part, name, "bias"] = (num_layers, columns), linear["bias"].shape
    for name in ("input_norm", "post_attention_norm"):
        wanted[(name,)], found[(name,)] = (num_layers, hidden), layers[name]["scale"].shape
    rows, prompts = tables.decode_position.shape[0], tables.prefill_context.shape[0]
    width = tables.decode_pages.shape[-1]
    wanted_tables = (
        (rows,),
        (num_groups, rows, width),
        (prompts + 1,),
        (prompts,),
        (num_groups, prompts, width),
        (num_groups, num_tokens),
        (num_tokens,),
    )
    for name, table, shape in zip(StackTables._fields, tables, wanted_tables, strict=True):
        wanted[(name,)], found[(name,)] = shape, table.shape
    half = rope[0].shape[-1]
    wanted[("cos",)], wanted[("sin",)] = (num_tokens, half), (num_tokens, half)
    found[("cos",)], found[("sin",)] = rope[0].shape, rope[1].shape
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ValueError(f"{' '.join(name)} is {list(found[name])}; it must be {list(shape)}")
    if isinstance(kept, QuantisedForm) and kept.has_minimum and queries // kv_heads % kept.block:
        raise ValueError(f"{queries // kv_heads} query columns of a KV head are not in blocks of {kept.block}")
    vectors = [layers[name]["scale"] for name in ("input_norm", "post_attention_norm")]
    vectors += [layers[part][name]["bias"] for part, name in _MATRICES if "bias" in layers[part][name]]
    if any(vector.dtype != x.dtype for vector in vectors) or queries % keys or 2 * half > dim:
        raise ValueError(
            f"{queries} query columns, {keys} key columns, rotation of {2 * half} of {dim}: query heads must be a"
            f" multiple of KV heads, the rotation no longer than a head, and norms and biases {x.dtype}"
        )
