"""GGUF block formats as integers, scales and minima: the file's own numbers, nothing rounded.

After the `dequantize_blocks` of the gguf package; what it multiplies out is kept apart here. A value is
`scale * integer + minimum`, in float32 what the package gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import Q4_K

from pallas_kernels.matmul import Blocks, QuantisedForm

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]

FORMS = {
    GGMLQuantizationType.Q4_0: QuantisedForm(4),
    GGMLQuantizationType.Q4_1: QuantisedForm(4, has_minimum=True),
    GGMLQuantizationType.Q5_0: QuantisedForm(8),
    GGMLQuantizationType.Q5_1: QuantisedForm(8, has_minimum=True),
    GGMLQuantizationType.Q8_0: QuantisedForm(8),
    # Their scales are a float16 times an integer, which float32 holds.
    GGMLQuantizationType.Q4_K: QuantisedForm(4, has_minimum=True, scale="float32"),
    GGMLQuantizationType.Q5_K: QuantisedForm(8, has_minimum=True, scale="float32"),
    GGMLQuantizationType.Q6_K: QuantisedForm(8, block=16, scale="float32"),
}
"""The formats that can be kept quantised, and the form of each."""


def unpack(data: _Bytes, quantisation: GGMLQuantizationType) -> Blocks:
    """The blocks of rows of a tensor.

    Args:
      data: uint8[rows, bytes of a row].
      quantisation: a key of `FORMS`.
    """
    block_bytes = GGML_QUANT_SIZES[quantisation][1]
    found = _UNPACK[quantisation](data.reshape(-1, block_bytes))
    rows = data.shape[0]
    integers, scales, minima = (None if each is None else each.reshape(rows, -1) for each in found)
    assert integers is not None
    assert scales is not None
    return Blocks(integers, scales, minima)


def _halves(data: _Bytes, first: int) -> np.ndarray[Any, Any]:
    """float16[N]: the number at byte `first` of each block."""
    return np.ascontiguousarray(data[:, first : first + 2]).view(np.float16)[:, 0]


def _nibbles(data: _Bytes, run: int) -> _Bytes:
    """[N, 2 * bytes]: of every `run` bytes the low halves, then the high ones."""
    runs = data.reshape(data.shape[0], -1, 1, run) >> np.array([0, 4], np.uint8)[:, None]
    return (runs & np.uint8(15)).reshape(data.shape[0], -1)


def _fifth_bits(data: _Bytes) -> _Bytes:
    """[N, 32] of 0 or 16: the bits of 4 bytes."""
    return np.unpackbits(data, axis=1, bitorder="little") << np.uint8(4)


def _q4_0(data: _Bytes) -> Blocks:
    return Blocks(_nibbles(data[:, 2:], 16).view(np.int8) - np.int8(8), _halves(data, 0))


def _q4_1(data: _Bytes) -> Blocks:
    return Blocks(_nibbles(data[:, 4:], 16).view(np.int8), _halves(data, 0), _halves(data, 2))


def _q5_0(data: _Bytes) -> Blocks:
    integers = _nibbles(data[:, 6:], 16) | _fifth_bits(data[:, 2:6])
    return Blocks(integers.view(np.int8) - np.int8(16), _halves(data, 0))


def _q5_1(data: _Bytes) -> Blocks:
    integers = _nibbles(data[:, 8:], 16) | _fifth_bits(data[:, 4:8])
    return Blocks(integers.view(np.int8), _halves(data, 0), _halves(data, 2))


def _q8_0(data: _Bytes) -> Blocks:
    return Blocks(np.ascontiguousarray(data[:, 2:]).view(np.int8), _halves(data, 0))


def _k_scales(data: _Bytes) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Scales and minima float32[N, 8] of blocks that begin as Q4_K's do."""
    scales, minima = Q4_K.get_scale_min(np.ascontiguousarray(data[:, 4:16]))
    wide = [_halves(data, first).astype(np.float32)[:, None] for first in (0, 2)]
    return wide[0] * scales.astype(np.float32), -(wide[1] * minima.astype(np.float32))


def _q4_k(data: _Bytes) -> Blocks:
    return Blocks(_nibbles(data[:, 16:], 32).view(np.int8), *_k_scales(data))


def _q5_k(data: _Bytes) -> Blocks:
    # Bit n of the 32 bytes belongs to the n-th 32 values.
    high = data[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]
    fifth = ((high & np.uint8(1)) << np.uint8(4)).reshape(data.shape[0], -1)
    return Blocks((_nibbles(data[:, 48:], 32) | fifth).view(np.int8), *_k_scales(data))


def _q6_k(data: _Bytes) -> Blocks:
    # Two bits of every 32 bytes at a time, lowest first.
    high = data[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    integers = _nibbles(data[:, :128], 64) | ((high & np.uint8(3)) << np.uint8(4)).reshape(data.shape[0], -1)
    scales = np.ascontiguousarray(data[:, 192:208]).view(np.int8).astype(np.float32)
    return Blocks(integers.view(np.int8) - np.int8(32), _halves(data, 208).astype(np.float32)[:, None] * scales)


_UNPACK: dict[GGMLQuantizationType, Callable[[_Bytes], Blocks]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
}
