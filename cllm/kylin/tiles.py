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

from .simd import I64, Emitter, Value, Variable, make_internal, start_function

ROWS = 16  # of a group
WORD = 4 * ROWS  # bytes of one word of a group's rows
BLOCK_TOKENS = 8  # of a block of activations: as many as the largest tile has

# Rounded activations lie in blocks of 8 tokens, [blocks][records][8], and beside the weights' records: so all addresses
# of a tile are one register plus a constant. A record of one token is one of
#
#   q8_K, 256 values      | int8[256] | int32[16] -32 x sums of 16 | int16[8] sums of 32 | float32 scale | 12 unused
#   q8_0, q8_1, 2 x 32    | int8[64]  | float32[2] scales | int32[2] sums of 32 values
#   floats, 64 values     | float32[64]
K_STARTS, K_SUMS_32, K_SCALE = 256, 320, 336
PAIR_SCALES, PAIR_SUMS = 64, 72
RECORD_VALUES = {"q8_K": 256, "q8_0": 64, "q8_1": 64, "f16": 64, "bf16": 64, "none": 64}
RECORD_BYTES = {"q8_K": 352, "q8_0": 80, "q8_1": 80, "f16": 256, "bf16": 256, "none": 256}

# Bytes ahead of a load, in tiles of at least so many tokens. Smaller ones wait for memory anyway, and the processor's
# own prefetching of a stream is the better one then (docs/performance.md).
PREFETCH, PREFETCH_TOKENS = 9216, 4
Grid = list[list[Variable]]  # [token][vector of rows]


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

    def zeros(self) -> Grid:
        """Integer sums that start at 0."""
        e = self.e
        return [[e.variable(e.zero(e.i32)) for _ in self.vectors] for _ in self.acc]

    def add_dots(
        self,
        total: Grid,
        words: Sequence[Callable[[], list[Value]]],
        acts_at: Value | int,
        *,
        largest: int,
        factor: list[Value] | None = None,
        signed: bool = False,
        starts_at: Value | None = None,
    ) -> None:
        """total += factor * dot of `words`, of magnitude up to `largest`, with activations from byte `acts_at`.

        `starts_at`: the byte of an int32 with which each dot product begins.
        """
        e = self.e
        span = e.dot_span(largest)
        acts = [e.address(x, acts_at) for x in self.acts]
        dot = e.dot_signed if signed else e.dot
        partial = self._begin_dots(total, starts_at, factor)
        for start in range(0, len(words), span):
            places = range(start, min(start + span, len(words)))
            if len(places) <= 2:  # few enough to hold the weights in registers, and one token's sum at a time
                weights = {place: words[place]() for place in places}
                for token in range(self.num_tokens):
                    parts = self._add_words(weights, acts[token], partial[token], dot)
                    self._add_scaled(total[token], parts, factor)
            else:
                for place in places:
                    weights = {place: words[place]()}
                    for token in range(self.num_tokens):
                        partial[token] = self._add_words(weights, acts[token], partial[token], dot)
                for sums, parts in zip(total, partial, strict=True):
                    self._add_scaled(sums, parts, factor)
            partial = self._begin_dots(total)

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

    def _begin_dots(
        self, total: Grid, starts_at: Value | None = None, factor: list[Value] | None = None
    ) -> list[list[Value]]:
        """[token][vector]: what dot products begin with. Where that cannot be an int32, `total` has it now."""
        e = self.e
        nothing = [[None for _ in self.vectors] for _ in self.acc]
        if starts_at is None:
            return nothing
        starts = [e.broadcast(e.i32, e.address(x, starts_at)) for x in self.acts]
        if e.has_whole_sums:
            return [[first for _ in self.vectors] for first in starts]
        assert factor is not None
        for sums, first in zip(total, starts, strict=True):
            for r in self.vectors:
                sums[r].set(e.add(sums[r].get(), e.mul(first, e.scale_as_int(factor[r]))))
        return nothing

    def subtract_sums(self, total: Grid, offset: int, sums_at: int) -> None:
        """total -= offset * the int32 sum of activations at byte `sums_at`."""
        e = self.e
        for token, x in enumerate(self.acts):
            correction = e.mul(e.broadcast(e.i32, x, sums_at), e.splat(offset, e.i32))
            for r in self.vectors:
                total[token][r].set(e.sub(total[token][r].get(), correction))

    def pair_sums(self, pairs: Sequence[list[Value]], sums_at: int) -> list[list[Value]]:
        """[token][vector]: sum over j of pairs[j] times the j-th two int16 sums at byte `sums_at`."""
        e = self.e
        result: list[list[Value]] = [[e.zero(e.i32) for _ in self.vectors] for _ in self.acc]
        for token, x in enumerate(self.acts):
            for j, pair in enumerate(pairs):
                sums = e.broadcast(e.i32, x, sums_at + 4 * j)
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


