"""The engine with weights packed for the processor and native attention, beside XLA's own."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.models import ExpertsConfig, ModelConfig, RopeConfig
from jaxserve.runtime import make_mesh, weights_form
from pallas_kernels.common import native
from pallas_kernels.decoder_stack import is_stack
from pallas_kernels.matmul import is_packed
from tests.engine.conftest import greedy, ids, random_prompts

XLA = {"matmul_implementation": "xla", "attention_implementation": "cpu"}
BY_LAYER = {"decoder_implementation": "xla"}
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=96,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    max_position_embeddings=100,
)
LENGTHS = (1, 5, 16, 17, 33, 60)


def form(platform="cpu", devices=1, model=MODEL, loaded=None, **settings):
    """`weights_form` on some devices."""
    mesh = SimpleNamespace(devices=np.asarray([SimpleNamespace(platform=platform)] * devices), size=devices)
    return weights_form(EngineConfig(model="m", **settings), mesh, model, loaded)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_those_of_plain_xla(make_llm, dtype):
    """Within rounding: log-probabilities of every prompt token."""
    prompts = random_prompts(LENGTHS[1:])
    scores = []
    for settings in ({}, BY_LAYER, XLA):
        llm = make_llm(dtype=dtype, **settings)
        llm.engine.reset_prefix_cache()
        outputs = llm.generate(prompts, greedy(1, prompt_logprobs=0), use_tqdm=False)
        scores.append(
            [
                entry[token].logprob
                for prompt, output in zip(prompts, outputs, strict=True)
                for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
            ]
        )
    for found in scores[:2]:
        np.testing.assert_allclose(found, scores[2], atol=1e-4 if dtype == "float32" else 0.15)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_are_the_same_alone_and_together_and_in_chunks(make_llm, dtype):
    """In bfloat16 too, whose roundings a different order of sums would show."""

    def generate(llm, prompts):
        llm.engine.reset_prefix_cache()
        llm.engine.runner.fill_pool(float("nan"))
        return ids(llm.generate(prompts, greedy(12), use_tqdm=False))

    prompts = random_prompts(LENGTHS)
    together = generate(make_llm(dtype=dtype), prompts)
    assert [generate(make_llm(dtype=dtype), [prompt])[0] for prompt in prompts] == together
    assert generate(make_llm(dtype=dtype, prefill_chunk=7), prompts) == together


def test_weights_are_packed_on_one_cpu_device(make_llm):
    def layers(**settings):
        return make_llm(**settings).engine.runner._params["layers"]

    assert is_stack(layers())
    assert is_packed(layers(**BY_LAYER)[0]["mlp"]["gate_proj"]["kernel"])
    assert not any(is_packed(leaf) for leaf in jax.tree.leaves(layers(**XLA)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"norm_kind": "layer"}, "norm_kind layer"),
        ({"norm_placement": "sandwich"}, "norm_placement sandwich"),
        ({"norm_offset": True}, "norm_offset"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"qk_norm": "full"}, "qk_norm full"),
        ({"attention_scale": 0.5}, "attention_scale 0.5"),
        ({"attention_softcap": 50.0}, "attention_softcap"),
        ({"residual_multiplier": 0.5}, "residual_multiplier 0.5"),
        ({"attention_sinks": True}, "attention_sinks"),
        ({"mlp_kinds": ("experts",), "experts": ExpertsConfig(4, 2, 8)}, "a mixture of experts"),
        ({"mlp_kinds": ("plain",)}, "an MLP without a gate"),
        ({"other_ropes": (RopeConfig(theta=5.0),), "layer_ropes": (1,)}, "more than one rope"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layers_that_one_call_lacks_are_run_one_by_one_and_the_log_says_why(caplog, changes, reason):
    model = replace(MODEL, **changes)
    with caplog.at_level("INFO"):
        assert form(model=model) == "packed"
    assert f"decoder layers are run one by one: {reason} is not supported in one call" in caplog.text
    with pytest.raises(ValueError, match=f"decoder_implementation native_cpu: {reason} is not supported"):
        form(model=model, decoder_implementation="native_cpu")


def test_one_call_takes_what_is_outside_of_layers_and_a_scale_that_is_the_usual_one():
    outside = {"embedding_multiplier": 6.0, "logits_divisor": 4.0, "final_logit_softcap": 30.0, "qkv_bias": True}
    assert form(model=replace(MODEL, attention_scale=MODEL.head_dim**-0.5, **outside)) == "packed_stack"


def test_form_of_weights_follows_device_and_settings(monkeypatch):
    assert form() == "packed_stack"
    assert form(devices=2) == "plain"
    assert form(dtype="float32", scan_layers=True) == "stacked"
    assert form("tpu") == "stacked"
    assert form(matmul_implementation="xla") == "plain"
    assert form(**BY_LAYER) == "packed"
    assert form(attention_implementation="cpu") == "packed"
    assert form(kv_cache_dtype="int8") == "packed"
    monkeypatch.setattr(native, "is_available", lambda: False)
    assert form() == "plain"
    for name in ("matmul_implementation", "decoder_implementation"):
        with pytest.raises(ImportError, match=r"jaxserve\[cpu\]"):
            form(**{name: "native_cpu"})


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"matmul_implementation": "xla"}, "needs packed weights"),
        ({"attention_implementation": "cpu"}, "attention is by cpu"),
        ({"kv_cache_dtype": "int8"}, "attention is by cpu"),
        ({"model": replace(MODEL, hidden_act="quick_gelu")}, "activation quick_gelu is not supported, silu"),
        ({"model": replace(MODEL, intermediate_size=80)}, r"gate_proj.weight is \[64, 80\], which has no packed form"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_one_call_for_all_layers_is_refused_with_the_reason(settings, reason):
    with pytest.raises(ValueError, match=reason):
        form(decoder_implementation="native_cpu", **settings)


@pytest.mark.parametrize(
    ("platform", "settings"), [("gpu", {}), ("cpu", {"devices": 2}), ("cpu", {"scan_layers": True})]
)
def test_packed_weights_are_refused_where_they_cannot_be(platform, settings):
    for name in ("matmul_implementation", "decoder_implementation"):
        with pytest.raises(ValueError, match=f"{name} native_cpu needs one CPU device"):
            form(platform, **{name: "native_cpu"}, **settings)


def test_a_mesh_of_the_machine_is_one_of_those():
    assert form() == weights_form(EngineConfig(model="m"), make_mesh(1), MODEL)
