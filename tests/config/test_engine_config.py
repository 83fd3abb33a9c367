"""Settings of an engine: what cannot work is refused when they are made, by name and with the rule."""

import pytest

from jaxserve.config import EngineConfig


def refusal(**settings):
    with pytest.raises(ValueError) as raised:
        EngineConfig(**settings)
    return str(raised.value)


@pytest.mark.parametrize("page_size", [0, -1, 3, 48, 512])
def test_a_page_is_a_power_of_two_tokens(page_size):
    assert refusal(page_size=page_size) == f"page_size is {page_size}; it must be a power of two from 1 to 256"


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_every_power_of_two_up_to_the_largest_page_is_taken(page_size):
    assert EngineConfig(page_size=page_size).page_size == page_size


@pytest.mark.parametrize("num_pages", [0, 1, -5])
def test_the_pool_has_a_page_beside_the_null_page(num_pages):
    assert refusal(num_pages=num_pages) == f"num_pages is {num_pages}; it must be an integer of at least 2"
    assert EngineConfig(num_pages=2).num_pages == 2


def test_every_slot_fits_the_token_budget():
    message = refusal(max_num_seqs=9, max_num_batched_tokens=8)
    assert "max_num_seqs is 9 and max_num_batched_tokens is 8" in message
    assert EngineConfig(max_num_seqs=8, max_num_batched_tokens=8).max_num_seqs == 8


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size"])
def test_counts_are_at_least_one(name):
    assert refusal(**{name: 0}).startswith(f"{name} is 0; it must be an integer of at least 1")


def test_without_chunks_the_budget_holds_a_whole_prompt():
    settings = {"enable_chunked_prefill": False, "max_model_len": 128}
    message = refusal(**settings, max_num_batched_tokens=127)
    assert "max_num_batched_tokens is 127 and max_model_len is 128" in message
    for budget in (128, 129, 4096):
        assert EngineConfig(**settings, max_num_batched_tokens=budget).max_num_batched_tokens == budget


def test_without_chunks_the_models_own_context_counts_too():
    config = EngineConfig(enable_chunked_prefill=False, max_num_batched_tokens=512)
    with pytest.raises(ValueError, match="max_num_batched_tokens is 512 and max_model_len is 1024"):
        config.scheduler_config(max_model_len=1024, num_pages=513)


def test_with_chunks_the_budget_may_be_below_or_above_the_context():
    for budget in (8, 127, 128, 4096):
        config = EngineConfig(max_model_len=128, max_num_batched_tokens=budget)
        scheduler = config.scheduler_config(max_model_len=128, num_pages=17)
        assert (scheduler.max_num_batched_tokens, scheduler.prefill_chunk) == (budget, budget)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_loras": 0}, "max_loras is 0"),
        ({"max_lora_rank": 0}, "max_lora_rank is 0"),
        ({"max_lora_rank": 513}, "max_lora_rank is 513; it must be at most 512"),
        ({"lora_modules": ("a=/x",)}, "lora_modules is set without enable_lora"),
        ({"enable_lora": True, "lora_modules": ("a",)}, "lora_modules has 'a'; it must be NAME=DIRECTORY"),
        ({"enable_lora": True, "max_loras": 1, "lora_modules": ("a=b", "c=d")}, "raise max_loras"),
    ],
)
def test_lora_settings_that_break_a_rule_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**settings)
