"""What lies between the products of a decoder layer, on rows [first, end) of arrays; see `native_cpu`."""

from __future__ import annotations

import numpy as np
from numba import njit

from pallas_kernels.common.cpu_values import INLINE, OPTIONS, load, store, store_as
from pallas_kernels.matmul.tile import COLUMNS
from pallas_kernels.paged_attention.native_cpu_block import exp

SILU, GELU_TANH, GELU, RELU = range(4)


@njit(**OPTIONS)
def normalise(x, scale, eps, out, first, end):
    """out = x / rms(x) * scale, rounded as x is."""
    width = x.shape[1]
    for i in range(first, end):
        total = np.float32(0)
        for j in range(width):
            value = load(x[i, j])
            total += value * value
        inverse = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
        for j in range(width):
            store_as(x[i, j], out, (i, j), load(x[i, j]) * inverse * load(scale[j]))


@njit(**OPTIONS)
def rotate(x, i, cos, sin):
    """Turns the leading dimensions of every head of token `i` of x [T, N, D] by cos, sin [R / 2], in place."""
    half = cos.shape[0]
    for head in range(x.shape[1]):
        for j in range(half):
            one, two = load(x[i, head, j]), load(x[i, head, half + j])
            store(x, (i, head, j), one * cos[j] - two * sin[j])
            store(x, (i, head, half + j), two * cos[j] + one * sin[j])


@njit(**OPTIONS)
def keep(x, i, pool, layer, page, part, offset):
    """Writes token `i` of x [T, K, D] to its place in the pool."""
    for head in range(x.shape[1]):
        for j in range(x.shape[2]):
            store(pool, (layer, page, part, head, offset, j), load(x[i, head, j]))


@njit(**INLINE)
def _sigmoid(x):
    e = exp(-abs(x))
    return (np.float32(1) if x >= 0 else e) / (np.float32(1) + e)


@njit(**INLINE)
def _erf(x):
    """To 2e-7: Abramowitz and Stegun 7.1.26."""
    a = abs(x)
    t = np.float32(1) / (np.float32(1) + np.float32(0.3275911) * a)
    p = np.float32(1.061405429)
    p = p * t - np.float32(1.453152027)
    p = p * t + np.float32(1.421413741)
    p = p * t - np.float32(0.284496736)
    p = p * t + np.float32(0.254829592)
    y = np.float32(1) - p * t * exp(-a * a)
    return y if x >= 0 else -y


@njit(**OPTIONS)
def activate(kind, x):
    """Makes `x` `act(x)` in float32[COLUMNS]; `kind` is one of the constants above."""
    if kind == SILU:
        for j in range(COLUMNS):
            x[j] *= _sigmoid(x[j])
    elif kind == GELU_TANH:
        for j in range(COLUMNS):
            # (1 + tanh(u)) / 2 is sigmoid(2 u)
            u = np.float32(1.5957691216) * (x[j] + np.float32(0.044715) * x[j] * x[j] * x[j])
            x[j] *= _sigmoid(u)
    elif kind == GELU:
        for j in range(COLUMNS):
            x[j] *= np.float32(0.5) * (np.float32(1) + _erf(x[j] * np.float32(0.70710678)))
    else:
        for j in range(COLUMNS):
            x[j] = max(x[j], np.float32(0))
