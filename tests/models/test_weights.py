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
from tests.models.tiny_models import FOLDER, NAMES, dense_attend, load


@pytest.mark.parametrize("name", NAMES)
def test_table_names_exactly_the_tensors_of_a_checkpoint(name):
    config, _, _ = load(name)
    with safe_open(FOLDER / name / "model.safetensors", "numpy") as file:
        assert {weight.hf_name for weight in weights(config)} == set(file.keys())


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


def test_layers_of_different_windows_scan_as_they_unroll():
    config, params, golden = load("mistral_sliding")
    layers = [*params["layers"], params["layers"][0]]
    config = replace(config, num_layers=4, sliding_windows=(4, None, 4, None))
    params = {**params, "layers": layers}
    ids = jnp.asarray(golden["prompt_ids"], jnp.int32)
    positions = jnp.arange(ids.size)
    unrolled, _ = forward(config, params, ids, positions, dense_attend, None)
    scanned, _ = forward(config, stack_layers(params), ids, positions, dense_attend, None)
    np.testing.assert_allclose(scanned, unrolled, atol=1e-5)
    other = replace(config, sliding_windows=(None, 4, None, 4))
    swapped, _ = forward(other, params, ids, positions, dense_attend, None)
    assert not np.allclose(swapped, unrolled, atol=1e-2)


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
