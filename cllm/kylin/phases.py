"""The phases of a step: what each computes from the numbers that the program gives it, and how it is cut into
pieces, which the members of a team claim from a counter.

A phase is compiled once and called by its address, since code that is inlined into one big function is optimised
again at each level. It must not know which layer it works for, files, or how weights are packed.
"""

from __future__ import annotations

import numpy as np

from . import ops
from .attention_simd import attend_tile, make_scratch, store_head
from .jit import inlined
from .kv_cache import BLOCK
from .layout import (
    ACTS,
    BIAS,
    CACHED_RECORDS,
    DATA,
    GROUPS,
    KERNEL,
    MATRIX,
    MAX_TOKENS,
    NUM_FIELDS,
    NUM_KINDS,
    OPERANDS,
    OUT,
    OUT_STRIDE,
    PART,
    PART_GAP,
    RECORDS,
    SPAN,
    SPAN_GAP,
    Field,
    claim,
    floats,
    ints,
    keys_and_values,
    longs,
)
from .native import call_native, carray, pointer
from .ops_simd import norm_row
from .tiles import BLOCK_TOKENS, ROWS


@inlined
def _round(m, acts, x, width, kinds, begin, end, first, last):  # type: ignore[no-untyped-def]
    """The columns first <= c < last of the rows begin <= t < end of float32[N, width] at the address x, to the records
    of each rounding in `kinds`, a set of bits, which the fields from `acts` on point to."""
    for kind in range(NUM_KINDS):
        if kinds >> kind & 1:
            call_native(m[Field.ROUNDINGS + kind], (x, width, m[acts + kind], begin, end, first, last))


# --- the phases: (address of m, address of the program's row, member, members) -----------------------------------


def norm_and_round(m_at, row_at, member, num_members):  # type: ignore[no-untyped-def]
    """H = norm(X), and its rounding. Operands: weight, kinds."""
    m, row = longs(m_at, NUM_FIELDS), longs(row_at, OPERANDS)
    x, h, width = m[Field.X], m[Field.H], m[Field.WIDTH]
    token, end = claim(row_at, member, num_members, m[Field.NUM_TOKENS], 1)
    while token < end:
        at = 4 * width * token
        norm_row(x + at, row[3], m[Field.EPS], h + at, width)
        _round(m, Field.ACTS, h, width, row[4], token, token + 1, 0, width)
        token, end = claim(row_at, member, num_members, m[Field.NUM_TOKENS], 1)


def gather(m_at, row_at, member, num_members):  # type: ignore[no-untyped-def]
    """X = the rows of SOURCES. Operand: float32[N, D], X of all tokens."""
    m, row = longs(m_at, NUM_FIELDS), longs(row_at, OPERANDS)
    sources, shape = ints(m[Field.SOURCES]), (MAX_TOKENS, m[Field.WIDTH])
    x, source = floats(m[Field.X], shape), floats(row[3], shape)
    token, end = claim(row_at, member, num_members, m[Field.NUM_TOKENS], 1)
    while token < end:
        x[token] = source[sources[token]]
        token, end = claim(row_at, member, num_members, m[Field.NUM_TOKENS], 1)


def round_only(m_at, row_at, member, num_members):  # type: ignore[no-untyped-def]
    """Operands: float32[N, width], width, kinds, the field of the records of the first kind."""
    m, row = longs(m_at, NUM_FIELDS), longs(row_at, OPERANDS)
    token, end = claim(row_at, member, num_members, m[Field.NUM_TOKENS], 1)
    while token < end:
        _round(m, row[6], row[3], row[4], row[5], token, token + 1, 0, row[4])
        token, end = claim(row_at, member, num_members, m[Field.NUM_TOKENS], 1)


def rope_and_store_f16(m_at, row_at, member, num_members):  # type: ignore[no-untyped-def]
    """Norms of the heads and rotation; keys and values into the cache.

    Operands: norm of q and of k (0: none), the layer's number. Pieces: as many tokens as a block of the cache has, or
    a member's share where that is less.
    """
    _rope_and_store(m_at, row_at, member, num_members, np.uint16)


