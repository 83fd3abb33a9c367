"""The weight table, the trees built from it, and their sharding."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec
from safetensors import safe_open

from jaxserve.models import abstract_params, forward, ignorable, init_params, param_shardings, stack_layers, weights
from jaxserve.models.decoder_layer import bind_layer
from jaxserve.models.norm import final_norm
from jaxserve.models.transformer import LayerRun, layer_runs
from tests.models.tiny_models import FOLDER, NAMES, dense_attend, load


@pytest.mark.parametrize("name", NAMES)
def test_table_names_exactly_the_tensors_of_a_checkpoint(name):
    config, _, _ = load(name)
    with safe_open(FOLDER / name / "model.safetensors", "numpy") as file:
        assert {name for weight in weights(config) for name in weight.tensors} == set(file.keys())


def test_tied_copy_and_buffers_are_ignorable_and_nothing_else():
    config, _, _ = load("llama_gqa_tied")
    assert ignorable(config, "lm_head.weight")
    assert not ignorable(replace(config, tie_word_embeddings=False), "lm_head.weight")
    assert ignorable(config, "model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not ignorable(config, "model.layers.0.self_attn.q_norm.weight")


def test_initialised_tree_has_the_abstract_trees_shapes():
    config, _, _ = load("llama_head_dim")
    params = init_params(config, jax.random.key(0), jnp.bfloat16)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    assert shapes == abstract_params(config, jnp.bfloat16)


@pytest.mark.parametrize("name", ["llama_head_dim", "gemma2_softcap", "starcoder2_layernorm"])
def test_initialised_norms_change_nothing(name):
    config, _, _ = load(name)
    params = init_params(config, jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (3, config.hidden_size))
    normal = x - x.mean(axis=-1, keepdims=True) if config.norm_kind == "layer" else x
    normal /= jnp.sqrt(jnp.square(normal).mean(axis=-1, keepdims=True))
    np.testing.assert_allclose(final_norm(config, params, x), normal, rtol=1e-4)
    layer = bind_layer(config, config.layer_kinds[0], params["layers"][0])
    np.testing.assert_allclose(layer.input_norm(x), normal, rtol=1e-4)


@pytest.mark.parametrize("windows", [(4, None, 4, None), (4, 4, None, 4, 4, None, 4), (None, 4, 4, 4, 4)])
def test_layers_of_different_windows_scan_as_they_unroll(windows):
    config, params, golden = load("mistral_sliding")
    layers = [params["layers"][index % 3] for index in range(len(windows))]
    config = replace(config, num_layers=len(windows), sliding_windows=windows, layer_ropes=(), mlp_kinds=())
    params = {**params, "layers": layers}
    ids = jnp.asarray(golden["prompt_ids"], jnp.int32)
    positions = jnp.arange(ids.size)
    unrolled, _ = forward(config, params, ids, positions, dense_attend, None)
    scanned, _ = forward(config, stack_layers(params), ids, positions, dense_attend, None)
    np.testing.assert_allclose(scanned, unrolled, atol=1e-5)
    other = replace(config, sliding_windows=tuple(4 if window is None else None for window in windows))
    swapped, _ = forward(other, params, ids, positions, dense_attend, None)
    assert not np.allclose(swapped, unrolled, atol=1e-2)


@pytest.mark.parametrize(
    ("kinds", "runs"),
    [
        ("aaaa", [(0, 1, 4)]),
        ("abab", [(0, 2, 2)]),
        ("aaaaab" * 4 + "aa", [(0, 6, 4), (24, 1, 2)]),
        ("abbbb", [(0, 1, 1), (1, 1, 4)]),
        ("aba", [(0, 1, 1), (1, 1, 1), (2, 1, 1)]),
        ("a", [(0, 1, 1)]),
    ],
)
def test_layers_are_cut_into_runs_of_a_period(kinds, runs):
    assert layer_runs(tuple(kinds)) == [LayerRun(*run) for run in runs]


def test_only_kinds_are_traced_and_not_layers():
    config, params, _ = load("gemma3_dual_rope")
    calls = []

    def attend(layer, q, k, v, cache, options):
        calls.append(options.sliding_window)
        return q, cache

    ids = jnp.zeros(3, jnp.int32)
    jax.eval_shape(lambda: forward(config, params, ids, ids, attend, None))
    assert sorted(calls, key=str) == [8, None]
    calls.clear()
    jax.eval_shape(lambda: forward(config, stack_layers(params), ids, ids, attend, None))
    assert calls == [8, 8, None]


def test_tables_name_matrices_that_are_stored_in_out():
    config, _, _ = load("llama_gqa_tied")
    names = replace(config.names.with_modules({"mlp.down_proj": "mlp.out"}), in_out=("mlp.down_proj",))
    table = {weight.path[1:]: weight for weight in weights(replace(config, names=names))}
    down, up = table[0, "mlp", "down_proj", "kernel"], table[0, "mlp", "up_proj", "kernel"]
    assert (down.hf_name, down.transpose, down.shape) == ("model.layers.0.mlp.out.weight", False, (96, 64))
    assert up.transpose


def test_modules_with_one_name_share_its_rows():
    config, _, _ = load("phi3_fused")
    rows = {weight.path[-2]: weight.rows for weight in weights(config) if weight.path[:2] == ("layers", 2)}
    assert (rows["q_proj"], rows["k_proj"], rows["v_proj"]) == (range(64), range(64, 96), range(96, 128))
    assert (rows["gate_proj"], rows["up_proj"], rows["o_proj"]) == (range(96), range(96, 192), None)


def shardings(devices, **changes):
    config, _, _ = load("llama_gqa_tied")
    mesh = AbstractMesh((1, devices), ("data", "model"))
    return param_shardings(replace(config, **changes), mesh)


def test_heads_inner_width_and_vocabulary_are_split():
    tree = shardings(2)
    layer = tree["layers"][0]
    assert tree["embed"].spec == PartitionSpec("model", None)
    assert layer["attention"]["q_proj"]["kernel"].spec == PartitionSpec(None, "model")
    assert layer["attention"]["k_proj"]["kernel"].spec == PartitionSpec(None, "model")
    assert layer["attention"]["o_proj"]["kernel"].spec == PartitionSpec("model", None)
    assert layer["mlp"]["down_proj"]["kernel"].spec == PartitionSpec("model", None)
    assert layer["input_norm"]["scale"].spec == PartitionSpec(None)


def test_kv_heads_are_replicated_when_there_are_fewer_than_devices():
    attention = shardings(4)["layers"][0]["attention"]
    assert attention["q_proj"]["kernel"].spec == PartitionSpec(None, "model")
    assert attention["k_proj"]["kernel"].spec == PartitionSpec(None, None)
    assert attention["v_proj"]["kernel"].spec == PartitionSpec(None, None)


def test_what_does_not_divide_is_replicated():
    tree = shardings(2, vocab_size=321, intermediate_size=97)
    assert tree["embed"].spec == PartitionSpec(None, None)
    assert tree["layers"][0]["mlp"]["gate_proj"]["kernel"].spec == PartitionSpec(None, None)


def test_stacked_shardings_fit_stacked_parameters():
    config, params, _ = load("llama_gqa_tied")
    tree = param_shardings(config, AbstractMesh((1, 2), ("data", "model")), stacked=True)
    stacked = stack_layers(params)
    assert jax.tree.structure(tree) == jax.tree.structure(stacked)
    assert tree["layers"]["mlp"]["up_proj"]["kernel"].spec == PartitionSpec(None, None, "model")
    assert all(len(s.spec) == x.ndim for s, x in zip(jax.tree.leaves(tree), jax.tree.leaves(stacked), strict=True))
