"""Rows of the embedding as float32, bit for bit as `quants.dequantize` decodes them.

A step of one token needs one row, for which NumPy's two dozen calls take 100 microseconds, whose code and arrays come
from memory behind the weights; one call of compiled code takes a few. It knows tensors and ids, no model.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from . import plain_blocks as pb
from .gguf import Tensor
from .jit import inlined, kernel
from .plain_blocks import half
from .quants import dequantize

Array = np.ndarray[Any, Any]

_F32 = np.float32
_T = GGMLQuantizationType
_Q4_K_BYTES = GGML_QUANT_SIZES[_T.Q4_K][1]


class Embedding:
    """The rows of an embedding, by token id."""

    def __init__(self, tensor: Tensor) -> None:
        self._type, self._data, self._width = tensor.type, tensor.data, tensor.shape[1]
        self._decode = _KERNELS.get(tensor.type)

    def rows(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Those of `ids` int32[T], which must lie within it: float32[T, D]."""
        if self._decode is None:
            return dequantize(self._data[ids], self._type)
        out = np.empty((len(ids), self._width), _F32)
        self._decode(self._data, ids, out)
        return out


# Kernels (data uint8[V, bytes of a row], ids int32[T], out float32[T, D]).


@inlined
def _scratch() -> Any:
    """(quants, scales, mins, products) of one block of 256, for the unpackers."""
    return np.empty(256, np.uint8), np.empty(16, np.int16), np.empty(16, np.int32), np.empty(256, np.int16)


@kernel
def _decode_with_mins(data: Array, ids: Array, out: Array) -> None:
    """Q4_K and Q5_K, which the bytes of a block tell apart."""
    quants, scales, mins, products = _scratch()
    num_blocks = out.shape[1] // 256
    size = data.shape[1] // num_blocks
    for t in range(len(ids)):
        for b in range(num_blocks):
            block, values = data[ids[t], size * b : size * (b + 1)], out[t, 256 * b : 256 * (b + 1)]
            if size == _Q4_K_BYTES:
                pb.unpack_q4_k(block, quants, scales, products, mins)
            else:
                pb.unpack_q5_k(block, quants, scales, products, mins)
            d, dmin = half(block, 0), half(block, 2)
            for j in range(8):
                scale, least = _F32(d * _F32(scales[j])), _F32(dmin * _F32(mins[j]))
                for i in range(32 * j, 32 * j + 32):
                    values[i] = _F32(_F32(scale * _F32(quants[i])) - least)


@kernel
def _decode_q6_k(data: Array, ids: Array, out: Array) -> None:
    quants, scales, _, products = _scratch()
    for t in range(len(ids)):
        for b in range(out.shape[1] // 256):
            block, values = data[ids[t], 210 * b : 210 * (b + 1)], out[t, 256 * b : 256 * (b + 1)]
            pb.unpack_q6_k(block, quants, scales, products)
            d = half(block, 208)
            for j in range(16):
                scale = _F32(d * _F32(scales[j]))
                for i in range(16 * j, 16 * j + 16):
                    values[i] = _F32(scale * _F32(np.int16(quants[i]) - np.int16(32)))


@kernel
def _decode_q8_0(data: Array, ids: Array, out: Array) -> None:
    for t in range(len(ids)):
        for b in range(out.shape[1] // 32):
            block, values = data[ids[t], 34 * b : 34 * (b + 1)], out[t, 32 * b : 32 * (b + 1)]
            d = half(block, 0)
            for i in range(32):
                values[i] = _F32(d * _F32(np.int8(block[2 + i])))


# Of the types that embeddings have in practice.
_KERNELS: MappingProxyType[GGMLQuantizationType, Any] = MappingProxyType(
    {_T.Q4_K: _decode_with_mins, _T.Q5_K: _decode_with_mins, _T.Q6_K: _decode_q6_k, _T.Q8_0: _decode_q8_0}
)
