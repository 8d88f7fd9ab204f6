"""The inner loops of the matrix products: 16 weight rows times 1 to 8 tokens, one short description a weight type.

It owns how repacked weights and rounded activations lie in memory, drawn beside each type, and must not know
matrices, threads or files. Weights lie in *groups* of 16 rows, and a group in *records* of 64 or 256 columns:
word i of the 16 rows' records stands together, so a vector lane is a row and nothing is summed across lanes.

Law 1: one accumulator for each (row, token), integer sums exact, and for each scale, in order of the columns,
acc = fma(d * isum, da, acc), or with minimums acc = fma(fma(-dmin, msum, d * isum), da, acc).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from llvmlite import ir

from .simd import I32, I64, Emitter, Value, Variable

ROWS = 16  # of a group
WORD = 4 * ROWS  # bytes of one word of a group's rows
BLOCK_TOKENS = 8  # of a block of activations: as many as the largest tile has

# Rounded activations lie in blocks of 8 tokens, [blocks][records][8], and beside the weights' records: so all addresses
# of a tile are one register plus a constant. A record of one token is one of
#
#   q8_K, 256 values      | int8[256] | int16[16] sums of 16 | int32[8] starts of pairs | int16[8] sums of 32 |
#                         | float32 scale | int32 is wide | 8 unused
#   q8_0, q8_1, 2 x 32    | int8[64]  | float32[2] scales | int32[2] sums of 32 values
#   floats, 64 values     | float32[64]
#
# A record is wide (1, else 0) where the magnitudes of one of its sixteens add up to `K_WIDE_SUM` or more. With one that
# is not, dot products of 32 values with Q4_K (15 * 2 * 1023) and of 16 with Q6_K (32 * 1023) fit 16 bits. Two of
# Q6_K's, as halves of 32 bits, begin with 2^15 - 32 * (low sum + 2^16 * high sum): the start 4 h + 2 j + s, for h, j, s
# of 0 and 1, is that of the sums 8 h + 4 j + s and 8 h + 4 j + s + 2.
K_SUMS_16, K_PAIR_STARTS, K_SUMS_32, K_SCALE, K_IS_WIDE = 256, 288, 320, 336, 340
K_WIDE_SUM = 1024
PAIR_SCALES, PAIR_SUMS = 64, 72
RECORD_VALUES = {"q8_K": 256, "q8_0": 64, "q8_1": 64, "f16": 64, "bf16": 64, "none": 64}
RECORD_BYTES = {"q8_K": 352, "q8_0": 80, "q8_1": 80, "f16": 256, "bf16": 256, "none": 256}

# Bytes ahead of a load, in tiles of at least so many tokens. Smaller ones wait for memory anyway, and the processor's
# own prefetching of a stream is the better one then (docs/performance.md).
PREFETCH, PREFETCH_TOKENS = 9216, 4
Grid = list[list[Variable]]  # [token][vector of rows]


class Dots(NamedTuple):
    """A dot product for each row and token: of `words` with the activations from byte `acts_at`."""

    words: Sequence[Callable[[], list[Value]]]
    acts_at: Value | int


class Pair(NamedTuple):
    """Two dot products. As halves of 32 bits they begin with the int32 at byte `starts_at`."""

    low: Dots
    high: Dots
    starts_at: Value | None = None


class Tile:
    """One record of a group against `num_tokens` tokens. `acc` is the float32 result so far."""

    def __init__(self, e: Emitter, num_tokens: int) -> None:
        self.e, self.num_tokens = e, num_tokens
        self.vectors = range(ROWS // e.lanes)  # that make up 16 rows
        self.acc = [[e.variable(e.zero(e.f32)) for _ in self.vectors] for _ in range(num_tokens)]
        self.weights: Value = None  # the address of the record
        self.acts: list[Value] = []  # of each token's record

    def word(self, index: int, base: Value | None = None, *, first: bool = True) -> list[Value]:
        """Word `index` of the 16 rows, from `base` or the record's begin. `first`: not yet loaded before."""
        e, base = self.e, self.weights if base is None else base
        if first and self.num_tokens >= PREFETCH_TOKENS:
            e.prefetch(base, WORD * index + PREFETCH)
        return [e.load(e.i32, base, WORD * index + 4 * e.lanes * r) for r in self.vectors]

    def words(self, first: int, count: int, base: Value) -> Callable[..., list[Value]]:
        """`word` by its number among the `count` from `first` on. A tile of few tokens loads them all now, so that
        memory is asked for much at once; a larger one has no registers for them."""
        if self.e.isa == "avx512vnni" and self.num_tokens < PREFETCH_TOKENS:
            loaded = [self.word(first + number, base) for number in range(count)]
            return lambda number, **_: loaded[number]
        return lambda number, **is_first: self.word(first + number, base, **is_first)

    def zeros(self) -> Grid:
        """Integer sums that start at 0."""
        e = self.e
        return [[e.variable(e.zero(e.i32)) for _ in self.vectors] for _ in self.acc]

    def add_dots(
        self,
        total: Grid,
        dots: Dots,
        *,
        largest: int,
        factor: list[Value] | None = None,
        signed: bool = False,
    ) -> None:
        """total += factor * dots, of words of magnitude up to `largest`."""
        e, words = self.e, dots.words
        span = e.dot_span(largest)
        acts = [e.address(x, dots.acts_at) for x in self.acts]
        dot = e.dot_signed if signed else e.dot
        nothing = self._nothing()
        for start in range(0, len(words), span):
            places = range(start, min(start + span, len(words)))
            if len(places) <= 2:  # few enough to hold the weights in registers, and one token's sum at a time
                weights = {place: words[place]() for place in places}
                for token in range(self.num_tokens):
                    parts = self._add_words(weights, acts[token], nothing[token], dot)
                    self._add_scaled(total[token], parts, factor)
            else:
                for sums, parts in zip(total, self._add_each(words, places, acts, nothing, dot), strict=True):
                    self._add_scaled(sums, parts, factor)

    def _nothing(self) -> list[list[Value]]:
        """[token][vector]: what `dot` begins with."""
        return [[None for _ in self.vectors] for _ in self.acts]

    def _add_each(
        self,
        words: Sequence[Callable[[], list[Value]]],
        places: range,
        acts: Sequence[Value],
        partial: list[list[Value]],
        dot: Callable[..., Value],
    ) -> list[list[Value]]:
        """partial + dots of the words at these places, one word after the other with all tokens."""
        for place in places:
            weights = {place: words[place]()}
            partial = [self._add_words(weights, x, row, dot) for x, row in zip(acts, partial, strict=True)]
        return partial

    def _add_words(
        self, weights: dict[int, list[Value]], acts: Value, partial: list[Value], dot: Callable[..., Value]
    ) -> list[Value]:
        """partial + dots of the words at these places with one token's activations."""
        for place, vectors in weights.items():
            activations = self.e.broadcast(self.e.i32, acts, 4 * place)
            partial = [dot(p, v, activations) for p, v in zip(partial, vectors, strict=True)]
        return partial

    def _add_scaled(self, total: list[Variable], partial: list[Value], factor: list[Value] | None) -> None:
        for r in self.vectors:
            total[r].set(self.e.scaled(total[r].get(), partial[r], factor and factor[r]))

    def add_scaled_dots(
        self,
        total: Grid,
        scales: Sequence[tuple[list[Value], int, int]],
        pairs_of: Callable[[Value], Sequence[Pair]],
        correct: Callable[[], None] | None = None,
        *,
        largest: int,
        signed: bool = False,
    ) -> None:
        """total += each dot product of a record of q8_K times its scale.

        `pairs_of` gives those of each quarter of the record. `scales`, in this order: for each pair a word, and
        which of its bytes are the scales. Unless the record is wide, both dot products of a pair fit 16 bits: one
        operation scales and adds them. Where they do not begin as a pair, `correct` does what their starts are for.
        """
        e, b = self.e, self.e.builder

        def wide() -> None:
            bytes_ = [(word, place) for word, *places in scales for place in places]
            factors = Factors(self, [[e.scale_of_byte(v, j, signed=signed) for v in w] for w, j in bytes_])
            with e.loop(4) as quarter:
                singles = [dots for pair in pairs_of(quarter) for dots in (pair.low, pair.high)]
                for j, dots in enumerate(singles):
                    factor = factors.at(e.mul(quarter, i64(len(singles))), j)
                    self.add_dots(total, dots, largest=largest, factor=factor)
            if correct is not None:
                correct()

        def narrow() -> None:
            halves = [[e.pair_of_bytes(v, low, high, signed=signed) for v in w] for w, low, high in scales]
            factors = Factors(self, [[e.cast(v, e.i32) for v in half] for half in halves])
            with e.loop(4) as quarter:
                pairs = pairs_of(quarter)
                for j, pair in enumerate(pairs):
                    self._add_pair(total, pair, factors.at(e.mul(quarter, i64(len(pairs))), j))

        # Elsewhere registers are too few, and small tiles wait for memory.
        if e.isa != "avx512vnni" or self.num_tokens < PREFETCH_TOKENS:
            wide()
            return
        is_wide = ir.Constant(I32, 0)
        for x in self.acts:
            is_wide = b.or_(is_wide, e.load(I32, x, K_IS_WIDE))
        with b.if_else(b.icmp_signed("==", is_wide, ir.Constant(I32, 0))) as (then, otherwise):
            with then:
                narrow()
            with otherwise:
                wide()

    def _add_pair(self, total: Grid, pair: Pair, factors: list[Value]) -> None:
        """total += two dot products of 16 bits times the two 16-bit halves of `factors`."""
        e, sign = self.e, self.e.splat(0x8000, self.e.i32)
        sums = self._dots(pair.high, self._nothing())
        # The low one is added up below the high one. 2^15 more, it is not negative and borrows nothing from it.
        starts = [sign for _ in self.acts]
        if pair.starts_at is not None:
            starts = [e.broadcast(e.i32, e.address(x, pair.starts_at)) for x in self.acts]
        sums = [[e.add(e.left(v, 16), first) for v in row] for row, first in zip(sums, starts, strict=True)]
        for row, added in zip(total, self._dots(pair.low, sums), strict=True):
            for variable, v, factor in zip(row, added, factors, strict=True):
                variable.set(e.add(variable.get(), e.pair_dot(e.builder.xor(v, sign), factor)))

    def _dots(self, dots: Dots, partial: list[list[Value]]) -> list[list[Value]]:
        """[token][vector]: partial + dots, of unsigned words that one sum may take."""
        acts = [self.e.address(x, dots.acts_at) for x in self.acts]
        return self._add_each(dots.words, range(len(dots.words)), acts, partial, self.e.dot)

    def subtract(self, total: Grid, factor: int, sums: list[list[Value]]) -> None:
        """total -= factor * sums, [token][vector]."""
        e, factors = self.e, self.e.splat(factor, self.e.i32)
        for row, added in zip(total, sums, strict=True):
            for variable, v in zip(row, added, strict=True):
                variable.set(e.sub(variable.get(), e.mul(v, factors)))

    def sums(self, sums_at: int) -> list[list[Value]]:
        """[token][vector]: the int32 at byte `sums_at`."""
        return [[self.e.broadcast(self.e.i32, x, sums_at)] * len(self.vectors) for x in self.acts]

    def sums_times(
        self, words: Sequence[list[Value]], sums_at: int, *, signed: bool = False
    ) -> list[list[Value]]:
        """[token][vector]: the sum over j of byte j of `words` times the j-th int16 at byte `sums_at`."""
        e = self.e
        pairs = [
            [e.pair_of_bytes(v, j, j + 1, signed=signed) for v in word] for word in words for j in (0, 2)
        ]
        result: list[list[Value]] = [[e.zero(e.i32) for _ in self.vectors] for _ in self.acc]
        for token, x in enumerate(self.acts):
            for number, pair in enumerate(pairs):
                sums = e.broadcast(e.i32, x, sums_at + 4 * number)
                for r in self.vectors:
                    result[token][r] = e.add(result[token][r], e.pair_dot(pair[r], sums))
        return result

    def accumulate(
        self,
        d: list[Value],
        isum: list[list[Value]],
        scale_at: int,
        m: list[Value] | None = None,
        msum: list[list[Value]] | None = None,
    ) -> None:
        """The float part of one scale: `d` float32, `m` float32 factor of the integer sums `msum`."""
        e = self.e
        for token, x in enumerate(self.acts):
            da = e.broadcast(e.f32, x, scale_at)
            for r in self.vectors:
                value = e.fmul(d[r], e.to_float(isum[token][r]))
                if m is not None and msum is not None:
                    value = e.fma(m[r], e.to_float(msum[token][r]), value)
                self.acc[token][r].set(e.fma(value, da, self.acc[token][r].get()))

    def add_products(self, weights: list[Value], acts_at: Value) -> None:
        """acc += weights * the float32 activation at byte `acts_at`."""
        e = self.e
        for token, x in enumerate(self.acts):
            activation = e.broadcast(e.f32, e.address(x, acts_at))
            for r in self.vectors:
                self.acc[token][r].set(e.fma(weights[r], activation, self.acc[token][r].get()))

    def add_to_rows(self, bases: Sequence[Value]) -> None:
        """acc += the 16 float32 at each token's address."""
        e = self.e
        for base, row in zip(bases, self.acc, strict=True):
            for r, variable in enumerate(row):
                variable.set(e.builder.fadd(e.load(e.f32, base, 4 * e.lanes * r), variable.get()))


def values_of(grid: Grid) -> list[list[Value]]:
    return [[variable.get() for variable in row] for row in grid]


class Factors:
    """Integer scales decoded to stack memory, so that a rolled loop can pick them by number."""

    def __init__(self, tile: Tile, factors: list[list[Value]]) -> None:
        e, self._tile = tile.e, tile
        self._bytes = 4 * e.lanes
        self._base = e.scratch(len(factors) * WORD)
        for j, factor in enumerate(factors):
            for r in tile.vectors:
                e.store(factor[r], self._base, j * WORD + r * self._bytes)

    def at(self, number: Value, offset: int = 0) -> list[Value]:
        """Factor `number + offset`."""
        e = self._tile.e
        base = e.address(self._base, e.mul(number, ir.Constant(I64, WORD)))
        return [e.load(e.scale_type, base, offset * WORD + r * self._bytes) for r in self._tile.vectors]


def i64(value: int) -> Value:
    return ir.Constant(I64, value)
