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
from .ops import TO_NEAREST
from .plain import find_largest, round_to_half
from .plain_blocks import f16_to_f32
from .rounding_simd import round_q8_k
from .tiles import (
    BLOCK_TOKENS,
    PAIR_SCALES,
    PAIR_SUMS,
    RECORD_BYTES,
    RECORD_VALUES,
)

Array = np.ndarray[Any, Any]
_F32, _I32, _U32 = np.float32, np.int32, np.uint32
_LARGEST_FINITE = np.finfo(np.float32).max
_EVEN_BYTES = np.uint64(0x00FF00FF00FF00FF)
_K_BYTES, _PAIR_BYTES, _FLOAT_BYTES = (RECORD_BYTES[rounding] for rounding in ("q8_K", "q8_0", "none"))

# Numbers of the roundings in compiled code. q8_0 and q8_1 differ in ggml only: here both keep the sums.
KIND_OF = {"q8_K": 0, "q8_0": 1, "q8_1": 1, "f16": 2, "bf16": 3, "none": 4}


def records_shape(rounding: str, num_tokens: int, num_columns: int) -> tuple[int, int, int, int]:
    """The shape of so many tokens' records: [blocks of tokens, records, 8, bytes]. Drawn in `tiles.py`."""
    num_records = -(-num_columns // RECORD_VALUES[rounding])
    return -(-num_tokens // BLOCK_TOKENS), num_records, BLOCK_TOKENS, RECORD_BYTES[rounding]


def round_rows(x: NDArray[np.float32], rounding: str) -> NDArray[np.uint8]:
    """The records of float32[T, n], uint8 of `records_shape`. Those of no token are 0."""
    x = np.ascontiguousarray(x)
    out = np.zeros(records_shape(rounding, *x.shape), np.uint8)
    compiled_rounding(KIND_OF[rounding]).ctypes(x.ctypes.data, x.shape[1], out.ctypes.data, 0, len(x))
    return out


@cache
def compiled_rounding(kind: int) -> Any:
    """The compiled rounding of a kind, with `address` and `ctypes`: a function of five int64.

    (address of float32[T, n], n, address of records uint8[blocks, records, 8, bytes], begin, end): the rows
    begin <= t < end. It is called by its address, so that a model compiles the kinds that it uses, once.
    """
    function = (_round_q8_k, _round_q8_0, _round_to_f16, _round_to_bf16, _copy)[kind]
    return native_function(function, 5)


@intrinsic
def call_rounding(typing_context, address, x, width, out, begin, end):  # type: ignore[no-untyped-def]
    """Calls `compiled_rounding` by its address."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 5)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 6), generate


def _round_q8_k(x_at, width, out_at, begin, end):  # type: ignore[no-untyped-def]
    num_records = width // 256
    for t in range(begin, end):
        record_at = _record_at(out_at, num_records, t, 0, _K_BYTES)
        round_q8_k(x_at + 4 * width * t, num_records, record_at, BLOCK_TOKENS * _K_BYTES)


def _round_q8_0(x_at, width, out_at, begin, end):  # type: ignore[no-untyped-def]
    x, num_blocks = carray(pointer(x_at), (end, width), np.float32), width // 32
    num_records = (num_blocks + 1) // 2
    for t in range(begin, end):
        for b in range(2 * num_records):
            at = _record_at(out_at, num_records, t, b // 2, _PAIR_BYTES)
            words = carray(pointer(at + 32 * (b % 2)), 4, np.uint64)
            scales = carray(pointer(at + PAIR_SCALES), 2, np.float32)
            sums = carray(pointer(at + PAIR_SUMS), 2, np.int32)
            if b == num_blocks:  # half a record stays empty
                words[:], scales[1], sums[1] = np.uint64(0), _F32(0), _I32(0)
                continue
            amax = abs(find_largest(x, t, 32 * b, 32 * b + 32))
            inverse = _F32(127) / amax
            scale = _F32(np.nan)
            if amax <= _LARGEST_FINITE:
                scale = round_to_half(amax / _F32(127))
            if not (inverse <= _LARGEST_FINITE and scale <= _LARGEST_FINITE):
                inverse = _F32(0)
            scales[b % 2] = scale
            _round_block(
                x[t, 32 * b : 32 * b + 32], inverse, carray(pointer(at + 32 * (b % 2)), 32, np.uint8)
            )
            sums[b % 2] = _sum(words, 0) + _sum(words, 2)


def _round_to_f16(x_at, width, out_at, begin, end):  # type: ignore[no-untyped-def]
    _round_each(_through_f16, x_at, width, out_at, begin, end)


def _round_to_bf16(x_at, width, out_at, begin, end):  # type: ignore[no-untyped-def]
    _round_each(_to_bf16, x_at, width, out_at, begin, end)


def _copy(x_at, width, out_at, begin, end):  # type: ignore[no-untyped-def]
    _round_each(_as_it_is, x_at, width, out_at, begin, end)


@inlined
def _round_each(convert, x_at, width, out_at, begin, end):  # type: ignore[no-untyped-def]
    """Records of float32: `convert` of each value, and zeros where a row has ended."""
    x, num_records = carray(pointer(x_at), (end, width), np.float32), (width + 63) // 64
    for t in range(begin, end):
        for b in range(num_records):
            out = carray(pointer(_record_at(out_at, num_records, t, b, _FLOAT_BYTES)), 64, np.float32)
            for i in range(64):
                out[i] = convert(x[t, 64 * b + i]) if 64 * b + i < width else _F32(0)


@inlined
def _through_f16(x: Any) -> Any:
    return f16_to_f32(to_half(x))


@inlined
def _as_it_is(x: Any) -> Any:
    return x


@inlined
def _record_at(out_at: Any, num_records: Any, t: Any, b: Any, num_bytes: int) -> Any:
    """The address of record `b` of token `t`."""
    return out_at + ((t // BLOCK_TOKENS * num_records + b) * BLOCK_TOKENS + t % BLOCK_TOKENS) * num_bytes


@inlined
def _round_block(source: Array, inverse: Any, target: Array) -> None:
    """int8 rint(x * inverse) of each value. An inverse of 0 stands for a block without values."""
    if inverse == _F32(0):
        target[:] = np.uint8(0)
        return
    for i in range(target.shape[0]):
        target[i] = np.uint8(np.int8((source[i] * inverse + TO_NEAREST) - TO_NEAREST))


@inlined
def _sum(words: Array, begin: int) -> Any:
    """The sum of 16 int8, in the two uint64 from `begin` on that hold them: eight bytes at once."""
    total = np.uint64(0)
    for word in range(begin, begin + 2):
        biased = np.uint64(words[word] ^ np.uint64(0x8080808080808080))  # value + 128, unsigned
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
