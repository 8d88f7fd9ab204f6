"""The phases of a step: what each computes from the numbers that the program gives it, and how it is cut into
pieces, which the members of a team claim from a counter.

A phase is compiled once and called by its address, since code that is inlined into one big function is optimised
again at each level. It must not know which layer it works for, files, or how weights are packed.
"""

from __future__ import annotations

import numpy as np

from . import ops
from .attention_simd import attend_tile, make_scratch, put_results, store_head, take_queries
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
    SCRATCH,
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
def _round(m, acts, x, stride, width, kinds, begin, end, first, last):  # type: ignore[no-untyped-def]
    """The columns first <= c < last of the rows begin <= t < end of float32[N, width], which are at the address x, row
    after row, to the records of each rounding in `kinds`, a set of bits, which the fields from `acts` on point to."""
    for kind in range(NUM_KINDS):
        if kinds >> kind & 1:
            numbers = (x, stride, width, m[acts + kind], begin, end, first, last)
            call_native(m[Field.ROUNDINGS + kind], numbers)


@inlined
def _norm_and_round(m, x, weight, kinds, member, row):  # type: ignore[no-untyped-def]
    """norm(X) of the token at the address x, rounded to a row of the records."""
    width = m[Field.WIDTH]
    h = m[Field.H] + 4 * width * member
    norm_row(x, weight, m[Field.EPS], h, width)
    _round(m, Field.ACTS, h, 4 * width, width, kinds, row, row + 1, 0, width)


# --- the phases: (address of m, address of the program's row, member, members) -----------------------------------


def norm_and_round(m_at, row_at, member, num_members):  # type: ignore[no-untyped-def]
    """The rounding of norm(X). Operands: weight, kinds."""
    m, row = longs(m_at, NUM_FIELDS), longs(row_at, OPERANDS)
    stride = 4 * m[Field.WIDTH]
    token, end = claim(row_at, member, num_members, m[Field.NUM_TOKENS], 1)
    while token < end:
        _norm_and_round(m, m[Field.X] + stride * token, row[3], row[4], member, token)
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
    stride = 4 * row[4]
    token, end = claim(row_at, member, num_members, m[Field.NUM_TOKENS], 1)
    while token < end:
        x = row[3] + stride * token
        _round(m, row[6], x, stride, row[4], row[5], token, token + 1, 0, row[4])
        token, end = claim(row_at, member, num_members, m[Field.NUM_TOKENS], 1)


def rope_and_store_f16(m_at, row_at, member, num_members):  # type: ignore[no-untyped-def]
    """Norms of the keys and rotation; keys and values into the cache.

    Operands: norm of k (0: none), the layer's number. Pieces: as many tokens as a block of the cache has, or
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
        _make_keys(m, row[3], row[4], begin, end, 0, kv_heads, dtype)
        item, stop = claim(row_at, member, num_members, num_items, 1)


@inlined
def _make_keys(m, norm, layer, begin, end, first, last, dtype):  # type: ignore[no-untyped-def]
    """Keys, made ready, and values of the tokens begin <= t < end into the cache: the kv-heads first <= h < last."""
    shape = (MAX_TOKENS, m[Field.KV_HEADS], m[Field.HEAD_WIDTH])
    k, v = floats(m[Field.K], shape), floats(m[Field.V], shape)
    positions, slots = ints(m[Field.POSITIONS]), ints(m[Field.SLOTS])
    tables = carray(pointer(m[Field.TABLES]), (m[Field.NUM_SLOTS], m[Field.SLOT_BLOCKS]), np.int32)
    keys, values = keys_and_values(m, dtype)
    for token in range(begin, end):
        _norm_and_turn(m, k[token, first:last], norm, positions[token])
    for head in range(first, last):
        store_head(k, v, keys, values, layer, tables, slots, positions, head, begin, end)


@inlined
def _norm_and_turn(m, heads, norm, position):  # type: ignore[no-untyped-def]
    """Heads float32[n, C] of one token, in place: normed, unless the norm is 0, and turned."""
    width = heads.shape[1]
    angles = (m[Field.MAX_POSITIONS], width // 2)
    cos, sin = floats(m[Field.COS], angles)[position], floats(m[Field.SIN], angles)[position]
    if norm != 0:
        for head in range(len(heads)):
            at = heads[head].ctypes.data
            norm_row(at, norm, m[Field.EPS], at, width)
    if m[Field.HALVES]:
        ops.turn_halves(heads, cos, sin)
    else:
        ops.turn_neighbours(heads, cos, sin)


def attend_f16(m_at, row_at, member, num_members):  # type: ignore[no-untyped-def]
    """What all tokens attend to, rounded. Pieces: a tile of tokens on one kv-head, whose queries are made ready here.

    Operands: the layer's number; kinds, or 0 where the queries of a kv-head are no whole records: then it is put to Z;
    whether keys and values are yet to be made, as by `rope_and_store_f16`; norms of q and k.
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
    group = heads // kv_heads
    rows, scores = make_scratch(group, width, longest)
    num_items, columns = m[Field.NUM_TILES] * kv_heads, width * group
    item, stop = claim(row_at, member, num_members, num_items, 1)
    while item < stop:
        tile, kv_head = item // kv_heads, item % kv_heads
        begin, end = tiles[tile, 0], tiles[tile, 1]
        if row[5]:
            _make_keys(m, row[7], row[3], begin, end, kv_head, kv_head + 1, dtype)
        take_queries(q, begin, end, kv_head, rows)
        for token in range(begin, end):
            at = group * (token - begin)
            _norm_and_turn(m, rows[0, at : at + group], row[6], positions[token])
        attend_tile(keys, values, row[3], tables, slots, positions, begin, end, kv_head, rows, scores)
        first, made = columns * kv_head, rows[1].ctypes.data
        _round(m, Field.ACTS, made, 4 * columns, width * heads, row[4], begin, end, first, first + columns)
        if row[4] == 0:
            put_results(rows, begin, end, kv_head, z)
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
    """Norms the step's only token, to a row of the records that no other member has, for `count` matrices: the number
    of that row. Of no weight, 0: nothing is done, and row 0 is that of all.

    Where each member does this for itself, none waits for one that does it for all.
    """
    if weight == 0:
        return 0
    own, kinds = BLOCK_TOKENS * member, 0
    for number in range(count):
        kinds |= 1 << (longs(matrix_at + 8 * MATRIX * number, MATRIX)[ACTS] - Field.ACTS)
    _norm_and_round(m, m[Field.X], weight, kinds, member, own)
    return own


