"""What sampling does over a whole row of logits and plain NumPy does too slowly; importing it loads numba and
compiles. It knows ids and numbers, no settings and no requests.

A row is float32[V]; `ranges` int64[N, 2] are the ids that can be sampled, ascending, each range at most
`BLOCK` long. The weight of an id is e^((logit - peak) * scale), in float32 by the fixed operations of
`exp32`, and every sum runs in one fixed order: a row gives the same bits wherever it stands in a batch.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numba as nb
import numpy as np
from numpy.typing import NDArray

from .kylin.jit import kernel
from .kylin.ops import exp32

BLOCK = 512  # a power of two

Row = NDArray[np.float32]
Ids = NDArray[np.int64]
Sums = NDArray[np.float64]

_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).tiny)

# Read-only and writable rows share one compiled version.
_row = nb.types.Array(nb.float32, 1, "C", readonly=True)


def _compiled(signature: Any = None) -> Any:
    return lambda function: kernel(function, signature)


class Blocks(NamedTuple):
    """The ids of a vocabulary cut into short ranges, at fixed places and around each unused id."""

    starts: Ids  # [M]: where each piece begins, the unused ids being pieces of one
    is_used: NDArray[np.bool_]  # [M]
    ranges: Ids  # [N, 2]: begin and end of the used pieces
    unused_ids: Ids


def make_blocks(vocab_size: int, unused_ids: Ids) -> Blocks:
    """`Blocks` of a vocabulary; the ascending `unused_ids` belong to none of its ranges."""
    edges = np.unique([*range(0, vocab_size, BLOCK), *unused_ids, *(unused_ids + 1), vocab_size])
    starts = edges[:-1]
    is_used = ~np.isin(starts, unused_ids)
    ranges = np.ascontiguousarray(np.stack([starts, edges[1:]], axis=1)[is_used])
    return Blocks(starts, is_used, ranges, unused_ids)


@lru_cache(maxsize=4)
def whole_blocks(vocab_size: int) -> Blocks:
    """`Blocks` of a vocabulary with every id in use."""
    return make_blocks(vocab_size, np.empty(0, np.int64))


@_compiled()
def _fill_weights(row, begin, end, peak, scale, weights):
    """The weights of ids begin <= id < end, then zeros up to BLOCK."""
    part = row[begin:end]  # indices that cannot be negative let the loop vectorise
    for i in range(len(part)):
        weights[i] = exp32((part[i] - peak) * scale)
    weights[end - begin :] = np.float32(0)


@_compiled(nb.float64[::1](_row, nb.int64[:, ::1], nb.float32, nb.float32))
def block_sums(row, ranges, peak, scale):
    """float64[N]: each block's sum of weights, added in halves in float32."""
    sums = np.empty(len(ranges), np.float64)
    weights = np.empty(BLOCK, np.float32)
    for b in range(len(ranges)):
        _fill_weights(row, ranges[b, 0], ranges[b, 1], peak, scale, weights)
        half = BLOCK // 2
        while half:
            upper = weights[half:]
            for i in range(half):
                weights[i] += upper[i]
            half //= 2
        sums[b] = weights[0]
    return sums


@_compiled(nb.int64(_row, nb.int64[:, ::1], nb.float32, nb.float32, nb.float64))
def draw(row, ranges, peak, scale, uniform):
    """The first id at which the weights, summed by ascending id, exceed uniform (below 1) of their sum."""
    sums = block_sums(row, ranges, peak, scale)
    total = 0.0
    for value in sums:
        total += value
    target = uniform * total
    b, before = 0, 0.0
    while before + sums[b] <= target:  # ends: the last sum makes it the total, which is above the target
        before += sums[b]
        b += 1
    begin, end = ranges[b, 0], ranges[b, 1]
    weights = np.empty(BLOCK, np.float32)
    _fill_weights(row, begin, end, peak, scale, weights)
    chosen = begin
    for i in range(end - begin):
        if weights[i] > 0:
            chosen = begin + i
            before += weights[i]
            if before > target:
                break
    return chosen  # where rounding leaves the sum just short: the block's last id with any weight


