"""The arrays of one step, built from the scheduler's plan. It knows no model and makes no decision."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .plan import Plan

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Batch:
    """Flat int32 arrays, one entry a token. It maps one to one to a `llama_batch`."""

    token_ids: Ids  # [T]
    positions: Ids  # [T]
    slots: Ids  # [T]
    logit_rows: Ids  # [R], the entries whose logits are wanted


class BatchManager:
    """Fills the same arrays again for each step; a batch is valid until the next one is built."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self._arrays = np.zeros((4, max_num_batched_tokens), np.int32)

    def build(self, plan: Plan) -> Batch:
        """The batch of `plan`, its chunks in order, each chunk's tokens in order."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logit_rows: list[int] = []
        for sequence, num_tokens, num_rows in plan.chunks:
            start, slot = sequence.num_computed, sequence.slot
            assert slot is not None
            if num_tokens == num_rows == 1:  # a running stream
                logit_rows.append(len(token_ids))
                token_ids.append(sequence.token_ids[start])
                positions.append(start)
                slots.append(slot)
                continue
            token_ids += sequence.token_ids[start : start + num_tokens]
            positions += range(start, start + num_tokens)
            slots += [slot] * num_tokens
            logit_rows += range(len(token_ids) - num_rows, len(token_ids))
        end = len(token_ids)
        self._arrays[:3, :end] = (token_ids, positions, slots)
        self._arrays[3, : len(logit_rows)] = logit_rows
        return self._batch(end, len(logit_rows))

    def build_after(self, plan: Plan, token_ids: list[int]) -> Batch:
        """The batch of the step after `plan`, before that has been committed: one of `token_ids` for each chunk."""
        end = len(token_ids)
        self._arrays[0, :end] = token_ids
        self._arrays[1, :end] = [chunk.sequence.num_computed + chunk.num_tokens for chunk in plan.chunks]
        slots = [chunk.sequence.slot for chunk in plan.chunks]
        self._arrays[2, :end] = slots  # type: ignore[assignment]  # planned sequences have slots
        self._arrays[3, :end] = range(end)
        return self._batch(end, end)

    def _batch(self, num_tokens: int, num_rows: int) -> Batch:
        ids, positions, slots, rows = self._arrays
        return Batch(ids[:num_tokens], positions[:num_tokens], slots[:num_tokens], rows[:num_rows])
