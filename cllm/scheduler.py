"""Which sequences take part in the next step, and with how many tokens. Policy over counts: no arrays, no model.

First in, first out within a priority: a sequence is admitted when a slot is free and its whole length (prompt
and `max_tokens`) fits the KV cache beside the others, so nothing that runs is ever pushed out.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from .errors import CLLMError
from .sampler import Sampled
from .sequence import Sequence


class Chunk(NamedTuple):
    """The next `num_tokens` tokens of a sequence. The logits of its last `num_rows` tokens are wanted."""

    sequence: Sequence
    num_tokens: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. `sampled`: the sequences that get a new token, in the order of their chunks.

    `scores`: whether rows of a prompt are among those wanted (`prompt_logprobs`).
    """

    chunks: list[Chunk]
    sampled: list[Sequence]
    scores: bool


class Scheduler:
    """Admits, plans and retires sequences. All counts are of tokens."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_num_batched_tokens: int,
        max_logit_rows: int,
        kv_capacity: int,
        kv_block: int,
    ) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.kv_capacity = kv_capacity
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_logit_rows = max_logit_rows
        self._kv_block = kv_block
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._released: list[int] = []
        self._suspects: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def kv_need(self, sequence: Sequence) -> int:
        """The most that a sequence will hold in the KV cache, in whole blocks."""
        return -(-(sequence.num_prompt + sequence.max_tokens) // self._kv_block) * self._kv_block

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda other: other.request.params.priority)

    def schedule(self) -> Plan:
        """The next step. Running sequences come first, then waiting ones as far as the token budget goes."""
        if self._suspects:
            return self._plan(self._suspects[:1])
        self._admit()
        return self._plan(self.running)

    def commit(self, plan: Plan, samples: Iterable[Sampled | CLLMError], now: float) -> list[Sequence]:
        """Counts a step's tokens as computed and gives each sampled sequence its new token, or its error.

        Returns the sequences that gained a token or ended; those that ended have been retired.
        """
        touched = list(plan.sampled)
        for sequence, num_tokens, _ in plan.chunks:
            sequence.num_computed += num_tokens
            if sequence.max_tokens == 0 and sequence.num_pending == 0:
                sequence.finish("length")
                touched.append(sequence)
        for sequence, sample in zip(plan.sampled, samples, strict=True):
            if isinstance(sample, CLLMError):
                sequence.fail(sample)
            else:
                sequence.append(sample, now)
        if self._suspects:
            self._suspects = [sequence for sequence in self._suspects if sequence not in touched]
        for sequence in touched:
            if sequence.finish_reason:
                self.retire(sequence)
        return touched

    def retire(self, sequence: Sequence) -> None:
        """Takes a finished sequence out, in whatever state it is."""
        if sequence in self._suspects:
            self._suspects.remove(sequence)
        if sequence.slot is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        self._released.append(sequence.slot)
        sequence.slot = None

    def suspect(self, plan: Plan, *, nothing_changed: bool) -> list[Sequence]:
        """After a failed step: its sequences are to be computed one by one. Returns those that failed alone.

        Unless `nothing_changed`, their slots are to be freed and they start over.
        """
        if len(plan.chunks) == 1 and plan.chunks[0].sequence in self._suspects:
            return [plan.chunks[0].sequence]
        for sequence, _, _ in plan.chunks:
            if not nothing_changed:
                sequence.num_computed = 0
                self._released.append(sequence.slot)  # type: ignore[arg-type]
            self._suspects.append(sequence)
        return []

    def take_released(self) -> list[int]:
        """Slots that the backend is to free before the next step."""
        released, self._released = self._released, []
        return released

    def check_integrity(self) -> None:
        """Raises AssertionError unless slots and counts agree. For tests, and for the idle engine."""
        held = [sequence.slot for sequence in self.running if sequence.slot is not None]
        assert sorted(held + self._free_slots) == list(range(self._num_slots)), "slots lost or held twice"
        assert all(s.slot is None and s.num_computed == 0 for s in self.waiting), (
            "a waiting sequence has a slot"
        )
        assert all(s.num_pending >= 1 and not s.finish_reason for s in self.running), (
            "nothing left to compute"
        )
        assert self._reserved() <= self.kv_capacity, "more promised than the KV cache holds"
        assert all(s in self.running for s in self._suspects), "a suspect does not run"

    def _reserved(self) -> int:
        return sum(map(self.kv_need, self.running))

    def _admit(self) -> None:
        if not self.waiting or not self._free_slots:
            return
        room = self.kv_capacity - self._reserved()
        while self.waiting and self._free_slots and self.kv_need(self.waiting[0]) <= room:
            sequence = self.waiting.pop(0)
            sequence.slot = self._free_slots.pop()
            sequence.request.started = sequence.request.started or time.perf_counter()
            self.running.append(sequence)
            room -= self.kv_need(sequence)

    def _plan(self, sequences: list[Sequence]) -> Plan:
        tokens, rows = self._max_num_batched_tokens, self._max_logit_rows
        chunks: list[Chunk] = []
        sampled: list[Sequence] = []
        prompts: list[Sequence] = []
        scores = False
        for sequence in sequences:
            if (
                sequence.num_pending == 1 and sequence.max_tokens
            ):  # one token each first, so that no stream waits for a prompt
                chunks.append(Chunk(sequence, 1, 1))
                sampled.append(sequence)
            else:
                prompts.append(sequence)
        tokens -= len(chunks)
        rows -= len(chunks)
        for sequence in prompts:
            chunk = self._prompt_chunk(sequence, tokens, rows)
            if chunk.num_tokens == 0:
                break
            chunks.append(chunk)
            scores = scores or sequence.wants_prompt_logprobs
            if chunk.num_tokens == sequence.num_pending and sequence.max_tokens:
                sampled.append(sequence)
            tokens -= chunk.num_tokens
            rows -= chunk.num_rows
        return Plan(chunks, sampled, scores)

    @staticmethod
    def _prompt_chunk(sequence: Sequence, tokens: int, rows: int) -> Chunk:
        """As much of the sequence as there are `tokens` and `rows` left for."""
        start, end = sequence.num_computed, len(sequence.token_ids)
        if sequence.wants_prompt_logprobs:
            # The row of position p scores token p + 1; after a failed step some tokens are scored already.
            first_row = sequence.request.num_scored - 1
        else:
            first_row = end - 1 if sequence.max_tokens else end
        num_tokens = min(end - start, tokens, first_row + rows - start)
        return Chunk(sequence, num_tokens, max(start + num_tokens - first_row, 0))
