"""What this machine can do at most: bytes a second from memory, 8-bit multiply-adds a second in registers.

Measured with as many threads as the backends use, by loops that do nothing else. Knows no model.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..kylin.isa import host_isa
from ..kylin.jit import kernel
from ..kylin.simd import I64, Emitter

_CHAINS = 10  # independent sums: enough to hide the latency of a dot product, few enough for the registers
_DOTS_A_CALL = 1 << 20


class Ceiling(NamedTuple):
    """What the machine could do at one moment."""

    read_gb_s: float  # 10^9 bytes a second from memory
    dot_gops: float  # 10^9 operations a second of int8 dot products; a multiplication and an addition are two


class Ceilings:
    """Measures the ceilings of `num_threads` threads, any number of times. Holds `num_bytes`, more than any cache."""

    def __init__(self, num_threads: int, num_bytes: int = 1 << 29) -> None:
        self._num_threads, self._num_bytes = num_threads, num_bytes
        self._parts = np.array_split(np.ones(num_bytes // 8, np.int64), num_threads)

    def measure(self, rounds: int = 3) -> Ceiling:
        """The fastest of some rounds of each loop; takes about a tenth of a second."""
        read_s = _best(self._num_threads, rounds, lambda part: _sum(self._parts[part]))
        dots_s = _best(self._num_threads, rounds, lambda part: _dots(_DOTS_A_CALL))
        operations = self._num_threads * _DOTS_A_CALL * _CHAINS * Emitter(None, host_isa()).lanes * 4 * 2
        return Ceiling(self._num_bytes / read_s / 1e9, operations / dots_s / 1e9)


def _best(num_threads: int, rounds: int, work: Any) -> float:
    """Seconds of the fastest round, after one that is not counted, of `work(part)` on every thread."""
    with ThreadPoolExecutor(num_threads) as pool:
        times = []
        for _ in range(rounds + 1):
            started = time.perf_counter()
            list(pool.map(work, range(num_threads)))
            times.append(time.perf_counter() - started)
    return min(times[1:])


@kernel
def _sum(data):  # type: ignore[no-untyped-def]
    total = np.int64(0)
    for i in range(data.size):
        total += data[i]
    return total


@intrinsic
def _dot_loop(typing_context, count):  # type: ignore[no-untyped-def]
    """`count` turns of `_CHAINS` dot products of u8 x s8, four to a 32-bit lane."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit = Emitter(builder, host_isa())
        weights = emit.splat(0x01020304, emit.i32)
        sums = [
            emit.variable(emit.dot(None, weights, emit.splat(chain, emit.i32))) for chain in range(_CHAINS)
        ]
        with emit.loop(arguments[0]):
            for total in sums:  # each feeds on itself, so that no turn can be left out
                total.set(emit.dot(total.get(), weights, emit.cast(total.get(), emit.i32)))
        result = emit.cast(sums[0].get(), emit.i32)
        for total in sums[1:]:
            result = builder.add(result, emit.cast(total.get(), emit.i32))
        return builder.sext(builder.extract_element(result, ir.Constant(ir.IntType(32), 0)), I64)

    return types.int64(types.int64), codegen


@kernel
def _dots(count):  # type: ignore[no-untyped-def]
    return _dot_loop(np.int64(count))  # type: ignore[call-arg]  # numba gives the typing context