@_compiled(nb.int64[::1](_row, nb.int64[:, ::1], nb.float32[::1], nb.float32))
def _ids_from(row, ranges, maxima, threshold):
    """int64: the ids with a logit of at least `threshold`, ascending. `maxima` float32[N]: of each block."""
    size = 0
    for b in range(len(ranges)):
        if maxima[b] >= threshold:
            size += ranges[b, 1] - ranges[b, 0]
    ids = np.empty(size, np.int64)
    count = 0
    for b in range(len(ranges)):
        if maxima[b] >= threshold:
            for i in range(ranges[b, 0], ranges[b, 1]):
                ids[count] = i  # overwritten by the next unless this one counts
                count += row[i] >= threshold
    return ids[:count]


@_compiled(nb.float32[::1](_row, nb.int64[::1], nb.float32, nb.float32))
def _weights_of(row, ids, peak, scale):
    """float32[len(ids)]: the weight of each id."""
    weights = np.empty(len(ids), np.float32)
    for i in range(len(ids)):
        weights[i] = exp32((row[ids[i]] - peak) * scale)
    return weights


def best_tokens(row: Row, blocks: Blocks, count: int | None = None, floor: float = -_LARGEST) -> Ids:
    """The `count` best ids (None: all), best first; none unused, and none at -inf or below `floor`."""
    maxima = np.maximum.reduceat(row, blocks.starts)[blocks.is_used]
    threshold = _float32_at_least(floor)
    if count is not None:
        # The count-th best of some logits is a lower bound of the count-th best of all.
        some = maxima if count <= len(maxima) else np.delete(row, blocks.unused_ids)
        if count <= len(some):
            threshold = max(threshold, np.partition(some, -count)[-count])
    ids: Ids = _ids_from(row, blocks.ranges, maxima, threshold)
    return ids[np.argsort(-row[ids], kind="stable")][:count]


def kept_tokens(
    row: Row, blocks: Blocks, peak: float, *, temperature: float, min_p: float, top_k: int, top_p: float
) -> tuple[Ids, Sums]:
    """(ids, best first; their weights summed) after `min_p`, `top_k` and `top_p`, of which at least one is on.

    The weight of an id is e^((logit - peak) / temperature), `peak` the largest logit. Kept are: with `min_p`
    the weights of at least `min_p`, that is logits of at least peak + temperature * ln(min_p); then the `top_k`
    best; then the shortest head whose share of what was left reaches `top_p` (Holtzman et al. 2020,
    arXiv:1904.09751).
    """
    scale = inverse_temperature(temperature)
    if min_p > 0 or 0 < top_k < len(row):
        floor = peak + temperature * math.log(min_p) if min_p > 0 else -_LARGEST
        ids = best_tokens(row, blocks, top_k if 0 < top_k < len(row) else None, floor)
        cumulative = _summed_weights(row, ids, peak, scale)
        return _head(ids, cumulative, top_p * cumulative[-1]) if top_p < 1 else (ids, cumulative)
    return _nucleus(row, blocks, peak, scale, top_p)


def _nucleus(row: Row, blocks: Blocks, peak: float, scale: float, top_p: float) -> tuple[Ids, Sums]:
    mass = top_p * float(block_sums(row, blocks.ranges, peak, scale).sum())
    count = 64  # it is nearly always short: look for it among the few best before more are sorted
    while True:
        ids = best_tokens(row, blocks, count)
        cumulative = _summed_weights(row, ids, peak, scale)
        if cumulative[-1] >= mass or len(ids) < count:
            return _head(ids, cumulative, mass)
        count *= 16


def _summed_weights(row: Row, ids: Ids, peak: float, scale: float) -> Sums:
    return np.cumsum(_weights_of(row, ids, peak, scale), dtype=np.float64)


def _head(ids: Ids, cumulative: Sums, mass: float) -> tuple[Ids, Sums]:
    """The shortest head of `ids` whose summed weight reaches `mass`; all where rounding leaves them short."""
    length = int(np.searchsorted(cumulative, mass)) + 1
    return ids[:length], cumulative[:length]


def inverse_temperature(temperature: float) -> float:
    """1 / temperature as a positive float32 also for huge ones, so that -inf times it stays -inf."""
    return max(1 / temperature, _SMALLEST)


def _float32_at_least(value: float) -> np.float32:
    """The smallest finite float32 that is not below `value`, for comparisons without rounding."""
    rounded = np.float32(max(value, -_LARGEST))
    return rounded if float(rounded) >= value else np.nextafter(rounded, np.float32(np.inf))
