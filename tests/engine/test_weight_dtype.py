"""The engine with matrices of 16 bits and float32 activations: the bits of the same numbers as float32."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant
from safetensors.numpy import save_file

from jaxserve import LLM
from jaxserve.config import EngineConfig
from jaxserve.engine.dry_run import start_plan
from jaxserve.testing.tiny import tiny_config, tiny_weights, write_tiny_model
from pallas_kernels.decoder_stack import is_stack
from tests.engine.conftest import greedy, ids, random_prompts
from tests.engine.test_cpu_kernels import BY_LAYER, XLA, form
from tests.loading.gguf_files import write_gguf

SIZES = dict(vocab=288)
PROMPTS = random_prompts((5, 16, 17, 33))
LORA = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 4, "prefill_buckets": (64,)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds "bfloat16", "float32" and "F16.gguf", the first two with the same numbers."""
    folder = tmp_path_factory.mktemp("halves")
    config = tiny_config(**SIZES)
    tensors = tiny_weights(config)
    write_gguf(folder / "F16.gguf", config, tensors, quant=Quant.F16)
    for name, dtype in (("bfloat16", ml_dtypes.bfloat16), ("float32", np.float32)):
        write_tiny_model(folder / name, **SIZES)
        rounded = {key: value.astype(ml_dtypes.bfloat16).astype(dtype) for key, value in tensors.items()}
        save_file(rounded, folder / name / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def make(folder):
    """`make(name, **settings)`: an LLM on a model of `folder`."""
    made = {}

    def make(name, **settings):
        key = name, *settings.items()
        if key not in made:
            made[key] = LLM(
                str(folder / name), compile_cache="", skip_tokenizer_init=True,
                **dict(dtype="float32", max_model_len=64, max_num_batched_tokens=64, decode_buckets=(8,),
                       prefill_buckets=(64,), table_width_buckets=(4,), num_pages=40) | settings,
            )  # fmt: skip
        return made[key]

    return make


def answers(llm):
    """Token ids, and log-probabilities of every prompt token."""
    llm.engine.reset_prefix_cache()
    outputs = llm.generate(PROMPTS, greedy(8, prompt_logprobs=0), use_tqdm=False)
    scores = [
        entry[token].logprob
        for prompt, output in zip(PROMPTS, outputs, strict=True)
        for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
    ]
    return ids(outputs), scores


def kept_in(llm):
    layers = llm.engine.runner.params["layers"]
    layer = layers if isinstance(layers, dict) else layers[0]
    return layer["mlp"]["up_proj"]["kernel"].dtype.name, llm.engine.runner.params["embed"].dtype.name


@pytest.mark.parametrize("settings", [{}, BY_LAYER, LORA], ids=["one call", "layer by layer", "lora"])
@pytest.mark.parametrize(
    ("name", "dtype"), [("bfloat16", "bfloat16"), pytest.param("F16.gguf", "float16", marks=pytest.mark.slow)]
)
def test_answers_have_the_bits_of_float32_weights(make, name, dtype, settings):
    kept, wide = make(name, **settings), make(name, weight_dtype="float32", **settings)
    assert kept_in(kept) == (dtype, dtype)
    assert kept_in(wide) == ("float32", "float32")
    assert is_stack(kept.engine.runner.params["layers"]) == (not settings)
    assert answers(kept) == answers(wide)


@pytest.mark.parametrize("settings", [XLA, {"scan_layers": True}], ids=["plain", "stacked"])
def test_weights_that_are_not_packed_are_made_float32_at_the_product(make, settings):
    assert kept_in(make("bfloat16", **settings)) == ("float32", "float32")
    kept = make("bfloat16", weight_dtype="bfloat16", **settings)
    assert kept_in(kept) == ("bfloat16", "bfloat16")
    (found, scores), (wanted, wanted_scores) = answers(kept), answers(make("bfloat16", **settings))
    assert found == wanted
    np.testing.assert_allclose(scores, wanted_scores, atol=1e-4)


def test_a_dtype_asked_for_rounds_weights_and_nothing_else(make):
    """The float32 checkpoint holds what bfloat16 holds, so rounding changes nothing there."""
    assert kept_in(make("float32")) == ("float32", "float32")
    kept = make("float32", weight_dtype="bfloat16")
    assert kept_in(kept) == ("bfloat16", "bfloat16")
    assert answers(kept) == answers(make("float32"))


def test_weights_take_half_the_memory_in_the_plan_too(make):
    llm = make("bfloat16")
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.engine.runner.params))
    dense = sum(leaf.nbytes for leaf in jax.tree.leaves(make("bfloat16", weight_dtype="float32").engine.runner.params))
    assert 0.5 < held / dense < 0.51  # norms
    plans = [
        start_plan(dataclasses.replace(llm.engine.config, weight_dtype=each)).memory for each in ("auto", "float32")
    ]
    assert [plan.weights_bytes for plan in plans] == [held, dense]


TWO_DEVICES = """
import json, sys
from jaxserve import LLM, SamplingParams
found = []
for weight_dtype in ("auto", "bfloat16"):
    llm = LLM(sys.argv[1], dtype="float32", weight_dtype=weight_dtype, tensor_parallel_size=2, compile_cache="",
              skip_tokenizer_init=True, max_model_len=64, max_num_batched_tokens=64, decode_buckets=(8,),
              prefill_buckets=(64,), table_width_buckets=(4,), num_pages=40)
    kernel = llm.engine.runner.params["layers"][0]["mlp"]["up_proj"]["kernel"]
    outputs = llm.generate(json.loads(sys.argv[2]), SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    found.append([kernel.dtype.name, str(kernel.sharding.spec), [o.outputs[0].token_ids for o in outputs]])
print(json.dumps(found))
"""


def test_two_devices_share_matrices_of_16_bits(folder):
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", TWO_DEVICES, str(folder / "bfloat16"), json.dumps(PROMPTS)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    auto, kept = json.loads(done.stdout.splitlines()[-1])
    assert (auto[0], kept[0]) == ("float32", "bfloat16")
    assert "model" in kept[1]
    assert auto[1:] == kept[1:]


@pytest.mark.parametrize("kept", ["float32", "bfloat16", "float16"])
def test_layers_are_one_call_where_all_matrices_are_of_one_dtype(kept, caplog):
    shapes = {"layers": [{"mlp": {name: jax.ShapeDtypeStruct((64, 96), kept) for name in ("up", "down")}}]}
    assert form(dtype="float32", loaded=shapes) == "packed_stack"
    shapes["layers"][0]["mlp"]["down"] = jax.ShapeDtypeStruct((96, 64), "float32" if kept != "float32" else "bfloat16")
    with caplog.at_level("INFO", "jaxserve"):
        assert form(dtype="float32", loaded=shapes) == "packed"
    assert "have several forms, " in caplog.text and kept in caplog.text


@pytest.mark.parametrize("kept", ["float16", "float32"])
def test_weights_of_another_dtype_than_bfloat16_are_refused(kept):
    with pytest.raises(ValueError, match=rf"weight_dtype is {kept} and dtype is bfloat16; .* use dtype float32"):
        EngineConfig(model="m", dtype="bfloat16", weight_dtype=kept)
    with pytest.raises(ValueError, match="weight_dtype is 'int8'; it must be one of auto, float32, bfloat16, float16"):
        EngineConfig(model="m", weight_dtype="int8")
