"""The engine with weights kept quantised, beside one whose weights are the same numbers."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant
from safetensors.numpy import save_file

from jaxserve import LLM
from jaxserve.config import EngineConfig
from jaxserve.engine.dry_run import start_plan
from jaxserve.loading.quantised_weights import abstract_params_of, quantised_forms
from jaxserve.models import make_params, weights
from jaxserve.testing.tiny import tiny_config, tiny_weights, write_tiny_model
from pallas_kernels.decoder_stack import is_stack
from pallas_kernels.matmul import QuantisedForm, QuantisedMatrix, quantise
from tests.engine.conftest import greedy, ids, random_prompts
from tests.engine.test_cpu_kernels import BY_LAYER, MODEL, form
from tests.loading.gguf_files import write_gguf
from tests.models.tiny_models import FOLDER

SIZES = dict(vocab=288)
"""The embedding is quantised too."""
PROMPTS = random_prompts((5, 16, 17, 33))


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """`make(name, dtype, quantization)`: an LLM on a model of `models` below."""
    folder = tmp_path_factory.mktemp("quantised")
    config = tiny_config(**SIZES)
    tensors = tiny_weights(config)
    write_gguf(folder / "Q4_1.gguf", config, tensors, quant=Quant.Q4_1)
    for name, bits in (("plain", None), ("int8", 8), ("int4", 4)):
        write_tiny_model(folder / name, **SIZES)
        rounded = {key: through(key, value, bits) for key, value in tensors.items()}
        save_file(rounded, folder / name / "model.safetensors", metadata={"format": "pt"})
    made = {}

    def make(name, dtype, quantization, **settings):
        key = name, dtype, quantization, *settings
        if key not in made:
            made[key] = LLM(
                str(folder / name), dtype=dtype, quantization=quantization, compile_cache="", skip_tokenizer_init=True,
                max_model_len=64, max_num_batched_tokens=64, decode_buckets=(8,), prefill_buckets=(64,),
                table_width_buckets=(4,), num_pages=40, **settings,
            )  # fmt: skip
        return made[key]

    return make


def through(name, value, bits):
    """A tensor's numbers after they were quantised."""
    if bits is None or value.ndim == 1:
        return value
    integers, scales, minima = quantise(value, 8 if "embed" in name else bits)
    wide = integers * np.repeat(scales.astype(np.float32), 32, 1)
    return wide if minima is None else wide + np.repeat(minima.astype(np.float32), 32, 1)


def scores(llm):
    """Log-probabilities of every prompt token."""
    llm.engine.reset_prefix_cache()
    outputs = llm.generate(PROMPTS, greedy(1, prompt_logprobs=0), use_tqdm=False)
    return [
        entry[token].logprob
        for prompt, output in zip(PROMPTS, outputs, strict=True)
        for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
    ]


@pytest.mark.parametrize(("plain", "quantised", "quantization"), [
    ("Q4_1.gguf", "Q4_1.gguf", "gguf"), ("int8", "plain", "int8"), ("int4", "plain", "int4"),
])  # fmt: skip
def test_answers_are_those_of_the_same_numbers_in_float32(make, plain, quantised, quantization):
    """Both multiply the same numbers and sum them as float32, so only the order of sums is another."""
    wanted, llm = make(plain, "float32", None), make(quantised, "float32", quantization)
    assert is_stack(llm.engine.runner._params["layers"])
    np.testing.assert_allclose(scores(llm), scores(wanted), atol=1e-4)
    assert ids(llm.generate(PROMPTS, greedy(8), use_tqdm=False)) == ids(
        wanted.generate(PROMPTS, greedy(8), use_tqdm=False)
    )


def test_layers_one_by_one_give_the_answers_of_one_call(make):
    llm = make("Q4_1.gguf", "float32", "gguf", **BY_LAYER)
    assert isinstance(llm.engine.runner._params["layers"][1]["mlp"]["up_proj"]["kernel"], QuantisedMatrix)
    np.testing.assert_allclose(scores(llm), scores(make("Q4_1.gguf", "float32", "gguf")), atol=1e-4)


def test_bfloat16_answers_are_as_close_to_float32_as_those_of_dequantised_weights(make):
    """Activations are rounded alike; weights are exact here and rounded there, which in two layers hardly shows."""
    exact = np.asarray(scores(make("Q4_1.gguf", "float32", None)))
    kept, rounded = (np.abs(scores(make("Q4_1.gguf", "bfloat16", name)) - exact) for name in ("gguf", None))
    assert kept.max() < 0.3
    assert kept.mean() < 1.5 * rounded.mean()


