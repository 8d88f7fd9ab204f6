"""The phases of a step: what each computes from the numbers that the program gives it, and how it is cut into
pieces, which the members of a team claim from a counter.

A phase is compiled once and called by its address, since code that is inlined into one big function is optimised
again at each level. It must not know which layer it works for, files, or how weights are packed.
"""

from __future__ import annotations

import numpy as np

from . import ops, ops_simd
from .attention_simd import attend_tile, make_scratch, store_token
from .jit import inlined
from .layout import (
    BIAS,
    DATA,
    GROUPS,
    KERNEL,
    KIND,
    MATRIX,
    MAX_TOKENS,
    NUM_FIELDS,
    NUM_KINDS,
    OPERANDS,
    OUT,
    OUT_STRIDE,
    RECORDS,
    Field,
    claim,
    claim_groups,
    floats,
    ints,
    keys_and_values,
    longs,
)
from .matmul import call_groups
from .native import carray, pointer
from .rounding import call_rounding
from .tiles import ROWS


@inlined
def _round_token(m, x, kinds, token):  # type: ignore[no-untyped-def]
    """Row `token` of x to the records of each rounding in `kinds`, a set of bits."""
    for kind in range(NUM_KINDS):
        if kinds >> kind & 1:
            acts, acts_bytes = m[Field.ACTS + kind], m[Field.ACTS_BYTES + kind]
            call_rounding(
                m[Field.ROUNDINGS + kind], x.ctypes.data, x.shape[1], acts, acts_bytes, token, token + 1
            )


# --- the phases: (address of m, address of the program's row, member, members) -----------------------------------


def norm_and_round(m_at, row_at, member, num_members):  # type: ignore[no-untyped-def]
    """H = norm(X), and its rounding. Operands: weight, kinds."""
    m, row = longs(m_at, NUM_FIELDS), longs(row_at, OPERANDS)
    width = m[Field.WIDTH]
    x, h = floats(m[Field.X], (MAX_TOKENS, width)), floats(m[Field.H], (MAX_TOKENS, width))
    weight, eps = floats(row[2], width), floats(m[Field.EPS], 1)[0]
    token = claim(row_at)
    while token < m[Field.NUM_TOKENS]:
        ops_simd.rms_norm(x, weight, eps, h, token, token + 1)
        _round_token(m, h, row[3], token)
        token = claim(row_at)


def norm_logit_rows(m_at, row_at, member, num_members):  # type: ignore[no-untyped-def]
    """As `norm_and_round`, of the rows whose logits are wanted, which move to the front."""
    m, row = longs(m_at, NUM_FIELDS), longs(row_at, OPERANDS)
    width, sources = m[Field.WIDTH], ints(m[Field.LOGIT_ROWS])
    x, h = floats(m[Field.X], (MAX_TOKENS, width)), floats(m[Field.H], (MAX_TOKENS, width))
    weight, eps = floats(row[2], width), floats(m[Field.EPS], 1)[0]
    target = claim(row_at)
    while target < m[Field.NUM_ROWS]:
        for i in range(width):
            h[target, i] = x[sources[target], i]
        ops_simd.rms_norm(h, weight, eps, h, target, target + 1)
        _round_token(m, h, row[3], target)
        target = claim(row_at)


def round_only(m_at, row_at, member, num_members):  # type: ignore[no-untyped-def]
    """Operands: float32[N, width], width, kinds."""
    m, row = longs(m_at, NUM_FIELDS), longs(row_at, OPERANDS)
    x = floats(row[2], (MAX_TOKENS, row[3]))
    token = claim(row_at)
    while token < m[Field.NUM_TOKENS]:
        _round_token(m, x, row[4], token)
        token = claim(row_at)


def rope_and_store_f16(m_at, row_at, member, num_members):  # type: ignore[no-untyped-def]
    """Norms of the heads and rotation; keys and values into the cache.

    Operands: norm of q and of k (0: none), the layer's number. Pieces: tokens.
    """
    _rope_and_store(m_at, row_at, np.uint16)


