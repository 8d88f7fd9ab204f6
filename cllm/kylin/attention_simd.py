"""Attention with vector instructions: the inner loops over a block of 16 positions, and the kernel made of them.

It computes what `attention.py` does, which is its plain twin. A work item is a *tile* of up to 4 tokens in a row
of one sequence, times one kv-head: the query heads of the tile share each load of keys and values.

Law 1: a score is one chain of fma over the channels, a weighted sum one over the positions, from position 0.
Both stay the same whatever rows a query shares its loads with.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import overload

from .jit import inlined, intrinsic, kernel
from .kv_cache import BLOCK
from .ops import exp32, sum_lanes
from .rounding import to_half
from .simd import F32, I64, Emitter, Value, host_isa, make_internal, start_function

TILE_TOKENS = 4
_ISA = host_isa()


def emit_scores(module: ir.Module, isa: str, num_rows: int, *, half: bool) -> Value:
    """The function (q, q_stride, keys, next_keys, width, scale, out, out_stride), i64 but for float32 `scale`.

    out[row][0..31] = scale * (q[row] . key of each position) for two blocks [width][16]; strides in bytes. With
    4 rows it is out[row][0..15], and the next keys do not count: enough chains of fma run beside each other.
    """
    kind = ir.FunctionType(ir.VoidType(), [I64] * 5 + [F32, I64, I64])
    function = ir.Function(module, kind, f"cllm_scores_{num_rows}_{half}")
    make_internal(function)
    q, q_stride, keys, next_keys, width, scale, out, out_stride = function.args
    e = Emitter(start_function(function), isa)
    blocks = (keys,) if num_rows == 4 else (keys, next_keys)
    vectors = range(len(blocks) * BLOCK // e.lanes)
    queries = [e.address(q, e.mul(q_stride, ir.Constant(I64, row))) for row in range(num_rows)]
    sums = [[e.variable(e.zero(e.f32)) for _ in vectors] for _ in queries]
    size = 2 if half else 4
    with e.loop(width) as channel:
        bases = [e.address(block, e.mul(channel, ir.Constant(I64, BLOCK * size))) for block in blocks]
        at = e.mul(channel, ir.Constant(I64, 4))
        loaded = [_load_stored(e, base, size, r) for base in bases for r in range(BLOCK // e.lanes)]
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

    out[row] += sum over begin <= p < end of weights[row][p] * values[p], for one block [16][width].
    """
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 8), f"cllm_weigh_{num_rows}_{half}")
    make_internal(function)
    weights, weights_stride, values, width, begin, end, out, out_stride = function.args
    e = Emitter(start_function(function), isa)
    b, size = e.builder, 2 if half else 4
    done = e.variable(ir.Constant(I64, 0))  # channels
    for num_vectors in (8 // num_rows, 1) if num_rows < 8 else (1,):
        chunk = num_vectors * e.lanes
        with e.loop(b.sdiv(b.sub(width, done.get()), ir.Constant(I64, chunk))):
            outs = [
                e.address(
                    e.address(out, e.mul(out_stride, ir.Constant(I64, row))), e.mul(done.get(), _i64(4))
                )
                for row in range(num_rows)
            ]
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
    """Calls `emit`'s function for a cache of the array type `cache`; it is emitted once in a module."""
    half = cache.dtype == nb.uint16
    name = f"cllm_{emit.__name__.removeprefix('emit_')}_{num_rows}_{half}"
    function = builder.module.globals.get(name) or emit(builder.module, _ISA, num_rows, half=half)
    builder.call(function, values)


@intrinsic(prefer_literal=True)
def _scores(  # type: ignore[no-untyped-def]
    typing_context, num_rows, cache, q, q_stride, keys, next_keys, width, scale, out, out_stride
):
    """`emit_scores` for as many rows; `cache` is an array of the cache's type."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        _call_emitted(builder, emit_scores, num_rows.literal_value, cache, values[2:])
        return context.get_dummy_value()

    numbers = (types.int64,) * 5
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
    """Memory of one thread for `attend_tile`: (queries and results [2, rows, C], scores [rows, positions])."""
    rows = TILE_TOKENS * group
    padded = (longest + 2 * BLOCK - 1) // (2 * BLOCK) * (2 * BLOCK)
    return np.empty((2, rows, width), np.float32), np.empty((rows, padded), np.float32)


@kernel
def attend_tile(q, keys, values, tables, slots, positions, begin, end, kv_head, rows, scores, out):  # type: ignore[no-untyped-def]
    """z of the tokens begin <= t < end, which are a tile, for the query heads of one kv-head.

    q, out float32[T, H, C]; keys [blocks, K, C, 16] and values [blocks, K, 16, C] of one layer; tables
    int32[slots, blocks a slot]; slots, positions int32[T]; rows, scores from `make_scratch`.
    """
    group, width = q.shape[1] // keys.shape[1], q.shape[2]
    table = tables[slots[begin]]
    queries, results = rows[0], rows[1]
    num_rows = (end - begin) * group
    for row in range(num_rows):
        token, head = begin + row // group, kv_head * group + row % group
        for channel in range(width):
            queries[row, channel] = q[token, head, channel]
            results[row, channel] = np.float32(0)
    scale = np.float32(1) / np.sqrt(np.float32(width))
    _score_blocks(queries, num_rows, keys, table, kv_head, positions[end - 1] + 1, scale, scores)
    for row in range(num_rows):
        # The reciprocal of the sum stands where the query is no longer needed.
        queries[row, 0] = _exponentials(scores[row], positions[begin + row // group] + 1)
    _weigh_blocks(scores, num_rows, group, values, table, kv_head, positions[begin] + 1, end - begin, results)
    for row in range(num_rows):
        token, head, factor = begin + row // group, kv_head * group + row % group, queries[row, 0]
        for channel in range(width):
            out[token, head, channel] = results[row, channel] * factor


@kernel
def _score_blocks(queries, num_rows, keys, table, kv_head, num_seen, scale, scores):  # type: ignore[no-untyped-def]
    """Scores of all rows against every block with a position below `num_seen`."""
    width = queries.shape[1]
    q_stride, out_stride = 4 * width, 4 * scores.shape[1]
    num_blocks = (num_seen + BLOCK - 1) // BLOCK
    block_bytes = width * BLOCK * keys.itemsize
    for place in range(0, num_blocks, 2):
        last = min(place + 1, num_blocks - 1)  # where there is no second block the first one is taken twice
        first = keys.ctypes.data + (table[place] * keys.shape[1] + kv_head) * block_bytes
        second = keys.ctypes.data + (table[last] * keys.shape[1] + kv_head) * block_bytes
        out = scores.ctypes.data + 4 * BLOCK * place
        row = 0
        while num_rows - row >= 4:
            q, target = queries.ctypes.data + row * q_stride, out + row * out_stride
            _scores(4, keys, q, q_stride, first, second, width, scale, target, out_stride)
            target += 4 * BLOCK
            _scores(4, keys, q, q_stride, second, second, width, scale, target, out_stride)
            row += 4
        if num_rows - row >= 2:
            q, target = queries.ctypes.data + row * q_stride, out + row * out_stride
            _scores(2, keys, q, q_stride, first, second, width, scale, target, out_stride)
            row += 2
        if num_rows > row:
            q, target = queries.ctypes.data + row * q_stride, out + row * out_stride
            _scores(1, keys, q, q_stride, first, second, width, scale, target, out_stride)


@kernel
def _exponentials(scores, num_seen):  # type: ignore[no-untyped-def]
    """In place e^(score - largest) of the first `num_seen` scores; the reciprocal of their sum."""
    padded = (num_seen + BLOCK - 1) // BLOCK * BLOCK
    for i in range(num_seen, padded):
        scores[i] = -np.inf
    lanes = np.empty(BLOCK, np.float32)
    for lane in range(BLOCK):
        lanes[lane] = scores[lane]
    for start in range(0, padded, BLOCK):
        for lane in range(BLOCK):
            score = scores[start + lane]
            lanes[lane] = score if score > lanes[lane] else lanes[lane]
    largest = lanes[0]
    for lane in range(BLOCK):
        largest = max(largest, lanes[lane])
        lanes[lane] = np.float32(0)
    for i in range(padded):
        scores[i] = exp32(scores[i] - largest)  # 0 behind the last position
    for start in range(0, padded, BLOCK):
        for lane in range(BLOCK):
            lanes[lane] += scores[start + lane]
    return np.float32(1) / sum_lanes(lanes)


@kernel
def _weigh_blocks(scores, num_rows, group, values, table, kv_head, first_seen, num_tokens, results):  # type: ignore[no-untyped-def]
    """results += weights * values. The first token of the tile sees `first_seen` positions, each later one more.

    What only later tokens see is added row by row, so that no row ever multiplies what it must not see.
    """
    width = results.shape[1]
    stride, out_stride = 4 * scores.shape[1], 4 * width
    block_bytes = width * BLOCK * values.itemsize
    for start in range(0, first_seen + num_tokens - 1, BLOCK):
        block = values.ctypes.data + (table[start // BLOCK] * values.shape[1] + kv_head) * block_bytes
        shared = max(0, min(BLOCK, first_seen - start))
        weights = scores.ctypes.data + 4 * start
        row = 0
        while num_rows - row >= 4:
            out = results.ctypes.data + row * out_stride
            _weigh(4, values, weights + row * stride, stride, block, width, 0, shared, out, out_stride)
            row += 4
        if num_rows - row >= 2:
            out = results.ctypes.data + row * out_stride
            _weigh(2, values, weights + row * stride, stride, block, width, 0, shared, out, out_stride)
            row += 2
        if num_rows > row:
            out = results.ctypes.data + row * out_stride
            _weigh(1, values, weights + row * stride, stride, block, width, 0, shared, out, out_stride)
        for row in range(group, num_rows):
            seen = max(0, min(BLOCK, first_seen + row // group - start))
            if seen > shared:
                out = results.ctypes.data + row * out_stride
                _weigh(1, values, weights + row * stride, stride, block, width, shared, seen, out, out_stride)


@kernel
def store_token(k, v, keys, values, tables, slots, positions, token):  # type: ignore[no-untyped-def]
    """Writes k, v float32[T, K, C] of one token to its position of one layer's cache."""
    block = tables[slots[token], positions[token] // BLOCK]
    place = positions[token] % BLOCK
    for head in range(k.shape[1]):
        for channel in range(k.shape[2]):
            keys[block, head, channel, place] = to_stored(k[token, head, channel], keys)
            values[block, head, place, channel] = to_stored(v[token, head, channel], values)


def to_stored(x: Any, cache: Any) -> Any:
    """A float32 as the cache, of which `cache` is an array, holds it: float16 bits or as it is."""
    raise NotImplementedError("for compiled code only")


@overload(to_stored)
def _overload_to_stored(x: Any, cache: Any) -> Any:
    def to_f16(x: Any, cache: Any) -> Any:
        return np.uint16(to_half(x))

    def to_f32(x: Any, cache: Any) -> Any:
        return x

    return to_f16 if cache.dtype == nb.uint16 else to_f32
