"""The contract of a backend, written once. It knows slots and token ids, never requests, text or sampling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..batch import Batch
from ..errors import BackendError
from ..kylin.kv_cache import BLOCK, KVCache

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What the layers above need to know of a loaded model."""

    architecture: str
    vocab_size: int
    trained_context: int  # tokens
    context_length: int  # tokens that one sequence may have, prompt and output
    num_slots: int
    kv_capacity: int  # tokens that the KV cache holds over all slots
    kv_block: int  # shared lengths round down to a multiple of it, a slot's use rounds up
    max_num_batched_tokens: int  # tokens of one step that the scheduler plans
    max_logit_rows: int  # rows of logits a step
    max_idle_tokens: int | None  # what idle slots may hold before they slow the others (None: no limit)
    can_truncate: bool  # False for recurrent or windowed models
    launches_early: bool  # whether `launch` returns while the step is computed elsewhere, as on a GPU
    description: str  # for people: kernels, threads, memory


class Step(Protocol):
    """One launched batch."""

    def logits(self) -> Floats:
        """Waits; float32[len(logit_rows), vocab_size], valid until the next launch. May raise `BackendError`."""


class Backend(ABC):
    """One model with its KV cache. Not thread-safe: one thread owns it.

    A *slot* is one sequence's place in the KV cache. `launch` checks the batch and starts the work where that
    returns at once; otherwise `Step.logits()` does it. Errors may come from either. After a failed step the
    slots of its batch are undefined and every other slot is as it was; a `BackendError` whose
    `nothing_changed` is True (a refused batch, a full KV cache) left all of them as they were.
    """

    info: BackendInfo

    @abstractmethod
    def launch(self, batch: Batch) -> Step:
        """Starts one step. Positions of each slot must continue where it stands."""

    @abstractmethod
    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Slot `target`, which is empty, begins as the first `length` tokens of `source`, shared or copied."""

    @abstractmethod
    def truncate(self, slot: int, length: int) -> None:
        """Drops the tokens of `slot` from `length` on."""

    def free(self, slot: int) -> None:
        """Empties `slot`."""
        self.truncate(slot, 0)

    def argmax(self, logits: Floats) -> NDArray[np.int64]:
        """int64[R]: the place of the largest of each row of float32[R, vocab_size], as `np.argmax` finds it.

        Here because a backend whose threads are idle between two steps can share the work among them.
        """
        ids: NDArray[np.int64] = logits.argmax(axis=1)
        return ids

    def warm_up(self) -> None:  # noqa: B027  most backends have nothing to prepare
        """Prepares what the first step would otherwise wait for (compilation)."""

    def close(self) -> None:  # noqa: B027
        """Gives memory and threads back. Nothing may be called afterwards."""


def count_new_tokens(batch: Batch, lengths: list[int], info: BackendInfo) -> dict[int, int]:
    """{slot: tokens that the batch adds}, after checking the batch against the `lengths` of all slots.

    Raises `BackendError`, before anything has changed, where a slot or token id does not exist, positions do
    not continue where their slot stands, or a row of logits does not exist.
    """
    # As lists: NumPy offers the interpreter to a waiting thread at every look-up, which costs more than a short step.
    ids, slots, positions = batch.token_ids.tolist(), batch.slots.tolist(), batch.positions.tolist()
    rows = batch.logit_rows.tolist()
    if not len(ids) == len(slots) == len(positions):
        raise BackendError("expected as many slots and positions as token ids", nothing_changed=True)
    if len(rows) > info.max_logit_rows or not _all_below(len(ids), rows):
        raise BackendError("a row of logits is asked for that does not exist", nothing_changed=True)
    if not _all_below(info.vocab_size, ids):
        raise BackendError(f"a token id is outside the vocabulary of {info.vocab_size}", nothing_changed=True)
    if not _all_below(info.num_slots, slots):
        slot = next(slot for slot in slots if not 0 <= slot < info.num_slots)
        raise BackendError(f"slot {slot} does not exist: there are {info.num_slots}", nothing_changed=True)
    new: dict[int, int] = dict.fromkeys(slots, 0)
    for slot, position in zip(slots, positions, strict=True):
        if position != lengths[slot] + new[slot]:
            raise BackendError(
                f"slot {slot} stands at position {lengths[slot] + new[slot]}, the batch continues at {position}",
                nothing_changed=True,
            )
        new[slot] += 1
    return new


def _all_below(limit: int, values: list[int]) -> bool:
    return not values or (min(values) >= 0 and max(values) < limit)


class HistoryBackend(Backend):
    """A backend that keeps only each slot's token ids and computes logits from them anew: slow and simple.

    Its memory is only counted: in the blocks of a kylin cache without layers.
    """

    def __init__(self, info: BackendInfo) -> None:
        self.info = info
        self.histories: list[list[int]] = [[] for _ in range(info.num_slots)]
        self._blocks = KVCache(
            num_layers=0,
            num_kv_heads=0,
            head_width=0,
            num_blocks=info.kv_capacity // BLOCK,
            num_slots=info.num_slots,
            slot_tokens=info.context_length,
        )

    @abstractmethod
    def history_logits(self, histories: list[list[int]], positions: list[int]) -> Floats:
        """Logits float32[R, vocab_size], those of row r after position `positions[r]` of the ids `histories[r]`.

        Rows of one sequence stand together and have the same list.
        """

    def launch(self, batch: Batch) -> Step:
        self._blocks.extend(count_new_tokens(batch, self._blocks.lengths, self.info))
        for slot, token_id in zip(batch.slots.tolist(), batch.token_ids.tolist(), strict=True):
            self.histories[slot].append(token_id)
        return _HistoryStep(self, batch)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self._blocks.copy_prefix(source, target, length)
        self.histories[target] = self.histories[source][:length]

    def truncate(self, slot: int, length: int) -> None:
        self._blocks.truncate(slot, length)
        del self.histories[slot][length:]


@dataclass(slots=True)
class _HistoryStep:
    backend: HistoryBackend
    batch: Batch

    def logits(self) -> Floats:
        batch, histories = self.batch, self.backend.histories
        slots, positions, rows = batch.slots.tolist(), batch.positions.tolist(), batch.logit_rows.tolist()
        return self.backend.history_logits(
            [histories[slots[row]] for row in rows], [positions[row] for row in rows]
        )
