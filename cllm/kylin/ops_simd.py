"""Two operations beside the matrix products that are worth vector instructions: the norm, whose sum LLVM does not keep
in registers, and the rounding of keys and values to float16. Their plain twins are `ops.rms_norm`, of the same bits,
and `rounding.to_half`. Widths are whole vectors of 16.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from llvmlite import ir
from numba import types

from .isa import host_isa
from .jit import inlined, intrinsic
from .ops import LANES
from .simd import I64, Emitter, Value, call_emitted, make_internal, start_function

_ISA = host_isa()


def emit_sum_of_squares(module: ir.Module, isa: str) -> Value:
    """The function (x, width, out), i64: the sum of float32 x[0..width] in the order of `ops.rms_norm`, to `out`."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 3), "cllm_sum_of_squares")
    make_internal(function)
    x, width, out = function.args
    e = Emitter(start_function(function), isa)
    b = e.builder
    sums = [e.variable(e.zero(e.f32)) for _ in range(LANES // e.lanes)]
    with e.loop(width, LANES) as column:
        base = e.address(x, e.mul(column, ir.Constant(I64, 4)))
        for r, total in enumerate(sums):
            value = e.load(e.f32, base, 4 * e.lanes * r)
            total.set(b.fadd(total.get(), e.fmul(value, value)))
    # As `ops.sum_lanes`: halves are added until four lanes are left.
    quarters = [part for total in sums for part in _in_fours(e, total.get())]
    four = b.fadd(b.fadd(quarters[0], quarters[2]), b.fadd(quarters[1], quarters[3]))
    lanes = [b.extract_element(four, ir.Constant(ir.IntType(32), i)) for i in range(4)]
    e.store(b.fadd(b.fadd(lanes[0], lanes[2]), b.fadd(lanes[1], lanes[3])), out)
    b.ret_void()
    return function


def _in_fours(e: Emitter, vector: Value) -> list[Value]:
    i32 = ir.IntType(32)
    masks = [
        ir.Constant(ir.VectorType(i32, 4), [ir.Constant(i32, i) for i in range(start, start + 4)])
        for start in range(0, e.lanes, 4)
    ]
    return [e.builder.shuffle_vector(vector, ir.Constant(e.f32, ir.Undefined), mask) for mask in masks]


def emit_to_halves(module: ir.Module, isa: str) -> Value:
    """The function (x, count, out), i64: float32 x[0..count] rounded to the nearest float16, ties to even."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 3), "cllm_to_halves")
    make_internal(function)
    x, count, out = function.args
    e = Emitter(start_function(function), isa)
    with e.loop(count, e.lanes) as at:
        value = e.load(e.f32, e.address(x, e.mul(at, ir.Constant(I64, 4))))
        e.store(e.float_to_half(value), e.address(out, e.mul(at, ir.Constant(I64, 2))))
    e.builder.ret_void()
    return function


@intrinsic
def _sum_of_squares(typing_context, x, width, out):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        call_emitted(builder, "cllm_sum_of_squares", partial(emit_sum_of_squares, isa=_ISA), values)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 3), generate


@intrinsic
def to_halves(typing_context, x, count, out):  # type: ignore[no-untyped-def]
    """`emit_to_halves`."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        call_emitted(builder, "cllm_to_halves", partial(emit_to_halves, isa=_ISA), values)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 3), generate


@inlined
def rms_norm(x, weight, eps, out, begin, end):  # type: ignore[no-untyped-def]
    """As `ops.rms_norm`."""
    width = x.shape[1]
    total = np.empty(1, np.float32)
    for row in range(begin, end):
        _sum_of_squares(x.ctypes.data + 4 * width * row, width, total.ctypes.data)
        scale = np.float32(1) / np.sqrt(total[0] / np.float32(width) + eps)
        for column in range(width):
            out[row, column] = x[row, column] * scale * weight[column]
