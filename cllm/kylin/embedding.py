"""Rows of the embedding as float32, bit for bit as `quants.dequantize` decodes them.

A step of one token needs one row, for which NumPy's two dozen calls take 100 microseconds, whose code and arrays come
from memory behind the weights; compiled code takes a few. It knows tensors and ids, no model.
"""

from __future__ import annotations

from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from . import plain_blocks as pb
from .gguf import Tensor
from .jit import inlined, native_function
from .native import call_native, carray, pointer
from .plain_blocks import half
from .quants import dequantize

_F32 = np.float32
_T = GGMLQuantizationType
_Q4_K_BYTES = GGML_QUANT_SIZES[_T.Q4_K][1]


class Embedding:
    """The rows of an embedding, by token id. Its decoder is compiled at first use."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.is_compiled = tensor.type in _DECODERS

    @cached_property
    def operands(self) -> NDArray[np.int64]:
        """int64[3] for `put_rows`: the decoder's address, the rows', and bytes of a row. 0 for a type that is not
        compiled."""
        if not self.is_compiled:
            return np.zeros(3, np.int64)
        data = self._tensor.data
        return np.array([self._decoder().address, data.ctypes.data, data.shape[1]], np.int64)

    def rows(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Those of `ids` int32[T], which must lie within it: float32[T, D]."""
        if not self.is_compiled:
            return dequantize(self._tensor.data[ids], self._tensor.type)
        ids, out = np.ascontiguousarray(ids, np.int32), np.empty((len(ids), self._tensor.shape[1]), _F32)
        _, data, row_bytes = self.operands.tolist()
        self._decoder().ctypes(data, row_bytes, ids.ctypes.data, len(ids), out.shape[1], out.ctypes.data)
        return out

    def _decoder(self) -> Any:
        return native_function(_DECODERS[self._tensor.type], 6)


@inlined
def put_rows(embedding, ids, width, out_at):  # type: ignore[no-untyped-def]
    """Rows of a compiled type to float32[T, width] at an address. `embedding`: its operands; ids int32[T]."""
    call_native(embedding[0], (embedding[1], embedding[2], ids.ctypes.data, len(ids), width, out_at))


# --- decoders: (address of rows, bytes of one, address of ids int32[T], T, width, address of float32[T, width]) ---


@inlined
def _block(data, row_bytes, row, number, size):  # type: ignore[no-untyped-def]
    return carray(pointer(data + row_bytes * row + size * number), size, np.uint8)


@inlined
def _values(out, width, token, number, count):  # type: ignore[no-untyped-def]
    return carray(pointer(out + 4 * (width * token + count * number)), count, np.float32)


@inlined
def _scratch() -> Any:
    """(quants, scales, mins, products) of one block of 256, for the unpackers."""
    return np.empty(256, np.uint8), np.empty(16, np.int16), np.empty(16, np.int32), np.empty(256, np.int16)


def _decode_with_mins(data, row_bytes, ids_at, num_ids, width, out):  # type: ignore[no-untyped-def]
    """Q4_K and Q5_K, which the bytes of a block tell apart."""
    ids, (quants, scales, mins, products) = carray(pointer(ids_at), num_ids, np.int32), _scratch()
    size = row_bytes // (width // 256)
    for t in range(num_ids):
        for b in range(width // 256):
            block, values = _block(data, row_bytes, ids[t], b, size), _values(out, width, t, b, 256)
            if size == _Q4_K_BYTES:
                pb.unpack_q4_k(block, quants, scales, products, mins)
            else:
                pb.unpack_q5_k(block, quants, scales, products, mins)
            d, dmin = half(block, 0), half(block, 2)
            for j in range(8):
                scale, least = _F32(d * _F32(scales[j])), _F32(dmin * _F32(mins[j]))
                for i in range(32 * j, 32 * j + 32):
                    values[i] = _F32(_F32(scale * _F32(quants[i])) - least)


def _decode_q6_k(data, row_bytes, ids_at, num_ids, width, out):  # type: ignore[no-untyped-def]
    ids, (quants, scales, _, products) = carray(pointer(ids_at), num_ids, np.int32), _scratch()
    for t in range(num_ids):
        for b in range(width // 256):
            block, values = _block(data, row_bytes, ids[t], b, 210), _values(out, width, t, b, 256)
            pb.unpack_q6_k(block, quants, scales, products)
            d = half(block, 208)
            for j in range(16):
                scale = _F32(d * _F32(scales[j]))
                for i in range(16 * j, 16 * j + 16):
                    values[i] = _F32(scale * _F32(np.int16(quants[i]) - np.int16(32)))


def _decode_q8_0(data, row_bytes, ids_at, num_ids, width, out):  # type: ignore[no-untyped-def]
    ids = carray(pointer(ids_at), num_ids, np.int32)
    for t in range(num_ids):
        for b in range(width // 32):
            block, values = _block(data, row_bytes, ids[t], b, 34), _values(out, width, t, b, 32)
            d = half(block, 0)
            for i in range(32):
                values[i] = _F32(d * _F32(np.int8(block[2 + i])))


# Of the types that embeddings have in practice.
_DECODERS: MappingProxyType[GGMLQuantizationType, Any] = MappingProxyType(
    {_T.Q4_K: _decode_with_mins, _T.Q5_K: _decode_with_mins, _T.Q6_K: _decode_q6_k, _T.Q8_0: _decode_q8_0}
)
