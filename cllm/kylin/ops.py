"""The operations of a step that are not matrix products, as plain numba kernels over a range of rows.

Law 1 holds here by construction: each row is computed alone, sums run over 16 fixed lanes that are added in a
fixed tree, and the exponential is a polynomial of fixed operations, so the bits depend on nothing else.
"""

from __future__ import annotations

import numpy as np

from .jit import inlined, kernel
from .native import fma

LANES = 16
LOG2_E = np.float32(1.4426950408889634)
# ln 2 in two parts: the first has so few bits that n * LN2_HIGH is exact (Cody and Waite).
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
TO_NEAREST = np.float32(12582912.0)  # 1.5 * 2^23: adding it rounds a small float to an integer, ties to even
EXP_MIN = np.float32(-86.0)  # e^x and what it is made of stay normal numbers down to here
# e^r = 1 + r * (1 + r * (..)) on |r| <= ln(2)/2: a minimax polynomial by Remez' algorithm, lowest power first.
EXP_TERMS = tuple(
    np.float32(term) for term in (1, 0.50000006, 0.16666365, 0.04166477, 0.008379059, 0.0014061423)
)


@inlined
def exp32(x):  # type: ignore[no-untyped-def]
    """e^x in float32 for x <= 0, relative error below 1.2e-7; 0 below -86, NaN of NaN."""
    shifted = fma(x, LOG2_E, TO_NEAREST)
    n = shifted - TO_NEAREST
    r = fma(n, -LN2_LOW, fma(n, -LN2_HIGH, x))
    p = fma(EXP_TERMS[5], r, EXP_TERMS[4])
    p = fma(p, r, EXP_TERMS[3])
    p = fma(p, r, EXP_TERMS[2])
    p = fma(p, r, EXP_TERMS[1])
    p = fma(p, r, EXP_TERMS[0])
    p = fma(p, r, np.float32(1))
    # The low bits of `shifted` are n: shifted into the exponent they make 2^n.
    exponent = (np.float32(shifted).view(np.int32) + np.int32(127)) << np.int32(23)
    power = np.int32(exponent).view(np.float32)
    return np.float32(0) if x < EXP_MIN else p * power


@inlined
def sum_lanes(lanes):  # type: ignore[no-untyped-def]
    """The sum of float32[16], added in halves: the one reduction tree of all float sums over lanes."""
    for i in range(8):
        lanes[i] += lanes[i + 8]
    for i in range(4):
        lanes[i] += lanes[i + 4]
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3])


@kernel
def rms_norm(x, weight, eps, out, begin, end):  # type: ignore[no-untyped-def]
    """out[i] = x[i] / sqrt(mean(x[i]^2) + eps) * weight for rows begin <= i < end of float32[N, D]."""
    width = x.shape[1]
    lanes = np.empty(LANES, np.float32)
    for row in range(begin, end):
        for lane in range(LANES):
            lanes[lane] = np.float32(0)
        for start in range(0, width - LANES + 1, LANES):
            for lane in range(LANES):
                value = x[row, start + lane]
                lanes[lane] += value * value
        for column in range(width - width % LANES, width):
            value = x[row, column]
            lanes[column % LANES] += value * value
        mean = sum_lanes(lanes) / np.float32(width)
        scale = np.float32(1) / np.sqrt(mean + eps)
        for column in range(width):
            out[row, column] = x[row, column] * scale * weight[column]


@inlined
def turn_halves(x, cos, sin):  # type: ignore[no-untyped-def]
    """Turns the pairs (i, i + C/2) of heads x [H, C] in place by the angles of one position; cos, sin [C/2]."""
    half = cos.shape[0]
    for head in range(x.shape[0]):
        for i in range(half):
            a, b = x[head, i], x[head, i + half]
            x[head, i] = a * cos[i] - b * sin[i]
            x[head, i + half] = a * sin[i] + b * cos[i]


@inlined
def turn_neighbours(x, cos, sin):  # type: ignore[no-untyped-def]
    """As `turn_halves`, with the pairs (2i, 2i + 1)."""
    for head in range(x.shape[0]):
        for i in range(cos.shape[0]):
            a, b = x[head, 2 * i], x[head, 2 * i + 1]
            x[head, 2 * i] = a * cos[i] - b * sin[i]
            x[head, 2 * i + 1] = a * sin[i] + b * cos[i]


@kernel
def rope_halves(x, positions, cos, sin, begin, end):  # type: ignore[no-untyped-def]
    """`turn_halves` of the tokens begin <= t < end of x [T, H, C], by their positions; cos, sin [P, C/2]."""
    for token in range(begin, end):
        turn_halves(x[token], cos[positions[token]], sin[positions[token]])


@kernel
def rope_neighbours(x, positions, cos, sin, begin, end):  # type: ignore[no-untyped-def]
    """As `rope_halves`, with `turn_neighbours`."""
    for token in range(begin, end):
        turn_neighbours(x[token], cos[positions[token]], sin[positions[token]])


@inlined
def silu_mul_row(gate, up):  # type: ignore[no-untyped-def]
    """gate = gate * sigmoid(gate) * up in place, for float32[n]."""
    for i in range(gate.shape[0]):
        value = gate[i]
        small = exp32(-abs(value))
        sigmoid = (np.float32(1) if value >= 0 else small) / (np.float32(1) + small)
        gate[i] = value * sigmoid * up[i]


@kernel
def silu_mul(gate, up, begin, end):  # type: ignore[no-untyped-def]
    """gate = gate * sigmoid(gate) * up in place, for rows begin <= i < end of float32[T, F]."""
    for row in range(begin, end):
        silu_mul_row(gate[row], up[row])
