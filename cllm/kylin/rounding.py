"""Rounds activations into the records that the fast matrix products read. The rounding itself is that of
`quants.py`, value for value; only where the results lie is decided here (drawn in `tiles.py`). It must not
know weights, models or threads."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .jit import inlined, native_function
from .native import carray, pointer
from .plain_blocks import f16_to_f32
from .rounding_simd import round_q8_0, round_q8_k
from .tiles import BLOCK_TOKENS, RECORD_BYTES, RECORD_VALUES

_F32, _U32 = np.float32, np.uint32
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
    round_ = compiled_rounding(KIND_OF[rounding]).ctypes
    round_(x.ctypes.data, x.strides[0], x.shape[1], out.ctypes.data, 0, len(x), 0, x.shape[1])
    return out


def compiled_rounding(kind: int) -> Any:
    """The compiled rounding of a kind, with `address` and `ctypes`: a function of eight int64.

    (address of float32, stride in bytes, n, address of records uint8[blocks, records, 8, bytes], begin, end, first,
    last): of the rows begin <= t < end of [T, n] the columns first <= c < last, which begin a record, and end one or
    the row. Only these are at the address, row after row. It is called by its address, so that a model compiles the
    kinds that it uses, once.
    """
    function = (_round_q8_k, _round_q8_0, _round_to_f16, _round_to_bf16, _copy)[kind]
    return native_function(function, 8)


def _round_q8_k(x_at, stride, width, out_at, begin, end, first, last):  # type: ignore[no-untyped-def]
    num_records = width // 256
    for t in range(begin, end):
        record_at = _record_at(out_at, num_records, t, first // 256, _K_BYTES)
        row_at = x_at + stride * (t - begin)
        round_q8_k(row_at, (last - first) // 256, record_at, BLOCK_TOKENS * _K_BYTES)


def _round_q8_0(x_at, stride, width, out_at, begin, end, first, last):  # type: ignore[no-untyped-def]
    num_records = (width + 63) // 64
    for t in range(begin, end):
        record_at = _record_at(out_at, num_records, t, first // 64, _PAIR_BYTES)
        row_at = x_at + stride * (t - begin)
        round_q8_0(row_at, (last - first) // 32, record_at, BLOCK_TOKENS * _PAIR_BYTES)


def _round_to_f16(x_at, stride, width, out_at, begin, end, first, last):  # type: ignore[no-untyped-def]
    _round_each(_through_f16, x_at, stride, width, out_at, begin, end, first, last)


def _round_to_bf16(x_at, stride, width, out_at, begin, end, first, last):  # type: ignore[no-untyped-def]
    _round_each(_to_bf16, x_at, stride, width, out_at, begin, end, first, last)


def _copy(x_at, stride, width, out_at, begin, end, first, last):  # type: ignore[no-untyped-def]
    _round_each(_as_it_is, x_at, stride, width, out_at, begin, end, first, last)


@inlined
def _round_each(convert, x_at, stride, width, out_at, begin, end, first, last):  # type: ignore[no-untyped-def]
    """Records of float32: `convert` of each value, and zeros where a row has ended."""
    num_records = (width + 63) // 64
    for t in range(begin, end):
        x = carray(pointer(x_at + stride * (t - begin)), last - first, np.float32)
        for start in range(first, last, 64):
            record_at = _record_at(out_at, num_records, t, start // 64, _FLOAT_BYTES)
            out = carray(pointer(record_at), 64, np.float32)
            for i in range(64):
                out[i] = convert(x[start - first + i]) if start + i < last else _F32(0)


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
