"""The numbers that a step consists of: where each size and address stands, and reading them in compiled code.

A step works on an int64 vector of fields; a program is rows of numbers, one a phase; a matrix is a row of numbers. All
that a phase knows comes from these. This module must not know what a phase does.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from .jit import inlined
from .kv_cache import BLOCK, CHUNK
from .native import atomic_add, atomic_load, carray, pointer
from .rounding import KIND_OF
from .tiles import BLOCK_TOKENS, ROWS

MAX_TOKENS = 256  # of one step; a larger batch takes several
NUM_KINDS = max(KIND_OF.values()) + 1
PHASE_NAMES = ("norm", "qkv", "rope", "attention", "attn_output", "gate_up", "down", "output")


class Field(IntEnum):
    """What a step works on: places in an int64 vector of sizes and addresses. N is MAX_TOKENS."""

    NUM_TOKENS = 0  # of this step
    NUM_TILES = 1  # of attention
    SLOTS = 2  # int32[N]
    POSITIONS = 3  # int32[N]
    TILES = 4  # int32[N, 2]
    SOURCES = 5  # int32[N]: which of all tokens the wanted ones are
    WIDTH = 6  # D
    HEADS = 7  # H
    KV_HEADS = 8  # K
    HEAD_WIDTH = 9  # C
    FFN_WIDTH = 10  # F
    EPS = 11  # the address of a float32
    HALVES = 12  # which pairs rope turns
    COS = 13  # float32[positions, C/2]
    SIN = 14
    MAX_POSITIONS = 15
    TABLES = 16  # int32[slots, blocks a slot]
    NUM_SLOTS = 17
    SLOT_BLOCKS = 18
    KEYS = 19  # and VALUES: as in kv_cache.py
    VALUES = 20
    NUM_CHUNKS = 21
    NUM_LAYERS = 22
    X = 23  # float32[N, D], the residual
    H = 24  # float32[members, D], what norms make of one token
    Q = 25  # float32[N, H, C]
    K = 26  # float32[N, K, C]
    V = 27  # float32[N, K, C]
    Z = 28  # float32[N, H, C], unless it is rounded at once
    GATE = 29  # float32[N, F], likewise
    SCRATCH = 30  # float32[members, 2, SCRATCH]
    ACTS = 31  # for each kind of rounding: its records
    GATED_ACTS = ACTS + NUM_KINDS  # likewise of the gate's result, made while others still read the former
    ROUNDINGS = GATED_ACTS + NUM_KINDS  # for each kind the address of its compiled function, or 0
    END = ROUNDINGS + NUM_KINDS


NUM_FIELDS = int(Field.END)

# A step has three vectors of fields, one for each set of tokens that a phase may work on: all of the step; those of
# which the last layer makes keys and values only; those whose logits are wanted, the only ones that go through it.
ALL, KEYS_ONLY, WANTED = range(3)
# A row of the program: | phase's address, counted as, set of tokens, operands 3..7 | a counter of claims, 7 unused |
# for each member of the team, on a cache line of its own.
FUNCTION, COUNTED_AS, TOKENS, OPERANDS, LINE = 0, 1, 2, 8, 8
# A matrix is 12 numbers, to which the operands of a row point. ACTS: the field of the records that it multiplies. Its
# groups follow each other in memory, but behind each SPAN of them lie SPAN_GAP other bytes, and behind each PART of
# them PART_GAP more.
KERNEL, DATA, RECORDS, GROUPS, ACTS, OUT, OUT_STRIDE, BIAS, SPAN, SPAN_GAP, PART, PART_GAP = range(12)
MATRIX = 12
CACHED_RECORDS = 64  # of groups, 1 to 4 KB each: they stay in a core's second cache
SCRATCH = (
    ROWS * CACHED_RECORDS * BLOCK_TOKENS
)  # float32: a piece has so many rows at most, for a block of tokens


# --- reading the numbers --------------------------------------------------------------------------------------


@inlined
def longs(address, count):  # type: ignore[no-untyped-def]
    return carray(pointer(address), count, np.int64)


@inlined
def ints(address):  # type: ignore[no-untyped-def]
    return carray(pointer(address), MAX_TOKENS, np.int32)


@inlined
def floats(address, shape):  # type: ignore[no-untyped-def]
    return carray(pointer(address), shape, np.float32)


@inlined
def keys_and_values(m, dtype):  # type: ignore[no-untyped-def]
    """Keys and values of all layers."""
    pool = (m[Field.NUM_CHUNKS], m[Field.NUM_LAYERS], m[Field.KV_HEADS], CHUNK)
    width = m[Field.HEAD_WIDTH]
    keys = carray(pointer(m[Field.KEYS]), (*pool, width, BLOCK), dtype)
    return keys, carray(pointer(m[Field.VALUES]), (*pool, BLOCK, width), dtype)


@inlined
def claim(row_at, member, num_members, num_items, piece):  # type: ignore[no-untyped-def]
    """(begin, end) of the next items for a member, at most `piece`, which are none when all are taken.

    Each member has a range of its own, from which it takes one piece behind the other: so it reads weights as one
    stream, which the processor follows ahead, and finds in its own caches what it has made of its tokens in the phase
    before. A member that has ended its own goes on with those of the others.
    """
    begin, end = 0, 0
    num_ranges = min(num_members, num_items)
    for turn in range(num_ranges):
        if begin == end:
            owner = (member + turn) % num_ranges
            low, high = num_items * owner // num_ranges, num_items * (owner + 1) // num_ranges
            counter = row_at + 8 * (OPERANDS + LINE * owner)
            if atomic_load(counter) < high - low:  # what only reads it leaves the line with the others
                begin = min(low + atomic_add(counter, piece), high)
                end = min(begin + piece, high)
    return begin, end
