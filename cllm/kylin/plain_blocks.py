"""Owns how jitted code reads one native GGUF block: into int16 products of quant and integer scale where
there is an integer dot product, else into float32. It must not know tokens or dot products. The layouts are
those drawn in `quants.py`, the twin that says what each function means. No libm, no fastmath; data is read
byte by byte, so that it may lie at any address.

Two habits make LLVM vectorise these loops. Small loops of literal length would be unrolled before the
vectoriser sees them, so either the long index is the outer one, or the length comes from an array's shape.
And NumPy's scalar types are restored at each step, since numba widens integer expressions to 64 bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from .jit import inlined
from .quants import IQ4_VALUES

Array = np.ndarray[Any, Any]


_U8, _U32, _I16, _F32 = np.uint8, np.uint32, np.int16, np.float32
_IQ4_VALUES = np.array(IQ4_VALUES, np.float32)


@inlined
def f16_to_f32(code: Any) -> Any:
    """The value of an f16 given as uint32, by integer arithmetic: exact, with subnormals, inf and NaN."""
    sign = _U32(_U32(code & _U32(0x8000)) << _U32(16))
    magnitude = _U32(code & _U32(0x7FFF))
    rebias = _U32(0x38000000)  # 127 - 15 in the exponent field
    bits = _U32(_U32(magnitude << _U32(13)) + rebias)
    bits = _U32(bits + (rebias if magnitude >= _U32(0x7C00) else _U32(0)))
    subnormal = _F32(_F32(np.int32(magnitude)) * _F32(2.0**-24)).view(np.uint32)
    return _U32((subnormal if magnitude < _U32(0x400) else bits) | sign).view(np.float32)


@inlined
def half(block: Array, at: int) -> Any:
    """The f16 in bytes `at` and `at + 1` of a block."""
    return f16_to_f32(_U32(_U32(block[at]) | _U32(_U32(block[at + 1]) << _U32(8))))


# Rows of plain floats: uint8[n * bytes] to float32[n].


@inlined
def decode_f32(row: Array, weights: Array) -> None:
    for i in range(weights.shape[0]):
        low = _U32(_U32(row[4 * i]) | _U32(_U32(row[4 * i + 1]) << _U32(8)))
        high = _U32(_U32(row[4 * i + 2]) | _U32(_U32(row[4 * i + 3]) << _U32(8)))
        weights[i] = _U32(low | _U32(high << _U32(16))).view(np.float32)


@inlined
def decode_f16(row: Array, weights: Array) -> None:
    for i in range(weights.shape[0]):
        weights[i] = f16_to_f32(_U32(_U32(row[2 * i]) | _U32(_U32(row[2 * i + 1]) << _U32(8))))


@inlined
def decode_bf16(row: Array, weights: Array) -> None:
    for i in range(weights.shape[0]):
        upper = _U32(_U32(row[2 * i]) | _U32(_U32(row[2 * i + 1]) << _U32(8)))
        weights[i] = _U32(upper << _U32(16)).view(np.float32)


# Blocks of 32 values: products int16[32] are the quants themselves.


@inlined
def unpack_q8_0(block: Array, products: Array) -> None:
    for i in range(products.shape[0]):
        products[i] = np.int8(block[2 + i])


@inlined
def unpack_nibbles(block: Array, at: int, offset: int, products: Array) -> None:
    """Q4_0 and Q4_1: 16 bytes hold 2 x 16 values; `offset` is subtracted."""
    run = products.shape[0] // 2
    for i in range(run):
        code = block[at + i]
        products[i] = _I16(_I16(code & _U8(15)) - _I16(offset))
        products[run + i] = _I16(_I16(code >> _U8(4)) - _I16(offset))


@inlined
def add_fifth_bits(block: Array, at: int, products: Array) -> None:
    """Q5_0 and Q5_1: bit i of the 4 bytes at `at` is worth 16 in value i."""
    bits = _U32(_U32(block[at]) | _U32(_U32(block[at + 1]) << _U32(8)))
    bits = _U32(bits | _U32(_U32(block[at + 2]) << _U32(16)) | _U32(_U32(block[at + 3]) << _U32(24)))
    for i in range(products.shape[0]):
        products[i] = _I16(products[i] + _I16(_I16(_U32(bits >> _U32(i)) & _U32(1)) << _I16(4)))


# Blocks of 256 values. `quants` uint8[256] and `scales` int16[16] are scratch.


@inlined
def _read_nibbles(block: Array, at: int, run: int, quants: Array) -> None:
    """Each run of bytes holds two runs of values, the low nibbles first."""
    for i in range(run):
        for j in range(128 // run):
            code = block[at + run * j + i]
            quants[2 * run * j + i] = code & _U8(15)
            quants[2 * run * j + run + i] = code >> _U8(4)


@inlined
def _read_pairs(block: Array, at: int, quants: Array) -> None:
    """64 bytes of bit pairs: each 32 bytes hold 4 runs of 32 values, the lowest bits first."""
    for i in range(32):
        for j in range(8):
            quants[32 * j + i] = (block[at + 32 * (j // 4) + i] >> _U8(2 * (j % 4))) & _U8(3)


@inlined
def _add_high_bits(block: Array, at: int, weight: int, quants: Array) -> None:
    """32 bytes of single bits: bit j of byte i adds `weight` to value 32 j + i."""
    for i in range(32):
        for j in range(8):
            quants[32 * j + i] |= ((block[at + i] >> _U8(j)) & _U8(1)) * _U8(weight)


@inlined
def _scale(quants: Array, offset: int, scales: Array, run: int, products: Array) -> None:
    """products = (quants - offset) * scales, one scale for each run of values. Fits int16 in every type."""
    for i in range(run):
        for j in range(256 // run):
            products[run * j + i] = _I16(_I16(_I16(quants[run * j + i]) - _I16(offset)) * scales[j])


@inlined
def _read_scales_and_mins(block: Array, scales: Array, mins: Array) -> None:
    """The 8 + 8 six-bit numbers in bytes 4 to 15 of Q4_K and Q5_K."""
    for j in range(4):
        first, second, third = block[4 + j], block[8 + j], block[12 + j]
        scales[j] = first & _U8(63)
        mins[j] = second & _U8(63)
        scales[4 + j] = (third & _U8(15)) | ((first >> _U8(6)) << _U8(4))
        mins[4 + j] = (third >> _U8(4)) | ((second >> _U8(6)) << _U8(4))


@inlined
def unpack_q4_k(block: Array, quants: Array, scales: Array, products: Array, mins: Array) -> None:
    _read_scales_and_mins(block, scales, mins)
    _read_nibbles(block, 16, 32, quants)
    _scale(quants, 0, scales, 32, products)


@inlined
def unpack_q5_k(block: Array, quants: Array, scales: Array, products: Array, mins: Array) -> None:
    _read_scales_and_mins(block, scales, mins)
    _read_nibbles(block, 48, 32, quants)
    _add_high_bits(block, 16, 16, quants)
    _scale(quants, 0, scales, 32, products)


@inlined
def unpack_q6_k(block: Array, quants: Array, scales: Array, products: Array) -> None:
    for j in range(16):
        scales[j] = np.int8(block[192 + j])
    _read_nibbles(block, 0, 64, quants)
    for i in range(32):
        for j in range(8):
            pair = (block[128 + 32 * (j // 4) + i] >> _U8(2 * (j % 4))) & _U8(3)
            quants[32 * j + i] |= pair << _U8(4)
    _scale(quants, 32, scales, 16, products)


# Types without an integer dot product: float32[256] (IQ4_NL: [32]), each operation as in `quants.py`.


@inlined
def decode_q2_k(block: Array, quants: Array, weights: Array) -> None:
    d, dmin = half(block, 80), half(block, 82)
    _read_pairs(block, 16, quants)
    for j in range(16):
        scale = d * _F32(block[j] & _U8(15))
        minimum = dmin * _F32(block[j] >> _U8(4))
        for i in range(16):
            weights[16 * j + i] = scale * _F32(quants[16 * j + i]) - minimum


@inlined
def decode_q3_k(block: Array, quants: Array, weights: Array) -> None:
    d = half(block, 108)
    _read_pairs(block, 32, quants)
    _add_high_bits(block, 0, 4, quants)
    for j in range(16):
        low = (block[96 + j % 8] >> _U8(4 * (j // 8))) & _U8(15)
        high = (block[104 + j % 4] >> _U8(2 * (j // 4))) & _U8(3)
        scale = d * _F32(np.int32(low | (high << _U8(4))) - 32)
        for i in range(16):
            weights[16 * j + i] = scale * _F32(np.int32(quants[16 * j + i]) - 4)


@inlined
def decode_iq4_nl(block: Array, weights: Array) -> None:
    d = half(block, 0)
    for i in range(16):
        weights[i] = d * _IQ4_VALUES[block[2 + i] & _U8(15)]
        weights[16 + i] = d * _IQ4_VALUES[block[2 + i] >> _U8(4)]


@inlined
def decode_iq4_xs(block: Array, weights: Array) -> None:
    d = half(block, 0)
    for j in range(8):
        low = (block[4 + j // 2] >> _U8(4 * (j % 2))) & _U8(15)
        high = (block[2 + j // 4] >> _U8(2 * (j % 4))) & _U8(3)
        scale = d * _F32(np.int32(low | (high << _U8(4))) - 32)
        for i in range(16):
            code = block[8 + 16 * j + i]
            weights[32 * j + i] = scale * _IQ4_VALUES[code & _U8(15)]
            weights[32 * j + 16 + i] = scale * _IQ4_VALUES[code >> _U8(4)]
