"""What compiled code needs of the machine and Python does not offer: atomic counters, waiting, the cycle counter,
parking, the fused multiplication. It must not know arrays, models or work; addresses are int64."""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types

from .jit import intrinsic

F32, I64 = ir.FloatType(), ir.IntType(64)
carray: Any = numba.carray  # type: ignore[attr-defined]  # an array at a `pointer`

# The C library's. An unnamed semaphore is the cheapest way to sleep without Python: one call, no GIL.
sched_yield = types.ExternalFunction("sched_yield", types.int32())
sem_init: Any = types.ExternalFunction("sem_init", types.int32(types.intp, types.int32, types.uint32))
sem_post = types.ExternalFunction("sem_post", types.int32(types.intp))
sem_wait = types.ExternalFunction("sem_wait", types.int32(types.intp))
sem_trywait = types.ExternalFunction("sem_trywait", types.int32(types.intp))


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, I64.as_pointer())


def _call(builder: Any, name: str, result: Any, arguments: Any = ()) -> Any:
    """Calls the LLVM intrinsic `name`."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    return builder.call(function, arguments)


@intrinsic
def atomic_add(typing_context, address, value):  # type: ignore[no-untyped-def]
    """Adds to the int64 at an address; what it was before. Orders all memory accesses."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        return builder.atomic_rmw("add", _pointer(builder, values[0]), values[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def atomic_store(typing_context, address, value):  # type: ignore[no-untyped-def]
    """Puts a value at an address; whoever reads it there sees what was written before."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        builder.store_atomic(values[1], _pointer(builder, values[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def atomic_load(typing_context, address):  # type: ignore[no-untyped-def]
    """The int64 at an address; what its writer did before is visible."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        return builder.load_atomic(_pointer(builder, values[0]), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def pause(typing_context):  # type: ignore[no-untyped-def]
    """Tells the core that this is a waiting loop."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        if "x86" in builder.module.triple or "i686" in builder.module.triple:
            _call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def cycles(typing_context):  # type: ignore[no-untyped-def]
    """The processor's cycle counter: it runs at a constant rate, which is not that of seconds."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        return _call(builder, "llvm.readcyclecounter", I64)

    return types.int64(), generate


@intrinsic
def call_native(typing_context, address, arguments):  # type: ignore[no-untyped-def]
    """Calls the function at an address, one of `jit.native_function`, with a tuple of int64."""
    count = len(arguments)
    numbers = types.UniTuple(types.int64, count)  # type: ignore[no-untyped-call]

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        function = builder.inttoptr(values[0], ir.FunctionType(ir.VoidType(), [I64] * count).as_pointer())
        builder.call(function, [builder.extract_value(values[1], i) for i in range(count)])
        return context.get_dummy_value()

    return types.void(types.int64, numbers), generate


@intrinsic
def pointer(typing_context, address):  # type: ignore[no-untyped-def]
    """An address as what `numba.carray` takes."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        return builder.inttoptr(values[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def fma(typing_context, a, b, c):  # type: ignore[no-untyped-def]
    """a * b + c of float32, rounded once."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        return _call(builder, "llvm.fma.f32", F32, values)

    return types.float32(*(types.float32,) * 3), generate
