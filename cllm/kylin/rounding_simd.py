"""The roundings to int8 by vector instructions: activations to their records, drawn in `tiles.py`. The plain twin is
`quants.py`, of the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np
from llvmlite import ir

from .jit import emitted, intrinsic
from .ops import TO_NEAREST
from .simd import F32, I8, I16, I32, I64, Emitter, Value, make_internal, start_function
from .tiles import (
    K_IS_WIDE,
    K_PAIR_STARTS,
    K_SCALE,
    K_SUMS_16,
    K_SUMS_32,
    K_WIDE_SUM,
    PAIR_SCALES,
    PAIR_SUMS,
    i64,
)

VALUES = 256  # of a block of q8_K
_HALF = 32  # values of a block of q8_0, which is half a record
_FACTOR = K_IS_WIDE + 4  # unused bytes of a record
_SIGN = 0x80000000
_LARGEST_FINITE = float(np.finfo(np.float32).max)


def emit_round_q8_k(module: ir.Module, isa: str) -> Value:
    """The function (x, num_blocks, records, stride), all i64: float32 x[num_blocks * 256] to records of q8_K, which
    are `stride` bytes apart.

    All scales first, since to find one is a chain of operations that each wait for the one before: those of several
    blocks run at once.
    """
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 4), "cllm_round_q8_k")
    make_internal(function)
    x, num_blocks, records, stride = function.args
    e = Emitter(start_function(function), isa)
    for step in (_put_scale, _put_values):
        with e.loop(num_blocks) as number:
            block_at = e.address(x, e.mul(number, i64(4 * VALUES)))
            step(e, block_at, e.address(records, e.mul(number, stride)))
    e.builder.ret_void()
    return function


def _put_scale(e: Emitter, x: Value, record: Value) -> None:
    """The scale of a block, and behind it for now the factor of its rounding."""
    b, zero, most = e.builder, ir.Constant(F32, 0.0), ir.Constant(F32, _LARGEST_FINITE)
    largest = _largest(e, x)
    factor = b.fdiv(ir.Constant(F32, -127.0), largest)
    scale = b.fdiv(ir.Constant(F32, 1.0), factor)
    has_factor, is_finite = (
        b.fcmp_ordered("<=", e.call("llvm.fabs.f32", F32, [value]), most) for value in (factor, largest)
    )
    scale = b.select(is_finite, b.select(has_factor, scale, zero), ir.Constant(F32, float("nan")))
    factor = b.select(b.and_(has_factor, is_finite), factor, zero)
    e.store(scale, record, K_SCALE)
    e.store(factor, record, _FACTOR)


def _put_values(e: Emitter, x: Value, record: Value) -> None:
    """The values and their sums. Where the factor is 0, the values that are not 0 are those of a scale NaN."""
    b, factor, ones = e.builder, e.broadcast(e.f32, record, _FACTOR), e.splat(0x01010101, e.i32)
    words = _rounded(e, [e.fmul(e.load(e.f32, x, 4 * at), factor) for at in range(0, VALUES, e.lanes)])
    for number, word in enumerate(words):
        e.store(word, record, 4 * e.lanes * number)
    for number, sums in enumerate(_sums_of(16, e, [e.dot(None, ones, v) for v in words])):
        e.store(b.trunc(sums, ir.VectorType(I16, e.lanes)), record, K_SUMS_16 + 2 * e.lanes * number)
        e.store(_pair_starts(e, sums), record, K_PAIR_STARTS + 2 * e.lanes * number)
        sums_32 = b.trunc(_add_neighbours(e, sums), ir.VectorType(I16, e.lanes // 2))
        e.store(sums_32, record, K_SUMS_32 + e.lanes * number)
    magnitudes = _sums_of(16, e, [e.dot(None, _magnitudes(e, v), ones) for v in words])
    is_wide = b.icmp_signed(">=", _most(e, magnitudes), ir.Constant(I32, K_WIDE_SUM))
    e.store(b.zext(is_wide, I32), record, K_IS_WIDE)


def _pair_starts(e: Emitter, sums: Value) -> Value:
    """`K_PAIR_STARTS` of these sums of 16."""
    b = e.builder
    places = ([lane for lane in range(e.lanes) if lane // 2 % 2 == half] for half in (0, 1))
    low, high = (_shuffled(e, sums, sums, lanes) for lanes in places)
    both = b.add(low, b.shl(high, e.splat(16, low.type)))
    return b.sub(e.splat(1 << 15, low.type), b.shl(both, e.splat(5, low.type)))


def emit_round_q8_0(module: ir.Module, isa: str) -> Value:
    """The function (x, num_blocks, records, stride), all i64: float32 x[num_blocks * 32] to records of q8_0, two blocks
    each, which are `stride` bytes apart. An odd block's other half is that of zeros. Scales first, as in q8_K."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 4), "cllm_round_q8_0")
    make_internal(function)
    x, num_blocks, records, stride = function.args
    e = Emitter(start_function(function), isa)
    b = e.builder
    zeros = e.scratch(4 * _HALF)
    for at in range(0, _HALF, e.lanes):
        e.store(e.zero(e.f32), zeros, 4 * at)
    for step in (_put_scales, _put_halves):
        with e.loop(num_blocks, 2) as number:
            first = e.address(x, e.mul(number, i64(4 * _HALF)))
            has_second = b.icmp_signed("<", b.add(number, i64(1)), num_blocks)
            second = b.select(has_second, e.address(first, 4 * _HALF), zeros)
            step(e, (first, second), e.address(records, b.sdiv(e.mul(number, stride), i64(2))))
    b.ret_void()
    return function


