"""Rows of the embedding as float32, bit for bit as `quants.dequantize` decodes them.

A step of one token needs one row, for which NumPy's two dozen calls take 100 microseconds, whose code and arrays come
from memory behind the weights; compiled code takes a few. It knows tensors and ids, no model.
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


def look_up(embedding: Tensor, ids: NDArray[np.int32]) -> NDArray[np.float32]:
    """The rows `ids` int32[T] of an embedding of D columns: float32[T, D]. The ids must lie within it."""
    decode = _KERNELS.get(embedding.type)
    if decode is None:
        return dequantize(embedding.data[ids], embedding.type)
    block_size, block_bytes = GGML_QUANT_SIZES[embedding.type]
    blocks = embedding.data[ids].reshape(-1, block_bytes)
    values = np.empty((len(blocks), block_size), _F32)
    decode(blocks, values)
    return values.reshape(len(ids), -1)


@inlined
def _scratch() -> Any:
    """(quants, scales, mins, products) of one block of 256, for the unpackers."""
    return np.empty(256, np.uint8), np.empty(16, np.int16), np.empty(16, np.int32), np.empty(256, np.int16)


@kernel
def _decode_with_mins(blocks: Array, out: Array) -> None:
    """Q4_K and Q5_K, which the bytes of a block tell apart."""
    quants, scales, mins, products = _scratch()
    for b in range(len(blocks)):
        if blocks.shape[1] == _Q4_K_BYTES:
            pb.unpack_q4_k(blocks[b], quants, scales, products, mins)
        else:
            pb.unpack_q5_k(blocks[b], quants, scales, products, mins)
        d, dmin = half(blocks[b], 0), half(blocks[b], 2)
        for j in range(8):
            scale, least = _F32(d * _F32(scales[j])), _F32(dmin * _F32(mins[j]))
            for i in range(32 * j, 32 * j + 32):
                out[b, i] = _F32(_F32(scale * _F32(quants[i])) - least)


@kernel
def _decode_q6_k(blocks: Array, out: Array) -> None:
    quants, scales, _, products = _scratch()
    for b in range(len(blocks)):
        pb.unpack_q6_k(blocks[b], quants, scales, products)
        d = half(blocks[b], 208)
        for j in range(16):
            scale = _F32(d * _F32(scales[j]))
            for i in range(16 * j, 16 * j + 16):
                out[b, i] = _F32(scale * _F32(np.int16(quants[i]) - np.int16(32)))


@kernel
def _decode_q8_0(blocks: Array, out: Array) -> None:
    for b in range(len(blocks)):
        d = half(blocks[b], 0)
        for i in range(32):
            out[b, i] = _F32(d * _F32(np.int8(blocks[b, 2 + i])))


# From uint8[B, block bytes] to float32[B, block size], for the types that embeddings have in practice.
_KERNELS: MappingProxyType[GGMLQuantizationType, Any] = MappingProxyType(
    {_T.Q4_K: _decode_with_mins, _T.Q5_K: _decode_with_mins, _T.Q6_K: _decode_q6_k, _T.Q8_0: _decode_q8_0}
)