class TileSizes(NamedTuple):
    """Bytes of one record: of 16 rows of weights, and of one token's activations."""

    weights: int
    acts: int


def i64(value: int) -> Value:
    return ir.Constant(I64, value)


def tile_sizes(isa: str) -> tuple[int, ...]:
    """Tokens of the tiles, largest first: as many as the registers hold accumulators for."""
    return (8, 4, 2, 1) if isa == "avx512vnni" else (4, 2, 1)


def emit_tiles(
    module: ir.Module, isa: str, name: str, record: Callable[[Tile], None], sizes: TileSizes, num_tokens: int
) -> Value:
    """The function (weights, acts, out, out_stride, num_records, num_groups, bias, adds), all i64.

    Writes out[token][row], float32, its stride in bytes: the rows of `num_groups` groups times `num_tokens` tokens of
    a block, from the one at `acts` on, plus float32 bias[row] where that address is not 0. It is added to what is
    there where `adds` is 1.
    """
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 8), f"{name}_{num_tokens}")
    make_internal(function)
    weights, acts, out, out_stride, num_records, num_groups, bias, adds = function.args
    e = Emitter(start_function(function), isa)
    b = e.builder
    group_bytes = e.mul(num_records, i64(sizes.weights))
    with e.loop(num_groups) as group:
        tile = Tile(e, num_tokens)
        first = e.address(weights, e.mul(group, group_bytes))
        with e.loop(num_records) as number:
            tile.weights = e.address(first, e.mul(number, i64(sizes.weights)))
            at = e.address(acts, e.mul(number, i64(sizes.acts * BLOCK_TOKENS)))
            tile.acts = [e.address(at, sizes.acts * token) for token in range(num_tokens)]
            record(tile)
        rows_at = e.mul(group, i64(4 * ROWS))
        outs = [e.address(e.address(out, rows_at), e.mul(out_stride, i64(t))) for t in range(num_tokens)]
        with b.if_then(b.icmp_signed("!=", bias, i64(0))):
            tile.add_to_rows([e.address(bias, rows_at)] * num_tokens)
        with b.if_then(b.icmp_signed("!=", adds, i64(0))):
            tile.add_to_rows(outs)
        for base, row in zip(outs, tile.acc, strict=True):
            for r, variable in enumerate(row):
                e.store(variable.get(), base, 4 * e.lanes * r)
    b.ret_void()
    return function


def emit_groups(
    module: ir.Module, isa: str, name: str, record: Callable[[Tile], None], sizes: TileSizes
) -> Value:
    """The function (weights, acts, out, out_stride, num_records, first, last, begin, end, bias, adds), all i64.

    The groups begin <= g < end of 16 rows times the tokens first <= t < last, in tiles as large as fit. `first` begins
    a block; `out` and `bias` are of all tokens and groups.
    """
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 11), name)
    weights, acts, out, out_stride, num_records, *rest = function.args
    first, last, begin, end, bias, adds = rest
    e = Emitter(start_function(function), isa)
    b = e.builder
    rows_at, num_groups = e.mul(begin, i64(4 * ROWS)), b.sub(end, begin)
    weights = e.address(weights, e.mul(begin, e.mul(num_records, i64(sizes.weights))))
    bias = b.select(b.icmp_signed("!=", bias, i64(0)), e.address(bias, rows_at), i64(0))
    token, token_bytes = e.variable(first), e.mul(num_records, i64(sizes.acts))
    for size in tile_sizes(isa):
        tiles = emit_tiles(module, isa, name, record, sizes, size)
        with e.loop(b.sdiv(b.sub(last, token.get()), i64(size))):
            place = b.srem(token.get(), i64(BLOCK_TOKENS))
            block_at = e.mul(b.sub(token.get(), place), token_bytes)
            acts_at = e.address(acts, e.address(block_at, e.mul(place, i64(sizes.acts))))
            out_at = e.address(out, e.address(rows_at, e.mul(token.get(), out_stride)))
            b.call(tiles, [weights, acts_at, out_at, out_stride, num_records, num_groups, bias, adds])
            token.set(e.add(token.get(), i64(size)))
    b.ret_void()
    return function