def _put_scales(e: Emitter, halves: tuple[Value, Value], record: Value) -> None:
    """The scales of both halves, and in the place of their sums for now the factors of their rounding."""
    b, largest = e.builder, e.zero(e.i32)
    for lane, x in enumerate(halves):
        magnitudes = [e.both(e.load(e.i32, x, 4 * at), _SIGN - 1) for at in range(0, _HALF, e.lanes)]
        largest = b.insert_element(largest, _most(e, magnitudes), ir.Constant(I32, lane))
    largest, most = e.cast(largest, e.f32), e.splat(_LARGEST_FINITE, e.f32)
    factor = b.fdiv(e.splat(127.0, e.f32), largest)
    half = e.float_to_half(b.fdiv(largest, e.splat(127.0, e.f32)))
    scale = e.half_to_float(b.zext(half, e.i32))
    is_finite = b.fcmp_ordered("<=", scale, most)
    has_factor = b.and_(b.fcmp_ordered("<=", factor, most), is_finite)
    scale = b.select(is_finite, scale, e.splat(float("nan"), e.f32))
    factor = b.select(has_factor, factor, e.zero(e.f32))
    for value, place in ((scale, PAIR_SCALES), (factor, PAIR_SUMS)):
        e.store(_shuffled(e, value, value, range(2)), record, place)


def _put_halves(e: Emitter, halves: tuple[Value, Value], record: Value) -> None:
    """The values and their sums, as `_put_values`."""
    scaled, ones = [], e.splat(0x01010101, e.i32)
    for number, x in enumerate(halves):
        factor = e.broadcast(e.f32, record, PAIR_SUMS + 4 * number)
        scaled += [e.fmul(e.load(e.f32, x, 4 * at), factor) for at in range(0, _HALF, e.lanes)]
    words = _rounded(e, scaled)
    for number, word in enumerate(words):
        e.store(word, record, 4 * e.lanes * number)
    (sums,) = _sums_of(_HALF, e, [e.dot(None, ones, v) for v in words])
    e.store(sums, record, PAIR_SUMS)


