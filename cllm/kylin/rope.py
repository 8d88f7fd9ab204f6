"""Rotary position embedding: the angle of every position and pair, for each way of stretching the context.

The tables are made once, in float64, and rounded to float32, so that every kernel and the reference rotate
by the same numbers.

Sources: RoFormer (arXiv 2104.09864); position interpolation (2306.15595); YaRN (2309.00071); the divisors in
`rope_freqs.weight` are Llama 3.1's frequency rescaling, worked out by the converter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

# YaRN's published bounds: pairs that turn more than 32 times over the original context stay as they are,
# those that turn less than once are interpolated, the others are blended.
_BETA_FAST, _BETA_SLOW = 32.0, 1.0


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How positions are stretched past the original context."""

    KINDS: ClassVar[tuple[str, ...]] = ("none", "linear", "yarn")
    kind: str = "none"
    factor: float = 1.0
    original_context_length: int = 0
    attn_factor: float = 1.0


def rope_table(
    num_positions: int,
    head_width: int,
    base: float,
    scaling: RopeScaling,
    factors: NDArray[np.float32] | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(cos, sin), each float32[num_positions, head_width / 2]. `factors` [C/2] divide the frequencies."""
    frequencies, magnitude = _frequencies(head_width, base, scaling, factors)
    angles = np.arange(num_positions, dtype=np.float64)[:, None] * frequencies  # [P, C/2]
    return (magnitude * np.cos(angles)).astype(np.float32), (magnitude * np.sin(angles)).astype(np.float32)


def _frequencies(
    head_width: int, base: float, scaling: RopeScaling, factors: NDArray[np.float32] | None
) -> tuple[NDArray[np.float64], float]:
    """(radians a position for each pair [C/2], the factor on cos and sin)."""
    half = head_width // 2
    frequencies = base ** (-np.arange(half, dtype=np.float64) / half)
    if factors is not None:
        frequencies = frequencies / factors
    if scaling.kind == "none":
        return frequencies, scaling.attn_factor
    if scaling.kind == "linear":
        return frequencies / scaling.factor, scaling.attn_factor

    def pair_that_turns(turns: float) -> float:  # over the original context
        return half * math.log(scaling.original_context_length / (turns * 2 * math.pi)) / math.log(base)

    low = max(math.floor(pair_that_turns(_BETA_FAST)), 0)
    high = min(math.ceil(pair_that_turns(_BETA_SLOW)), head_width - 1)
    interpolated = np.clip((np.arange(half) - low) / max(high - low, 0.001), 0.0, 1.0)
    blended = frequencies * (1 - interpolated) + frequencies / scaling.factor * interpolated
    return blended, scaling.attn_factor * (1 + 0.1 * math.log(max(scaling.factor, 1.0)))
