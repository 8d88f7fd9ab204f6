"""Attention with vector instructions: the inner loops over blocks of 16 positions, and the kernel made of them.

It computes what `attention.py` does, which is its plain twin. A work item is a *tile* of up to 8 tokens in a row
of one sequence, times one kv-head: the query heads of the tile share each load of keys and values.

Law 1: a score is one chain of fma over the channels, a weighted sum one over the positions, from position 0.
Both stay the same whatever rows a query shares its loads with.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numba as nb
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import overload

from .isa import host_isa
from .jit import inlined, intrinsic, kernel
from .kv_cache import BLOCK, CHUNK
from .ops_simd import exponentials, to_halves
from .simd import F32, I64, Emitter, Value, call_emitted, make_internal, start_function

TILE_TOKENS = 8
_ISA = host_isa()
_MOST_BLOCKS = 4  # whose values one call adds up: 16 KB of f16 at a width of 128, half of the first cache
_MOST_ROWS = 16 if _ISA == "avx512vnni" else 4  # that the registers hold sums for


def emit_scores(module: ir.Module, isa: str, num_rows: int, *, half: bool) -> Value:
    """The function (q, q_stride, keys, width, scale, out, out_stride), i64 but for float32 `scale`.

    out[row][0..15] = scale * (q[row] . key of each position) for one block [width][16]; strides in bytes.
    """
    kind = ir.FunctionType(ir.VoidType(), [I64] * 4 + [F32, I64, I64])
    function = ir.Function(module, kind, f"cllm_scores_{num_rows}_{half}")
    make_internal(function)
    q, q_stride, keys, width, scale, out, out_stride = function.args
    e = Emitter(start_function(function), isa)
    vectors = range(BLOCK // e.lanes)
    queries = [e.address(q, e.mul(q_stride, ir.Constant(I64, row))) for row in range(num_rows)]
    sums = [[e.variable(e.zero(e.f32)) for _ in vectors] for _ in queries]
    size = 2 if half else 4
    with e.loop(width) as channel:
        base, at = e.address(keys, e.mul(channel, _i64(BLOCK * size))), e.mul(channel, _i64(4))
        loaded = [_load_stored(e, base, size, r) for r in vectors]
        for row, query in enumerate(queries):
            factor = e.broadcast(e.f32, e.address(query, at))
            for r in vectors:
                sums[row][r].set(e.fma(factor, loaded[r], sums[row][r].get()))
    for row in range(num_rows):
        base = e.address(out, e.mul(out_stride, ir.Constant(I64, row)))
        for r in vectors:
            e.store(e.fmul(sums[row][r].get(), e.splat(scale, e.f32)), base, 4 * e.lanes * r)
    e.builder.ret_void()
    return function


def emit_weigh(module: ir.Module, isa: str, num_rows: int, *, half: bool) -> Value:
    """The function (weights, weights_stride, values, width, begin, end, out, out_stride) in `module`, all i64.

    out[row] += sum over begin <= p < end of weights[row][p] * values[p], for adjacent blocks [positions][width].
    """
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 8), f"cllm_weigh_{num_rows}_{half}")
    make_internal(function)
    weights, weights_stride, values, width, begin, end, out, out_stride = function.args
    e = Emitter(start_function(function), isa)
    b, size = e.builder, 2 if half else 4
    done = e.variable(ir.Constant(I64, 0))  # channels
    # Vectors of channels at once: as many sums as the registers hold, first for heads that are 8 vectors wide, then
    # for those of 4, then for what is left.
    most = min(8, (16 if e.lanes == 16 else 8) // num_rows)
    for num_vectors in sorted({most, min(most, 4), 1}, reverse=True):
        chunk = num_vectors * e.lanes
        with e.loop(b.sdiv(b.sub(width, done.get()), ir.Constant(I64, chunk))):
            place = e.address(out, e.mul(done.get(), _i64(4)))
            outs = [e.address(place, e.mul(out_stride, _i64(row))) for row in range(num_rows)]
            sums = [[e.variable(e.load(e.f32, o, 4 * e.lanes * r)) for r in range(num_vectors)] for o in outs]
            with e.loop(b.sub(end, begin)) as number:
                position = e.add(begin, number)
                base = e.address(values, e.mul(e.add(e.mul(position, width), done.get()), _i64(size)))
                loaded = [_load_stored(e, base, size, r) for r in range(num_vectors)]
                for row in range(num_rows):
                    at = e.add(e.mul(weights_stride, _i64(row)), e.mul(position, _i64(4)))
                    factor = e.broadcast(e.f32, e.address(weights, at))
                    for r in range(num_vectors):
                        sums[row][r].set(e.fma(factor, loaded[r], sums[row][r].get()))
            for o, row_sums in zip(outs, sums, strict=True):
                for r, variable in enumerate(row_sums):
                    e.store(variable.get(), o, 4 * e.lanes * r)
            done.set(e.add(done.get(), _i64(chunk)))
    b.ret_void()
    return function


def _i64(value: int) -> Value:
    return ir.Constant(I64, value)


def _load_stored(e: Emitter, base: Value, size: int, number: int) -> Value:
    at = number * e.lanes * size
    return e.load_halves(base, at) if size == 2 else e.load(e.f32, base, at)


def _call_emitted(builder: Any, emit: Any, num_rows: int, cache: Any, values: Any) -> None:
    """Calls `emit`'s function for a cache of the array type `cache`."""
    half = cache.dtype == nb.uint16
    name = f"cllm_{emit.__name__.removeprefix('emit_')}_{num_rows}_{half}"
    call_emitted(builder, name, partial(emit, isa=_ISA, num_rows=num_rows, half=half), values)


