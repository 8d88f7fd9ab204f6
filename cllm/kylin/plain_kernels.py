"""Owns the portable matrix kernels: one small function for each weight type over three shared dot products.
It must not know how its arguments are checked (`plain` does that) or how a block is laid out
(`plain_blocks` does).

Shapes: data uint8[rows, B, block bytes] (F32, F16, BF16: [rows, 1, row bytes]); values int8[T, B, block];
scales float32[T, B]; sums int32[T, B, S], one for 32 values; x float32[T, n]; out float32[T, rows]. Each
weight row is unpacked once and then meets every token."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from . import plain_blocks as pb
from .jit import inlined, kernel
from .plain_blocks import Array, half

_F32, _I32 = np.float32, np.int32
_LANES = 16


@inlined
def _dot(products: Array, values: Array, t: int, b: int) -> Any:
    """Exact: 256 * 4096 * 127 < 2**31."""
    total = _I32(0)
    for i in range(values.shape[2]):  # not a literal length: see plain_blocks
        total = _I32(total + _I32(_I32(products[b, i]) * _I32(values[t, b, i])))
    return total


@inlined
def _dot_blocks(products: Array, d: Array, values: Array, scales: Array, out: Array, row: int) -> None:
    """Types without an offset: products int16[B, block], d float32[B]."""
    for t in range(values.shape[0]):
        acc = _F32(0)
        for b in range(d.shape[0]):
            acc += (d[b] * _F32(_dot(products, values, t, b))) * scales[t, b]
        out[t, row] = acc


@inlined
def _dot_blocks_with_mins(
    products: Array,
    d: Array,
    dmin: Array,
    mins: Array,
    values: Array,
    scales: Array,
    sums: Array,
    out: Array,
    row: int,
) -> None:
    """Types with an offset: -dmin[b] * mins[b, s] for all values of sub-block s, mins int32[B, S]."""
    for t in range(values.shape[0]):
        acc = _F32(0)
        for b in range(d.shape[0]):
            offset = _I32(0)
            for s in range(sums.shape[2]):
                offset = _I32(offset + _I32(mins[b, s] * sums[t, b, s]))
            total = d[b] * _F32(_dot(products, values, t, b)) - dmin[b] * _F32(offset)
            acc += total * scales[t, b]
        out[t, row] = acc


@inlined
def _dot_floats(weights: Array, x: Array, lanes: Array, out: Array, row: int) -> None:
    """Of each 64 values lane l adds products l, l + 16, l + 32, l + 48; a fixed tree then adds the lanes.

    What is left of n after whole groups of 64 is added one by one behind the tree."""
    n = weights.shape[0]
    for t in range(x.shape[0]):
        lanes[:] = _F32(0)
        for group in range(n // 64):
            for lane in range(_LANES):
                total = _F32(0)
                for step in range(4):
                    i = 64 * group + _LANES * step + lane
                    total += weights[i] * x[t, i]
                lanes[lane] += total
        width = _LANES // 2
        while width:
            for lane in range(width):
                lanes[lane] += lanes[lane + width]
            width //= 2
        acc = lanes[0]
        for i in range(n - n % 64, n):
            acc += weights[i] * x[t, i]
        out[t, row] = acc


@inlined
def _scratch() -> Any:
    """(quants, scales) of one block of 256, for the unpackers."""
    return np.empty(256, np.uint8), np.empty(16, np.int16)


@inlined
def _row_of(values: Array) -> Any:
    """(products, d) for one unpacked row."""
    return np.empty(values.shape[1:], np.int16), np.empty(values.shape[1], np.float32)


@kernel
def _matmul_q4_k(
    data: Array, values: Array, scales: Array, sums: Array, out: Array, begin: int, end: int
) -> None:
    quants, sub_scales = _scratch()
    products, d = _row_of(values)
    dmin, mins = np.empty_like(d), np.empty(sums.shape[1:], np.int32)
    for row in range(begin, end):
        for b in range(d.shape[0]):
            block = data[row, b]
            d[b], dmin[b] = half(block, 0), half(block, 2)
            pb.unpack_q4_k(block, quants, sub_scales, products[b], mins[b])
        _dot_blocks_with_mins(products, d, dmin, mins, values, scales, sums, out, row)


@kernel
def _matmul_q5_k(
    data: Array, values: Array, scales: Array, sums: Array, out: Array, begin: int, end: int
) -> None:
    quants, sub_scales = _scratch()
    products, d = _row_of(values)
    dmin, mins = np.empty_like(d), np.empty(sums.shape[1:], np.int32)
    for row in range(begin, end):
        for b in range(d.shape[0]):
            block = data[row, b]
            d[b], dmin[b] = half(block, 0), half(block, 2)
            pb.unpack_q5_k(block, quants, sub_scales, products[b], mins[b])
        _dot_blocks_with_mins(products, d, dmin, mins, values, scales, sums, out, row)


@kernel
def _matmul_q6_k(
    data: Array, values: Array, scales: Array, sums: Array, out: Array, begin: int, end: int
) -> None:
    quants, sub_scales = _scratch()
    products, d = _row_of(values)
    for row in range(begin, end):
        for b in range(d.shape[0]):
            d[b] = half(data[row, b], 208)
            pb.unpack_q6_k(data[row, b], quants, sub_scales, products[b])
        _dot_blocks(products, d, values, scales, out, row)


@kernel
def _matmul_q8_0(
    data: Array, values: Array, scales: Array, sums: Array, out: Array, begin: int, end: int
) -> None:
    products, d = _row_of(values)
    for row in range(begin, end):
        for b in range(d.shape[0]):
            d[b] = half(data[row, b], 0)
            pb.unpack_q8_0(data[row, b], products[b])
        _dot_blocks(products, d, values, scales, out, row)


@kernel
def _matmul_q4_0(
    data: Array, values: Array, scales: Array, sums: Array, out: Array, begin: int, end: int
) -> None:
    products, d = _row_of(values)
    for row in range(begin, end):
        for b in range(d.shape[0]):
            d[b] = half(data[row, b], 0)
            pb.unpack_nibbles(data[row, b], 2, 8, products[b])
        _dot_blocks(products, d, values, scales, out, row)


@kernel
def _matmul_q5_0(
    data: Array, values: Array, scales: Array, sums: Array, out: Array, begin: int, end: int
) -> None:
    products, d = _row_of(values)
    for row in range(begin, end):
        for b in range(d.shape[0]):
            d[b] = half(data[row, b], 0)
            pb.unpack_nibbles(data[row, b], 6, 16, products[b])
            pb.add_fifth_bits(data[row, b], 2, products[b])
        _dot_blocks(products, d, values, scales, out, row)


@kernel
def _matmul_q4_1(
    data: Array, values: Array, scales: Array, sums: Array, out: Array, begin: int, end: int
) -> None:
    products, d = _row_of(values)
    dmin, mins = np.empty_like(d), np.ones(sums.shape[1:], np.int32)
    for row in range(begin, end):
        for b in range(d.shape[0]):
            d[b], dmin[b] = half(data[row, b], 0), -half(data[row, b], 2)
            pb.unpack_nibbles(data[row, b], 4, 0, products[b])
        _dot_blocks_with_mins(products, d, dmin, mins, values, scales, sums, out, row)


@kernel
def _matmul_q5_1(
    data: Array, values: Array, scales: Array, sums: Array, out: Array, begin: int, end: int
) -> None:
    products, d = _row_of(values)
    dmin, mins = np.empty_like(d), np.ones(sums.shape[1:], np.int32)
    for row in range(begin, end):
        for b in range(d.shape[0]):
            d[b], dmin[b] = half(data[row, b], 0), -half(data[row, b], 2)
            pb.unpack_nibbles(data[row, b], 8, 0, products[b])
            pb.add_fifth_bits(data[row, b], 4, products[b])
        _dot_blocks_with_mins(products, d, dmin, mins, values, scales, sums, out, row)


@inlined
def _float_row_of(x: Array) -> Any:
    """(weights, lanes) for one decoded row."""
    return np.empty(x.shape[1], np.float32), np.empty(_LANES, np.float32)


@kernel
def _matmul_f32(data: Array, x: Array, out: Array, begin: int, end: int) -> None:
    weights, lanes = _float_row_of(x)
    for row in range(begin, end):
        pb.decode_f32(data[row, 0], weights)
        _dot_floats(weights, x, lanes, out, row)


@kernel
def _matmul_f16(data: Array, x: Array, out: Array, begin: int, end: int) -> None:
    weights, lanes = _float_row_of(x)
    for row in range(begin, end):
        pb.decode_f16(data[row, 0], weights)
        _dot_floats(weights, x, lanes, out, row)


@kernel
def _matmul_bf16(data: Array, x: Array, out: Array, begin: int, end: int) -> None:
    weights, lanes = _float_row_of(x)
    for row in range(begin, end):
        pb.decode_bf16(data[row, 0], weights)
        _dot_floats(weights, x, lanes, out, row)


@kernel
def _matmul_q2_k(data: Array, x: Array, out: Array, begin: int, end: int) -> None:
    quants, _ = _scratch()
    weights, lanes = _float_row_of(x)
    for row in range(begin, end):
        for b in range(data.shape[1]):
            pb.decode_q2_k(data[row, b], quants, weights[256 * b : 256 * b + 256])
        _dot_floats(weights, x, lanes, out, row)


@kernel
def _matmul_q3_k(data: Array, x: Array, out: Array, begin: int, end: int) -> None:
    quants, _ = _scratch()
    weights, lanes = _float_row_of(x)
    for row in range(begin, end):
        for b in range(data.shape[1]):
            pb.decode_q3_k(data[row, b], quants, weights[256 * b : 256 * b + 256])
        _dot_floats(weights, x, lanes, out, row)


@kernel
def _matmul_iq4_nl(data: Array, x: Array, out: Array, begin: int, end: int) -> None:
    weights, lanes = _float_row_of(x)
    for row in range(begin, end):
        for b in range(data.shape[1]):
            pb.decode_iq4_nl(data[row, b], weights[32 * b : 32 * b + 32])
        _dot_floats(weights, x, lanes, out, row)


@kernel
def _matmul_iq4_xs(data: Array, x: Array, out: Array, begin: int, end: int) -> None:
    weights, lanes = _float_row_of(x)
    for row in range(begin, end):
        for b in range(data.shape[1]):
            pb.decode_iq4_xs(data[row, b], weights[256 * b : 256 * b + 256])
        _dot_floats(weights, x, lanes, out, row)


_T = GGMLQuantizationType

KERNELS: MappingProxyType[GGMLQuantizationType, Any] = MappingProxyType(
    {
        _T.Q4_K: _matmul_q4_k,
        _T.Q5_K: _matmul_q5_k,
        _T.Q6_K: _matmul_q6_k,
        _T.Q8_0: _matmul_q8_0,
        _T.Q5_0: _matmul_q5_0,
        _T.Q4_0: _matmul_q4_0,
        _T.Q4_1: _matmul_q4_1,
        _T.Q5_1: _matmul_q5_1,
        _T.F32: _matmul_f32,
        _T.F16: _matmul_f16,
        _T.BF16: _matmul_bf16,
        _T.Q2_K: _matmul_q2_k,
        _T.Q3_K: _matmul_q3_k,
        _T.IQ4_NL: _matmul_iq4_nl,
        _T.IQ4_XS: _matmul_iq4_xs,
    }
)
