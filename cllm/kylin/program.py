"""The program of a step for one model: its matrices, buffers and phases as the numbers that `step.py` runs on.

It owns the buffers, and keeps alive every array whose address it hands out. It must not know how a phase works.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import layout, phases
from .gguf import Tensor
from .kv_cache import KVCache
from .layout import CACHED_RECORDS, MAX_TOKENS, PHASE_NAMES, Field
from .matmul import PackedMatrix, compiled_kernel, num_records
from .memory import zeros
from .rounding import KIND_OF, compiled_rounding, records_shape
from .step import phase_address
from .tiles import BLOCK_TOKENS, RECORD_VALUES, ROWS
from .weights import Floats, Linear, ModelShape, Weights

A_LAYER = 7  # matrices of a layer, in the order of `matrices_of`
_Q, _K, _OUTPUT, GATE, _DOWN = 0, 1, 3, 4, 6
_OUTS = ("Q", "K", "V", "X", None, None, "X")  # where results go; those of gate and up are never whole
_RECORDS_A_MEMBER = 4  # that the members end together, where pieces are whole records
_OF_WANTED = 1  # the second place in the arrays of which two sets of tokens have their own
_OWN = ("X", "SLOTS", "POSITIONS", "TILES")


@dataclass(frozen=True)
class Program:
    """A program with its buffers."""

    sets: NDArray[np.int64]  # fields of each set of tokens
    rows: tuple[NDArray[np.int64], NDArray[np.int64]]  # of steps of any tokens, and of those of one
    phase_cycles: NDArray[np.int64]
    matrices: NDArray[np.int64]
    arrays: Mapping[str, NDArray[Any]]  # inputs and buffers, by the name of their field
    kept: tuple[object, ...]  # whatever else an address points into

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What `step.lead` and `step.serve` take of it."""
        return self.sets, self.rows, self.phase_cycles


def matrices_of(weights: Weights) -> Iterator[Linear]:
    """All matrix products of a step in order, seven a layer and the output."""
    for block in weights.blocks:
        yield from (block.attn_q, block.attn_k, block.attn_v, block.attn_output)
        yield from (block.ffn_gate, block.ffn_up, block.ffn_down)
    yield weights.output