def rope_and_store_f32(m_at, row_at, member, num_members):  # type: ignore[no-untyped-def]
    """As `rope_and_store_f16` for a cache of float32."""
    _rope_and_store(m_at, row_at, np.float32)


@inlined
def _rope_and_store(m_at, row_at, dtype):  # type: ignore[no-untyped-def]
    m, row = longs(m_at, NUM_FIELDS), longs(row_at, OPERANDS)
    heads, kv_heads, width = m[Field.HEADS], m[Field.KV_HEADS], m[Field.HEAD_WIDTH]
    q, k = floats(m[Field.Q], (MAX_TOKENS, heads, width)), floats(m[Field.K], (MAX_TOKENS, kv_heads, width))
    q_rows = floats(m[Field.Q], (MAX_TOKENS * heads, width))
    k_rows = floats(m[Field.K], (MAX_TOKENS * kv_heads, width))
    v, eps = floats(m[Field.V], (MAX_TOKENS, kv_heads, width)), floats(m[Field.EPS], 1)[0]
    angles = (m[Field.MAX_POSITIONS], width // 2)
    cos, sin = floats(m[Field.COS], angles), floats(m[Field.SIN], angles)
    positions, slots = ints(m[Field.POSITIONS]), ints(m[Field.SLOTS])
    tables = carray(pointer(m[Field.TABLES]), (m[Field.NUM_SLOTS], m[Field.SLOT_BLOCKS]), np.int32)
    keys, values = keys_and_values(m, dtype)
    token = claim(row_at)
    while token < m[Field.NUM_TOKENS]:
        if row[2] != 0:
            ops_simd.rms_norm(q_rows, floats(row[2], width), eps, q_rows, token * heads, (token + 1) * heads)
            ops_simd.rms_norm(
                k_rows, floats(row[3], width), eps, k_rows, token * kv_heads, (token + 1) * kv_heads
            )
        if m[Field.HALVES]:
            ops.rope_halves(q, positions, cos, sin, token, token + 1)
            ops.rope_halves(k, positions, cos, sin, token, token + 1)
        else:
            ops.rope_neighbours(q, positions, cos, sin, token, token + 1)
            ops.rope_neighbours(k, positions, cos, sin, token, token + 1)
        store_token(k, v, keys, values, row[4], tables, slots, positions, token)
        token = claim(row_at)


def attend_f16(m_at, row_at, member, num_members):  # type: ignore[no-untyped-def]
    """Operands: the layer's number."""
    _attend(m_at, row_at, np.uint16)


def attend_f32(m_at, row_at, member, num_members):  # type: ignore[no-untyped-def]
    """As `attend_f16` for a cache of float32."""
    _attend(m_at, row_at, np.float32)


@inlined
def _attend(m_at, row_at, dtype):  # type: ignore[no-untyped-def]
    """Z of all tokens. Pieces: a tile of tokens on one kv-head."""
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
    item = claim(row_at)
    while item < m[Field.NUM_TILES] * kv_heads:
        # Late tiles see the most positions: they are claimed first, so that the members end together.
        tile, kv_head = m[Field.NUM_TILES] - 1 - item // kv_heads, item % kv_heads
        begin, end = tiles[tile, 0], tiles[tile, 1]
        attend_tile(q, keys, values, row[2], tables, slots, positions, begin, end, kv_head, rows, scores, z)
        item = claim(row_at)


# --- the phases that multiply -----------------------------------------------------------------------------------


@inlined
def _piece(num_groups, num_members, num_records):  # type: ignore[no-untyped-def]
    """Groups that are claimed at once: few enough that the members end together, and that their weights, a record
    of which is 1 to 4 KB, stay in the core's own cache while tile after tile of tokens reads them."""
    return max(1, min(num_groups // (8 * num_members), 64 // num_records))


@inlined
def _call(m, matrix, num_tokens, begin, end):  # type: ignore[no-untyped-def]
    """Groups begin <= g < end of the product, and the bias."""
    kind = matrix[KIND]
    call_groups(
        matrix[KERNEL],
        matrix[DATA],
        m[Field.ACTS + kind],
        m[Field.ACTS_BYTES + kind],
        matrix[OUT],
        matrix[OUT_STRIDE],
        matrix[RECORDS],
        num_tokens,
        begin,
        end,
    )
    if matrix[BIAS] != 0:
        bias = floats(matrix[BIAS], matrix[GROUPS] * ROWS)
        for token in range(num_tokens):
            y = floats(matrix[OUT] + token * matrix[OUT_STRIDE], matrix[GROUPS] * ROWS)
            for i in range(ROWS * begin, ROWS * end):
                y[i] += bias[i]


def multiply(m_at, row_at, member, num_members):  # type: ignore[no-untyped-def]
    """Products with the same activations. Operands: up to three matrices that follow each other, how many, and
    which field says how many tokens."""
    m, row = longs(m_at, NUM_FIELDS), longs(row_at, OPERANDS)
    count, num_tokens = row[3], m[row[4]]
    num_groups = 0
    for number in range(count):
        num_groups += longs(row[2] + 8 * MATRIX * number, MATRIX)[GROUPS]
    piece = _piece(num_groups, num_members, longs(row[2], MATRIX)[RECORDS])
    begin, end = claim_groups(row_at, member, num_members, num_groups, piece)
    while begin < end and num_tokens > 0:
        base = 0
        for number in range(count):
            matrix = longs(row[2] + 8 * MATRIX * number, MATRIX)
            low, high = max(begin - base, 0), min(end - base, matrix[GROUPS])
            if low < high:
                _call(m, matrix, num_tokens, low, high)
            base += matrix[GROUPS]
        begin, end = claim_groups(row_at, member, num_members, num_groups, piece)


def multiply_and_add(m_at, row_at, member, num_members):  # type: ignore[no-untyped-def]
    """X += product, by way of Y. Operand: the matrix."""
    m, row = longs(m_at, NUM_FIELDS), longs(row_at, OPERANDS)
    matrix, width = longs(row[2], MATRIX), m[Field.WIDTH]
    x, y = floats(m[Field.X], (MAX_TOKENS, width)), floats(m[Field.Y], (MAX_TOKENS, width))
    piece = _piece(matrix[GROUPS], num_members, matrix[RECORDS])
    begin, end = claim_groups(row_at, member, num_members, matrix[GROUPS], piece)
    while begin < end:
        _call(m, matrix, m[Field.NUM_TOKENS], begin, end)
        for token in range(m[Field.NUM_TOKENS]):
            for i in range(ROWS * begin, ROWS * end):
                x[token, i] += y[token, i]
        begin, end = claim_groups(row_at, member, num_members, matrix[GROUPS], piece)


def multiply_gated(m_at, row_at, member, num_members):  # type: ignore[no-untyped-def]
    """GATE = silu(gate) * up. Operand: the first of two matrices that follow each other."""
    m, row = longs(m_at, NUM_FIELDS), longs(row_at, OPERANDS)
    first, second, width = longs(row[2], MATRIX), longs(row[2] + 8 * MATRIX, MATRIX), m[Field.FFN_WIDTH]
    gate, up = floats(m[Field.GATE], (MAX_TOKENS, width)), floats(m[Field.UP], (MAX_TOKENS, width))
    piece = _piece(first[GROUPS], num_members, first[RECORDS])
    begin, end = claim_groups(row_at, member, num_members, first[GROUPS], piece)
    while begin < end:
        _call(m, first, m[Field.NUM_TOKENS], begin, end)
        _call(m, second, m[Field.NUM_TOKENS], begin, end)
        for token in range(m[Field.NUM_TOKENS]):
            part = slice(ROWS * begin, ROWS * end)
            ops.silu_mul_row(gate[token, part], up[token, part])
        begin, end = claim_groups(row_at, member, num_members, first[GROUPS], piece)


PHASES = (
    norm_and_round,
    norm_logit_rows,
    round_only,
    rope_and_store_f16,
    attend_f16,
    multiply,
    multiply_and_add,
    multiply_gated,
)  # of a model whose cache is f16
