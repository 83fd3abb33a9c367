"""All layers in one call, against the layers of `jaxserve.models` one by one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models import ModelConfig, RopeConfig, init_params, pack_kernels, stack_layers
from jaxserve.models.rope import rope_tables
from jaxserve.models.transformer import forward
from pallas_kernels.decoder_stack import StackTables, decoder_stack, is_stack
from pallas_kernels.kv_write import write_kv
from pallas_kernels.matmul import form_of, pack_quantised, packed_columns, quantise
from pallas_kernels.paged_attention import paged_attention

LAYERS, PAGE, WIDTH, PAGES = 2, 4, 12, 30
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_layers=LAYERS,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    max_position_embeddings=100,
)
MODELS = {
    "plain": MODEL,
    "biases": replace(MODEL, qkv_bias=True, o_bias=True, mlp_bias=True, hidden_act="gelu"),
    "windows": replace(MODEL, sliding_windows=(None, 7), hidden_act="gelu_pytorch_tanh"),
    "partial rotation": replace(MODEL, rope=RopeConfig(partial_rotary_factor=0.5), hidden_act="relu"),
    "wide heads": replace(MODEL, head_dim=48, num_heads=6, num_kv_heads=2),
}
ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh"}
DECODE = (5, -1, 17, 40)
"""Positions of decoding rows; the second is padding."""
CHUNKS = ((9, 21), (3, 3))
"""(tokens, tokens in the cache after) of prompts; two rows and three tokens more are padding."""
TOKENS = len(DECODE) + 15


@pytest.fixture(scope="module", params=list(MODELS))
def model(request):
    """(config, parameters with biases and norms that are not trivial)."""
    config = MODELS[request.param]
    params = init_params(config, jax.random.key(1))

    def shake(path, leaf):
        if leaf.ndim > 1:
            return leaf
        name = sum(map(ord, jax.tree_util.keystr(path)))
        return leaf + 0.3 * jax.random.normal(jax.random.key(name), leaf.shape)

    return config, jax.tree_util.tree_map_with_path(shake, params)


def cast(params, dtype):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def inputs(config, dtype, pool_dtype, decode=DECODE, chunks=CHUNKS, tokens=TOKENS):
    """Token ids, positions, a pool with NaN where nothing is held, and the tables of a step."""
    rng = np.random.default_rng(3)
    rows, prompts = len(decode), len(chunks) + 2
    starts = np.full(prompts + 1, sum(count for count, _ in chunks), np.int32)
    starts[: len(chunks)] = np.cumsum([0, *(count for count, _ in chunks)])[:-1]
    context = np.zeros(prompts, np.int32)
    positions = np.zeros(tokens, np.int32)
    positions[:rows] = np.maximum(decode, 0)
    of_rows = np.full(tokens, -1)
    for row, (count, total) in enumerate(chunks):
        at = slice(rows + starts[row], rows + starts[row] + count)
        context[row], positions[at], of_rows[at] = total, np.arange(total - count, total), rows + row
    of_rows[:rows] = np.where(np.asarray(decode) >= 0, np.arange(rows), -1)
    pages = np.zeros((rows + prompts, WIDTH), np.int32)
    pool = np.full((LAYERS, PAGES * 3, 2, config.num_kv_heads, PAGE, config.head_dim), np.nan, np.float32)
    free = iter(rng.permutation(np.arange(1, PAGES * 3)))
    for row, length in enumerate([*(p + 1 for p in decode), *(total for _, total in chunks)]):
        for index in range(-(-length // PAGE)):
            page = pages[row, index] = next(free)
            new = 1 if row < rows else chunks[row - rows][0]
            held = min(max(length - new - index * PAGE, 0), PAGE)
            kept = pool[:, page, :, :, :held]
            pool[:, page, :, :, :held] = rng.standard_normal(kept.shape)
    page_ids = np.where(of_rows >= 0, pages[of_rows, positions // PAGE], 0)
    tables = StackTables(
        np.asarray(decode, np.int32),
        pages[None, :rows],
        starts,
        context,
        pages[None, rows:],
        page_ids[None],
        positions % PAGE,
    )
    tables = StackTables(*(jnp.asarray(table, jnp.int32) for table in tables))
    ids = jnp.asarray(rng.integers(0, config.vocab_size, tokens), jnp.int32)
    return ids, jnp.asarray(positions), jnp.asarray(pool, pool_dtype), tables, of_rows >= 0


def one_by_one(config, params, ids, positions, pool, tables, places=None):
    rows = tables.decode_position.shape[0]

    def attend(layer, q, k, v, cache, options):
        group, place = (0, layer) if places is None else jnp.asarray(places)[layer]
        cache = write_kv(cache, place, k, v, tables.page_ids[group], tables.offsets, implementation="xla")
        over = partial(paged_attention, implementation="reference", **options._asdict())
        decode = over(q[:rows], cache, place, tables.decode_pages[group], tables.decode_position + 1)
        chunks = (tables.prefill_pages[group], tables.prefill_context, tables.prefill_starts)
        return jnp.concatenate([decode, over(q[rows:], cache, place, *chunks)]), cache

    return forward(config, params, ids, positions, attend, pool)


@partial(jax.jit, static_argnums=(0, 6))
def in_one_call(config, params, ids, positions, pool, tables, places=None):
    def run_layers(layers, x, rope, cache):
        return decoder_stack(
            x,
            layers,
            cache,
            rope,
            tables,
            sliding_windows=config.sliding_windows,
            rms_norm_eps=config.rms_norm_eps,
            activation=ACTIVATIONS.get(config.hidden_act, config.hidden_act),
            places=places,
        )

    return forward(config, params, ids, positions, None, pool, run_layers)


def packed(config, params):
    params = stack_layers(pack_kernels(config, jax.tree.map(jnp.copy, params)))
    assert is_stack(params["layers"])
    return params


def quantised(params, bits):
    """Parameters with the layers' matrices quantised, those of 4 bits with minima; and their numbers as float32."""

    def each(path, leaf):
        if path[0].key != "layers" or leaf.ndim == 1:
            return leaf, leaf
        matrix = jax.tree.map(jnp.asarray, pack_quantised(quantise(np.asarray(leaf.T, np.float32), bits), bits))
        return matrix, packed_columns(matrix, jnp.arange(leaf.shape[1])).T

    pairs = jax.tree_util.tree_map_with_path(each, params)
    return (jax.tree.map(lambda pair, n=n: pair[n], pairs, is_leaf=lambda x: type(x) is tuple) for n in (0, 1))


