"""LoRA adapters on the weights of a GGUF file: rows that llama.cpp reorders, blocks that are kept or not."""

import pytest

from jaxserve import LLM
from jaxserve.convert import Conversion, convert_checkpoint
from jaxserve.testing.tiny_lora import write_tiny_lora
from tests.engine.conftest import greedy, ids, random_prompts
from tests.engine.test_lora import LORA, scores


@pytest.fixture(scope="module")
def models(tmp_path_factory, tiny_model_dir):
    """The tiny model as GGUF in float32 and Q8_0, what the latter holds as safetensors, and an adapter."""
    at = tmp_path_factory.mktemp("gguf_lora")
    convert_checkpoint(Conversion(str(tiny_model_dir), at / "float32.gguf", "gguf"))
    convert_checkpoint(Conversion(str(tiny_model_dir), at / "q8_0.gguf", "gguf", dtype="q8_0"))
    convert_checkpoint(Conversion(str(at / "q8_0.gguf"), at / "dequantised"))
    write_tiny_lora(at / "adapter", tiny_model_dir, seed=5)
    return at


def engine(model, at, **settings):
    llm = LLM(
        str(model), dtype="float32", max_model_len=128, max_num_batched_tokens=64, num_pages=66, decode_buckets=(8,),
        prefill_buckets=(64,), table_width_buckets=(8,), compile_cache="", **LORA, **settings,
    )  # fmt: skip
    llm.load_lora_adapter("a", str(at / "adapter"))
    return llm


def assert_near(got, want, atol):
    for one, other in zip(got, want, strict=True):
        both = one.keys() & other.keys()
        assert len(both) >= 18
        assert [one[token] for token in both] == pytest.approx([other[token] for token in both], abs=atol)


@pytest.mark.parametrize(
    ("file", "same_as", "quantization", "atol"),
    [
        ("float32.gguf", None, None, 1e-5),
        ("q8_0.gguf", "dequantised", None, 1e-5),
        ("q8_0.gguf", "dequantised", "gguf", 2e-3),
    ],
)
def test_adapters_do_to_a_gguf_file_what_they_do_to_its_safetensors(
    models, tiny_model_dir, file, same_as, quantization, atol
):
    prompts = random_prompts((5, 40), seed=7)
    reference = engine(models / same_as if same_as else tiny_model_dir, models)
    llm = engine(models / file, models, quantization=quantization)
    without, adapted = scores(llm, prompts), scores(llm, prompts, lora="a")
    assert_near(without, scores(reference, prompts), atol)
    assert_near(adapted, scores(reference, prompts, lora="a"), atol)
    mixed = ids(llm.generate(prompts * 2, greedy(8), lora=["a", "", "", "a"], use_tqdm=False))
    assert mixed[0] != mixed[2] and mixed[1] != mixed[3]
    assert mixed[0] == ids(llm.generate(prompts[:1], greedy(8), lora="a", use_tqdm=False))[0]
