"""The loops around a tile: records of a group, groups of a piece, tiles of tokens. It must not know weight types,
threads or files; what a tile is, and how its weights and activations lie in memory: `tiles.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llvmlite import ir

from .simd import I64, Emitter, Value, make_internal, start_function
from .tiles import BLOCK_TOKENS, PREFETCH_TOKENS, ROWS, Tile, i64


class TileSizes(NamedTuple):
    """Bytes of one record: of 16 rows of weights, and of one token's activations."""

    weights: int
    acts: int


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
    group_bytes, is_added = e.mul(num_records, i64(sizes.weights)), b.icmp_signed("!=", adds, i64(0))
    with e.loop(num_groups) as group:
        tile = Tile(e, num_tokens)
        first, rows_at = e.address(weights, e.mul(group, group_bytes)), e.mul(group, i64(4 * ROWS))
        outs = [e.address(e.address(out, rows_at), e.mul(out_stride, i64(t))) for t in range(num_tokens)]
        if num_tokens >= PREFETCH_TOKENS:
            with b.if_then(is_added):  # to what prompts have in the third cache
                for base in outs:
                    e.prefetch(base, 0)
        with e.loop(num_records) as number:
            tile.weights = e.address(first, e.mul(number, i64(sizes.weights)))
            at = e.address(acts, e.mul(number, i64(sizes.acts * BLOCK_TOKENS)))
            tile.acts = [e.address(at, sizes.acts * token) for token in range(num_tokens)]
            record(tile)
        with b.if_then(b.icmp_signed("!=", bias, i64(0))):
            tile.add_to_rows([e.address(bias, rows_at)] * num_tokens)
        with b.if_then(is_added):
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
