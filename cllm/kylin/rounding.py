"""Rounds activations into the records that the fast matrix products read. The rounding itself is that of
`quants.py`, value for value; only where the results lie is decided here (drawn in `tiles.py`). It must not
know weights, models or threads."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from .jit import inlined, intrinsic, native_function
from .native import carray, pointer
from .plain import find_largest, round_to_half
from .plain_blocks import f16_to_f32
from .tiles import K_SCALE, K_SUMS_16, K_SUMS_32, PAIR_SCALES, PAIR_SUMS, RECORD_BYTES, RECORD_VALUES

Array = np.ndarray[Any, Any]
_F32, _I32, _U32 = np.float32, np.int32, np.uint32
_LARGEST_FINITE = np.finfo(np.float32).max
_ROUND = np.float32(1.5 * 2**23)  # (x + _ROUND) - _ROUND is x rounded to an integer, ties to even
_EVEN_BYTES = np.uint64(0x00FF00FF00FF00FF)
_K_BYTES, _PAIR_BYTES = RECORD_BYTES["q8_K"], RECORD_BYTES["q8_0"]

# Numbers of the roundings in compiled code. q8_0 and q8_1 differ in ggml only: here both keep the sums.
KIND_OF = {"q8_K": 0, "q8_0": 1, "q8_1": 1, "f16": 2, "bf16": 3, "none": 4}


def row_bytes(rounding: str, num_columns: int) -> int:
    """Bytes of one token's records."""
    return -(-num_columns // RECORD_VALUES[rounding]) * RECORD_BYTES[rounding]


def round_rows(x: NDArray[np.float32], rounding: str) -> NDArray[np.uint8]:
    """The records of float32[T, n]: uint8[T, row_bytes]."""
    x = np.ascontiguousarray(x)
    out = np.empty((len(x), row_bytes(rounding, x.shape[1])), np.uint8)
    run = compiled_rounding(KIND_OF[rounding]).ctypes
    run(x.ctypes.data, x.shape[1], out.ctypes.data, out.shape[1], 0, len(x))
    return out


@cache
def compiled_rounding(kind: int) -> Any:
    """The compiled rounding of a kind, with `address` and `ctypes`: a function of six int64.

    (address of float32[T, n], n, address of records uint8[T, out_bytes], out_bytes, begin, end): the rows
    begin <= t < end. It is called by its address, so that a model compiles the kinds that it uses, once.
    """
    function = (_round_q8_k, _round_q8_0, _round_to_f16, _round_to_bf16, _copy)[kind]
    return native_function(function, 6)


@intrinsic
def call_rounding(typing_context, address, x, width, out, out_bytes, begin, end):  # type: ignore[no-untyped-def]
    """Calls `compiled_rounding` by its address."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 6)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 7), generate


def _round_q8_k(x_at, width, out_at, out_bytes, begin, end):  # type: ignore[no-untyped-def]
    x = carray(pointer(x_at), (end, width), np.float32)
    out = carray(pointer(out_at), (end, out_bytes), np.uint8)
    words = carray(pointer(out_at), (end, out_bytes // 8), np.uint64)
    shorts = carray(pointer(out_at), (end, out_bytes // 2), np.int16)
    floats = carray(pointer(out_at), (end, out_bytes // 4), np.float32)
    for t in range(begin, end):
        for b in range(width // 256):
            largest = find_largest(x, t, 256 * b, 256 * b + 256)
            inverse = _F32(-127) / largest
            scale = _F32(1) / inverse
            if not abs(largest) <= _LARGEST_FINITE:
                inverse, scale = _F32(0), _F32(np.nan)
            elif not abs(inverse) <= _LARGEST_FINITE:
                inverse, scale = _F32(0), _F32(0)
            record = _K_BYTES * b
            floats[t, (record + K_SCALE) // 4] = scale
            _round_block(x, t, 256 * b, 256, inverse, out, record)
            sums_16, sums_32 = (record + K_SUMS_16) // 2, (record + K_SUMS_32) // 2
            for j in range(8):
                first, second = _sum(words, t, record + 32 * j), _sum(words, t, record + 32 * j + 16)
                shorts[t, sums_16 + 2 * j] = first
                shorts[t, sums_16 + 2 * j + 1] = second
                shorts[t, sums_32 + j] = first + second


def _round_q8_0(x_at, width, out_at, out_bytes, begin, end):  # type: ignore[no-untyped-def]
    x = carray(pointer(x_at), (end, width), np.float32)
    out = carray(pointer(out_at), (end, out_bytes), np.uint8)
    words = carray(pointer(out_at), (end, out_bytes // 8), np.uint64)
    ints = carray(pointer(out_at), (end, out_bytes // 4), np.int32)
    floats = carray(pointer(out_at), (end, out_bytes // 4), np.float32)
    num_blocks = width // 32
    for t in range(begin, end):
        if num_blocks % 2:  # half a record stays empty
            last = _PAIR_BYTES * (num_blocks // 2)
            for i in range(last, last + _PAIR_BYTES):
                out[t, i] = 0
        for b in range(num_blocks):
            amax = abs(find_largest(x, t, 32 * b, 32 * b + 32))
            inverse = _F32(127) / amax
            scale = _F32(np.nan)
            if amax <= _LARGEST_FINITE:
                scale = round_to_half(amax / _F32(127))
            if not (inverse <= _LARGEST_FINITE and scale <= _LARGEST_FINITE):
                inverse = _F32(0)
            record, block = _PAIR_BYTES * (b // 2), b % 2
            floats[t, (record + PAIR_SCALES) // 4 + block] = scale
            begin_at = record + 32 * block
            _round_block(x, t, 32 * b, 32, inverse, out, begin_at)
            ints[t, (record + PAIR_SUMS) // 4 + block] = _sum(words, t, begin_at) + _sum(
                words, t, begin_at + 16
            )


def _round_to_f16(x_at, width, out_at, out_bytes, begin, end):  # type: ignore[no-untyped-def]
    x = carray(pointer(x_at), (end, width), np.float32)
    out = carray(pointer(out_at), (end, out_bytes // 4), np.float32)
    for t in range(begin, end):
        for i in range(width):
            out[t, i] = f16_to_f32(to_half(x[t, i]))
        for i in range(width, (width + 63) // 64 * 64):
            out[t, i] = _F32(0)


def _round_to_bf16(x_at, width, out_at, out_bytes, begin, end):  # type: ignore[no-untyped-def]
    x = carray(pointer(x_at), (end, width), np.float32)
    out = carray(pointer(out_at), (end, out_bytes // 4), np.float32)
    for t in range(begin, end):
        for i in range(width):
            out[t, i] = _to_bf16(x[t, i])
        for i in range(width, (width + 63) // 64 * 64):
            out[t, i] = _F32(0)


def _copy(x_at, width, out_at, out_bytes, begin, end):  # type: ignore[no-untyped-def]
    x = carray(pointer(x_at), (end, width), np.float32)
    out = carray(pointer(out_at), (end, out_bytes // 4), np.float32)
    for t in range(begin, end):
        for i in range(width):
            out[t, i] = x[t, i]
        for i in range(width, (width + 63) // 64 * 64):
            out[t, i] = _F32(0)


@inlined
def _round_block(x: Array, t: int, begin: int, count: int, inverse: Any, out: Array, at: int) -> None:
    """int8 rint(x * inverse) of `count` values. An inverse of 0 stands for a block without values."""
    source, target = x[t, begin : begin + count], out[t, at : at + count]
    if inverse == _F32(0):
        target[:] = np.uint8(0)
        return
    for i in range(count):
        target[i] = np.uint8(np.int8((source[i] * inverse + _ROUND) - _ROUND))


@inlined
def _sum(words: Array, t: int, begin: int) -> Any:
    """The sum of the 16 int8 from byte `begin` on, in the uint64 that hold them: eight bytes at once."""
    total = np.uint64(0)
    for word in range(begin // 8, begin // 8 + 2):
        biased = np.uint64(words[t, word] ^ np.uint64(0x8080808080808080))  # value + 128, unsigned
        total += (biased & _EVEN_BYTES) + ((biased >> np.uint64(8)) & _EVEN_BYTES)
    # The product's top 16 bits are the sum of the four 16-bit parts.
    return _I32(_I32((total * np.uint64(0x0001000100010001)) >> np.uint64(48)) - _I32(16 * 128))


@inlined
def to_half(x: Any) -> Any:
    """The f16 nearest to a float32, ties to even, as the low bits of a uint32. Too large is infinite."""
    bits = _F32(x).view(np.uint32)
    sign = _U32(_U32(bits >> _U32(16)) & _U32(0x8000))
    magnitude = _U32(bits & _U32(0x7FFFFFFF))
    odd = _U32(_U32(magnitude >> _U32(13)) & _U32(1))
    normal = _U32(_U32(_U32(magnitude + _U32(0xFFF)) + odd) - _U32(112 << 23)) >> _U32(13)
    normal = min(_U32(normal), _U32(0x7C00))
    # The step of floats from 0.5 on is that of f16 subnormals.
    subnormal = _F32(_U32(magnitude).view(np.float32) + _F32(0.5)).view(np.uint32)
    subnormal = _U32(_U32(subnormal) - _U32(0x3F000000))
    half = _U32(subnormal) if magnitude < _U32(0x38800000) else _U32(normal)
    return _U32(sign | (_U32(0x7E00) if magnitude > _U32(0x7F800000) else half))


@inlined
def _to_bf16(x: Any) -> Any:
    """x rounded to the nearest bf16, ties to even, as float32."""
    bits = _F32(x).view(np.uint32)
    rounded = _U32(_U32(bits + _U32(0x7FFF)) + _U32(_U32(bits >> _U32(16)) & _U32(1)))
    return _U32(rounded & _U32(0xFFFF0000)).view(np.float32) if x == x else _F32(np.nan)
