"""What `native_cpu` does with a block of keys or values: four queries at a time, all in the nearest caches."""

from __future__ import annotations

import numpy as np
from numba import njit

from pallas_kernels.common.cpu_values import INLINE, OPTIONS, bits_to_float, load, prefetch

KEY_BLOCK = 128
"""Keys whose scores are held at once."""


@njit(**INLINE)
def exp(x: float) -> float:
    """exp(x) of x <= 0 to 1e-7; 0 below -87. After Cephes' expf."""
    low = x < np.float32(-87.0)
    if low:
        x = np.float32(-87.0)
    n = np.int32(x * np.float32(1.4426950408889634) - np.float32(0.5))
    f = x - np.float32(n) * np.float32(0.693359375) + np.float32(n) * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * f + np.float32(1.3981999507e-3)
    p = p * f + np.float32(8.3334519073e-3)
    p = p * f + np.float32(4.1665795894e-2)
    p = p * f + np.float32(1.6666665459e-1)
    p = p * f + np.float32(5.0000001201e-1)
    p = p * f * f + f + np.float32(1.0)
    power = bits_to_float(np.uint32((n + np.int32(127)) << np.int32(23)))
    return np.float32(0) if low else p * power


@njit(**OPTIONS | {"fastmath": True})  # without NaN in mind the comparison is one instruction
def largest(row):
    """Largest of KEY_BLOCK numbers."""
    top = row[0]
    for j in range(KEY_BLOCK):
        top = max(top, row[j])
    return top


@njit(**OPTIONS)
def exponentials(row, top):
    """Makes x exp(x - top) in a row of KEY_BLOCK; returns the sum."""
    total = np.float32(0)
    for j in range(KEY_BLOCK):
        e = exp(row[j] - top)
        row[j] = e
        total += e
    return total


@njit(**OPTIONS)
def score_keys(q, q0, k, count, out):
    """out[q0 + i, j] = q[q0 + i] . k[j] for four queries and the first `count` keys, rounded up to fours."""
    j = 0
    while j < count:
        a00 = a01 = a02 = a03 = a10 = a11 = a12 = a13 = np.float32(0)
        a20 = a21 = a22 = a23 = a30 = a31 = a32 = a33 = np.float32(0)
        for d in range(q.shape[1]):
            k0, k1, k2, k3 = k[j, d], k[j + 1, d], k[j + 2, d], k[j + 3, d]
            x = q[q0, d]
            a00 += x * k0
            a01 += x * k1
            a02 += x * k2
            a03 += x * k3
            x = q[q0 + 1, d]
            a10 += x * k0
            a11 += x * k1
            a12 += x * k2
            a13 += x * k3
            x = q[q0 + 2, d]
            a20 += x * k0
            a21 += x * k1
            a22 += x * k2
            a23 += x * k3
            x = q[q0 + 3, d]
            a30 += x * k0
            a31 += x * k1
            a32 += x * k2
            a33 += x * k3
        out[q0, j], out[q0, j + 1], out[q0, j + 2], out[q0, j + 3] = a00, a01, a02, a03
        out[q0 + 1, j], out[q0 + 1, j + 1], out[q0 + 1, j + 2], out[q0 + 1, j + 3] = a10, a11, a12, a13
        out[q0 + 2, j], out[q0 + 2, j + 1], out[q0 + 2, j + 2], out[q0 + 2, j + 3] = a20, a21, a22, a23
        out[q0 + 3, j], out[q0 + 3, j + 1], out[q0 + 3, j + 2], out[q0 + 3, j + 3] = a30, a31, a32, a33
        j += 4


@njit(**OPTIONS)
def add_values(p, q0, v, count, sums):
    """sums[q0 + i] += p[q0 + i, j] * v[j] for four queries and the first `count` values, rounded up to fours."""
    j = 0
    while j < count:
        p00, p01, p02, p03 = p[q0, j], p[q0, j + 1], p[q0, j + 2], p[q0, j + 3]
        p10, p11, p12, p13 = p[q0 + 1, j], p[q0 + 1, j + 1], p[q0 + 1, j + 2], p[q0 + 1, j + 3]
        p20, p21, p22, p23 = p[q0 + 2, j], p[q0 + 2, j + 1], p[q0 + 2, j + 2], p[q0 + 2, j + 3]
        p30, p31, p32, p33 = p[q0 + 3, j], p[q0 + 3, j + 1], p[q0 + 3, j + 2], p[q0 + 3, j + 3]
        for d in range(sums.shape[1]):
            v0, v1, v2, v3 = v[j, d], v[j + 1, d], v[j + 2, d], v[j + 3, d]
            sums[q0, d] += p00 * v0 + p01 * v1 + p02 * v2 + p03 * v3
            sums[q0 + 1, d] += p10 * v0 + p11 * v1 + p12 * v2 + p13 * v3
            sums[q0 + 2, d] += p20 * v0 + p21 * v1 + p22 * v2 + p23 * v3
            sums[q0 + 3, d] += p30 * v0 + p31 * v1 + p32 * v2 + p33 * v3
        j += 4


@njit(**OPTIONS)
def _copy(source, target):
    for i in range(target.shape[0]):
        target[i] = load(source[i])


@njit(**OPTIONS)
def read_block(pool, layer, pages, part, head, first, start, stop, block):
    """Tokens [start, stop) of a block that begins at token `first`, as float32; zeros for the others."""
    page_size = pool.shape[4]
    for j in range(start):
        for d in range(block.shape[1]):
            block[j, d] = np.float32(0)
    j = start
    while j < stop:
        page, slot = (first + j) // page_size, (first + j) % page_size
        source = pool[layer, pages[page], part, head]
        count = min(page_size - slot, stop - j)
        _copy(source[slot : slot + count].reshape(-1), block[j : j + count].reshape(-1))
        j += count
    for j in range(stop, KEY_BLOCK):
        for d in range(block.shape[1]):
            block[j, d] = np.float32(0)


@njit(**OPTIONS)
def fetch_block(pool, layer, pages, part, head, first, end):
    """Asks for the pages of tokens [first, end), which memory gives while another block is computed."""
    page_size = pool.shape[4]
    for page in range(first // page_size, (end + page_size - 1) // page_size):
        piece = pool[layer, pages[page], part, head]
        for line in range(0, piece.nbytes, 64):
            prefetch(piece.ctypes.data + line)
