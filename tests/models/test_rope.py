"""KRN-8: frequencies of every scaling kind against formulae written out by hand, and the rotation itself."""

from __future__ import annotations

import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core import UnsupportedModelError
from jaxserve.models import RopeConfig, forward
from jaxserve.models.config import NO_ROPE
from jaxserve.models.rope import apply_rope, inverse_frequencies, rope_config_from_hf, rope_tables
from tests.models.tiny_models import dense_attend, load

DIM = 16


def frequencies(parameters, *, max_position=1024, dim=DIM, **hf):
    config = rope_config_from_hf({"rope_parameters": parameters, "max_position_embeddings": max_position, **hf})
    return inverse_frequencies(config, dim, max_position), config


def plain(theta, dim=DIM):
    return np.array([theta ** (-2 * i / dim) for i in range(dim // 2)])


def test_default_frequencies_are_powers_of_theta():
    found, config = frequencies({"rope_type": "default", "rope_theta": 500.0})
    np.testing.assert_allclose(found, plain(500.0), rtol=1e-12)
    assert config.attention_factor == 1.0


def test_old_and_new_spelling_read_the_same():
    parameters = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    new = rope_config_from_hf({"rope_parameters": {**parameters, "rope_type": "llama3", "rope_theta": 5e5}})
    for key in ("rope_type", "type"):
        assert rope_config_from_hf({"rope_scaling": {**parameters, key: "llama3"}, "rope_theta": 5e5}) == new


def test_linear_divides_every_frequency():
    found, _ = frequencies({"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4})
    np.testing.assert_allclose(found, plain(1e4) / 4, rtol=1e-12)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_keeps_short_waves_scales_long_ones_and_blends_between(factor):
    found, _ = frequencies(
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        dim=128,
    )
    kinds = set()
    for value, base in zip(found, plain(5e5, 128), strict=True):
        wavelength = 2 * math.pi / base
        if wavelength < 8192 / 4:
            kinds.add("kept")
            wanted = base
        elif wavelength > 8192:
            kinds.add("scaled")
            wanted = base / factor
        else:
            kinds.add("blended")
            share = (8192 / wavelength - 1) / (4 - 1)
            wanted = share * base + (1 - share) * base / factor
        assert value == pytest.approx(wanted, rel=1e-9)
    assert kinds == {"kept", "scaled", "blended"}


def test_yarn_ramps_between_whole_dimensions_and_scales_attention():
    found, config = frequencies(
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 2048}, dim=64
    )
    low = math.floor(64 * math.log(2048 / (32 * 2 * math.pi)) / (2 * math.log(1e4)))
    high = math.ceil(64 * math.log(2048 / (1 * 2 * math.pi)) / (2 * math.log(1e4)))
    assert (low, high) == (8, 21)
    for index, (value, base) in enumerate(zip(found, plain(1e4, 64), strict=True)):
        scaled = min(max((index - low) / (high - low), 0), 1)
        assert value == pytest.approx(base / 4 * scaled + base * (1 - scaled), rel=1e-9)
    assert config.attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_attention_factor_follows_the_config():
    yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64}
    assert frequencies({**yarn, "attention_factor": 1.25})[1].attention_factor == 1.25
    wanted = (0.1 * 0.707 * math.log(40) + 1) / (0.1 * 0.5 * math.log(40) + 1)
    found = frequencies({**yarn, "mscale": 0.707, "mscale_all_dim": 0.5})[1].attention_factor
    assert found == pytest.approx(wanted)


def test_dynamic_grows_the_base_past_the_original_length_only():
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 512}
    inside, _ = frequencies(parameters, max_position=512)
    np.testing.assert_allclose(inside, plain(1e4), rtol=1e-12)
    beyond, _ = frequencies(parameters, max_position=1024)
    theta = 1e4 * (2.0 * 1024 / 512 - (2.0 - 1)) ** (DIM / (DIM - 2))
    np.testing.assert_allclose(beyond, plain(theta), rtol=1e-9)


def test_longrope_takes_long_factors_when_the_context_exceeds_the_original():
    short, long = [1.0 + i / 10 for i in range(8)], [2.0 + i for i in range(8)]
    config = rope_config_from_hf(
        {
            "rope_scaling": {"type": "longrope", "short_factor": short, "long_factor": long},
            "original_max_position_embeddings": 256,
            "max_position_embeddings": 1024,
            "rope_theta": 1e4,
        }
    )
    np.testing.assert_allclose(inverse_frequencies(config, DIM, 1024), plain(1e4) / long, rtol=1e-12)
    np.testing.assert_allclose(inverse_frequencies(config, DIM, 256), plain(1e4) / short, rtol=1e-12)
    assert config.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(256)))