def rope_and_store_f32(m_at, row_at, member, num_members):  # type: ignore[no-untyped-def]
    """As `rope_and_store_f16` for a cache of float32."""
    _rope_and_store(m_at, row_at, member, num_members, np.float32)


@inlined
def _rope_and_store(m_at, row_at, member, num_members, dtype):  # type: ignore[no-untyped-def]
    m, row = longs(m_at, NUM_FIELDS), longs(row_at, OPERANDS)
    num_tokens, kv_heads = m[Field.NUM_TOKENS], m[Field.KV_HEADS]
    block = max(1, min(BLOCK, (num_tokens + num_members - 1) // num_members))
    num_items = (num_tokens + block - 1) // block
    item, stop = claim(row_at, member, num_members, num_items, 1)
    while item < stop:
        begin, end = item * block, min((item + 1) * block, num_tokens)
        _make_heads(m, row[3], row[4], row[5], begin, end, 0, kv_heads, dtype)
        item, stop = claim(row_at, member, num_members, num_items, 1)


@inlined
def _make_heads(m, q_norm, k_norm, layer, begin, end, first, last, dtype):  # type: ignore[no-untyped-def]
    """The kv-heads first <= h < last of the tokens begin <= t < end, and their queries: normed, unless the norms are 0,
    and turned; keys and values into the cache."""
    heads, kv_heads, width = m[Field.HEADS], m[Field.KV_HEADS], m[Field.HEAD_WIDTH]
    q, k = floats(m[Field.Q], (MAX_TOKENS, heads, width)), floats(m[Field.K], (MAX_TOKENS, kv_heads, width))
    v = floats(m[Field.V], (MAX_TOKENS, kv_heads, width))
    angles = (m[Field.MAX_POSITIONS], width // 2)
    cos, sin = floats(m[Field.COS], angles), floats(m[Field.SIN], angles)
    positions, slots = ints(m[Field.POSITIONS]), ints(m[Field.SLOTS])
    tables = carray(pointer(m[Field.TABLES]), (m[Field.NUM_SLOTS], m[Field.SLOT_BLOCKS]), np.int32)
    keys, values = keys_and_values(m, dtype)
    group = heads // kv_heads
    for token in range(begin, end):
        queries, new_keys = q[token, group * first : group * last], k[token, first:last]
        if q_norm != 0:
            _norm_heads(queries, q_norm, m[Field.EPS])
            _norm_heads(new_keys, k_norm, m[Field.EPS])
        at = positions[token]
        if m[Field.HALVES]:
            ops.turn_halves(queries, cos[at], sin[at])
            ops.turn_halves(new_keys, cos[at], sin[at])
        else:
            ops.turn_neighbours(queries, cos[at], sin[at])
            ops.turn_neighbours(new_keys, cos[at], sin[at])
    for head in range(first, last):
        store_head(k, v, keys, values, layer, tables, slots, positions, head, begin, end)


@inlined
def _norm_heads(heads, weight, eps):  # type: ignore[no-untyped-def]
    """float32[heads, width] normed in place."""
    for head in range(len(heads)):
        at = heads[head].ctypes.data
        norm_row(at, weight, eps, at, heads.shape[1])


def attend_f16(m_at, row_at, member, num_members):  # type: ignore[no-untyped-def]
    """Z of all tokens, and its rounding. Pieces: a tile of tokens on one kv-head.

    Operands: the layer's number; kinds, which are none where the queries of a kv-head are no whole records; whether the
    kv-heads are yet to be made, as by `rope_and_store_f16` with the norms that follow.
    """
    _attend(m_at, row_at, member, num_members, np.uint16)


def attend_f32(m_at, row_at, member, num_members):  # type: ignore[no-untyped-def]
    """As `attend_f16` for a cache of float32."""
    _attend(m_at, row_at, member, num_members, np.float32)


@inlined
def _attend(m_at, row_at, member, num_members, dtype):  # type: ignore[no-untyped-def]
    m, row = longs(m_at, NUM_FIELDS), longs(row_at, OPERANDS)
    heads, kv_heads, width = m[Field.HEADS], m[Field.KV_HEADS], m[Field.HEAD_WIDTH]
    q, z = floats(m[Field.Q], (MAX_TOKENS, heads, width)), floats(m[Field.Z], (MAX_TOKENS, heads, width))
    keys, values = keys_and_values(m, dtype)
    tables = carray(pointer(m[Field.TABLES]), (m[Field.NUM_SLOTS], m[Field.SLOT_BLOCKS]), np.int32)
    tiles = carray(pointer(m[Field.TILES]), (MAX_TOKENS, 2), np.int32)
    positions, slots = ints(m[Field.POSITIONS]), ints(m[Field.SLOTS])
    longest = 0
    for token in range(m[Field.NUM_TOKENS]):
        longest = max(longest, positions[token] + 1)
    rows, scores = make_scratch(heads // kv_heads, width, longest)
    num_items, columns = m[Field.NUM_TILES] * kv_heads, width * (heads // kv_heads)
    item, stop = claim(row_at, member, num_members, num_items, 1)
    while item < stop:
        tile, kv_head = item // kv_heads, item % kv_heads
        begin, end = tiles[tile, 0], tiles[tile, 1]
        if row[5]:
            _make_heads(m, row[6], row[7], row[3], begin, end, kv_head, kv_head + 1, dtype)
        attend_tile(q, keys, values, row[3], tables, slots, positions, begin, end, kv_head, rows, scores, z)
        first = columns * kv_head
        _round(m, Field.ACTS, m[Field.Z], width * heads, row[4], begin, end, first, first + columns)
        item, stop = claim(row_at, member, num_members, num_items, 1)


# --- the phases that multiply -----------------------------------------------------------------------------------


@inlined
def _claim_groups(task):  # type: ignore[no-untyped-def]
    """(begin, end) of the next groups for a member, and (first, last) of the tokens with which to multiply them.

    `task`: (the row's address, member, members, tokens, groups, records of a group, groups of which pieces are whole
    multiples).

    With few tokens, which wait for memory, the members share the groups, so that each weight is read once. With more
    they share the tokens: what a member makes of its own stays in its own caches from phase to phase. Each then reads
    all weights, at 100 GB/s over the number of its tokens: all of them stay below 25 GB/s.

    A piece has few enough groups that the members end together, and that their weights stay in the core's own cache
    while tile after tile of tokens reads them.
    """
    row_at, member, num_members, num_tokens, num_groups, num_records, unit = task
    num_blocks = num_members if num_tokens >= 4 * num_members * num_members else 1
    num_units = num_groups // unit
    num_items = num_blocks * num_units if num_tokens else 0
    piece = max(1, min(num_items // (8 * num_members), CACHED_RECORDS // (num_records * unit)))
    first, end = claim(row_at, member, num_members, num_items, piece)
    block = min(first // num_units, num_blocks - 1)
    begin, end = unit * (first - block * num_units), unit * (end - block * num_units)
    num_eights = (num_tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    first, last = num_eights * block // num_blocks, num_eights * (block + 1) // num_blocks
    return begin, end, BLOCK_TOKENS * first, min(BLOCK_TOKENS * last, num_tokens)


@inlined
def _norm_own(m, weight, matrix_at, count, member):  # type: ignore[no-untyped-def]
    """Norms the step's only token, in a row of H and of the records that no other member has, for `count` matrices: the
    number of that row. Of no weight, 0: nothing is done, and row 0 is that of all.

    Where each member does this for itself, none waits for one that does it for all.
    """
    if weight == 0:
        return 0
    own, h, width, kinds = BLOCK_TOKENS * member, m[Field.H], m[Field.WIDTH], 0
    for number in range(count):
        kinds |= 1 << (longs(matrix_at + 8 * MATRIX * number, MATRIX)[ACTS] - Field.ACTS)
    norm_row(m[Field.X], weight, m[Field.EPS], h + 4 * width * own, width)
    _round(m, Field.ACTS, h, width, kinds, own, own + 1, 0, width)
    return own


@inlined
def _multiply(m, matrix, adds, begin, end, first, last, own):  # type: ignore[no-untyped-def]
    """Groups begin <= g < end times the tokens first <= t < last, and the bias, put or added to where they belong.
    The records of token t are in row `own` + t."""
    out, stride, acts = matrix[OUT] - own * matrix[OUT_STRIDE], matrix[OUT_STRIDE], m[matrix[ACTS]]
    while begin < end:
        span = begin // matrix[SPAN]
        stop = min(matrix[SPAN] * (span + 1), end)
        data = matrix[DATA] + span * matrix[SPAN_GAP] + begin // matrix[PART] * matrix[PART_GAP]
        numbers = (own + first, own + last, begin, stop, matrix[BIAS], adds)
        call_native(matrix[KERNEL], (data, acts, out, stride, matrix[RECORDS], *numbers))
        begin = stop


def multiply(m_at, row_at, member, num_members):  # type: ignore[no-untyped-def]
    """Products with the same activations. Operands: up to three matrices that follow each other, how many, whether the
    products are added to what is there; into how many parts each matrix is cut, of which all first ones go before all
    second ones; the norm of X that each member is to make first, or 0."""
    m, row = longs(m_at, NUM_FIELDS), longs(row_at, OPERANDS)
    count, adds, parts = row[4], row[5], row[6]
    num_groups = 0
    for number in range(count):
        num_groups += longs(row[3] + 8 * MATRIX * number, MATRIX)[GROUPS]
    records = longs(row[3], MATRIX)[RECORDS]
    own = _norm_own(m, row[7], row[3], count, member)
    task = (row_at, member, num_members, m[Field.NUM_TOKENS], num_groups, records, 1)
    begin, end, first, last = _claim_groups(task)
    while begin < end:
        part = begin * parts // num_groups
        base = part * (num_groups // parts)
        while base < end:
            for number in range(count):
                matrix = longs(row[3] + 8 * MATRIX * number, MATRIX)
                size = matrix[GROUPS] // parts
                low, high = max(begin - base, 0), min(end - base, size)
                if low < high:
                    _multiply(m, matrix, adds, part * size + low, part * size + high, first, last, own)
                base += size
            part += 1
        begin, end, first, last = _claim_groups(task)


def multiply_gated(m_at, row_at, member, num_members):  # type: ignore[no-untyped-def]
    """GATE = silu(gate) * up, and its rounding.

    Operands: the first of two matrices that follow each other; groups whose rows are whole records, and kinds, or 1
    and none where a phase of its own rounds; the norm of X that each member is to make first, or 0; groups of each
    matrix that are multiplied in turn.
    """
    m, row = longs(m_at, NUM_FIELDS), longs(row_at, OPERANDS)
    gate, up, unit = longs(row[3], MATRIX), longs(row[3] + 8 * MATRIX, MATRIX), row[4]
    width, turn = m[Field.FFN_WIDTH], row[7]
    gates, ups = floats(m[Field.GATE], (MAX_TOKENS, width)), floats(m[Field.UP], (MAX_TOKENS, width))
    own = _norm_own(m, row[6], row[3], 2, member)
    task = (row_at, member, num_members, m[Field.NUM_TOKENS], gate[GROUPS], gate[RECORDS], unit)
    begin, end, first, last = _claim_groups(task)
    while begin < end:
        for low in range(begin, end, turn):
            high = min(low + turn, end)
            _multiply(m, gate, 0, low, high, first, last, own)
            _multiply(m, up, 0, low, high, first, last, own)
        low, high = ROWS * begin, ROWS * end
        for token in range(first, last):
            ops.silu_mul_row(gates[token, low:high], ups[token, low:high])
        _round(m, Field.GATED_ACTS, m[Field.GATE], width, row[5], first, last, low, high)
        begin, end, first, last = _claim_groups(task)


PHASES = (
    norm_and_round,
    gather,
    round_only,
    rope_and_store_f16,
    attend_f16,
    multiply,
    multiply_gated,
)  # of a model whose cache is f16
