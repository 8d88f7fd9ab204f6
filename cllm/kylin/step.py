"""One whole forward pass in compiled code: a program of phases, each shared by the members of a team, which meet
at a barrier behind it.

It computes what `Model.forward` does one operation at a time, by the same kernels in the same order of float
operations, so both give the same bits. The program is data, made by `program.py`: rows of numbers that name a
phase of `phases.py` and its operands. This module must not know what a phase does.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import types

from .attention_simd import find_tiles
from .embedding import put_rows
from .jit import inlined, kernel, native_function
from .layout import (
    ALL,
    COUNTED_AS,
    FUNCTION,
    KEYS_ONLY,
    LINE,
    MAX_TOKENS,
    OPERANDS,
    OUT,
    TOKENS,
    WANTED,
    Field,
    ints,
)
from .native import call_native, carray, cycles, pointer
from .team import barrier, call_members, start_step, take_waited, wait_for_step


@kernel
def serve(state, member, sets, programs, phase_cycles):  # type: ignore[no-untyped-def]
    """What the members 1, 2, .. of a team do until it ends."""
    num_members = wait_for_step(state, member)
    while num_members:
        _run(state, member, num_members, sets, _program_of(sets, programs), phase_cycles)
        num_members = wait_for_step(state, member)


@kernel
def lead(  # type: ignore[no-untyped-def]
    state, num_members, sets, programs, phase_cycles, output, embedding, ids, slots, positions, rows, logits
):
    """One step, begun and joined by member 0: (cycles, cycles that members waited for others). The cache counts the
    tokens as held.

    sets int64[sets of tokens, NUM_FIELDS]; programs (int64[phases, OPERANDS + LINE * members],) * 2, of any tokens and
    of one; phase_cycles int64[len(PHASE_NAMES)], added to; output int64[MATRIX], the output's; embedding int64[3],
    `Embedding.operands`: of one that is not compiled X has the rows. Of the step: token ids, slots and positions
    int32[T]; rows int32[R], the tokens whose logits are wanted, and logits float32[>= R, padded V].
    """
    began = cycles()
    call_members(state, num_members)
    if embedding[0] != 0:
        put_rows(embedding, ids, sets[ALL, Field.WIDTH], sets[ALL, Field.X])
    _set_inputs(sets, slots, positions, rows)
    output[OUT] = logits.ctypes.data
    for m in sets:
        tiles = carray(pointer(m[Field.TILES]), (MAX_TOKENS, 2), np.int32)
        m[Field.NUM_TILES] = find_tiles(
            ints(m[Field.SLOTS]), ints(m[Field.POSITIONS]), m[Field.NUM_TOKENS], tiles
        )
    program = _program_of(sets, programs)
    for number in range(len(program)):
        for member in range(num_members):
            program[number, OPERANDS + LINE * member] = 0
    start_step(state)
    _run(state, 0, num_members, sets, program, phase_cycles)
    return cycles() - began, take_waited(state)


@inlined
def _set_inputs(sets, slots, positions, rows):  # type: ignore[no-untyped-def]
    num_tokens, num_rows = len(slots), len(rows)
    every, wanted = sets[ALL], sets[WANTED]
    ints(every[Field.SLOTS])[:num_tokens] = slots
    ints(every[Field.POSITIONS])[:num_tokens] = positions
    are_all_wanted = num_rows == num_tokens
    for number in range(num_rows):
        row = rows[number]
        ints(wanted[Field.SLOTS])[number] = slots[row]
        ints(wanted[Field.POSITIONS])[number] = positions[row]
        ints(wanted[Field.SOURCES])[number] = row
        are_all_wanted = are_all_wanted and row == number
    every[Field.NUM_TOKENS], wanted[Field.NUM_TOKENS] = num_tokens, num_rows
    sets[KEYS_ONLY, Field.NUM_TOKENS] = 0 if are_all_wanted else num_tokens


@inlined
def _program_of(sets, programs):  # type: ignore[no-untyped-def]
    """That of this step: the second for a single token whose logits are wanted."""
    is_single = sets[ALL, Field.NUM_TOKENS] == 1 and sets[WANTED, Field.NUM_TOKENS] == 1
    return programs[1] if is_single else programs[0]


@inlined
def _run(state, member, num_members, sets, program, phase_cycles):  # type: ignore[no-untyped-def]
    clock = cycles()
    for number in range(len(program)):
        row = program[number]
        call_native(row[FUNCTION], (sets[row[TOKENS]].ctypes.data, row.ctypes.data, member, num_members))
        barrier(state, member, num_members)
        now = cycles()
        if member == 0:
            phase_cycles[row[COUNTED_AS]] += now - clock
        clock = now


def compile_loops() -> None:
    """Compiles `lead` and `serve`, or loads them, before a thread waits for another that would do so."""
    numbers, table, ids = types.int64[::1], types.int64[:, ::1], types.int32[::1]
    inputs = (ids, ids, ids, ids, types.float32[:, ::1])
    programs = types.UniTuple(table, 2)  # type: ignore[no-untyped-call]
    arguments = (numbers, types.int64, table, programs, numbers)
    lead.compile((*arguments, numbers, numbers, *inputs))
    serve.compile(arguments)


def phase_address(phase: Callable[..., None]) -> int:
    """The address of one of `phases.py`, compiled."""
    return int(native_function(phase, 4).address)