@intrinsic(prefer_literal=True)
def _scores(  # type: ignore[no-untyped-def]
    typing_context, num_rows, cache, q, q_stride, keys, width, scale, out, out_stride
):
    """`emit_scores` for as many rows; `cache` is an array of the cache's type."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        _call_emitted(builder, emit_scores, num_rows.literal_value, cache, values[2:])
        return context.get_dummy_value()

    numbers = (types.int64,) * 4
    return types.void(num_rows, cache, *numbers, types.float32, types.int64, types.int64), generate


@intrinsic(prefer_literal=True)
def _weigh(  # type: ignore[no-untyped-def]
    typing_context, num_rows, cache, weights, weights_stride, values_at, width, begin, end, out, out_stride
):
    """`emit_weigh` for as many rows; `cache` is an array of the cache's type."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        _call_emitted(builder, emit_weigh, num_rows.literal_value, cache, values[2:])
        return context.get_dummy_value()

    return types.void(num_rows, cache, *(types.int64,) * 8), generate


# --- the kernel -----------------------------------------------------------------------------------------------


@kernel
def find_tiles(slots, positions, num_tokens, tiles):  # type: ignore[no-untyped-def]
    """Cuts the tokens into tiles int32[n, 2], (begin, end); how many they are."""
    count = 0
    begin = 0
    while begin < num_tokens:
        end = begin + 1
        while (
            end < num_tokens
            and end - begin < TILE_TOKENS
            and slots[end] == slots[begin]
            and positions[end] == positions[begin] + end - begin
        ):
            end += 1
        tiles[count, 0], tiles[count, 1] = begin, end
        count += 1
        begin = end
    return count


@inlined
def make_scratch(group, width, longest):  # type: ignore[no-untyped-def]
    """Memory of one thread for `attend_tile`: queries and results float32[2, rows, C], of each token of a tile the
    heads of one kv-head, and scores [rows, positions]."""
    rows = TILE_TOKENS * group
    padded = (longest + BLOCK - 1) // BLOCK * BLOCK
    return np.empty((2, rows, width), np.float32), np.empty((rows, padded), np.float32)


@kernel
def take_queries(q, begin, end, kv_head, rows):  # type: ignore[no-untyped-def]
    """Of q float32[T, H, C] the queries of a tile on one kv-head."""
    group = rows.shape[1] // TILE_TOKENS
    for token in range(begin, end):
        for head in range(group):
            row, query = (token - begin) * group + head, kv_head * group + head
            for channel in range(q.shape[2]):
                rows[0, row, channel] = q[token, query, channel]


