"""Plans by arithmetic: bytes, pages and requests against numbers reckoned by hand."""

import pytest

from jaxserve.plan.model_file import CONFIGS
from tests.plan.models import NORMS, OF_KV_HEADS, SPLIT, plan_for, write_config


def test_weights_kv_and_pages_of_four_devices_by_hand(tmp_path):
    plan = plan_for(write_config(tmp_path), "v5e-4", max_num_seqs=2, max_model_len=1000)
    figures = plan.as_dict()
    assert figures["weights_bytes_per_device"] == 2 * ((SPLIT + OF_KV_HEADS) // 4 + NORMS)
    assert figures["kv_bytes_per_token"] == 3 * 2 * 4 * 128 * 2
    assert figures["kv_bytes_per_token_per_device"] == 3 * 2 * 128 * 2
    # 63 pages hold a request; two slots and the null page.
    assert (figures["kv_pages"], figures["max_concurrent_tokens"]) == (2 * 63 + 1, 2 * 63 * 16)
    assert figures["max_concurrent_requests"] == 2
    assert figures["kv_bytes_per_device"] == 127 * 16 * 3 * 2 * 128 * 2
    # Bias, two masks and counts of each of two slots and the scratch one, and their last tokens.
    assert figures["state_bytes_per_device"] == 3 * 1024 * (4 + 1 + 1 + 4) + 3 * 4
    assert figures["allowed_bytes_per_device"] == 12_800_000_000
    assert figures["fits"] and figures["remedies"] == [] and not figures["compiled"]
    assert any("Memory has room for" in note for note in figures["notes"])


def test_of_more_devices_than_kv_heads_several_hold_one_and_that_is_said(tmp_path):
    plan = plan_for(write_config(tmp_path), "v5e-8", max_num_seqs=2)
    figures = plan.as_dict()
    assert figures["weights_bytes_per_device"] == 2 * (SPLIT // 8 + OF_KV_HEADS // 4 + NORMS)
    assert figures["kv_bytes_per_token_per_device"] == figures["kv_bytes_per_token"] // 4 == 3 * 2 * 128 * 2
    assert any(note.startswith("4 KV heads on 8 devices") and "held by 2 devices" in note for note in plan.notes)


def test_kv_heads_that_do_not_divide_are_held_by_every_device_and_that_is_said(tmp_path):
    plan = plan_for(write_config(tmp_path, num_key_value_heads=3, num_attention_heads=24), "v5e-8", max_num_seqs=2)
    figures = plan.as_dict()
    assert figures["kv_bytes_per_token_per_device"] == figures["kv_bytes_per_token"] == 3 * 2 * 3 * 128 * 2
    assert any(note.startswith("3 KV heads do not divide among 8 devices") for note in plan.notes)


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        ({"quantization": "int8_channel"}, {"weights": 1, "kv": 2}),
        ({"kv_cache_dtype": "int8"}, {"weights": 2, "kv": 1}),
        ({"dtype": "float32"}, {"weights": 4, "kv": 4}),
    ],
)
def test_number_formats_count(tmp_path, settings, numbers):
    figures = plan_for(write_config(tmp_path), "v5e-1", **settings).as_dict()
    wide = max(2, numbers["weights"])
    plain = wide * NORMS + 1024 * 256 * (wide - numbers["weights"])  # an embedding that is only looked up stays so
    wanted = numbers["weights"] * (SPLIT + OF_KV_HEADS) + plain
    assert figures["weights_bytes_per_device"] == pytest.approx(
        wanted, rel=0.02 if "quantization" in settings else 1e-2
    )
    scales = 3 * 2 * 4 * 4 * (numbers["kv"] == 1)
    assert figures["kv_bytes_per_token"] == 3 * 2 * 4 * 128 * numbers["kv"] + scales


