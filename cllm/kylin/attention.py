"""Attention over the block cache: a plain numba kernel that reads keys and values through the block tables.

A work item is one token's queries on one kv-head: the H/K query heads that share its keys and values read
each block once. Blocks are taken in order from position 0 and a block's 16 positions are 16 lanes, so the
order of every float operation follows from the token's own position alone.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba.extending import overload

from .jit import kernel
from .kv_cache import BLOCK, CHUNK
from .ops import exp32, sum_lanes
from .plain_blocks import f16_to_f32


def _stored_value(bits: Any) -> Any:
    """What the cache holds as float32: `bits` is float16 in a uint16, or already float32."""
    raise NotImplementedError("for compiled code only")


@overload(_stored_value, inline="always")
def _overload_stored_value(bits: Any) -> Any:
    def from_f16(bits: Any) -> Any:
        return f16_to_f32(np.uint32(bits))

    def from_f32(bits: Any) -> Any:
        return bits

    return from_f16 if bits == nb.uint16 else from_f32


@kernel
def attend(q, keys, values, layer, tables, slots, positions, out, begin, end):  # type: ignore[no-untyped-def]
    """z for the work items begin <= token * K + kv_head < end.

    q, out float32[T, H, C]; keys [chunks, layers, K, 16, C, 16]; values [chunks, layers, K, 16, 16, C];
    tables int32[slots, blocks a slot]; slots, positions int32[T]: token t sees positions 0..positions[t].
    """
    num_kv_heads, width = keys.shape[2], keys.shape[4]
    group = q.shape[1] // num_kv_heads
    scale = np.float32(1) / np.sqrt(np.float32(width))
    block_values = np.empty(width * BLOCK, np.float32)
    longest = 0
    for item in range(begin, end):
        longest = max(longest, positions[item // num_kv_heads] // BLOCK + 1)
    scores = np.empty((group, longest * BLOCK), np.float32)
    for item in range(begin, end):
        token, kv_head = item // num_kv_heads, item % num_kv_heads
        num_seen = positions[token] + 1
        table = tables[slots[token]]
        heads = q[token, kv_head * group : (kv_head + 1) * group]
        _score(heads, keys, layer, table, kv_head, num_seen, scale, block_values, scores)
        for head in range(group):
            _softmax(scores[head], num_seen)
        _weigh(scores, values, layer, table, kv_head, num_seen, block_values, out[token, kv_head * group :])


@kernel
def _score(heads, keys, layer, table, kv_head, num_seen, scale, loaded, scores):  # type: ignore[no-untyped-def]
    """scores[h, p] = heads[h] . key of p * scale; a key's channels are added in order. [H/K, C] x [C, 16]."""
    width = heads.shape[1]
    lanes = np.empty(BLOCK, np.float32)
    for place in range((num_seen + BLOCK - 1) // BLOCK):
        block = keys[table[place] // CHUNK, layer, kv_head, table[place] % CHUNK].reshape(-1)
        for i in range(width * BLOCK):
            loaded[i] = _stored_value(block[i])
        for head in range(heads.shape[0]):
            lanes[:] = np.float32(0)
            for channel in range(width):
                query = heads[head, channel]
                for lane in range(BLOCK):
                    lanes[lane] += query * loaded[channel * BLOCK + lane]
            for lane in range(BLOCK):
                scores[head, place * BLOCK + lane] = lanes[lane] * scale


@kernel
def _softmax(scores, num_seen):  # type: ignore[no-untyped-def]
    """In place over the first `num_seen` scores; the rest of the last block becomes exactly 0."""
    largest = scores[0]
    for i in range(num_seen):
        largest = max(largest, scores[i])
    padded = (num_seen + BLOCK - 1) // BLOCK * BLOCK
    lanes = np.zeros(BLOCK, np.float32)
    for i in range(num_seen):
        scores[i] = exp32(scores[i] - largest)
    scores[num_seen:padded] = np.float32(0)
    for start in range(0, padded, BLOCK):
        for lane in range(BLOCK):
            lanes[lane] += scores[start + lane]
    total = sum_lanes(lanes)
    for i in range(num_seen):
        scores[i] /= total


@kernel
def _weigh(weights, values, layer, table, kv_head, num_seen, loaded, out):  # type: ignore[no-untyped-def]
    """out[h] = sum over p of weights[h, p] * value of p, positions in order. [H/K, P] x [P, C]."""
    group, width = weights.shape[0], out.shape[1]
    out[:group] = np.float32(0)
    for start in range(0, num_seen, BLOCK):
        number = table[start // BLOCK]
        block = values[number // CHUNK, layer, kv_head, number % CHUNK].reshape(-1)
        for i in range(width * BLOCK):
            loaded[i] = _stored_value(block[i])
        for head in range(group):
            for position in range(min(BLOCK, num_seen - start)):
                weight = weights[head, start + position]
                for channel in range(width):
                    out[head, channel] += weight * loaded[position * width + channel]


@kernel
def store(k, v, keys, values, layer, tables, slots, positions):  # type: ignore[no-untyped-def]
    """Writes k, v [T, K, C], in the cache's type, of each token to its position in the cache of a layer."""
    for token in range(k.shape[0]):
        block = tables[slots[token], positions[token] // BLOCK]
        place = positions[token] % BLOCK
        for head in range(k.shape[1]):
            for channel in range(k.shape[2]):
                keys[block // CHUNK, layer, head, block % CHUNK, channel, place] = k[token, head, channel]
                values[block // CHUNK, layer, head, block % CHUNK, place, channel] = v[token, head, channel]
