"""The engine with weights packed for the processor and native attention, beside XLA's own."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.runtime import make_mesh, weights_form
from pallas_kernels.common import native
from pallas_kernels.matmul import is_packed
from tests.engine.conftest import greedy, ids, random_prompts

XLA = {"matmul_implementation": "xla", "attention_implementation": "cpu"}
LENGTHS = (1, 5, 16, 17, 33, 60)


def form(platform="cpu", devices=1, **settings):
    """`weights_form` on some devices."""
    mesh = SimpleNamespace(devices=np.asarray([SimpleNamespace(platform=platform)] * devices), size=devices)
    return weights_form(EngineConfig(model="m", **settings), mesh)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_those_of_plain_xla(make_llm, dtype):
    """Within rounding: log-probabilities of every prompt token."""
    prompts = random_prompts(LENGTHS[1:])
    scores = []
    for settings in ({}, XLA):
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
    np.testing.assert_allclose(*scores, atol=1e-4 if dtype == "float32" else 0.08)


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
    params = make_llm().engine.runner._params
    assert is_packed(params["layers"][0]["mlp"]["gate_proj"]["kernel"])
    assert not any(is_packed(leaf) for leaf in jax.tree.leaves(make_llm(**XLA).engine.runner._params))
    assert ids(make_llm().generate([[1, 2, 3]], greedy(4), use_tqdm=False))


def test_form_of_weights_follows_device_and_settings(monkeypatch):
    assert form() == "packed"
    assert form(devices=2) == "plain"
    assert form(dtype="float32", scan_layers=True) == "stacked"
    assert form("tpu") == "stacked"
    assert form(matmul_implementation="xla") == "plain"
    monkeypatch.setattr(native, "is_available", lambda: False)
    assert form() == "plain"
    with pytest.raises(ImportError, match=r"jaxserve\[cpu\]"):
        form(matmul_implementation="native_cpu")


@pytest.mark.parametrize(
    ("platform", "settings"), [("gpu", {}), ("cpu", {"devices": 2}), ("cpu", {"scan_layers": True})]
)
def test_packed_weights_are_refused_where_they_cannot_be(platform, settings):
    with pytest.raises(ValueError, match="needs one CPU device"):
        form(platform, matmul_implementation="native_cpu", **settings)


def test_a_mesh_of_the_machine_is_one_of_those(make_llm):
    assert weights_form(EngineConfig(model="m"), make_mesh(1)) == "packed"
