"""Operations beside the matrix products that are worth vector instructions: the norm and the softmax, whose sums LLVM
does not keep in registers, and the rounding of keys and values to float16. Their plain twins are `ops.rms_norm`,
`ops.exp32` and `ops.sum_lanes`, of the same bits, and `rounding.to_half`. Widths are whole vectors of 16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from . import ops
from .jit import emitted, intrinsic
from .ops import LANES
from .simd import F32, I64, Emitter, Value, Variable, make_internal, start_function


def emit_rms_norm(module: ir.Module, isa: str) -> Value:
    """The function (x, weight, eps, out, width), i64: `ops.rms_norm` of one row, float32 x[0..width], which may be
    `out`. `eps` is the address of a float32."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 5), "cllm_rms_norm")
    make_internal(function)
    x, weight, eps, out, width = function.args
    e = Emitter(start_function(function), isa)
    b = e.builder
    sums = [e.variable(e.zero(e.f32)) for _ in range(LANES // e.lanes)]
    with e.loop(width, LANES) as column:
        base = e.address(x, e.mul(column, ir.Constant(I64, 4)))
        for r, total in enumerate(sums):
            value = e.load(e.f32, base, 4 * e.lanes * r)
            total.set(b.fadd(total.get(), e.fmul(value, value)))
    mean = b.fdiv(_fold(e, sums, b.fadd), b.sitofp(width, F32))
    root = e.call("llvm.sqrt.f32", F32, [b.fadd(mean, e.load(F32, eps))])
    scale = e.splat(b.fdiv(ir.Constant(F32, 1.0), root), e.f32)
    with e.loop(width, e.lanes) as column:
        at = e.mul(column, ir.Constant(I64, 4))
        scaled = e.fmul(e.load(e.f32, e.address(x, at)), scale)
        e.store(e.fmul(scaled, e.load(e.f32, e.address(weight, at))), e.address(out, at))
    b.ret_void()
    return function


def emit_exponentials(module: ir.Module, isa: str) -> Value:
    """The function (scores, count, out), i64: in place e^(score - largest) of float32 scores[0..count], and the
    reciprocal of their sum, over 16 lanes, to `out`. `count`: a positive multiple of 16."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 3), "cllm_exponentials")
    make_internal(function)
    scores, count, out = function.args
    e = Emitter(start_function(function), isa)
    b, places = e.builder, [4 * e.lanes * r for r in range(LANES // e.lanes)]

    def larger(new: Value, old: Value) -> Value:
        return b.select(b.fcmp_ordered(">", new, old), new, old)

    tops = [e.variable(e.load(e.f32, scores, place)) for place in places]
    with e.loop(count, LANES) as column:
        base = e.address(scores, e.mul(column, ir.Constant(I64, 4)))
        for place, top in zip(places, tops, strict=True):
            top.set(larger(e.load(e.f32, base, place), top.get()))
    largest = e.splat(_fold(e, tops, larger), e.f32)
    sums = [e.variable(e.zero(e.f32)) for _ in places]
    with e.loop(count, LANES) as column:
        base = e.address(scores, e.mul(column, ir.Constant(I64, 4)))
        for place, total in zip(places, sums, strict=True):
            value = _exp(e, b.fsub(e.load(e.f32, base, place), largest))
            e.store(value, base, place)
            total.set(b.fadd(total.get(), value))
    e.store(b.fdiv(ir.Constant(F32, 1.0), _fold(e, sums, b.fadd)), out)
    b.ret_void()
    return function


def _exp(e: Emitter, x: Value) -> Value:
    """e^x, operation by operation that of `ops.exp32`."""
    b = e.builder

    def number(value: Any) -> Value:
        return e.splat(float(value), e.f32)

    shifted = e.fma(x, number(ops.LOG2_E), number(ops.TO_NEAREST))
    n = b.fsub(shifted, number(ops.TO_NEAREST))
    r = e.fma(n, number(-ops.LN2_LOW), e.fma(n, number(-ops.LN2_HIGH), x))
    p = number(ops.EXP_TERMS[-1])
    for term in (*ops.EXP_TERMS[-2::-1], 1):
        p = e.fma(p, r, number(term))
    power = e.cast(e.left(e.add(e.cast(shifted, e.i32), e.splat(127, e.i32)), 23), e.f32)
    return b.select(b.fcmp_ordered("<", x, number(ops.EXP_MIN)), e.zero(e.f32), b.fmul(p, power))


def _fold(e: Emitter, vectors: Sequence[Variable], combine: Callable[[Value, Value], Value]) -> Value:
    """One of the 16 lanes, combined as by `ops.sum_lanes`: in halves, down to four lanes, and then one by one."""
    quarters = [part for vector in vectors for part in _in_fours(e, vector.get())]
    four = combine(combine(quarters[0], quarters[2]), combine(quarters[1], quarters[3]))
    lanes = [e.builder.extract_element(four, ir.Constant(ir.IntType(32), i)) for i in range(4)]
    return combine(combine(lanes[0], lanes[2]), combine(lanes[1], lanes[3]))


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
def norm_row(typing_context, x, weight, eps, out, width):  # type: ignore[no-untyped-def]
    """`emit_rms_norm`."""
    return emitted("cllm_rms_norm", emit_rms_norm, 5)


@intrinsic
def exponentials(typing_context, scores, count, out):  # type: ignore[no-untyped-def]
    """`emit_exponentials`."""
    return emitted("cllm_exponentials", emit_exponentials, 3)


@intrinsic
def to_halves(typing_context, x, count, out):  # type: ignore[no-untyped-def]
    """`emit_to_halves`."""
    return emitted("cllm_to_halves", emit_to_halves, 3)
