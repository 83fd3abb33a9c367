"""Norms against their formula, and what bfloat16 must not lose."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxserve.models.norm import layer_norm, rms_norm


def test_norm_divides_by_the_root_mean_square_and_multiplies():
    found = rms_norm(jnp.asarray([[3.0, 4.0]]), jnp.asarray([1.0, 2.0]), 0.0)
    np.testing.assert_allclose(found, np.array([[3.0, 8.0]]) / np.sqrt(12.5), rtol=1e-6)


def test_one_is_added_to_a_bfloat16_scale_in_float32():
    scale = 2.0**-9  # 1 + scale has no bfloat16
    found = rms_norm(jnp.ones((1, 4)), jnp.full(4, scale, jnp.bfloat16), 0.0, offset=True)
    np.testing.assert_array_equal(found, np.full((1, 4), 1 + scale, np.float32))


def test_layer_norm_takes_the_mean_off_and_adds_its_bias():
    found = layer_norm(jnp.asarray([[1.0, 3.0, 8.0]]), jnp.asarray([1.0, 2.0, 1.0]), jnp.asarray([0.0, 5.0, 1.0]), 0.0)
    np.testing.assert_allclose(found, np.array([[-3.0, -2.0, 4.0]]) / np.sqrt(26 / 3) + [[0, 5, 1]], rtol=1e-6)


def test_layer_norm_of_bfloat16_is_computed_in_float32():
    # Far from 0 the mean of squares would lose the variance in bfloat16, and in float32 taken apart.
    found = layer_norm(jnp.asarray([[256.0, 258.0]], jnp.bfloat16), jnp.ones(2), jnp.zeros(2), 1e-5)
    np.testing.assert_array_equal(found, jnp.asarray([[-1.0, 1.0]], jnp.bfloat16))
