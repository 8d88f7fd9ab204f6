"""Emits vector operations as LLVM IR: the vocabulary in which the fast kernels are written, with one lowering for
each instruction set. It must not know weights, models or threads.

Every operation means the same on every instruction set, bit for bit: integer results are exact, float
operations are single IEEE operations (with `fma` fused everywhere), and nothing is reassociated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
HALF = ir.HalfType()
Value = Any  # an ir.Value: llvmlite has no type information


class Emitter:
    """Vector operations at the end of `builder`'s block. A vector has `lanes` lanes of 32 bits.

    Addresses are i64 values. Loads and stores take any address: an aligned one is only faster.
    """

    def __init__(self, builder: ir.IRBuilder, isa: str) -> None:
        self.builder, self.isa = builder, isa
        self.lanes = {"avx512vnni": 16, "sdot": 4}.get(isa, 8)
        self.i32 = ir.VectorType(I32, self.lanes)
        self.f32 = ir.VectorType(F32, self.lanes)
        self.i16 = ir.VectorType(I16, 2 * self.lanes)
        self.i8 = ir.VectorType(I8, 4 * self.lanes)
        self.has_f16 = isa != "generic"

    # --- memory, control ---

    def address(self, base: Value, offset: int | Value = 0) -> Value:
        """base + offset bytes."""
        if isinstance(offset, int):
            return self.builder.add(base, ir.Constant(I64, offset)) if offset else base
        return self.builder.add(base, offset)

    def load(self, kind: ir.Type, base: Value, offset: int = 0) -> Value:
        pointer = self.builder.inttoptr(self.address(base, offset), kind.as_pointer())
        return self.builder.load(pointer, align=1)

    def store(self, value: Value, base: Value, offset: int = 0) -> None:
        pointer = self.builder.inttoptr(self.address(base, offset), value.type.as_pointer())
        self.builder.store(value, pointer, align=1)

    def prefetch(self, base: Value, offset: int) -> None:
        """Asks for the cache line at an address, which need not exist, and no closer than the core's second cache: far
        ahead of its use it would drive what is used now out of the first."""
        pointer = self.builder.inttoptr(self.address(base, offset), I8.as_pointer())
        arguments = [ir.Constant(I32, n) for n in (0, 2, 1)]  # to read, into L2, data
        self.call("llvm.prefetch.p0", ir.VoidType(), [pointer, *arguments])

    @contextmanager
    def loop(self, count: int | Value, step: int = 1) -> Iterator[Value]:
        """Runs its body for the i64 values 0, step, .. below `count`."""
        b = self.builder
        limit = ir.Constant(I64, count) if isinstance(count, int) else count
        index = self.variable(ir.Constant(I64, 0))
        head, body, after = (b.append_basic_block(name) for name in ("head", "body", "after"))
        b.branch(head)
        b.position_at_end(head)
        b.cbranch(b.icmp_signed("<", index.get(), limit), body, after)
        b.position_at_end(body)
        yield index.get()
        index.set(b.add(index.get(), ir.Constant(I64, step)))
        b.branch(head)
        b.position_at_end(after)

    def variable(self, value: Value) -> Variable:
        return Variable(self.builder, value)

    def scratch(self, num_bytes: int) -> Value:
        """The address of stack memory, aligned to 64 bytes."""
        with self.builder.goto_entry_block():
            slot = self.builder.alloca(I8, num_bytes)
            slot.align = 64
            return self.builder.ptrtoint(slot, I64)

    def call(self, name: str, result: ir.Type, arguments: Sequence[Value]) -> Value:
        """Calls the function or LLVM intrinsic `name`."""
        module = self.builder.module
        function = module.globals.get(name) or ir.Function(
            module, ir.FunctionType(result, [argument.type for argument in arguments]), name
        )
        return self.builder.call(function, arguments)

    # --- making vectors ---

    def splat(self, value: int | float | Value, kind: ir.VectorType) -> Value:
        """`value` in every element."""
        if isinstance(value, int | float):
            number = value - 2**32 if isinstance(value, int) and value >= 2**31 else value
            return ir.Constant(kind, [ir.Constant(kind.element, number)] * kind.count)
        b = self.builder
        single = b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, kind.count), [ir.Constant(I32, 0)] * kind.count)
        return b.shuffle_vector(single, ir.Constant(kind, ir.Undefined), zeros)

    def broadcast(self, kind: ir.VectorType, base: Value, offset: int = 0) -> Value:
        """The element at an address in every lane."""
        return self.splat(self.load(kind.element, base, offset), kind)

    def zero(self, kind: ir.VectorType) -> Value:
        return self.splat(0 if isinstance(kind.element, ir.IntType) else 0.0, kind)

    def cast(self, value: Value, kind: ir.VectorType) -> Value:
        """The same bits as another type."""
        return self.builder.bitcast(value, kind)

    # --- 32-bit integer lanes ---

    def add(self, a: Value, b: Value) -> Value:
        return self.builder.add(a, b)

    def sub(self, a: Value, b: Value) -> Value:
        return self.builder.sub(a, b)

    def mul(self, a: Value, b: Value) -> Value:
        return self.builder.mul(a, b)

    def both(self, a: Value, mask: int) -> Value:
        """a & mask, in every 32-bit lane."""
        return self.builder.and_(a, self.splat(mask, self.i32))

    def either(self, a: Value, b: Value) -> Value:
        """a | b, where no bit is in both. LLVM's vpternlog for it takes the pipes of Zen 4 that multiply."""
        return self.builder.add(self._pinned(a), b) if self.isa == "avx512vnni" else self.builder.or_(a, b)

    def left(self, a: Value, bits: int) -> Value:
        return self.builder.shl(a, self.splat(bits, self.i32)) if bits else a

    def right(self, a: Value, bits: int) -> Value:
        return self.builder.lshr(a, self.splat(bits, self.i32)) if bits else a

    def right_by(self, a: Value, bits: Value) -> Value:
        """a >> bits, for an i64 that is known only when the code runs."""
        return self.builder.lshr(a, self.splat(self.builder.trunc(bits, I32), self.i32))

    def right_signed(self, a: Value, bits: int) -> Value:
        return self.builder.ashr(a, self.splat(bits, self.i32)) if bits else a

    def pick_bytes(self, a: Value, picks: Sequence[int | None]) -> Value:
        """In every 32-bit lane the bytes of the lane that `picks` lists, lowest first; None is a zero byte."""
        source, count = self.cast(a, self.i8), 4 * self.lanes
        indices = [count if p is None else 4 * lane + p for lane in range(self.lanes) for p in picks]
        mask = ir.Constant(ir.VectorType(I32, count), [ir.Constant(I32, i) for i in indices])
        return self.cast(self.builder.shuffle_vector(source, self.zero(self.i8), mask), self.i32)

    # --- dot products of bytes: four of a lane's weights with four activations ---
    #
    # A sum over several words begins with `dot` of nothing, goes on with `dot` of what came before, and ends
    # with `scaled`. Between the two it may be narrower than 32 bits: at most `dot_span(largest)` words.

    def dot_span(self, largest: int) -> int:
        """Words that one sum may take before `scaled`, for weights of at most `largest` in magnitude."""
        return 32767 // (2 * 127 * largest) if self.isa == "avx2" else 64

    def dot(self, partial: Value | None, weights: Value, activations: Value) -> Value:
        """partial + four products a lane of unsigned (below 128) and signed bytes."""
        if self.isa == "avx2":
            products = self._maddubs(self.cast(weights, self.i8), self.cast(activations, self.i8))
            return products if partial is None else self._pinned(self.builder.add(partial, products))
        partial = self.zero(self.i32) if partial is None else partial
        if self.isa in ("avx512vnni", "avxvnni"):
            name = f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}"
            return self.call(name, self.i32, [partial, weights, activations])
        if self.isa == "sdot":
            bytes_ = [self.cast(v, self.i8) for v in (weights, activations)]
            return self.call("llvm.aarch64.neon.sdot.v4i32.v16i8", self.i32, [partial, *bytes_])
        return self._generic_dot(partial, weights, activations)

    # Weights of the full signed range. x86's instructions want them unsigned.

    @property
    def signed_offset(self) -> int:
        """What `dot_signed` has added to each weight; the caller subtracts it times the sum of activations."""
        return 128 if self.isa in ("avx512vnni", "avxvnni") else 0

    def dot_signed(self, partial: Value | None, weights: Value, activations: Value) -> Value:
        """As `dot` for weights of -128..127 and activations above -128; see `signed_offset`."""
        if self.isa == "avx2":
            w, a = self.cast(weights, self.i8), self.cast(activations, self.i8)
            magnitudes = self.call("llvm.abs.v32i8", self.i8, [w, ir.Constant(ir.IntType(1), 0)])
            signed = self.call("llvm.x86.avx2.psign.b", self.i8, [a, w])
            products = self._maddubs(magnitudes, signed)
            return products if partial is None else self.builder.add(partial, products)
        if self.signed_offset:
            weights = self.builder.xor(weights, self.splat(0x80808080, self.i32))
        return self.dot(partial, weights, activations)

    def scaled(self, total: Value, partial: Value, scale: Value | None = None) -> Value:
        """total + partial * scale, 32 bits a lane. `scale` comes from `scale_of_byte`; None is 1."""
        if self.isa == "avx2":
            return self.add(total, self.pair_dot(partial, scale or self.splat(1, self.i16)))
        return self.add(total, partial if scale is None else self.mul(partial, scale))

    def scale_of_byte(self, word: Value, place: int, *, signed: bool = False) -> Value:
        """Byte `place` of every lane as a factor for `scaled`."""
        if self.isa == "avx2":
            return self.pair_of_bytes(word, place, place, signed=signed)
        if signed:
            return self.right_signed(self.left(word, 24 - 8 * place), 24)
        return self.both(self.right(word, 8 * place), 0xFF)

    @property
    def scale_type(self) -> ir.VectorType:
        return self.i16 if self.isa == "avx2" else self.i32

    def pair_of_bytes(self, word: Value, low: int, high: int, *, signed: bool = False) -> Value:
        """Bytes `low` and `high` of every lane as two 16-bit halves, for `pair_dot`."""
        if not signed:
            return self.cast(self.pick_bytes(word, (low, None, high, None)), self.i16)
        upper = self.cast(self.pick_bytes(word, (None, low, None, high)), self.i16)
        return self.builder.ashr(upper, self.splat(8, self.i16))

    def pair_dot(self, a: Value, b: Value) -> Value:
        """Two products a lane of signed 16-bit halves, added: int32."""
        a16, b16 = self.cast(a, self.i16), self.cast(b, self.i16)
        if self.isa in ("avx2", "avxvnni"):
            return self.call("llvm.x86.avx2.pmadd.wd", self.i32, [a16, b16])
        if self.isa == "avx512vnni":
            return self.call("llvm.x86.avx512.pmaddw.d.512", self.i32, [a16, b16])
        a, b = self.cast(a, self.i32), self.cast(b, self.i32)
        low = self.mul(*(self.right_signed(self.left(v, 16), 16) for v in (a, b)))
        return self.add(low, self.mul(self.right_signed(a, 16), self.right_signed(b, 16)))

    def _pinned(self, value: Value) -> Value:
        """value, hidden from LLVM, which would order what is done with it anew: other instructions, more registers."""
        return self.builder.asm(ir.FunctionType(value.type, [value.type]), "", "=v,0", [value], False)

    def _maddubs(self, unsigned: Value, signed: Value) -> Value:
        return self.call("llvm.x86.avx2.pmadd.ub.sw", self.i16, [unsigned, signed])

    def _generic_dot(self, partial: Value, weights: Value, activations: Value) -> Value:
        """Works for signed weights too, and for unsigned ones below 128, which look the same."""
        for place in range(4):
            w = self.right_signed(self.left(weights, 24 - 8 * place), 24)
            a = self.right_signed(self.left(activations, 24 - 8 * place), 24)
            partial = self.add(partial, self.mul(w, a))
        return partial

    # --- float lanes ---

    def to_float(self, a: Value) -> Value:
        """int32 to float32, rounded to nearest even."""
        return self.builder.sitofp(a, self.f32)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once."""
        return self.call(f"llvm.fma.v{self.lanes}f32", self.f32, [a, b, c])

    def fmul(self, a: Value, b: Value) -> Value:
        return self.builder.fmul(a, b)

    def negate(self, a: Value) -> Value:
        return self.builder.fneg(a)

    def half_to_float(self, a: Value) -> Value:
        """The f16 in the low 16 bits of every 32-bit lane as float32, exactly."""
        if self.has_f16:
            halves = self.builder.trunc(a, ir.VectorType(I16, self.lanes))
            return self.builder.fpext(self.cast(halves, ir.VectorType(HALF, self.lanes)), self.f32)
        b = self.builder
        magnitude = self.left(self.both(a, 0x7FFF), 13)
        # The exponent is 112 too small. A multiplication sets it right for subnormals as well.
        value = self.cast(self.fmul(self.cast(magnitude, self.f32), self.splat(2.0**112, self.f32)), self.i32)
        special = b.or_(magnitude, self.splat(0x7F800000, self.i32))
        is_special = b.icmp_unsigned(">=", magnitude, self.splat(0x7C00 << 13, self.i32))
        value = b.select(is_special, special, value)
        return self.cast(self.either(value, self.left(self.both(a, 0x8000), 16)), self.f32)

    def float_to_half(self, a: Value) -> Value:
        """float32 lanes to as many f16, as int16: the nearest, ties to even; NaN stays one."""
        shorts = ir.VectorType(I16, self.lanes)
        if self.has_f16:
            return self.cast(self.builder.fptrunc(a, ir.VectorType(HALF, self.lanes)), shorts)
        b, bits = self.builder, self.cast(a, self.i32)
        magnitude = self.both(bits, 0x7FFFFFFF)
        odd = self.both(self.right(magnitude, 13), 1)
        rounded = self.add(self.add(magnitude, self.splat(0xFFF - (112 << 23), self.i32)), odd)
        normal = self.right(rounded, 13)
        is_large = b.icmp_signed(">=", magnitude, self.splat(0x477FF000, self.i32))  # rounds past the largest
        half = b.select(is_large, self.splat(0x7C00, self.i32), normal)
        # The step of floats from 0.5 on is that of f16 subnormals.
        lifted = b.fadd(self.cast(magnitude, self.f32), self.splat(0.5, self.f32))
        subnormal = self.sub(self.cast(lifted, self.i32), self.splat(0x3F000000, self.i32))
        half = b.select(b.icmp_signed("<", magnitude, self.splat(0x38800000, self.i32)), subnormal, half)
        is_nan = b.icmp_signed(">", magnitude, self.splat(0x7F800000, self.i32))
        half = b.select(is_nan, self.splat(0x7E00, self.i32), half)
        return b.trunc(self.either(half, self.both(self.right(bits, 16), 0x8000)), shorts)

    def load_halves(self, base: Value, offset: int = 0) -> Value:
        """As many f16 as there are lanes, from memory, as float32."""
        halves = self.load(ir.VectorType(I16, self.lanes), base, offset)
        if self.has_f16:
            return self.builder.fpext(self.cast(halves, ir.VectorType(HALF, self.lanes)), self.f32)
        return self.half_to_float(self.builder.zext(halves, self.i32))


class Variable:
    """A value that changes in a loop. LLVM turns its stack slot into a register."""

    def __init__(self, builder: ir.IRBuilder, value: Value) -> None:
        self._builder = builder
        with builder.goto_entry_block():
            self._slot = builder.alloca(value.type)
        self.set(value)

    def get(self) -> Value:
        return self._builder.load(self._slot)

    def set(self, value: Value) -> None:
        self._builder.store(value, self._slot)


def start_function(function: Value) -> ir.IRBuilder:
    """A builder at the begin of `function`: in a block behind the entry, which is left to stack slots."""
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    builder.branch(function.append_basic_block("start"))
    builder.position_at_end(function.blocks[-1])
    return builder


def make_internal(function: Value) -> None:
    """Keeps a function to its module, and whole: a copy in each caller only takes time to compile."""
    function.linkage = "internal"
    function.attributes.add("noinline")


def call_emitted(
    builder: Any, name: str, emit: Callable[[ir.Module], Value], arguments: Sequence[Value]
) -> None:
    """Calls the function `name`, which `emit` puts into the module where it is not there yet."""
    module = builder.module
    builder.call(module.globals.get(name) or emit(module), arguments)
