"""The engine against outputs of transformers in float32: tiny models and SmolLM2-135M-Instruct."""

import json
from pathlib import Path

import pytest

from jaxserve import LLM
from pallas_kernels.paged_attention import LATENT_IMPLEMENTATIONS
from tests.engine.conftest import assert_idle_clean, assert_same_tokens, greedy
from tests.models.tiny_models import NAMES

GOLDEN = Path(__file__).parents[1] / "golden"
SMOLLM2 = json.loads((GOLDEN / "smollm2_golden.json").read_text())["cases"]


WAYS = (("reference", 4, 7), ("cpu", 16, 64), ("native_cpu", 4, 16))
"""(attention, page_size, prefill_chunk)."""
TWICE = (
    "llama_gqa_tied",
    "mistral_sliding",
    "qwen2_bias",
    "gemma2_softcap",
    "gemma3_dual_rope",
    "granite_multipliers",
    "mixtral_moe",
    "gpt_oss_sinks",
    "glm4_interleaved",
)
"""Models that differ in what attention or products are given: by "cpu" too; the others are by "native_cpu" alone."""


def way(name, attention, page_size, chunk):
    quick = attention == "native_cpu" or (attention == "cpu" and name in TWICE)
    return pytest.param(name, attention, page_size, chunk, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "attention", "page_size", "chunk"), [way(name, *each) for each in WAYS for name in NAMES]
)
def test_tiny_models_match_their_golden_files(name, attention, page_size, chunk):
    """Greedy ids and prompt log-probabilities; sliding windows shorter and longer than chunk and page."""
    if name == "deepseek_v3_mla" and attention not in LATENT_IMPLEMENTATIONS:
        attention = "auto"  # refused by name, see test_latent_attention.py
    golden = json.loads((GOLDEN / "tiny_models" / name / "golden.json").read_text())
    llm = LLM(
        str(GOLDEN / "tiny_models" / name),
        skip_tokenizer_init=True,
        dtype="float32",
        attention_implementation=attention,
        max_model_len=128,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        prefill_chunk=chunk,
        page_size=page_size,
        num_pages=2 * 128 // page_size + 1,
        decode_buckets=(2,),
        prefill_buckets=(64,),
        table_width_buckets=(128 // page_size,),
        compile_cache="",
    )
    llm.engine.runner.fill_pool(float("nan"))
    count = len(golden["greedy_ids"])
    output = llm.generate([golden["prompt_ids"]], greedy(count, prompt_logprobs=0), use_tqdm=False)[0]
    assert_same_tokens(output.outputs[0].token_ids, golden["greedy_ids"], golden["greedy_top2_gaps"])
    for entry, token, want in zip(
        output.prompt_logprobs[1:], golden["prompt_ids"][1:], golden["logprobs_of_prompt"][1:], strict=True
    ):
        assert abs(entry[token].logprob - want) < 2e-3
    assert_idle_clean(llm)


@pytest.fixture(scope="module")
def smollm2():
    return LLM(
        "smollm2-135m",
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        num_pages=200,
        decode_buckets=(8,),
        prefill_buckets=(128,),
        table_width_buckets=(64,),
        compile_cache="",
    )


@pytest.fixture(scope="module")
def smollm2_outputs(smollm2):
    """All cases in one batch: ids, log-probabilities and prompt log-probabilities."""
    prompts = [case["prompt_ids"] for case in SMOLLM2]
    params = [greedy(len(case["greedy_ids"]), logprobs=5, prompt_logprobs=0) for case in SMOLLM2]
    return smollm2.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize("index", range(len(SMOLLM2)), ids=[case["name"] for case in SMOLLM2])
def test_smollm2_matches_its_golden_file(smollm2_outputs, index):
    case, output = SMOLLM2[index], smollm2_outputs[index]
    got = output.outputs[0]
    assert_same_tokens(got.token_ids, case["greedy_ids"], case["top1_top2_gap"])
    for position, top in enumerate(case["top5_logprobs"]):
        if got.token_ids[:position] != case["greedy_ids"][:position]:
            break
        for token, want in top:
            entry = got.logprobs[position].get(token)
            # The fifth and sixth may change places when they are as good as equal.
            assert entry is not None or want < min(e.logprob for e in got.logprobs[position].values()) + 2e-3
            assert entry is None or abs(entry.logprob - want) < 2e-3
    for entry, token, want in zip(
        output.prompt_logprobs[1:], case["prompt_ids"][1:], case["prompt_logprobs"][1:], strict=True
    ):
        assert abs(entry[token].logprob - want) < 2e-3
    if got.token_ids == case["greedy_ids"]:
        assert got.text == case["greedy_text"]


def test_smollm2_chat_and_text_prompts_make_the_golden_ids(smollm2):
    for case in SMOLLM2:
        if "messages" in case:
            ids = smollm2.engine.tokenizer.encode_chat(case["messages"])
        else:
            ids = smollm2.engine.tokenizer.encode(case["prompt"])
        assert ids == case["prompt_ids"], case["name"]


def test_smollm2_answers_by_its_own_end(smollm2):
    from jaxserve import SamplingParams

    messages = [{"role": "user", "content": "What is the capital of France?"}]
    output = smollm2.chat([messages], SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)[0].outputs[0]
    assert output.text == "The capital of France is Paris."
    assert output.finish_reason == "stop" and output.token_ids[-1] == 2
