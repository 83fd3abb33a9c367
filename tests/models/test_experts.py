"""Mixtures of experts: who is chosen, what a token gets, and that nobody else has a part in it."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from jaxserve.core import UnsupportedModelError
from jaxserve.models import (
    Batch,
    ExpertsConfig,
    abstract_params,
    forward,
    init_params,
    model_config_from_hf,
    param_shardings,
    stack_layers,
    weights,
)
from jaxserve.models.config import LayerKind
from jaxserve.models.decoder_layer import bind_layer
from jaxserve.models.expert_product import ExpertWeights, expert_product
from jaxserve.models.experts import route
from pallas_kernels.matmul import QuantisedForm, ScaledForm, ScaledMatrix, abstract_scaled, scaled_form
from pallas_kernels.matmul.scaled import widened
from tests.models.tiny_models import dense_attend, load

WAYS = ("blocks", "ragged")
LOGITS = [[1.0, 3.0, 2.0, 0.0], [0.0, 0.0, 0.0, -1.0]]


def routed(logits, added=None, **settings):
    experts = ExpertsConfig(len(logits[0]), settings.pop("num_chosen", 2), 8, **settings)
    found = route(experts, jnp.asarray(logits, jnp.float32), added)
    return [np.asarray(each).tolist() for each in found]


@pytest.mark.parametrize("scoring", ["softmax", "softmax_of_chosen"])
def test_largest_scores_choose_equal_ones_in_order_and_weigh_by_their_softmax(scoring):
    of_two, chosen = routed(LOGITS, scoring=scoring)
    assert chosen == [[1, 2], [0, 1]]
    share = np.e / (1 + np.e)
    np.testing.assert_allclose(of_two, [[share, 1 - share], [0.5, 0.5]], rtol=1e-6)


def test_weights_that_are_not_normalised_are_shares_of_all():
    whole = np.exp(LOGITS[0]).sum()
    np.testing.assert_allclose(
        routed(LOGITS[:1], normalise=False, scale=2.0)[0], [[2 * np.e**3 / whole, 2 * np.e**2 / whole]], rtol=1e-6
    )


def test_a_correction_chooses_and_does_not_weigh():
    found, chosen = routed(LOGITS[:1], jnp.asarray([0, -1.0, 0, 1.0]), scoring="sigmoid", correction=True)
    assert chosen == [[3, 2]]
    own = [1 / (1 + np.exp(-x)) for x in (0.0, 2.0)]
    np.testing.assert_allclose(found, [[x / sum(own) for x in own]], rtol=1e-6)


def test_only_experts_of_the_best_groups_are_chosen():
    # The largest is in the first group, the best pair in the second.
    logits = [[5.0, -9.0, 4.0, 4.5, 0.0, 3.0]]
    assert routed(logits, num_groups=3, num_groups_chosen=1, scoring="sigmoid")[1] == [[3, 2]]
    assert routed(logits, num_groups=3, num_groups_chosen=3, scoring="sigmoid")[1] == [[0, 3]]


def product_case(tokens=11, num_experts=5, chosen=2, hidden=8, inner=6, seed=0):
    random = np.random.default_rng(seed)
    shapes = [(num_experts, hidden, inner)] * 2 + [(num_experts, inner, hidden)]
    shapes += [(num_experts, inner)] * 2 + [(num_experts, hidden)]
    own = ExpertWeights(*(jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes))
    picks = np.stack([random.permutation(num_experts)[:chosen] for _ in range(tokens)])
    return jnp.asarray(random.standard_normal((tokens, hidden)), jnp.float32), picks.astype(np.int32), own


def mix(gate, up):
    return jnp.tanh(gate) * up


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tokens", [1, 11, 60])
def test_each_choice_is_the_product_with_that_expert(way, tokens):
    x, picks, own = product_case(tokens)
    picks[tokens // 2, 1] = 5  # nobody
    found = expert_product(x, jnp.asarray(picks), own, mix, way=way)
    kernels, biases = own[:3], own[3:]
    for token in range(tokens):
        for place, expert in enumerate(picks[token]):
            wanted = np.zeros(8)
            if expert < 5:
                gate, up = (np.asarray(x[token] @ kernels[i][expert] + biases[i][expert]) for i in (0, 1))
                wanted = np.tanh(gate) * up @ kernels[2][expert] + biases[2][expert]
            np.testing.assert_allclose(found[token, place], wanted, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_a_token_gets_the_same_bits_whoever_is_beside_it(way):
    x, picks, own = product_case(40)
    run = jax.jit(lambda x, picks: expert_product(x, picks, own, mix, way=way))
    together = run(x, jnp.asarray(picks))
    for token in (0, 17, 39):
        others, theirs, _ = product_case(40, seed=token + 1)
        alone, nobody = np.full_like(others, 7), np.full_like(picks, 5)
        alone[token], nobody[token] = x[token], picks[token]
        np.testing.assert_array_equal(run(alone, nobody)[token], together[token])
        mixed, theirs = np.array(others), np.array(theirs)
        mixed[token], theirs[token] = x[token], picks[token]
        np.testing.assert_array_equal(run(mixed, theirs)[token], together[token])


def test_experts_that_no_live_token_chose_are_not_read_on_cpu():
    x, picks, own = product_case(12, num_experts=6)
    picks = np.where(picks == 3, 6, picks)
    poisoned = ExpertWeights(*(leaf.at[3].set(jnp.nan) for leaf in own))
    assert np.isfinite(expert_product(x, jnp.asarray(picks), poisoned, mix, way="blocks")).all()


@pytest.mark.parametrize("name", ["mixtral_moe", "gpt_oss_sinks"])
def test_padding_has_no_experts_and_changes_nothing(name):
    config, params, _ = load(name)
    mlp = bind_layer(config, config.layer_kinds[0], params["layers"][0]).mlp
    x = jax.random.normal(jax.random.key(0), (9, config.hidden_size))
    live = jnp.arange(9) < 4
    whole, padded = mlp(x, Batch()), mlp(x.at[4:].set(jnp.nan), Batch(live))
    np.testing.assert_array_equal(padded[:4], whole[:4])
    assert not padded[4:].any()


def test_the_router_is_computed_in_float32_whatever_the_dtype():
    config, params, _ = load("mixtral_moe")
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params["layers"][0])
    router = bind_layer(config, config.layer_kinds[0], narrow).mlp.router
    x = jax.random.normal(jax.random.key(0), (64, config.hidden_size)).astype(jnp.bfloat16)
    logits = np.asarray(x, np.float64) @ np.asarray(narrow["mlp"]["router"]["weight"], np.float64)
    top = np.sort(jax.nn.softmax(logits), axis=-1)[:, :-3:-1]
    np.testing.assert_allclose(router(x)[0], top / top.sum(-1, keepdims=True), rtol=1e-5)


def mixed_kinds(kinds):
    """A tiny model whose layers differ in their MLP, with shared experts."""
    config, _, golden = load("mixtral_moe")
    experts = replace(config.experts, shared_size=24, correction=True, scoring="sigmoid", num_groups=2)
    config = replace(
        config, num_layers=len(kinds), mlp_kinds=kinds, experts=experts, sliding_windows=(), layer_ropes=()
    )
    params = init_params(config, jax.random.key(3))
    return config, params, jnp.asarray(golden["prompt_ids"], jnp.int32)


@pytest.mark.parametrize("pattern", ["dee", "dedede", "eed", "ddeede"])
def test_layers_of_several_kinds_of_mlp_scan_as_they_unroll(pattern):
    kinds = tuple({"d": "dense", "e": "experts"}[letter] for letter in pattern)
    config, params, ids = mixed_kinds(kinds)
    stacked = stack_layers(params)
    assert isinstance(stacked["layers"], tuple) and len(stacked["layers"]) == 2
    positions = jnp.arange(ids.size)
    unrolled, _ = forward(config, params, ids, positions, dense_attend, None)
    scanned, _ = forward(config, stacked, ids, positions, dense_attend, None)
    np.testing.assert_allclose(scanned, unrolled, atol=1e-4)
    tree = param_shardings(config, AbstractMesh((1, 2), ("data", "model")), stacked=True)
    assert jax.tree.structure(tree) == jax.tree.structure(stacked)


def test_a_correction_stays_float32():
    config, _, _ = mixed_kinds(("dense", "experts"))
    for params in (abstract_params(config, jnp.bfloat16), init_params(config, jax.random.key(0), jnp.bfloat16)):
        router = params["layers"][1]["mlp"]["router"]
        assert (router["correction"].dtype, router["weight"].dtype) == (jnp.float32, jnp.bfloat16)


@pytest.mark.parametrize(
    ("devices", "gate", "down", "down_bias"),
    [
        (2, ("model", None, None), ("model", None, None), ("model", None)),
        (3, (None, None, "model"), (None, "model", None), (None, None)),
        (5, (None, None, None), (None, None, None), (None, None)),
    ],
)
def test_experts_are_split_among_devices_or_by_their_width_or_not(devices, gate, down, down_bias):
    config, _, _ = load("gpt_oss_sinks")
    mesh = AbstractMesh((1, devices), ("data", "model"))
    mlp = param_shardings(config, mesh)["layers"][0]["mlp"]
    assert mlp["experts"]["gate_proj"]["kernels"].spec == PartitionSpec(*gate)
    assert mlp["experts"]["down_proj"]["kernels"].spec == PartitionSpec(*down)
    assert mlp["experts"]["down_proj"]["biases"].spec == PartitionSpec(*down_bias)
    assert mlp["router"]["weight"].spec == PartitionSpec(None, None)


def test_tables_say_how_experts_are_stored():
    fused = {weight.path[2:]: weight for weight in weights(load("gpt_oss_sinks")[0]) if weight.path[1:2] == (0,)}
    gate, up = (fused["mlp", "experts", name, "kernels"] for name in ("gate_proj", "up_proj"))
    assert gate.tensors == up.tensors == ("model.layers.0.mlp.experts.gate_up_proj",)
    assert (gate.columns, up.columns, up.tensor_shape) == (slice(0, None, 2), slice(1, None, 2), (4, 64, 192))
    single = {weight.path[2:]: weight for weight in weights(load("qwen3_moe")[0]) if weight.path[1:2] == (2,)}
    down = single["mlp", "experts", "down_proj", "kernels"]
    assert down.tensors[7] == "model.layers.2.mlp.experts.7.down_proj.weight" and len(down.tensors) == 8
    assert (down.shape, down.tensor_shape) == ((8, 32, 64), (64, 32))


def test_layers_of_qwen3_moe_are_dense_where_its_config_says():
    config, _, _ = load("qwen3_moe")
    hf = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [3],
        "decoder_sparse_step": 2,
    }
    assert model_config_from_hf(hf).mlp_kinds == ("dense", "experts", "dense", "dense", "dense", "experts")
    assert not model_config_from_hf(hf).experts.normalise
    assert config.experts == ExpertsConfig(8, 2, 32)
    assert config.layer_kinds[0] == LayerKind(None, 0, "experts")
    with pytest.raises(UnsupportedModelError, match="a token has 9 of 8 experts of width 32; each must be positive"):
        model_config_from_hf(hf | {"num_experts_per_tok": 9})
    with pytest.raises(UnsupportedModelError, match="config has no num_experts"):
        model_config_from_hf(hf | {"num_experts": None})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_groups": 3}, "1 of 3 groups of 8 experts: groups must divide"),
        ({"num_groups": 4, "num_chosen": 3}, "3 experts are chosen from 1 groups of 2"),
        ({"scoring": "max"}, "scoring is 'max'; supported are softmax, softmax_of_chosen, sigmoid"),
    ],
)
def test_impossible_mixtures_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ExpertsConfig(**{"num_experts": 8, "num_chosen": 2, "inner_size": 4, **settings})


@pytest.mark.parametrize("form", [scaled_form(QuantisedForm(8)), ScaledForm("float8_e4m3fn")], ids=["int8", "fp8"])
def test_scaled_experts_give_what_their_values_give(form):
    rng = np.random.default_rng(0)

    def scaled(*shape):
        shapes = abstract_scaled(shape, form)
        numbers = jnp.asarray(rng.integers(-100, 100, shape), jnp.float32).astype(shapes.numbers.dtype)
        scales = jnp.asarray(rng.uniform(0.001, 0.002, shapes.scales.shape), shapes.scales.dtype)
        return ScaledMatrix(numbers, scales)

    kept = ExpertWeights(scaled(4, 32, 64), scaled(4, 32, 64), scaled(4, 64, 32))
    wide = ExpertWeights(*(None if each is None else widened(each, jnp.float32) for each in kept))
    x, chosen = jnp.asarray(rng.normal(size=(9, 32)), jnp.float32), jnp.asarray(rng.integers(0, 5, (9, 2)))
    found, wanted = (
        expert_product(x, chosen, each, lambda g, u: jnp.tanh(g) * u, way="blocks") for each in (kept, wide)
    )
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert not np.asarray(found)[np.asarray(chosen) == 4].any()