@inlined
def _multiply(m, matrix, out, stride, adds, begin, end, first, last, own):  # type: ignore[no-untyped-def]
    """Groups begin <= g < end times the tokens first <= t < last, and the bias, put or added to `out`, float32[tokens,
    rows of all groups] of this stride. The records of token t are in row `own` + t."""
    acts = m[matrix[ACTS]]
    while begin < end:
        span = begin // matrix[SPAN]
        stop = min(matrix[SPAN] * (span + 1), end)
        data = matrix[DATA] + span * matrix[SPAN_GAP] + begin // matrix[PART] * matrix[PART_GAP]
        numbers = (own + first, own + last, begin, stop, matrix[BIAS], adds)
        call_native(matrix[KERNEL], (data, acts, out - own * stride, stride, matrix[RECORDS], *numbers))
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
                    out, stride = matrix[OUT], matrix[OUT_STRIDE]
                    low, high = part * size + low, part * size + high
                    _multiply(m, matrix, out, stride, adds, low, high, first, last, own)
                base += size
            part += 1
        begin, end, first, last = _claim_groups(task)


def multiply_gated(m_at, row_at, member, num_members):  # type: ignore[no-untyped-def]
    """The rounding of silu(gate) * up, a few tokens of a piece at a time, which stay in the core's caches.

    Operands: the first of two matrices that follow each other; groups whose rows are whole records, and kinds, or 1
    and 0 where a phase of its own rounds: then it is put to GATE; the norm of X that each member is to make first, or
    0; groups of each matrix that are multiplied in turn.
    """
    m, row = longs(m_at, NUM_FIELDS), longs(row_at, OPERANDS)
    gate, up, unit = longs(row[3], MATRIX), longs(row[3] + 8 * MATRIX, MATRIX), row[4]
    kinds, turn, width = row[5], row[7], m[Field.FFN_WIDTH]
    gates = m[Field.SCRATCH] + 4 * 2 * SCRATCH * member
    ups = gates + 4 * SCRATCH
    own = _norm_own(m, row[6], row[3], 2, member)
    task = (row_at, member, num_members, m[Field.NUM_TOKENS], gate[GROUPS], gate[RECORDS], unit)
    begin, end, first, last = _claim_groups(task)
    while begin < end:
        column, columns = ROWS * begin, ROWS * (end - begin)
        stride = 4 * columns
        few = SCRATCH // columns // BLOCK_TOKENS * BLOCK_TOKENS
        for start in range(first, last, few):
            stop = min(start + few, last)
            origin = stride * start + 4 * column  # of the token and row that come first
            for low in range(begin, end, turn):
                high = min(low + turn, end)
                _multiply(m, gate, gates - origin, stride, 0, low, high, start, stop, own)
                _multiply(m, up, ups - origin, stride, 0, low, high, start, stop, own)
            for token in range(start, stop):
                at = stride * (token - start)
                ops.silu_mul_row(floats(gates + at, columns), floats(ups + at, columns))
                if kinds == 0:
                    out = m[Field.GATE] + 4 * (width * token + column)
                    floats(out, columns)[:] = floats(gates + at, columns)
            _round(m, Field.GATED_ACTS, gates, stride, width, kinds, start, stop, column, column + columns)
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