def test_longrope_follows_the_length_that_is_served():
    rope = RopeConfig("longrope", original_max_position=64, short_factors=(1.0,) * 8, long_factors=(4.0,) * 8)
    config, params, golden = load("llama_gqa_tied")
    config = replace(config, rope=rope, max_position_embeddings=512)
    ids = jnp.asarray(golden["prompt_ids"], jnp.int32)

    def last(config):
        return forward(config, params, ids, jnp.arange(ids.size), dense_attend, None)[0][-1]

    plain = last(replace(config, rope=RopeConfig()))
    np.testing.assert_array_equal(last(replace(config, served_length=64)), plain)
    assert not np.allclose(last(replace(config, served_length=65)), plain, atol=1e-2)
    np.testing.assert_array_equal(last(replace(config, served_length=65)), last(config))


def test_frequency_factors_divide_one_by_one():
    factors = [1.0 + i for i in range(8)]
    found, _ = frequencies({"rope_type": "frequency_factors", "factors": factors, "rope_theta": 1e4})
    np.testing.assert_allclose(found, plain(1e4) / factors, rtol=1e-12)


def test_unknown_rope_type_is_refused_with_the_supported_ones():
    with pytest.raises(UnsupportedModelError, match=r"rope type 'spiral' is not supported; supported are default, lin"):
        rope_config_from_hf({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}})


def test_missing_parameters_are_named():
    with pytest.raises(UnsupportedModelError, match="'llama3' needs low_freq_factor, high_freq_factor, original_max"):
        rope_config_from_hf({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}})
    with pytest.raises(UnsupportedModelError, match="'linear' needs factor"):
        rope_config_from_hf({"rope_parameters": {"rope_type": "linear"}})


def test_factors_of_the_wrong_number_are_refused():
    with pytest.raises(UnsupportedModelError, match="has 3 factors; a head of 16 rotating dimensions needs 8"):
        frequencies({"rope_type": "frequency_factors", "factors": [1.0, 2.0, 3.0]})


def test_rotation_turns_pairs_half_a_head_apart():
    _, config = frequencies({"rope_type": "default", "rope_theta": 1e4})
    positions = jnp.asarray([0, 3], jnp.int32)
    x = np.random.default_rng(0).normal(size=(2, 1, DIM)).astype(np.float32)
    found = np.asarray(apply_rope(jnp.asarray(x), *rope_tables(config, DIM, 1024, positions)))
    np.testing.assert_array_equal(found[0], x[0])
    for pair, speed in enumerate(plain(1e4)):
        a, b = x[1, 0, pair], x[1, 0, pair + DIM // 2]
        cos, sin = math.cos(3 * speed), math.sin(3 * speed)
        assert found[1, 0, pair] == pytest.approx(a * cos - b * sin, abs=1e-6)
        assert found[1, 0, pair + DIM // 2] == pytest.approx(b * cos + a * sin, abs=1e-6)


def test_rotation_in_bfloat16_uses_exact_angles_far_out():
    _, config = frequencies({"rope_type": "default", "rope_theta": 1e4})
    tables = rope_tables(config, DIM, 1 << 20, jnp.asarray([100_001], jnp.int32))
    x = jnp.ones((1, 1, DIM), jnp.bfloat16)
    near = np.asarray(apply_rope(x, *tables).astype(jnp.float32))[0, 0, 0]
    # One bfloat16 rounding of the result, none of the angle.
    assert near == pytest.approx(math.cos(100_001) - math.sin(100_001), abs=6e-3)


def test_partial_rotation_leaves_the_rest_of_the_head():
    config = rope_config_from_hf({"rope_theta": 1e4, "partial_rotary_factor": 0.5})
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, DIM)), jnp.float32)
    found = apply_rope(x, *rope_tables(config, DIM, 64, jnp.asarray([5], jnp.int32)))
    np.testing.assert_array_equal(found[..., DIM // 2 :], x[..., DIM // 2 :])
    assert not np.allclose(found[..., : DIM // 2], x[..., : DIM // 2])


def test_interleaved_rotation_turns_neighbours_and_keeps_scores():
    config = rope_config_from_hf({"rope_theta": 1e4, "partial_rotary_factor": 0.5})
    tables = rope_tables(config, DIM, 64, jnp.asarray([0, 3], jnp.int32))
    x = np.random.default_rng(0).normal(size=(2, 1, DIM)).astype(np.float32)
    found = np.asarray(apply_rope(jnp.asarray(x), *tables, interleaved=True))
    for pair, speed in enumerate(plain(1e4, DIM // 2)):
        a, b = x[1, 0, 2 * pair], x[1, 0, 2 * pair + 1]
        cos, sin = math.cos(3 * speed), math.sin(3 * speed)
        assert found[1, 0, pair] == pytest.approx(a * cos - b * sin, abs=1e-6)
        assert found[1, 0, pair + DIM // 4] == pytest.approx(b * cos + a * sin, abs=1e-6)
    np.testing.assert_array_equal(found[..., DIM // 2 :], x[..., DIM // 2 :])
    assert (found[0] ** 2).sum() == pytest.approx((x[0] ** 2).sum(), rel=1e-6)


def test_without_rope_nothing_turns():
    tables = rope_tables(NO_ROPE, DIM, 64, jnp.asarray([0, 3], jnp.int32))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 1, DIM)), jnp.bfloat16)
    np.testing.assert_array_equal(apply_rope(x, *tables), x)