def test_llama_70b_on_eight_v6e_by_hand():
    figures = plan_for("llama-3.1-70b", "v6e-8").as_dict()
    matrices = 80 * (8192 * 128 * (2 * 64 + 2 * 8) + 3 * 8192 * 28672) + 2 * 128256 * 8192
    assert figures["weights_bytes_per_device"] == 2 * (matrices // 8 + 161 * 8192)
    assert figures["kv_bytes_per_token"] == 2 * 80 * 8 * 128 * 2 == 327_680
    left = 25_600_000_000 - sum(figures[f"{name}_bytes_per_device"] for name in ("weights", "activation", "state"))
    assert figures["kv_pages"] == left // (16 * 327_680 // 8)
    assert figures["fits"] and figures["max_concurrent_requests"] == 1


def test_a_model_that_does_not_fit_says_by_how_much_and_what_would_help():
    plan = plan_for("llama-3.1-70b", "v5e-8", max_model_len=8192)
    figures = plan.as_dict()
    weights = figures["weights_bytes_per_device"]
    assert not figures["fits"] and weights > figures["allowed_bytes_per_device"]
    assert "weights alone take" in figures["why_not"]
    pages = (8192 // 16 + 1) * 16 * figures["kv_bytes_per_token_per_device"]
    others = figures["activation_bytes_per_device"] + figures["state_bytes_per_device"]
    assert figures["missing_bytes_per_device"] == weights + others + pages - figures["allowed_bytes_per_device"]
    assert figures["kv_pages"] == figures["max_concurrent_tokens"] == figures["max_concurrent_requests"] == 0
    by_flags = {each["flags"]: each["says"] for each in figures["remedies"]}
    assert "--target=v5e-16" in by_flags and "--quantization=int8_channel" in by_flags
    # No 8-bit form on a slice that is large enough without.
    assert not any(flags.startswith("--target=v5e-16 ") for flags in by_flags)
    for flags in by_flags:
        changes = dict(word.removeprefix("--").split("=") for word in flags.split())
        target = changes.pop("target", "v5e-8")
        assert plan_for("llama-3.1-70b", target, max_model_len=8192, **changes).fits, flags


def test_a_request_too_long_for_the_pages_is_what_does_not_fit(tmp_path):
    path = write_config(tmp_path, max_position_embeddings=1 << 24)
    plan = plan_for(path, "v5e-1")
    assert not plan.fits and plan.why_not.startswith("one request of 16,777,216 tokens needs")
    shorter = next(each.flags for each in plan.remedies if each.flags.startswith("--max_model_len="))
    length = int(shorter.partition("=")[2])
    assert plan_for(path, "v5e-1", max_model_len=length).fits
    assert not plan_for(path, "v5e-1", max_model_len=length + 16).fits


def test_layers_with_windows_count_pages_of_every_group():
    figures = plan_for("gemma-3-27b", "v6e-8").as_dict()
    # Six groups of 11 layers, see docs/architecture.md: four places are empty.
    assert figures["kv_bytes_per_token"] == 6 * 11 * 2 * 16 * 128 * 2


def test_latent_attention_is_on_every_device():
    plan = plan_for("deepseek-v3", "v6e-64", quantization="fp8")
    figures = plan.as_dict()
    # Rows of 512 + 64 numbers, which TPUs keep in whole 128s.
    assert figures["kv_bytes_per_token_per_device"] == figures["kv_bytes_per_token"] == 61 * 640 * 2
    assert any(note.startswith("Latent attention keeps one row per token") for note in plan.notes)


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.json")))
def test_every_shipped_model_can_be_planned_for(name):
    target = {"deepseek-v3": "v6e-128", "gpt-oss-120b": "v6e-16"}.get(name, "v6e-8")
    figures = plan_for(name, target, max_num_seqs=1, max_model_len=2048).as_dict()
    assert figures["fits"], figures["why_not"]


def test_devices_that_stand_idle_are_told_of(tmp_path):
    plan = plan_for(write_config(tmp_path), "v5e-8", tensor_parallel_size=4)
    assert any(note.startswith("4 of 8 devices stand idle") for note in plan.notes)
    with pytest.raises(ValueError, match=r"tensor_parallel_size is 16; v5e-8 has 8 devices"):
        plan_for(write_config(tmp_path), "v5e-8", tensor_parallel_size=16)


def test_quantised_experts_that_cannot_be_cut_are_refused():
    with pytest.raises(ValueError, match=r"quantization int8: 128 devices share the experts' inner width"):
        plan_for("mixtral-8x7b", "v6e-128", quantization="int8")