@kernel
def put_results(rows, begin, end, kv_head, out):  # type: ignore[no-untyped-def]
    """The results of a tile on one kv-head to out float32[T, H, C]."""
    group = rows.shape[1] // TILE_TOKENS
    for token in range(begin, end):
        row = (token - begin) * group
        out[token, kv_head * group : (kv_head + 1) * group] = rows[1, row : row + group]


@kernel
def attend_tile(  # type: ignore[no-untyped-def]
    keys, values, layer, tables, slots, positions, begin, end, kv_head, rows, scores
):
    """Results of the tokens begin <= t < end, which are a tile, from their queries on one kv-head, which are spent.

    keys [chunks, layers, K, 16, C, 16]; values [chunks, layers, K, 16, 16, C]; tables int32[slots, blocks a slot];
    slots, positions int32[T]; rows, scores from `make_scratch`.
    """
    group, width = rows.shape[1] // TILE_TOKENS, rows.shape[2]
    table = tables[slots[begin]]
    queries, results = rows[0], rows[1]
    num_rows = (end - begin) * group
    for row in range(num_rows):
        for channel in range(width):
            results[row, channel] = np.float32(0)
    scale = np.float32(1) / np.sqrt(np.float32(width))
    _score_blocks(queries, num_rows, keys, layer, table, kv_head, positions[end - 1] + 1, scale, scores)
    for row in range(num_rows):
        num_seen = positions[begin + row // group] + 1
        padded = (num_seen + BLOCK - 1) // BLOCK * BLOCK
        for position in range(num_seen, padded):
            scores[row, position] = -np.inf
        # The reciprocal of the sum goes to queries[row, 0], where the query is no longer needed.
        reciprocal_at = queries.ctypes.data + 4 * width * row
        exponentials(scores.ctypes.data + 4 * scores.shape[1] * row, padded, reciprocal_at)
    first_seen = positions[begin] + 1
    _weigh_blocks(scores, num_rows, group, values, layer, table, kv_head, first_seen, end - begin, results)
    for row in range(num_rows):
        factor = queries[row, 0]
        for channel in range(width):
            results[row, channel] *= factor


@inlined
def _address(cache, layer, kv_head, block):  # type: ignore[no-untyped-def]
    """Where a head's part of a block begins, in the keys or values."""
    head = (block // CHUNK * cache.shape[1] + layer) * cache.shape[2] + kv_head
    place = head * CHUNK + block % CHUNK
    return cache.ctypes.data + place * cache.shape[4] * cache.shape[5] * cache.itemsize


@kernel
def _score_blocks(queries, num_rows, keys, layer, table, kv_head, num_seen, scale, scores):  # type: ignore[no-untyped-def]
    """Scores of all rows against every block with a position below `num_seen`."""
    width = queries.shape[1]
    q_stride, out_stride = 4 * width, 4 * scores.shape[1]
    for place in range((num_seen + BLOCK - 1) // BLOCK):
        block = _address(keys, layer, kv_head, table[place])
        q, out = queries.ctypes.data, scores.ctypes.data + 4 * BLOCK * place
        left = num_rows
        while left >= _MOST_ROWS:
            _scores(_MOST_ROWS, keys, q, q_stride, block, width, scale, out, out_stride)
            q, out, left = q + _MOST_ROWS * q_stride, out + _MOST_ROWS * out_stride, left - _MOST_ROWS
        while left >= 8:
            _scores(8, keys, q, q_stride, block, width, scale, out, out_stride)
            q, out, left = q + 8 * q_stride, out + 8 * out_stride, left - 8
        while left >= 4:
            _scores(4, keys, q, q_stride, block, width, scale, out, out_stride)
            q, out, left = q + 4 * q_stride, out + 4 * out_stride, left - 4
        while left >= 2:
            _scores(2, keys, q, q_stride, block, width, scale, out, out_stride)
            q, out, left = q + 2 * q_stride, out + 2 * out_stride, left - 2
        if left:
            _scores(1, keys, q, q_stride, block, width, scale, out, out_stride)


@inlined
def _num_adjacent(table, place, end):  # type: ignore[no-untyped-def]
    """How many blocks of the table from `place` on, before `end`, lie side by side, counted up to _MOST_BLOCKS."""
    first, count = table[place], 1
    while (
        count < _MOST_BLOCKS
        and place + count < end
        and table[place + count] == first + count
        and (first + count) % CHUNK != 0
    ):
        count += 1
    return count


@inlined
def _weigh_rows(values, weights, stride, num_rows, block, width, begin, end, out, out_stride):  # type: ignore[no-untyped-def]
    """`emit_weigh` of any number of rows."""
    left = num_rows
    while left >= _MOST_ROWS:
        _weigh(_MOST_ROWS, values, weights, stride, block, width, begin, end, out, out_stride)
        weights, out, left = weights + _MOST_ROWS * stride, out + _MOST_ROWS * out_stride, left - _MOST_ROWS
    while left >= 8:
        _weigh(8, values, weights, stride, block, width, begin, end, out, out_stride)
        weights, out, left = weights + 8 * stride, out + 8 * out_stride, left - 8
    while left >= 4:
        _weigh(4, values, weights, stride, block, width, begin, end, out, out_stride)
        weights, out, left = weights + 4 * stride, out + 4 * out_stride, left - 4
    while left >= 2:
        _weigh(2, values, weights, stride, block, width, begin, end, out, out_stride)
        weights, out, left = weights + 2 * stride, out + 2 * out_stride, left - 2
    if left:
        _weigh(1, values, weights, stride, block, width, begin, end, out, out_stride)


@kernel
def _weigh_blocks(  # type: ignore[no-untyped-def]
    scores, num_rows, group, values, layer, table, kv_head, first_seen, num_tokens, results
):
    """results += weights * values. The first token of the tile sees `first_seen` positions, each later one more.

    What only later tokens see is added token by token, so that none ever multiplies what it must not see.
    """
    width = results.shape[1]
    stride, out_stride = 4 * scores.shape[1], 4 * width
    start, end = 0, first_seen + num_tokens - 1
    while start < end:
        num_positions = BLOCK * _num_adjacent(table, start // BLOCK, (end + BLOCK - 1) // BLOCK)
        block = _address(values, layer, kv_head, table[start // BLOCK])
        shared = max(0, min(num_positions, first_seen - start))
        weights, out = scores.ctypes.data + 4 * start, results.ctypes.data
        _weigh_rows(values, weights, stride, num_rows, block, width, 0, shared, out, out_stride)
        for token in range(1, num_tokens):
            seen = max(0, min(num_positions, first_seen + token - start))
            if seen > shared:
                own, out = weights + group * token * stride, results.ctypes.data + group * token * out_stride
                _weigh_rows(values, own, stride, group, block, width, shared, seen, out, out_stride)
        start += num_positions


@kernel
def store_head(k, v, keys, values, layer, tables, slots, positions, head, begin, end):  # type: ignore[no-untyped-def]
    """Writes one kv-head of k, v float32[T, K, C] of the tokens begin <= t < end to their positions in the cache of a
    layer. Tokens in a row write to the same 4 KB of keys."""
    key = np.empty(k.shape[2], keys.dtype)
    for token in range(begin, end):
        number = tables[slots[token], positions[token] // BLOCK]
        chunk, block, place = number // CHUNK, number % CHUNK, positions[token] % BLOCK
        to_stored(k[token, head], key)
        for channel in range(k.shape[2]):
            keys[chunk, layer, head, block, channel, place] = key[channel]
        to_stored(v[token, head], values[chunk, layer, head, block, place])


def to_stored(x: Any, out: Any) -> None:
    """float32[C] as the cache, of whose type `out` is, holds it: float16 bits or as it is."""
    raise NotImplementedError("for compiled code only")


@overload(to_stored)
def _overload_to_stored(x: Any, out: Any) -> Any:
    def to_f16(x: Any, out: Any) -> None:
        to_halves(x.ctypes.data, x.size, out.ctypes.data)

    def to_f32(x: Any, out: Any) -> None:
        out[:] = x

    return to_f16 if out.dtype == nb.uint16 else to_f32