def numbers(x):
    return np.asarray(x.astype(jnp.float32))


@pytest.mark.parametrize(
    ("dtype", "pool_dtype"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
)
def test_decode_and_prefill_together_are_the_layers_one_by_one(model, dtype, pool_dtype):
    config, params = model[0], cast(model[1], dtype)
    ids, positions, pool, tables, live = inputs(config, dtype, pool_dtype)
    wanted, wanted_pool = map(numbers, one_by_one(config, params, ids, positions, pool, tables))
    found, found_pool = map(numbers, in_one_call(config, packed(config, params), ids, positions, pool, tables))
    scale = np.abs(wanted[live]).max()
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[live] / scale, wanted[live] / scale, atol=3e-6 if dtype == "float32" else 3e-2)
    assert (found[~live] == 0).all()
    # The null page, which padding writes to one by one and never in one call, is nobody's.
    np.testing.assert_allclose(found_pool[:, 1:], wanted_pool[:, 1:], atol=2e-5 if dtype == "float32" else 0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("places", [((0, 0), (1, 0)), ((1, 0), (0, 0)), ((1, 1), (0, 1))], ids=str)
@pytest.mark.parametrize("model", ["windows"], indirect=True)
def test_layers_in_groups_have_the_bits_of_layers_in_one(model, places, dtype):
    """The layers' pages side by side in a pool of as many places as a group has; each has a table of its own."""
    config, params = model[0], packed(model[0], cast(model[1], dtype))
    ids, positions, pool, tables, _ = inputs(config, dtype, dtype)
    wanted, wanted_pool = in_one_call(config, params, ids, positions, pool, tables)
    count, (size, num_groups) = pool.shape[1], (max(place for _, place in places) + 1, 2)
    grouped = jnp.full((size, num_groups * count, *pool.shape[2:]), jnp.nan, pool.dtype)
    for layer, (group, place) in enumerate(places):
        grouped = grouped.at[place, group * count : (group + 1) * count].set(pool[layer])

    def of_groups(table):
        return jnp.concatenate([jnp.where(table > 0, table + group * count, 0) for group in range(num_groups)])

    own = {name: of_groups(getattr(tables, name)) for name in ("decode_pages", "prefill_pages", "page_ids")}
    found, found_pool = in_one_call(config, params, ids, positions, grouped, tables._replace(**own), places)
    np.testing.assert_array_equal(numbers(found), numbers(wanted))
    for layer, (group, place) in enumerate(places):
        part = found_pool[place, group * count + 1 : (group + 1) * count]
        np.testing.assert_array_equal(numbers(part), numbers(wanted_pool[layer, 1:]))
    one, other = one_by_one(config, cast(model[1], dtype), ids, positions, grouped, tables._replace(**own), places)
    live = np.isfinite(numbers(one)).all(axis=1) & (numbers(found) != 0).any(axis=1)
    scale = np.abs(numbers(one)[live]).max()
    atol = 3e-6 if dtype == "float32" else 3e-2
    np.testing.assert_allclose(numbers(found)[live] / scale, numbers(one)[live] / scale, atol=atol)
    assert other.shape == grouped.shape


@pytest.mark.parametrize(("bits", "dtype"), [(4, "float32"), (4, "bfloat16"), (8, "bfloat16")])
@pytest.mark.parametrize("model", ["plain", "biases"], indirect=True)
def test_quantised_layers_are_the_layers_of_their_numbers(model, bits, dtype):
    config, (kept, dense) = model[0], quantised(cast(model[1], dtype), bits)
    params = packed(config, kept)
    assert form_of(params["layers"]["mlp"]["up_proj"]["kernel"]).has_minimum == (bits == 4)
    ids, positions, pool, tables, live = inputs(config, dtype, dtype)
    wanted = numbers(one_by_one(config, cast(dense, "float32"), ids, positions, pool.astype("float32"), tables)[0])
    found = numbers(in_one_call(config, params, ids, positions, pool, tables)[0])
    scale = np.abs(wanted[live]).max()
    np.testing.assert_allclose(found[live] / scale, wanted[live] / scale, atol=3e-6 if dtype == "float32" else 3e-2)
    assert (found[~live] == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_has_the_same_bits_whatever_is_beside_it(model, dtype):
    check_bits(model[0], packed(model[0], cast(model[1], dtype)), dtype)


@pytest.mark.parametrize(("bits", "dtype"), [(4, "float32"), (4, "bfloat16"), (8, "bfloat16")])
@pytest.mark.parametrize("model", ["biases"], indirect=True)
def test_a_token_has_the_same_bits_with_quantised_layers_too(model, bits, dtype):
    check_bits(model[0], packed(model[0], next(quantised(cast(model[1], dtype), bits))), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_layers_of_16_bits_give_the_bits_of_their_numbers_as_float32(model, dtype):
    """Each with rows of another number, so with tiles of every size."""
    config, params = model

    def held(leaf):
        return leaf.astype(dtype) if leaf.ndim > 1 else leaf

    kept = packed(config, jax.tree.map(held, params))
    assert kept["layers"]["mlp"]["up_proj"]["kernel"].dtype == kept["embed"].dtype == jnp.dtype(dtype)
    wide = packed(config, jax.tree.map(lambda leaf: held(leaf).astype(jnp.float32), params))
    for decode in (DECODE, tuple(n % 16 for n in range(30))):
        ids, positions, pool, tables, _ = inputs(config, "float32", "float32", decode, tokens=len(decode) + 15)
        found, wanted = (in_one_call(config, each, ids, positions, pool, tables) for each in (kept, wide))
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


def check_bits(config, params, dtype):
    """A decoding row alone, and a chunk in two steps instead of one, have the bits of all together."""
    ids, positions, pool, tables, _ = inputs(config, dtype, dtype)
    together, _ = in_one_call(config, params, ids, positions, pool, tables)
    rows = len(DECODE)
    alone = tables._replace(decode_position=tables.decode_position.at[:2].set(-1).at[3].set(-1))
    alone = alone._replace(
        prefill_starts=jnp.zeros_like(tables.prefill_starts), prefill_context=0 * tables.prefill_context
    )
    found, _ = in_one_call(config, params, ids, positions, pool, alone)
    np.testing.assert_array_equal(numbers(found)[2], numbers(together)[2])
    # A chunk in two steps instead of one.
    prompt, chunk = rows + tables.prefill_starts[1] - 9, tables._replace(decode_position=jnp.full(rows, -1))
    first = chunk._replace(
        prefill_starts=jnp.asarray([0, 5, 5, 5, 5], jnp.int32), prefill_context=jnp.asarray([17, 0, 0, 0], jnp.int32)
    )
    begun, pool = in_one_call(config, params, ids, positions, pool, first)
    order = jnp.asarray([*range(rows), *range(rows + 5, rows + 9), *range(rows + 4)], jnp.int32)[: ids.shape[0]]
    order = jnp.concatenate([order, jnp.zeros(ids.shape[0] - order.shape[0], jnp.int32)])
    second = chunk._replace(
        prefill_starts=jnp.asarray([0, 4, 4, 4, 4], jnp.int32),
        prefill_context=jnp.asarray([21, 0, 0, 0], jnp.int32),
        page_ids=tables.page_ids[:, order],
        offsets=tables.offsets[order],
    )
    ended, _ = in_one_call(config, params, ids[order], positions[order], pool, second)
    assert int(prompt) == rows
    np.testing.assert_array_equal(numbers(begun)[rows : rows + 5], numbers(together)[rows : rows + 5])
    np.testing.assert_array_equal(numbers(ended)[rows : rows + 4], numbers(together)[rows + 5 : rows + 9])


def test_many_rows_are_divided_among_threads(model):
    config, params = model[0], model[1]
    decode = tuple(range(20)) * 2
    ids, positions, pool, tables, live = inputs(config, "float32", "float32", decode[:18], ((30, 40),), 18 + 31)
    wanted, _ = one_by_one(config, params, ids, positions, pool, tables)
    found, _ = in_one_call(config, packed(config, params), ids, positions, pool, tables)
    np.testing.assert_allclose(numbers(found)[live], numbers(wanted)[live], atol=2e-5)


def test_padding_alone_gives_zeros_and_writes_nothing():
    params = packed(MODEL, init_params(MODEL, jax.random.key(0)))
    ids, positions, pool, tables, _ = inputs(MODEL, "float32", "float32", (-1, -1), (), 5)
    found, kept = in_one_call(MODEL, params, ids, positions, pool, tables)
    assert (numbers(found) == 0).all()
    assert np.isnan(numbers(kept)).all()


def test_nan_stays_with_its_row():
    params = packed(MODEL, init_params(MODEL, jax.random.key(0)))
    params["embed"] = params["embed"].at[7].set(jnp.nan)
    ids, positions, pool, tables, live = inputs(MODEL, "float32", "float32")
    found = numbers(in_one_call(MODEL, params, ids.at[2].set(7), positions, pool, tables)[0])
    assert np.isnan(found[2]).all()
    live[2] = False
    assert np.isfinite(found[live]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, layers, pool: (x[:, :32], layers, pool), r"attention q_proj is \[2, 2, 64, 32, 1\]; it must be"),
        (lambda x, layers, pool: (x[:3], layers, pool), r"page_ids is \[1, 19\]; it must be \[1, 3\]"),
        (lambda x, layers, pool: (x.astype(jnp.float16), layers, pool), "float32 or bfloat16 are supported"),
        (lambda x, layers, pool: (x, layers, pool.astype(jnp.int8)), "float32 or bfloat16 are supported"),
        (lambda x, layers, pool: (x, layers, pool[:1]), r"there are 1 groups of 1 places"),
        (
            lambda x, layers, pool: (x.astype(jnp.bfloat16), layers, pool),
            "x is bfloat16 and the layers' matrices float32",
        ),
    ],
    ids=["hidden size", "tokens", "dtype", "pool dtype", "layers", "weights' dtype"],
)
def test_what_does_not_fit_is_refused_before_memory_is_read(change, message):
    layers = packed(MODEL, init_params(MODEL, jax.random.key(0)))["layers"]
    _, positions, pool, tables, _ = inputs(MODEL, "float32", "float32")
    x, layers, pool = change(jnp.zeros((TOKENS, 64)), layers, pool)
    rope = rope_tables(MODEL.rope, MODEL.head_dim, 100, positions)
    with pytest.raises(ValueError, match=message):
        decoder_stack(x, layers, pool, rope, tables, sliding_windows=(None, None), rms_norm_eps=1e-5, activation="silu")


def test_quantised_matrices_that_do_not_fit_are_refused():
    config = MODELS["wide heads"]
    whole, mixed = (packed(config, next(quantised(init_params(config, jax.random.key(0)), bits))) for bits in (4, 8))
    mixed["layers"]["mlp"]["up_proj"] = whole["layers"]["mlp"]["up_proj"]
    narrow = packed(MODEL, next(quantised(init_params(MODEL, jax.random.key(0)), 4)))
    narrow["layers"]["mlp"]["down_proj"] = whole["layers"]["mlp"]["up_proj"]
    for model, params, message in (
        (config, whole, "144 query columns of a KV head are not in blocks of 32"),
        (config, mixed, "the layers' matrices are of 2 dtypes or forms"),
        (MODEL, narrow, r"mlp down_proj is \[64, 96\]; it must be \[96, 64\]"),
    ):
        ids, positions, pool, tables, _ = inputs(model, "float32", "float32")
        with pytest.raises(ValueError, match=message):
            in_one_call(model, params, ids, positions, pool, tables)