def test_tokens_are_the_same_alone_and_together(make):
    llm = make("Q4_1.gguf", "bfloat16", "gguf")
    together = ids(llm.generate(PROMPTS, greedy(12), use_tqdm=False))
    llm.engine.reset_prefix_cache()
    assert [ids(llm.generate([prompt], greedy(12), use_tqdm=False))[0] for prompt in PROMPTS] == together


def test_weights_take_the_memory_of_their_blocks_in_the_plan_too(make):
    llm = make("Q4_1.gguf", "bfloat16", "gguf")
    params, config = llm.engine.runner._params, llm.engine.config
    assert isinstance(params["embed"], QuantisedMatrix)
    assert isinstance(params["layers"]["mlp"]["up_proj"]["kernel"], QuantisedMatrix)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    dense = sum(leaf.nbytes for leaf in jax.tree.leaves(make("Q4_1.gguf", "bfloat16", None).engine.runner._params))
    assert llm.engine.runner.memory_plan.weights_bytes == held
    assert held < 5.3 / 16 * dense  # 5 bits, and norms
    plan = start_plan(config).memory
    assert plan.weights_bytes == held
    assert start_plan(dataclasses.replace(config, quantization=None)).memory.weights_bytes == dense


def loaded(model, quantization, changed=None):
    """Shapes of a model's weights; `changed` is the form of one matrix of the last layer."""
    forms = quantised_forms(quantization, model, weights(model), None)
    if changed is not None:
        forms["layers", model.num_layers - 1, "mlp", "down_proj", "kernel"] = changed
    return make_params(model, lambda weight: abstract_params_of(weight, forms, "float32"))


@pytest.mark.parametrize(
    ("model", "changed", "reason"),
    [
        (MODEL, QuantisedForm(8), "several forms, 4.32.minimum.float16, 8.32.symmetric.float16; all must have one"),
        (dataclasses.replace(MODEL, head_dim=48, num_kv_heads=2), None, "48 query columns of a KV head are not in"),
    ],
    ids=["forms", "heads"],
)
def test_layers_are_one_call_where_all_matrices_have_one_form(model, changed, reason, caplog):
    assert form(quantization="int4", loaded=loaded(MODEL, "int4")) == "packed_stack"
    assert form(quantization="int4", loaded=loaded(MODEL, "int4"), **BY_LAYER) == "packed"
    settings = {"model": model, "quantization": "int4", "loaded": loaded(model, "int4", changed)}
    with caplog.at_level("INFO", "jaxserve"):
        assert form(**settings) == "packed"
    assert reason in caplog.text
    with pytest.raises(ValueError, match=f"decoder_implementation native_cpu: .*{reason}"):
        form(decoder_implementation="native_cpu", **settings)


def test_names():
    with pytest.raises(ValueError, match="quantization is 'awq'; it must be one of gguf, int8, int4, int8_channel, fp"):
        EngineConfig(model="m", quantization="awq")


@pytest.mark.parametrize("name", ["gemma3_dual_rope", "phi3_fused", "starcoder2_layernorm", "glm4_interleaved"])
def test_families_answer_nearly_as_their_golden_files_from_8_bits(name):
    """Layer by layer, and all in one call with matrices that share a tensor."""
    golden = json.loads((FOLDER / name / "golden.json").read_text())
    llm = LLM(
        str(FOLDER / name), dtype="float32", quantization="int8", compile_cache="", skip_tokenizer_init=True,
        max_model_len=64, max_num_batched_tokens=64, decode_buckets=(8,), prefill_buckets=(64,),
        table_width_buckets=(4,), num_pages=40,
    )  # fmt: skip
    layers = llm.engine.runner._params["layers"]
    assert is_stack(layers) == (name == "phi3_fused")
    leaves = jax.tree.leaves(layers, is_leaf=lambda leaf: isinstance(leaf, QuantisedMatrix))
    assert any(isinstance(leaf, QuantisedMatrix) for leaf in leaves)
    prompt = golden["prompt_ids"]
    output = llm.generate([prompt], greedy(1, prompt_logprobs=0), use_tqdm=False)[0]
    found = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
    difference = np.abs(np.asarray(found) - golden["logprobs_of_prompt"][1:])
    assert 1e-4 < difference.max() < 0.15
