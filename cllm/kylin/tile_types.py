"""The weight types of the fast matrix products: how each lies in memory after repacking, and its inner loop.

A function here adds one record of a type to a tile; the drawing gives the words of one row's record, each of
which stands beside those of the 15 other rows. The meaning of each bit is in `quants.py`, from which a record
differs in the order of its bytes only. What a tile is, and the order of its float operations: `tiles.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce

import numpy as np
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from .jit import kernel
from .simd import Value
from .tiles import (
    K_PAIR_STARTS,
    K_SCALE,
    K_SUMS_16,
    K_SUMS_32,
    PAIR_SCALES,
    PAIR_SUMS,
    ROWS,
    WORD,
    Dots,
    Factors,
    Grid,
    Pair,
    Tile,
    i64,
    values_of,
)

Vectors = list[Value]  # one value for 16 rows, as vectors


@dataclass(frozen=True)
class TileType:
    """One weight type.

    `order`: for each 16 bits of a record, which 16 bits of the native blocks it takes; -1 is none.
    `regroup`: moves bits within records, uint32[groups, records, words, 16], after that.
    """

    blocks: int  # native blocks in a record
    order: tuple[int, ...]
    record: Callable[[Tile], None]
    regroup: Callable[[NDArray[np.uint32]], None] | None = None

    @property
    def words(self) -> int:
        return len(self.order) // 2


# --- blocks of 256 columns ------------------------------------------------------------------------------------


def _scales_and_mins(tile: Tile) -> tuple[list[Vectors], list[Vectors]]:
    """Words 1-3 of Q4_K and Q5_K: 8 + 8 six-bit numbers, as 2 + 2 words of 4 bytes. Layout: see `quants.py`."""
    e = tile.e
    first, second, third = (tile.word(i) for i in (1, 2, 3))
    scales = [[e.both(a, 0x3F3F3F3F) for a in first], []]
    mins = [[e.both(b, 0x3F3F3F3F) for b in second], []]
    for a, b, c in zip(first, second, third, strict=True):
        scales[1].append(e.either(e.both(c, 0x0F0F0F0F), e.both(e.right(a, 2), 0x30303030)))
        mins[1].append(e.either(e.both(e.right(c, 4), 0x0F0F0F0F), e.both(e.right(b, 2), 0x30303030)))
    return scales, mins


def _finish_with_mins(tile: Tile, mins: list[Vectors], total: Grid) -> None:
    e = tile.e
    head = tile.word(0)
    msum = tile.sums_times(mins, K_SUMS_32)
    d = [e.half_to_float(v) for v in head]
    m = [e.negate(e.half_to_float(e.right(v, 16))) for v in head]
    tile.accumulate(d, values_of(total), K_SCALE, m, msum)


def q4_k(tile: Tile) -> None:
    """36 words: | d, dmin f16 | 12 bytes of scales and minimums | 4 x 8 words, of which the low nibbles are
    columns 64 p + 0..31 and the high nibbles columns 64 p + 32..63 |"""
    e = tile.e
    scales, mins = _scales_and_mins(tile)
    total = tile.zeros()

    def pairs_of(p: Value) -> list[Pair]:
        word = tile.words(4, 8, e.address(tile.weights, e.mul(p, i64(8 * WORD))))

        def dots(half: int) -> Dots:
            def nibbles(number: int) -> Vectors:
                packed = word(number, first=half == 0)
                return [e.both(e.right(v, 4 * half), 0x0F0F0F0F) for v in packed]

            return Dots(_each(nibbles, 8), e.add(e.mul(p, i64(64)), i64(32 * half)))

        return [Pair(dots(0), dots(1))]

    in_order = [(word, j, j + 1) for word in scales for j in (0, 2)]
    tile.add_scaled_dots(total, in_order, pairs_of, largest=15)
    _finish_with_mins(tile, mins, total)


def q6_k(tile: Tile) -> None:
    """53 words: | int8[16] scales | d f16, 2 unused | 4 x 3 x 4 words |

    The 3 x 4 words at 2 h + s are of columns c = 128 h + 16 s + 0..15: bits 0-5 of their bytes are c, c + 32 and
    c + 64, and bits 6-7 are c + 96, the lowest in the first 4 words. Less 32.
    """
    e = tile.e
    scales = [tile.word(j) for j in range(4)]
    total = tile.zeros()

    def pairs_of(number: Value) -> list[Pair]:
        h, s = e.builder.lshr(number, i64(1)), e.builder.and_(number, i64(1))
        word = tile.words(5, 12, e.address(tile.weights, e.mul(number, i64(12 * WORD))))
        columns = e.add(e.mul(h, i64(128)), e.mul(s, i64(16)))
        starts_at = e.add(e.add(e.mul(h, i64(16)), e.mul(s, i64(4))), i64(K_PAIR_STARTS))

        def sixes(i: int, j: int) -> Vectors:
            three = [word(4 * k + j, first=i == 0) for k in range(3)]
            if i < 3:
                return [e.both(v, 0x3F3F3F3F) for v in three[i]]
            bits = [[e.both(e.right(v, 6 - 2 * k), 0x03030303 << 2 * k) for v in three[k]] for k in range(3)]
            return [e.either(e.either(u, v), w) for u, v, w in zip(*bits, strict=True)]

        def dots(i: int) -> Dots:
            return Dots(_each(partial(sixes, i), 4), e.add(columns, i64(32 * i)))

        return [Pair(dots(0), dots(1), starts_at), Pair(dots(2), dots(3), e.add(starts_at, i64(8)))]

    def subtract_32() -> None:
        tile.subtract(total, 32, tile.sums_times(scales, K_SUMS_16, signed=True))

    # Scale 8 h + 2 i + s is byte 2 i + s of two words.
    in_order = [(scales[2 * h + i], s, s + 2) for h in (0, 1) for s in (0, 1) for i in (0, 1)]
    tile.add_scaled_dots(total, in_order, pairs_of, subtract_32, largest=63, signed=True)
    tile.accumulate([e.half_to_float(v) for v in tile.word(4)], values_of(total), K_SCALE)


def q5_k(tile: Tile) -> None:
    """44 words: | as Q4_K, 4 words | 8 words of fifth bits: bit j of a byte belongs to columns 32 j + 0..31 |
    4 x 8 words of nibbles, as Q4_K |"""
    e = tile.e
    scales, mins = _scales_and_mins(tile)
    factors = Factors(tile, [[e.scale_of_byte(v, j) for v in word] for word in scales for j in range(4)])
    total = tile.zeros()
    with e.loop(4) as p:
        base = e.address(tile.weights, e.mul(p, i64(8 * WORD)))
        for half in (0, 1):
            group = e.add(e.mul(p, i64(2)), i64(half))  # of 32 columns

            def fives(word: int, half: int = half, base: Value = base, group: Value = group) -> Vectors:
                low = tile.word(12 + word, base, first=half == 0)
                high = tile.word(4 + word, first=False)
                return [
                    e.either(
                        e.both(e.right(v, 4 * half), 0x0F0F0F0F),
                        e.left(e.both(e.right_by(w, group), 0x01010101), 4),
                    )
                    for v, w in zip(low, high, strict=True)
                ]

            dots = Dots(_each(fives, 8), e.mul(group, i64(32)))
            tile.add_dots(total, dots, largest=31, factor=factors.at(group))
    _finish_with_mins(tile, mins, total)


# --- pairs of blocks of 32 columns ------------------------------------------------------------------------------


def q8_0(tile: Tile) -> None:
    """17 words: | d, d of the second block f16 | 8 words of int8 | 8 words of the second block |"""
    e = tile.e
    head = tile.word(0)
    for block in (0, 1):
        total = tile.zeros()
        words = [partial(tile.word, 1 + 8 * block + word) for word in range(8)]
        tile.add_dots(total, Dots(words, 32 * block), largest=128, signed=True)
        if e.signed_offset:
            tile.subtract(total, e.signed_offset, tile.sums(PAIR_SUMS + 4 * block))
        _accumulate_block(tile, head, block, total)


def q4_0(tile: Tile) -> None:
    """9 words: | d, d of the second block f16 | 4 words: columns 0..15 in low nibbles, 16..31 in high ones |
    4 words of the second block |. Less 8."""
    head = tile.word(0)
    for block in (0, 1):
        total = tile.zeros()
        tile.add_dots(total, Dots(_nibbles(tile, 1 + 4 * block), 32 * block), largest=15)
        tile.subtract(total, 8, tile.sums(PAIR_SUMS + 4 * block))
        _accumulate_block(tile, head, block, total)


def q4_1(tile: Tile) -> None:
    """2 x 5 words: | d, m f16 | 4 words of nibbles, as Q4_0 |. Plus m."""
    for block in (0, 1):
        total = tile.zeros()
        tile.add_dots(total, Dots(_nibbles(tile, 5 * block + 1), 32 * block), largest=15)
        _accumulate_block_with_minimum(tile, tile.word(5 * block), block, total)


def q5_0(tile: Tile) -> None:
    """11 words: | d, d of the second block f16 | 2 x: fifth bits, 4 words of nibbles |. Less 16.

    Of the fifth bits, spread when the weights are repacked, bit j of byte i belongs to column 4 j + i.
    """
    head = tile.word(0)
    for block in (0, 1):
        total = tile.zeros()
        words = _nibbles(tile, 5 * block + 2, fifth=tile.word(5 * block + 1))
        tile.add_dots(total, Dots(words, 32 * block), largest=31)
        tile.subtract(total, 16, tile.sums(PAIR_SUMS + 4 * block))
        _accumulate_block(tile, head, block, total)


def q5_1(tile: Tile) -> None:
    """2 x 6 words: | d, m f16 | fifth bits, as Q5_0 | 4 words of nibbles |. Plus m."""
    for block in (0, 1):
        total = tile.zeros()
        words = _nibbles(tile, 6 * block + 2, fifth=tile.word(6 * block + 1))
        tile.add_dots(total, Dots(words, 32 * block), largest=31)
        _accumulate_block_with_minimum(tile, tile.word(6 * block), block, total)


def _nibbles(tile: Tile, at: int, fifth: Vectors | None = None) -> list[Callable[[], Vectors]]:
    """The 8 words of a block of 32 in the 4 words from `at`, with their fifth bits where there are any."""
    e = tile.e

    def word(number: int) -> Vectors:
        packed = tile.word(at + number % 4, first=number < 4)
        values = [e.both(e.right(v, number // 4 * 4), 0x0F0F0F0F) for v in packed]
        if fifth is None:
            return values
        shifted = [e.left(v, 4 - number) if number < 4 else e.right(v, number - 4) for v in fifth]
        return [e.either(v, e.both(w, 0x10101010)) for v, w in zip(values, shifted, strict=True)]

    return _each(word, 8)


def _accumulate_block(tile: Tile, head: Vectors, block: int, total: Grid) -> None:
    d = [tile.e.half_to_float(tile.e.right(v, 16 * block)) for v in head]
    tile.accumulate(d, values_of(total), PAIR_SCALES + 4 * block)


def _accumulate_block_with_minimum(tile: Tile, head: Vectors, block: int, total: Grid) -> None:
    e = tile.e
    d = [e.half_to_float(v) for v in head]
    m = [e.half_to_float(e.right(v, 16)) for v in head]
    tile.accumulate(d, values_of(total), PAIR_SCALES + 4 * block, m, tile.sums(PAIR_SUMS + 4 * block))


# --- 64 plain floats --------------------------------------------------------------------------------------------


def f16(tile: Tile) -> None:
    """32 words of two f16 each."""
    e = tile.e
    _add_pairs(tile, e.half_to_float, lambda v: e.half_to_float(e.right(v, 16)))


def bf16(tile: Tile) -> None:
    """32 words of two bf16 each: the upper halves of float32."""
    e = tile.e
    _add_pairs(tile, lambda v: e.cast(e.left(v, 16), e.f32), lambda v: e.cast(e.both(v, 0xFFFF0000), e.f32))


def f32(tile: Tile) -> None:
    """64 words of float32."""
    e = tile.e
    with e.loop(16) as four:
        base = e.address(tile.weights, e.mul(four, i64(4 * WORD)))
        for place in range(4):
            weights = [e.cast(v, e.f32) for v in tile.word(place, base)]
            tile.add_products(weights, e.add(e.mul(four, i64(16)), i64(4 * place)))


def _add_pairs(tile: Tile, low: Callable[[Value], Value], high: Callable[[Value], Value]) -> None:
    e = tile.e
    with e.loop(8) as four:
        base = e.address(tile.weights, e.mul(four, i64(4 * WORD)))
        acts_at = e.mul(four, i64(32))
        for place in range(4):
            packed = tile.word(place, base)
            tile.add_products([low(v) for v in packed], e.add(acts_at, i64(8 * place)))
            tile.add_products([high(v) for v in packed], e.add(acts_at, i64(8 * place + 4)))


def _each(word: Callable[[int], Vectors], count: int) -> list[Callable[[], Vectors]]:
    """`word` of each number below `count`, to be called when its turn has come."""
    return [partial(word, number) for number in range(count)]


def _halves(*spans: tuple[int, int]) -> tuple[int, ...]:
    return tuple(half for begin, end in spans for half in range(begin, end))


@kernel
def _sixes(words):  # type: ignore[no-untyped-def]
    """Q6_K: 4 words of bit pairs, 4 of nibbles of columns c and c + 64, and 4 of c + 32 and c + 96 to its 3 x 4."""
    for group, record, quarter, j in np.ndindex(len(words), words.shape[1], 4, 4):
        three = words[group, record, 5 + 12 * quarter + j :: 4]
        for lane in range(ROWS):
            pairs, even, odd = three[0, lane], three[1, lane], three[2, lane]
            three[0, lane] = even & 0x0F0F0F0F | pairs << 4 & 0x30303030 | odd << 2 & 0xC0C0C0C0
            three[1, lane] = odd & 0x0F0F0F0F | pairs << 2 & 0x30303030 | odd & 0xC0C0C0C0
            three[2, lane] = even >> 4 & 0x0F0F0F0F | pairs & 0xF0F0F0F0


def _spread(*places: int) -> Callable[[NDArray[np.uint32]], None]:
    """Q5_0, Q5_1: in the words at `places` bit 4 i + j becomes bit 8 j + i."""

    def regroup(words: NDArray[np.uint32]) -> None:
        for place in places:
            part = words[:, :, place]
            bits = ((part >> 4 * i + j & 1) << 8 * j + i for i in range(8) for j in range(4))
            part[...] = reduce(np.bitwise_or, bits)

    return regroup


_Q6_K_PAIRS_AND_NIBBLES = _halves(
    *(
        (2 * word, 2 * word + 8)
        for h in (0, 1)
        for s in (0, 1)
        for word in (32 + 8 * h + 4 * s, 16 * h + 4 * s, 16 * h + 8 + 4 * s)
    )
)

_T = GGMLQuantizationType
TILE_TYPES: dict[GGMLQuantizationType, TileType] = {
    _T.Q4_K: TileType(1, _halves((0, 72)), q4_k),
    _T.Q5_K: TileType(1, _halves((0, 88)), q5_k),
    _T.Q6_K: TileType(1, (*_halves((96, 105)), -1, *_Q6_K_PAIRS_AND_NIBBLES), q6_k, _sixes),
    _T.Q8_0: TileType(2, _halves((0, 1), (17, 18), (1, 17), (18, 34)), q8_0),
    _T.Q4_0: TileType(2, _halves((0, 1), (9, 10), (1, 9), (10, 18)), q4_0),
    _T.Q4_1: TileType(2, _halves((0, 20)), q4_1),
    _T.Q5_0: TileType(2, _halves((0, 1), (11, 12), (1, 11), (12, 22)), q5_0, _spread(1, 6)),
    _T.Q5_1: TileType(2, _halves((0, 24)), q5_1, _spread(1, 7)),
    _T.F16: TileType(64, _halves((0, 64)), f16),
    _T.BF16: TileType(64, _halves((0, 64)), bf16),
    _T.F32: TileType(64, _halves((0, 128)), f32),
}
