"""The norm and the rounding to float16 by vector instructions, bit for bit against their plain twins."""

from __future__ import annotations

import numpy as np
import pytest
from native_code import compile_here, guarded
from test_simd import HERE

from cllm.kylin import ops, ops_simd
from cllm.kylin.jit import kernel
from cllm.kylin.ops import sum_lanes

rng = np.random.default_rng(0)


@kernel
def exponentials(x):  # type: ignore[no-untyped-def]
    """`ops.exp32` of each value."""
    out = np.empty_like(x)
    for i in range(x.size):
        out[i] = ops.exp32(x[i])
    return out


def test_exp32_is_the_exponential() -> None:
    x = np.concatenate([np.linspace(-86, 0, 1_000_001), -np.logspace(-30, 0, 1000)]).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert np.abs(exponentials(x) / exact - 1).max() < 1.2e-7
    ends = np.array([0, -0.0, -86.01, -1e30, -np.inf], np.float32)
    assert exponentials(ends).tolist() == [1, 1, 0, 0, 0]
    # NaN of every payload that fits the bits which become an exponent.
    nans = (np.uint32(0x7F800001) + np.arange(1024, dtype=np.uint32)).view(np.float32)
    assert np.isnan(exponentials(nans)).all()


@HERE
@pytest.mark.parametrize("width", [16, 48, 1024])
@pytest.mark.parametrize("is_in_place", [False, True])
def test_norm_matches_plain(isa: str, width: int, is_in_place: bool) -> None:
    """The same lanes and the same tree as `ops.rms_norm`."""
    call = compile_here(lambda module: ops_simd.emit_rms_norm(module, isa), 5)
    rows = (rng.standard_normal((4, width)) * 10.0 ** rng.integers(-3, 4, width)).astype(np.float32)
    rows[2], rows[3, 7] = 0, np.inf
    weight, eps = rng.standard_normal(width).astype(np.float32), np.full(1, 1e-6, np.float32)
    expected = np.empty_like(rows)
    ops.rms_norm(rows, weight, eps[0], expected, 0, 4)
    for row, plain in zip(rows, expected, strict=True):
        with guarded(row) as x, guarded(np.zeros_like(row)) as other:
            out = x if is_in_place else other
            call(x.ctypes.data, weight.ctypes.data, eps.ctypes.data, out.ctypes.data, width)
            assert out.tobytes() == plain.tobytes()


@HERE
@pytest.mark.parametrize("count", [16, 80])
def test_exponentials_match_plain(isa: str, count: int) -> None:
    """The same function, lanes and tree as `ops.exp32` and `ops.sum_lanes`; a masked score is 0."""
    call = compile_here(lambda module: ops_simd.emit_exponentials(module, isa), 3)
    scores = (rng.standard_normal(count) * 30).astype(np.float32)
    scores[[3, count - 1]] = -np.inf, scores.max() - 85.99
    expected = exponentials(scores - scores.max())
    lanes = np.zeros(16, np.float32)
    for row in expected.reshape(-1, 16):
        lanes += row
    reciprocal = np.zeros(1, np.float32)
    with guarded(scores) as found:
        call(found.ctypes.data, count, reciprocal.ctypes.data)
        assert found.tobytes() == expected.tobytes()
    assert found[3] == 0
    assert reciprocal[0] == np.float32(1) / sum_lanes.py_func(lanes)


@HERE
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_exponentials_of_what_is_not_finite(isa: str, value: float) -> None:
    """One NaN, an infinity or nothing but -infinity makes the sum NaN, never a number that looks right."""
    call = compile_here(lambda module: ops_simd.emit_exponentials(module, isa), 3)
    scores = np.full(32, value if value < 0 else 1, np.float32)
    scores[20] = value
    reciprocal = np.zeros(1, np.float32)
    call(scores.ctypes.data, 32, reciprocal.ctypes.data)
    assert np.isnan(reciprocal[0])


@HERE
def test_halves_are_those_of_numpy(isa: str) -> None:
    call = compile_here(lambda module: ops_simd.emit_to_halves(module, isa), 3)
    # Every upper half of a float32, with lower halves on both sides of each tie of float16.
    upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    for lower in (0, 1, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0xFFFF):
        x = (upper | np.uint32(lower)).view(np.float32)
        out = np.zeros(x.size, np.uint16)
        call(x.ctypes.data, x.size, out.ctypes.data)
        with np.errstate(over="ignore", invalid="ignore"):
            expected = x.astype(np.float16)
        found = out.view(np.float16)
        is_nan = np.isnan(expected)
        assert (np.isnan(found) == is_nan).all()
        assert found[~is_nan].tobytes() == expected[~is_nan].tobytes()
