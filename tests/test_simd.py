"""The emitter: each operation on each instruction set that runs here, and the instructions that others would use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llvmlite import ir
from native_code import assembly_for, compile_here

from cllm.errors import ConfigError
from cllm.kylin.isa import host_isa, usable_isas
from cllm.kylin.simd import I64, Emitter, start_function

X86, ARM = "x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu"
RUNS_HERE = usable_isas()
HERE = pytest.mark.parametrize("isa", RUNS_HERE)
rng = np.random.default_rng(0)


def lanewise(isa: str, operation: Callable[..., Any], *inputs: np.ndarray, out: type) -> np.ndarray:
    """`operation(e, vectors)` over arrays of 32-bit lanes, 16 a call."""

    def emit(module: ir.Module) -> Any:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * (len(inputs) + 1)), "run")
        e = Emitter(start_function(function), isa)
        for start in range(0, 64, 4 * e.lanes):
            vectors = [e.load(e.i32, address, start) for address in function.args[:-1]]
            e.store(operation(e, *vectors), function.args[-1], start)
        e.builder.ret_void()
        return function

    result = np.zeros(inputs[0].nbytes // 4, out)
    call = compile_here(emit, len(inputs) + 1)
    for start in range(0, result.nbytes, 64):
        call(*(x.ctypes.data + start for x in (*inputs, result)))
    return result


def words(low: int, high: int) -> np.ndarray:
    """16 lanes of 4 bytes each."""
    return rng.integers(low, high, (16, 4)).astype(np.int8)


@HERE
def test_dot_of_unsigned_weights(isa: str) -> None:
    """With the largest values that fit, as many words as `dot_span` allows, and a scale."""
    weights, acts = words(63, 64), words(-127, -126)
    weights[8:], acts[8:] = words(0, 64)[8:], words(-127, 128)[8:]

    def operation(e: Emitter, w: Any, a: Any) -> Any:
        partial = None
        for _ in range(min(e.dot_span(63), 8)):
            partial = e.dot(partial, w, a)
        scale = e.scale_of_byte(e.splat(0x0000C300, e.i32), 1, signed=True)  # -61
        return e.scaled(e.splat(5, e.i32), partial, scale)

    count = 2 if isa == "avx2" else 8
    expected = 5 - 61 * count * (weights.astype(np.int32) * acts).sum(1)
    np.testing.assert_array_equal(lanewise(isa, operation, weights, acts, out=np.int32), expected)


@HERE
def test_dot_of_signed_weights(isa: str) -> None:
    weights, acts = words(-128, 128), words(-127, 128)
    weights[0], acts[0] = -128, -127
    weights[1], acts[1] = -128, 127

    def operation(e: Emitter, w: Any, a: Any) -> Any:
        return e.scaled(e.zero(e.i32), e.dot_signed(None, w, a))

    offset = 128 if "vnni" in isa else 0
    expected = (weights.astype(np.int32) * acts).sum(1) + offset * acts.astype(np.int32).sum(1)
    np.testing.assert_array_equal(lanewise(isa, operation, weights, acts, out=np.int32), expected)


@HERE
def test_pairs(isa: str) -> None:
    a = words(-128, 128)
    b = rng.integers(-4064, 4065, (16, 2)).astype(np.int16)

    def operation(e: Emitter, a: Any, b: Any) -> Any:
        return e.add(
            e.pair_dot(e.pair_of_bytes(a, 1, 3, signed=True), b), e.pair_dot(e.pair_of_bytes(a, 0, 2), b)
        )

    signed, unsigned = a[:, [1, 3]].astype(np.int32), a.view(np.uint8)[:, [0, 2]].astype(np.int32)
    expected = ((signed + unsigned) * b).sum(1)
    np.testing.assert_array_equal(lanewise(isa, operation, a, b, out=np.int32), expected)


@HERE
def test_every_half_becomes_its_float(isa: str) -> None:
    halves = np.arange(65536, dtype=np.uint32)
    result = lanewise(isa, lambda e, a: e.half_to_float(a), halves | 0xABCD0000, out=np.float32)
    np.testing.assert_array_equal(result, halves.astype(np.uint16).view(np.float16).astype(np.float32))


@HERE
def test_fma_rounds_once(isa: str) -> None:
    a, b = (rng.standard_normal(16).astype(np.float32) for _ in range(2))
    c = -(a * b)
    result = lanewise(isa, lambda e, *v: e.fma(*(e.cast(x, e.f32) for x in v)), a, b, c, out=np.float32)
    np.testing.assert_array_equal(result, (a.astype(np.float64) * b + c).astype(np.float32))


@pytest.mark.parametrize(
    ("isa", "triple", "cpu", "instruction"),
    [
        ("avx512vnni", X86, "icelake-server", "vpdpbusd"),
        ("avxvnni", X86, "alderlake", "vpdpbusd"),
        ("avx2", X86, "haswell", "vpmaddubsw"),
        ("sdot", ARM, "neoverse-n1", "sdot"),
        ("generic", ARM, "cortex-a72", "mla"),
        ("generic", X86, "x86-64", "pmul"),
    ],
)
def test_instructions(isa: str, triple: str, cpu: str, instruction: str) -> None:
    """Every lowering compiles for a processor that has it, and is what it is there for."""

    def emit(module: ir.Module) -> Any:
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 3), "run")
        e = Emitter(start_function(function), isa)
        w, a = (e.load(e.i32, address) for address in function.args[:2])
        total = e.scaled(e.zero(e.i32), e.dot(None, w, a), e.scale_of_byte(w, 2, signed=True))
        total = e.add(total, e.scaled(total, e.dot_signed(None, w, a)))
        e.store(
            e.fma(e.to_float(e.pair_dot(total, w)), e.half_to_float(a), e.load_halves(function.args[2])),
            function.args[2],
        )
        e.builder.ret_void()
        return function

    assert instruction in assembly_for(emit, triple, cpu)


def test_isa_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLLM_ISA", "generic")
    assert host_isa.__wrapped__() == "generic"
    monkeypatch.setenv("CLLM_ISA", "sse9")
    with pytest.raises(ConfigError, match=r"CLLM_ISA should be one of .*generic.*'sse9'"):
        host_isa.__wrapped__()