def _rounded(e: Emitter, scaled: list[Value]) -> list[Value]:
    """The int8 nearest to each value, in words."""
    b, bytes_ = e.builder, []
    for value in scaled:
        # Rounds, and leaves the int8 in the low byte.
        shifted = b.fadd(value, e.splat(float(TO_NEAREST), e.f32))
        bytes_.append(b.trunc(e.cast(shifted, e.i32), ir.VectorType(I8, e.lanes)))
    return [e.cast(word, e.i32) for word in _in_pairs(e, _in_pairs(e, bytes_))]


def _magnitudes(e: Emitter, values: Value) -> Value:
    is_poison = ir.Constant(ir.IntType(1), 0)  # what becomes of -128, which is not there
    return e.cast(e.call(f"llvm.abs.v{4 * e.lanes}i8", e.i8, [e.cast(values, e.i8), is_poison]), e.i32)


def _sums_of(size: int, e: Emitter, dots: list[Value]) -> list[Value]:
    """From `dot` of all words in order, each lane a sum of 4: the sums of `size`, in order."""
    sums = [e.scaled(e.zero(e.i32), v) for v in dots]
    for _ in range((size // 4).bit_length() - 1):
        halves = [_add_neighbours(e, v) for v in sums]
        sums = _in_pairs(e, halves) if len(halves) > 1 else halves
    return sums


def _largest(e: Emitter, x: Value) -> Value:
    """The first value of largest magnitude; NaN counts as larger than infinity. See `plain.find_largest`."""
    b = e.builder
    vectors = [e.load(e.i32, x, 4 * at) for at in range(0, VALUES, e.lanes)]
    flipped = [b.xor(v, e.splat(_SIGN, e.i32)) for v in vectors]
    positive, negative = (
        _most(e, [e.zero(e.i32), *of]) for of in (vectors, flipped)
    )  # 0 where there is none
    negated = b.xor(negative, ir.Constant(I32, _SIGN - 2**32))
    result = e.variable(b.select(b.icmp_signed(">", positive, negative), positive, negated))
    # Backwards, so that the first one stays.
    with b.if_then(b.icmp_signed("==", positive, negative)), e.loop(VALUES) as number:
        bits = e.load(I32, e.address(x, e.mul(b.sub(i64(VALUES - 1), number), i64(4))))
        magnitude = b.and_(bits, ir.Constant(I32, _SIGN - 1))
        result.set(b.select(b.icmp_signed("==", magnitude, positive), bits, result.get()))
    return b.bitcast(result.get(), F32)


def _most(e: Emitter, vectors: list[Value]) -> Value:
    """The largest int32 of all lanes."""
    b = e.builder
    top = reduce(lambda p, q: b.select(b.icmp_signed(">", p, q), p, q), vectors)
    return e.call(f"llvm.vector.reduce.smax.v{e.lanes}i32", I32, [top])


def _in_pairs(e: Emitter, vectors: list[Value]) -> list[Value]:
    """Each two vectors as one, one behind the other."""
    lanes = range(2 * vectors[0].type.count)
    return [_shuffled(e, *two, lanes) for two in zip(vectors[::2], vectors[1::2], strict=True)]


def _add_neighbours(e: Emitter, a: Value) -> Value:
    """[a0 + a1, a2 + a3, ..]: half as many lanes."""
    return e.add(*(_shuffled(e, a, a, range(first, a.type.count, 2)) for first in (0, 1)))


def _shuffled(e: Emitter, a: Value, b: Value, lanes: Sequence[int]) -> Value:
    mask = ir.Constant(ir.VectorType(I32, len(lanes)), [ir.Constant(I32, lane) for lane in lanes])
    return e.builder.shuffle_vector(a, b, mask)


@intrinsic
def round_q8_k(typing_context, x, num_blocks, records, stride):  # type: ignore[no-untyped-def]
    """`emit_round_q8_k`."""
    return emitted("cllm_round_q8_k", emit_round_q8_k, 4)


@intrinsic
def round_q8_0(typing_context, x, num_blocks, records, stride):  # type: ignore[no-untyped-def]
    """`emit_round_q8_0`."""
    return emitted("cllm_round_q8_0", emit_round_q8_0, 4)
