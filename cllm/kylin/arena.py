"""All weights of a model repacked into one stretch of memory, in the order in which the threads read them.

A processor that follows a stream fetches some 30 KB beyond its end, which costs a microsecond where that is not what is
read next: so what a thread reads in one phase of a step is followed by what it reads in the next. It must not know what
a phase does.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .gguf import Tensor
from .matmul import PackedMatrix, num_groups, pack, packed_bytes
from .memory import zeros
from .program import A_LAYER, GATE, matrices_of, num_in_turn
from .team import Team
from .weights import Weights

Bytes = NDArray[np.uint8]
Progress = Callable[[str, int, int], None]  # (stage, done, total)

_PACK_BYTES = 1 << 22  # of one piece of repacking


def make_arena(weights: Weights) -> Bytes:
    """Room for every matrix."""
    num_bytes = sum(packed_bytes(layer.weight) for layer in matrices_of(weights))  # each a multiple of 64
    return zeros((num_bytes,), np.uint8)


def places_of(weights: Weights, arena: Bytes, num_threads: int) -> dict[Tensor, Bytes]:
    """For each matrix its `PackedMatrix.data`.

    A layer lies as | part of thread 0 | part of thread 1 | .., and a part as | q | k | v | attn_output | gate, up, ..
    | down |: as many groups of each as are the thread's, and of gate and up as many as it multiplies in turn. Where
    the groups cannot be shared evenly there is one part. The output follows the layers.
    """
    tensors = [layer.weight for layer in matrices_of(weights)]
    places: dict[Tensor, Bytes] = {}
    for first in range(0, len(tensors), A_LAYER):
        layer = tensors[first : first + A_LAYER]
        is_even = all(num_groups(tensor) % num_threads == 0 for tensor in layer)
        num_bytes = sum(map(packed_bytes, layer))
        parts, arena = arena[:num_bytes].reshape(num_threads if is_even else 1, -1), arena[num_bytes:]
        at = 0
        for turn, span in _turns(layer, len(parts)):
            size = sum(map(packed_bytes, turn)) // len(parts)
            group_bytes = packed_bytes(turn[0]) // num_groups(turn[0])
            area = parts[:, at : at + size].reshape(len(parts), -1, len(turn), span, group_bytes)
            places |= {tensor: area[:, :, number] for number, tensor in enumerate(turn)}
            at += size
    return places


def _turns(layer: list[Tensor], num_parts: int) -> Iterator[tuple[list[Tensor], int]]:
    """The matrices of a part in their order, together those that are read in turn, and the groups of a turn."""
    turns = [[tensor] for tensor in layer]
    if len(layer) == A_LAYER:
        gate, up = layer[GATE : GATE + 2]
        span = num_in_turn(gate)
        if gate.type == up.type and num_groups(gate) // num_parts % span == 0:
            turns[GATE : GATE + 2] = [[gate, up]]
    for turn in turns:
        yield turn, span if len(turn) == 2 else num_groups(turn[0]) // num_parts


def pack_all(weights: Weights, arena: Bytes, team: Team, progress: Progress) -> dict[Tensor, PackedMatrix]:
    """Every matrix in its place; the file's pages are given back as they are done."""
    packed, done = {}, 0
    for tensor, data in places_of(weights, arena, team.num_threads).items():
        packed[tensor] = matrix = PackedMatrix(tensor.type, tensor.shape[0], tensor.shape[1], data)
        piece = max(1, _PACK_BYTES // data.shape[-1])
        for begin in range(0, matrix.num_groups, piece * team.num_threads):
            end = min(begin + piece * team.num_threads, matrix.num_groups)

            def share(
                low: int, high: int, tensor: Tensor = tensor, data: Bytes = data, begin: int = begin
            ) -> None:
                pack(tensor, data, begin + low, begin + high)

            team.run(share, end - begin)
            done += (end - begin) * data.shape[-1]
            progress("repacking weights", done, len(arena))
        _give_back(tensor)
    return packed


def _give_back(tensor: Tensor) -> None:
    """Drops the tensor's pages of the mapped file from this process; they come back when they are read."""
    owner: Any = tensor.data
    while isinstance(owner, np.ndarray):
        owner = owner.base
    mapping = owner.obj if isinstance(owner, memoryview) else owner
    if not isinstance(mapping, mmap.mmap) or not hasattr(mapping, "madvise"):
        return
    start = tensor.data.ctypes.data - np.frombuffer(mapping, np.uint8).ctypes.data
    begin = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (start + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    if length > 0:
        mapping.madvise(mmap.MADV_DONTNEED, begin, length)