def num_in_turn(gate: Tensor) -> int:
    """Groups of the gate that are multiplied before as many of `up`, which then are: they lie in memory so, too."""
    return max(1, CACHED_RECORDS // num_records(gate))


def make_program(
    weights: Weights,
    packed: Mapping[Tensor, PackedMatrix],
    cache: KVCache,
    rope: tuple[Floats, Floats],
    num_members: int,
) -> Program:
    """The program for `weights`, whose matrices are `packed`, over `cache`; rope: cos and sin of all positions.

    `num_members`: of the team that runs it.
    """
    shape = weights.shape
    # To norm a single token each member has a block of tokens.
    num_rows = max(MAX_TOKENS, BLOCK_TOKENS * num_members)
    arrays, records = _make_arrays(shape, num_members), _make_records(weights, packed, num_rows)
    eps = np.array([shape.rms_eps], np.float32)
    sets = _make_fields(shape, arrays, records, cache, rope, eps)
    matrices = _make_matrices(weights, packed, arrays)
    roundings = [packed[layer.weight].rounding for layer in matrices_of(weights)]
    programs = []
    for is_single in (False, True):
        rows = _Rows(
            matrices, roundings, num_members, is_f16=cache.keys.dtype == np.uint16, is_single=is_single
        )
        _add_all(rows, weights, arrays)
        programs.append(rows.finished())
    kept = (weights, packed, records, cache, rope, eps)
    cycles = np.zeros(len(PHASE_NAMES), np.int64)
    return Program(sets, (programs[0], programs[1]), cycles, matrices, arrays, kept)


def _add_all(rows: _Rows, weights: Weights, arrays: Mapping[str, NDArray[Any]]) -> None:
    """The phases of a step."""
    last_layer, output = len(weights.blocks) - 1, A_LAYER * len(weights.blocks)
    for layer in range(last_layer):
        _add_layer(rows, weights, layer, arrays)
    # Of the last layer later tokens need the keys and values of all, but nothing else of those without logits.
    if not rows.is_single:
        rows.tokens = layout.KEYS_ONLY
        _add_projections(rows, weights, last_layer, _K)
    rows.tokens = layout.WANTED
    rows.add(phases.gather, "norm", arrays["X"].ctypes.data)
    _add_layer(rows, weights, last_layer, arrays)
    norm = rows.norm(weights.output_norm, output, 1)
    rows.add(phases.multiply, "output", rows.matrix(output), 1, False, 1, norm)


def _add_projections(rows: _Rows, weights: Weights, layer: int, start: int) -> tuple[int, ...]:
    """Queries, keys and values of one block, from the matrix `start` on, and the latter two into the cache: what
    attention has to know of that, since of a single token it makes its kv-heads itself."""
    block, first, count = weights.blocks[layer], A_LAYER * layer + start, _OUTPUT - start
    norms = [0 if norm is None else norm.ctypes.data for norm in (block.attn_q_norm, block.attn_k_norm)]
    norm = rows.norm(block.attn_norm, first, count)
    # Such parts that a member makes the kv-heads that it attends to.
    parts = math.gcd(weights.shape.num_kv_heads, rows.num_members)
    rows.add(phases.multiply, "qkv", rows.matrix(first), count, False, parts, norm)
    if not rows.is_single:
        store = phases.rope_and_store_f16 if rows.is_f16 else phases.rope_and_store_f32
        rows.add(store, "rope", norms[1], layer)
    return (rows.is_single, *norms)


def _add_layer(rows: _Rows, weights: Weights, layer: int, arrays: Mapping[str, NDArray[Any]]) -> None:
    """The phases of one block."""
    block, shape, first = weights.blocks[layer], weights.shape, A_LAYER * layer
    output, gate, down = first + _OUTPUT, first + GATE, first + _DOWN
    attend = phases.attend_f16 if rows.is_f16 else phases.attend_f32
    heads = _add_projections(rows, weights, layer, _Q)
    # What a member has made it rounds at once, where its pieces are whole records and enough for all members.
    z, z_width = arrays["Z"].ctypes.data, shape.num_heads * shape.head_width
    if z_width // shape.num_kv_heads % rows.record_values(output) == 0:
        rows.add(attend, "attention", layer, rows.kinds(output, 1), *heads)
    else:
        rows.add(attend, "attention", layer, 0, *heads)
        rows.add(phases.round_only, "norm", z, z_width, rows.kinds(output, 1), Field.ACTS)
    rows.add(phases.multiply, "attn_output", rows.matrix(output), 1, True, 1, 0)
    norm = rows.norm(block.ffn_norm, gate, 2)
    turn = num_in_turn(block.ffn_gate.weight)
    num_records, rest = divmod(shape.ffn_width, rows.record_values(down))
    if rest == 0 and num_records >= _RECORDS_A_MEMBER * rows.num_members:
        unit = rows.record_values(down) // ROWS
        rows.add(phases.multiply_gated, "gate_up", rows.matrix(gate), unit, rows.kinds(down, 1), norm, turn)
    else:
        rows.add(phases.multiply_gated, "gate_up", rows.matrix(gate), 1, 0, norm, turn)
        post = arrays["GATE"].ctypes.data
        rows.add(phases.round_only, "norm", post, shape.ffn_width, rows.kinds(down, 1), Field.GATED_ACTS)
    rows.add(phases.multiply, "down", rows.matrix(down), 1, True, 1, 0)


class _Rows:
    """The rows of a program as they are added; `is_single`: of one for steps of a single token."""

    def __init__(
        self,
        matrices: NDArray[np.int64],
        roundings: Sequence[str],
        num_members: int,
        *,
        is_f16: bool,
        is_single: bool,
    ) -> None:
        self._matrices, self._roundings, self.num_members = matrices, roundings, num_members
        self.is_f16, self.is_single = is_f16, is_single
        self.tokens = layout.ALL  # on which the next phases work
        self._rows: list[list[int]] = []

    def add(self, phase: Callable[..., None], counted_as: str, *operands: int) -> None:
        numbers = [phase_address(phase), PHASE_NAMES.index(counted_as), self.tokens, *map(int, operands)]
        self._rows.append(numbers + [0] * (layout.OPERANDS - len(numbers)))

    def norm(self, weight: Floats, first: int, count: int) -> int:
        """The norm before `count` matrices: as a phase, or, of a single token, the operand of the next product, upon
        which each member makes it for itself."""
        if self.is_single:
            return int(weight.ctypes.data)
        self.add(phases.norm_and_round, "norm", weight.ctypes.data, self.kinds(first, count))
        return 0

    def matrix(self, number: int) -> int:
        """The address of a row of the table of matrices."""
        return int(self._matrices[number].ctypes.data)

    def kinds(self, first: int, count: int) -> int:
        """The roundings that matrices want, as a set of bits."""
        return sum({1 << KIND_OF[rounding] for rounding in self._roundings[first : first + count]})

    def record_values(self, number: int) -> int:
        """Values in a record of what a matrix is multiplied with."""
        return RECORD_VALUES[self._roundings[number]]

    def finished(self) -> NDArray[np.int64]:
        """int64[phases, OPERANDS + LINE * num_members], on whole cache lines."""
        width = layout.OPERANDS + layout.LINE * self.num_members
        rows = zeros((len(self._rows), width), np.int64)
        rows[:, : layout.OPERANDS] = self._rows
        return rows


def _make_arrays(shape: ModelShape, num_members: int) -> dict[str, NDArray[Any]]:
    """Inputs and buffers of a step."""
    heads, kv_heads = (shape.num_heads, shape.head_width), (shape.num_kv_heads, shape.head_width)
    floats = {
        "X": (shape.width,),
        "Q": heads,
        "Z": heads,
        "K": kv_heads,
        "V": kv_heads,
        "GATE": (shape.ffn_width,),
    }
    ints: dict[str, tuple[int, ...]] = {"SLOTS": (), "POSITIONS": (), "TILES": (2,), "SOURCES": ()}
    arrays = {
        "H": zeros((num_members, shape.width), np.float32),
        "SCRATCH": zeros((num_members, 2, layout.SCRATCH), np.float32),
    }
    for dtype, shapes in ((np.float32, floats), (np.int32, ints)):
        for name, rest in shapes.items():
            arrays[name] = zeros(((2,) if name in _OWN else ()) + (MAX_TOKENS, *rest), dtype)
    return arrays


def _acts_field(number: int, rounding: str) -> int:
    """The field of the records that a matrix is multiplied with."""
    return (Field.GATED_ACTS if number % A_LAYER == _DOWN else Field.ACTS) + KIND_OF[rounding]


def _make_records(
    weights: Weights, packed: Mapping[Tensor, PackedMatrix], num_rows: int
) -> dict[int, NDArray[np.uint8]]:
    """For each field of records room for `num_rows` of its longest rows."""
    sizes: dict[int, int] = {}
    for number, layer in enumerate(matrices_of(weights)):
        matrix = packed[layer.weight]
        size = math.prod(records_shape(matrix.rounding, num_rows, matrix.num_columns))
        field = _acts_field(number, matrix.rounding)
        sizes[field] = max(sizes.get(field, 0), size)
    return {field: zeros((size,), np.uint8) for field, size in sizes.items()}


def _make_fields(
    shape: ModelShape,
    arrays: Mapping[str, NDArray[Any]],
    records: Mapping[int, NDArray[np.uint8]],
    cache: KVCache,
    rope: tuple[Floats, Floats],
    eps: Floats,
) -> NDArray[np.int64]:
    """int64[sets of tokens, NUM_FIELDS]."""
    sets = np.zeros((3, layout.NUM_FIELDS), np.int64)
    numbers = {
        Field.WIDTH: shape.width,
        Field.HEADS: shape.num_heads,
        Field.KV_HEADS: shape.num_kv_heads,
        Field.HEAD_WIDTH: shape.head_width,
        Field.FFN_WIDTH: shape.ffn_width,
        Field.EPS: eps.ctypes.data,
        Field.HALVES: shape.table.rope_pairs == "halves",
        Field.COS: rope[0].ctypes.data,
        Field.SIN: rope[1].ctypes.data,
        Field.MAX_POSITIONS: len(rope[0]),
        Field.TABLES: cache.tables.ctypes.data,
        Field.NUM_SLOTS: cache.tables.shape[0],
        Field.SLOT_BLOCKS: cache.tables.shape[1],
        Field.KEYS: cache.keys.ctypes.data,
        Field.VALUES: cache.values.ctypes.data,
        Field.NUM_CHUNKS: cache.keys.shape[0],
        Field.NUM_LAYERS: cache.keys.shape[1],
    }
    for field, number in numbers.items():
        sets[:, field] = number
    for name, array in arrays.items():
        sets[:, Field[name]] = array.ctypes.data
        if name in _OWN:
            sets[layout.WANTED, Field[name]] = array[_OF_WANTED].ctypes.data
    for place, array in records.items():
        kind = (place - Field.ACTS) % layout.NUM_KINDS
        sets[:, place] = array.ctypes.data
        sets[:, Field.ROUNDINGS + kind] = compiled_rounding(kind).address
    return sets


def _make_matrices(
    weights: Weights, packed: Mapping[Tensor, PackedMatrix], arrays: Mapping[str, NDArray[Any]]
) -> NDArray[np.int64]:
    layers = list(matrices_of(weights))
    table = np.zeros((len(layers), layout.MATRIX), np.int64)
    for number, layer in enumerate(layers):
        matrix = packed[layer.weight]
        table[number, layout.KERNEL] = compiled_kernel(matrix.type).address
        table[number, layout.DATA] = matrix.data.ctypes.data
        table[number, layout.RECORDS] = matrix.num_records
        table[number, layout.GROUPS] = matrix.num_groups
        _, spans, groups, _ = matrix.data.shape
        part_bytes, span_bytes, group_bytes, _ = matrix.data.strides
        table[number, layout.SPAN] = groups
        table[number, layout.SPAN_GAP] = span_bytes - groups * group_bytes
        table[number, layout.PART] = spans * groups
        table[number, layout.PART_GAP] = part_bytes - spans * span_bytes
        table[number, layout.ACTS] = _acts_field(number, matrix.rounding)
        table[number, layout.OUT_STRIDE] = 4 * matrix.padded_rows
        if number < len(layers) - 1:  # the output's result lies elsewhere in each step
            name = _OUTS[number % A_LAYER]
            if name is not None:
                is_wanted = name in _OWN and number // A_LAYER == len(weights.blocks) - 1  # the last layer's
                out = arrays[name][_OF_WANTED] if is_wanted else arrays[name]
                table[number, layout.OUT] = out.ctypes.data
            table[number, layout.BIAS] = 0 if layer.bias is None else layer.bias.ctypes.data
    return table
