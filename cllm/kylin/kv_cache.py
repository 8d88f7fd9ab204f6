"""The KV cache: a pool of blocks of 16 positions, and for each slot the list of blocks that it holds.

Blocks carry reference counts, so slots that begin alike share memory. Only a slot's last block is ever
written, and never while another slot shares it. This module knows no tokens and no requests.

    keys    [chunk][layer][kv-head][16 blocks][C][16]   a vector lane is a position: scores need no horizontal sums
    values  [chunk][layer][kv-head][16 blocks][16][C]   a vector lane is a channel

A slot's blocks follow each other in a chunk where they can, since one head's keys are then one stretch of memory:
processors fetch a stream ahead by themselves, and at depth that is the speed of attention. All layers of a chunk
lie together, so that the first tokens touch few of the large pages that the system must clear.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ..errors import BackendError
from .memory import zeros

BLOCK = 16  # positions in a block
CHUNK = 16  # blocks of which one head's keys, or values, lie side by side


class KVCache:
    """Room for `num_blocks * 16` tokens over `num_slots` slots.

    Attributes for the kernels: `keys`, `values` (uint16 holding float16 bits, or float32; layout above),
    `tables` int32[num_slots, blocks a slot]. `lengths`: tokens that each slot holds.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_width: int,
        num_blocks: int,
        num_slots: int,
        slot_tokens: int,
        dtype: str = "f16",
    ) -> None:
        element = {"f16": np.uint16, "f32": np.float32}[dtype]
        pool = (-(-num_blocks // CHUNK), num_layers, num_kv_heads, CHUNK)
        # Zeroed: what no position has written yet must not be NaN, since masked lanes are multiplied by 0.
        self.keys = zeros((*pool, head_width, BLOCK), element)
        self.values = zeros((*pool, BLOCK, head_width), element)
        self.tables = np.zeros((num_slots, blocks_for(slot_tokens)), np.int32)
        self.lengths = [0] * num_slots
        # How long each slot may become in the blocks that it has: most steps take none, and look no further.
        self._room = [0] * num_slots
        self._references = np.zeros(num_blocks, np.int32)
        self._num_free = num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._num_free

    def extend(self, num_new: Mapping[int, int]) -> None:
        """Makes room for `num_new[slot]` more tokens in each slot and counts them as held.

        Raises `BackendError`, and changes nothing, where the pool or a slot's table is too small.
        """
        lengths, room = self.lengths, self._room
        needed = {
            slot: self._blocks_to_take(slot, lengths[slot], count)
            for slot, count in num_new.items()
            if lengths[slot] + count > room[slot]
        }
        num_needed = sum(map(len, needed.values()))
        if num_needed > self._num_free:
            raise BackendError(
                f"KV cache full: {num_needed} blocks of {BLOCK} tokens needed, {self._num_free} free",
                nothing_changed=True,
            )
        for slot, places in needed.items():
            for place in places:
                self._replace(slot, place)
            room[slot] = places.stop * BLOCK
        for slot, count in num_new.items():
            lengths[slot] += count

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """`target`, which must be empty, begins as the first `length` tokens of `source`, sharing its blocks.

        `length` is a multiple of 16: only whole blocks are shared.
        """
        if self.lengths[target] or length % BLOCK or not 0 <= length <= self.lengths[source]:
            raise BackendError(
                f"cannot copy {length} tokens of slot {source} ({self.lengths[source]} tokens) "
                f"to slot {target} ({self.lengths[target]} tokens)"
            )
        shared = self.tables[source, : length // BLOCK]
        self._references[shared] += 1
        self.tables[target, : length // BLOCK] = shared
        self.lengths[target] = self._room[target] = length

    def truncate(self, slot: int, length: int) -> None:
        """Drops the tokens of `slot` from `length` on."""
        if not 0 <= length <= self.lengths[slot]:
            raise BackendError(f"cannot truncate slot {slot} of {self.lengths[slot]} tokens to {length}")
        for place in range(blocks_for(length), blocks_for(self.lengths[slot])):
            self._release(int(self.tables[slot, place]))
        # No room is counted in the last block, which others may share.
        self.lengths[slot] = self._room[slot] = length

    def free(self, slot: int) -> None:
        """Empties `slot`."""
        self.truncate(slot, 0)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is either free or held exactly as often as counted."""
        held = np.zeros_like(self._references)
        for slot, length in enumerate(self.lengths):
            np.add.at(held, self.tables[slot, : blocks_for(length)], 1)
        assert (held == self._references).all(), "reference counts differ from the tables"
        assert self._num_free == (held == 0).sum(), "free blocks differ from the tables"

    def _blocks_to_take(self, slot: int, length: int, count: int) -> range:
        """The places in the slot's table that need a fresh block before `count` tokens are written after `length`."""
        end = length + count
        if end > self.tables.shape[1] * BLOCK:
            raise BackendError(f"slot {slot} cannot hold {end} tokens", nothing_changed=True)
        first = blocks_for(length)
        if length % BLOCK and count and self._references[self.tables[slot, first - 1]] > 1:
            first -= 1  # shared: to be copied before it is written
        return range(first, blocks_for(end))

    def _replace(self, slot: int, place: int) -> None:
        """Puts a fresh block at `place`; where a shared one stood there, its content is copied."""
        block = self._take(int(self.tables[slot, place - 1]) if place else None)
        if place < blocks_for(self.lengths[slot]):
            old = int(self.tables[slot, place])
            for pool in (self.keys, self.values):
                pool[block // CHUNK, :, :, block % CHUNK] = pool[old // CHUNK, :, :, old % CHUNK]
            self._release(old)
        self.tables[slot, place] = block

    def _take(self, previous: int | None) -> int:
        """A free block: the one behind `previous` in its chunk, else the first of an empty chunk, else any."""
        references = self._references
        block = None if previous is None else previous + 1
        if block is None or block % CHUNK == 0 or block >= len(references) or references[block]:
            starts = np.arange(0, len(references), CHUNK)
            empty = np.add.reduceat(references, starts) == 0
            block = int(starts[empty.argmax()]) if empty.any() else int((references == 0).argmax())
        references[block] = 1
        self._num_free -= 1
        return block

    def _release(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0:
            self._num_free += 1


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // BLOCK)


def block_bytes(num_layers: int, num_kv_heads: int, head_width: int, dtype: str) -> int:
    """Bytes of one block over all layers, keys and values."""
    return 2 * num_layers * num_kv_heads * head_width * BLOCK * {"f16": 2, "f32": 4}[dtype]


def to_stored(x: NDArray[np.float32], like: NDArray[np.generic]) -> NDArray[np.generic]:
    """x as the cache stores it: float16 bits in uint16, rounded to nearest even, or float32 as it is."""
    if like.dtype == np.float32:
        return x
    with np.errstate(over="ignore"):  # past 65504 keys and values become infinite, as float16 has it
        return x.astype(np.float16).view(np.uint16)
