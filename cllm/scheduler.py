"""Which sequences take part in the next step, and with how many tokens. Policy over counts: no arrays, no model.

Every running stream gets a token; what is left of a step's budget goes to prompts (`plan.py`). Admission goes by
priority, then age. A finished sequence leaves its slot behind, idle, as a prefix for others. Where memory runs
out, idle slots are given up first, then the newest of the least urgent sequences gives way and is computed again
later. Arrivals never push anything out.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Iterable
from heapq import heappop, heappush

from .errors import CLLMError
from .kv_tree import KVTree, Match
from .plan import Chunk, Plan, SlotOperation, make_plan, plan_after, prompt_chunks
from .sampler import Sampled
from .sequence import Sequence
from .stats import SchedulerCounts

# Waiting sequences looked at in one step: some may have to wait for a prefix that is being computed.
_LOOKAHEAD = 64


class Scheduler:
    """Admits, plans and retires sequences. All counts are of tokens.

    `max_idle_tokens`: what idle slots may hold (None: no limit; 0: no prefix cache).
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        num_slots: int,
        max_num_batched_tokens: int,
        max_logit_rows: int,
        kv_capacity: int,
        kv_block: int,
        max_idle_tokens: int | None = None,
    ) -> None:
        self.waiting: list[Sequence] = []  # by priority, then age
        self.running: list[Sequence] = []  # likewise
        self.tree = KVTree(capacity=kv_capacity, block=kv_block)
        self.counts = SchedulerCounts()
        self.max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_logit_rows = max_logit_rows
        self._max_idle_tokens = max_idle_tokens
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots))  # a heap
        self._operations: list[SlotOperation] = []
        self._suspects: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens, alone, fits the cache."""
        return self.tree.blocks(num_tokens) <= self.tree.num_total_blocks

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_urgency)

    def schedule(self) -> Plan:
        """The next step; its slot operations are to be carried out before it."""
        if not self._suspects:
            self._admit()
        plan = self._plan()
        while not plan.chunks and self.running:  # memory is out, and nobody decodes who could end
            self._preempt(self.running[-1])
            plan = self._plan()
        return plan

    def plan_ahead(self, plan: Plan) -> Plan | None:
        """The step after `plan`, which is under way, with its memory reserved, which `unreserve` gives back.

        None where it may turn out otherwise: the same sequences would not go on, or another may come in.
        """
        may_admit = self.waiting and len(self.running) < self.max_num_seqs
        if may_admit or self._suspects or len(plan.chunks) < len(self.running):
            return None
        ahead = plan_after(plan)
        if ahead is not None:
            for number, chunk in enumerate(ahead.chunks):
                if not self.tree.reserve(_slot(chunk.sequence), 1):
                    self.unreserve(ahead.chunks[:number])
                    return None
        return ahead

    def unreserve(self, chunks: Iterable[Chunk]) -> None:
        """These were planned and are not computed."""
        for sequence, num_tokens, _ in chunks:
            self.tree.reserve(_slot(sequence), -num_tokens)

    def commit(self, plan: Plan, samples: Iterable[Sampled | CLLMError], now: float) -> list[Sequence]:
        """Counts a step's tokens as computed and gives each sampled sequence its new token, or its error.

        A sequence that has ended meanwhile gains none. Returns the sequences that gained a token or ended; those that
        ended have been retired.
        """
        for sequence, num_tokens, _ in plan.chunks:
            start = sequence.num_computed
            sequence.num_computed = start + num_tokens
            computed = sequence.token_ids[start : start + num_tokens]
            self.tree.commit(sequence.slot, computed)  # type: ignore[arg-type]  # a planned sequence has a slot
        for sequence, sample in zip(plan.sampled, samples, strict=True):
            if isinstance(sample, CLLMError):
                sequence.fail(sample)
            elif sequence.finish_reason is None:
                sequence.append(sample, now)
        touched = plan.sampled
        if plan.unsampled:
            touched = touched + self._ended_without_a_token(plan.unsampled)
        if self._suspects:
            self._suspects = [sequence for sequence in self._suspects if sequence not in touched]
        for sequence in touched:
            if sequence.finish_reason:
                self.retire(sequence)
        return touched

    @staticmethod
    def _ended_without_a_token(sequences: list[Sequence]) -> list[Sequence]:
        """Prompts that were only to be scored, when that is done, or that failed in it."""
        for sequence in sequences:
            if sequence.max_tokens == 0 and sequence.num_pending == 0:
                sequence.finish("length")
        return [sequence for sequence in sequences if sequence.finish_reason]

    def retire(self, sequence: Sequence) -> None:
        """Takes a finished sequence out, in whatever state it is. What it computed stays as a prefix for others."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
            return
        slot, was_suspect = sequence.slot, sequence in self._suspects
        self._leave(sequence)
        if self._max_idle_tokens == 0 or was_suspect:
            self._drop_slot(slot)
            return
        self.tree.retire(slot)
        while (
            self._max_idle_tokens is not None
            and self.tree.num_idle_blocks * self.tree.block > self._max_idle_tokens
        ):
            self._evict()

    def suspect(self, plan: Plan, *, nothing_changed: bool) -> list[Sequence]:
        """After a failed step: its sequences are to be computed one by one. Returns those that failed alone.

        Unless `nothing_changed`, what their slots held is lost and they start over.
        """
        if nothing_changed:
            self.unreserve(plan.chunks)
        else:
            for sequence, _, _ in plan.chunks:
                slot = _slot(sequence)
                self.tree.remove(slot)
                self.tree.open(slot)
                self._operations.append(SlotOperation(slot))
                sequence.num_computed = 0
        if len(plan.chunks) == 1 and plan.chunks[0].sequence in self._suspects:
            return [plan.chunks[0].sequence]
        self._suspects += [sequence for sequence, _, _ in plan.chunks]
        return []

    def take_operations(self) -> list[SlotOperation]:
        """What the backend is to do before the next step."""
        operations, self._operations = self._operations, []
        return operations

    def clear_cache(self) -> None:
        """Gives up every idle slot."""
        while self._evict():
            pass

    def check_integrity(self, under_way: Plan | None = None) -> None:
        """Raises AssertionError unless slots and counts agree, with this step under way. For tests."""
        self.tree.check_integrity()
        busy = [sequence.slot for sequence in self.running]
        assert len(self.running) <= self.max_num_seqs
        assert sorted([*self.tree.slots, *self._free_slots]) == list(range(self._num_slots)), "slots lost"
        assert set(busy) == self.tree.slots - self.tree.idle_slots, "a slot is busy without a sequence"
        assert all(s.slot is None and s.num_computed == 0 for s in self.waiting), (
            "a waiting sequence has a slot"
        )
        assert all(s.num_pending >= 1 and not s.finish_reason for s in self.running), (
            "nothing left to compute"
        )
        coming = {} if under_way is None else {chunk.sequence: chunk.num_tokens for chunk in under_way.chunks}
        assert all(self.tree.length(_slot(s)) == s.num_computed + coming.get(s, 0) for s in self.running)
        assert all(s in self.running for s in self._suspects), "a suspect does not run"
        for queue in (self.waiting, self.running):
            assert [*map(_urgency, queue)] == sorted(map(_urgency, queue)), "out of order"

    # --- admission ---

    def _admit(self) -> None:
        """Lets waiting sequences in while there are slots and memory for their whole length and one step more."""
        at = 0
        while at < min(len(self.waiting), _LOOKAHEAD) and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[at]
            match = self._match(sequence)
            if self._awaits_prefix(sequence, 0 if match is None else match.length):
                at += 1
                continue
            if not self._has_room(sequence, match):
                return
            del self.waiting[at]
            self._start(sequence, match)

    def _match(self, sequence: Sequence) -> Match | None:
        """A cached beginning; at least one token is left to compute, and a prompt to be scored has none."""
        if self._max_idle_tokens == 0 or sequence.wants_prompt_logprobs:
            return None
        return self.tree.match(sequence.token_ids, len(sequence.token_ids) - 1)

    def _awaits_prefix(self, sequence: Sequence, num_matched: int) -> bool:
        """Whether a running prompt is just computing more of this one's beginning than is cached yet."""
        if self._max_idle_tokens == 0 or sequence.wants_prompt_logprobs:
            return False
        token_ids, end = sequence.token_ids, num_matched + self.tree.block  # it is to save one more block
        return end < len(token_ids) and any(
            other.num_pending > 1
            and other.num_computed < end
            and other.token_ids[num_matched:end] == token_ids[num_matched:end]
            and other.token_ids[:num_matched] == token_ids[:num_matched]
            for other in self.running
        )

    def _has_room(self, sequence: Sequence, match: Match | None) -> bool:
        """Whether the whole sequence and a step more fit beside what the running ones still need for theirs."""
        tree = self.tree
        need = tree.blocks(len(sequence.token_ids) + 1)
        if match is not None:
            need -= match.length // tree.block
        promised = sum(tree.num_missing_blocks(_slot(s), s.num_pending + 1) for s in self.running)
        # What only idle slots hold may be given up, but not the very blocks that are to be shared.
        kept = 0 if match is None else tree.num_idle_blocks_of(match)
        return need + promised <= tree.num_available_blocks - kept or not self.running

    def _start(self, sequence: Sequence, match: Match | None) -> None:
        if match is not None and match.is_whole:
            slot = match.slot
            self.tree.take_over(slot)
        elif self._free_slots or self._evict(None if match is None else match.slot):
            slot = heappop(self._free_slots)
            self.tree.open(slot, match)
            if match is not None:
                self.tree.touch(match.slot)
                self._operations.append(SlotOperation(slot, match.slot, match.length))
        else:  # the only idle slot is the one that holds the beginning
            assert match is not None
            slot = match.slot
            self.tree.cut(match)
            self._operations.append(SlotOperation(slot, None, match.length))
        sequence.slot = slot
        sequence.num_computed = 0 if match is None else match.length
        request = sequence.request
        if request.started is None:
            request.started = time.perf_counter()
            request.num_cached_tokens = sequence.num_computed
            self.counts.num_prompt_tokens += sequence.num_prompt
            self.counts.num_cached_tokens += sequence.num_computed
        insort(self.running, sequence, key=_urgency)

    # --- memory ---

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Room for so many more tokens, taken from idle slots where need be; False where there is none."""
        slot = _slot(sequence)
        while not self.tree.reserve(slot, num_tokens):
            if self.tree.num_missing_blocks(slot, num_tokens) > self.tree.num_available_blocks:
                return False
            self._evict()
        return True

    def _evict(self, keep: int | None = None) -> bool:
        slot = self.tree.evict(keep)
        if slot is None:
            return False
        self.counts.num_evictions += 1
        heappush(self._free_slots, slot)
        self._operations.append(SlotOperation(slot))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of its priority's queue; all that it held is free."""
        slot = _slot(sequence)
        self._leave(sequence)
        self._drop_slot(slot)
        sequence.num_computed = 0
        self.waiting.insert(bisect_left(self.waiting, _urgency(sequence), key=_urgency), sequence)
        self.counts.num_preemptions += 1

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        if sequence in self._suspects:
            self._suspects.remove(sequence)
        sequence.slot = None

    def _drop_slot(self, slot: int) -> None:
        self.tree.remove(slot)
        heappush(self._free_slots, slot)
        self._operations.append(SlotOperation(slot))

    def _plan(self) -> Plan:
        """One token for each stream, then chunks of prompts, as far as there is memory. After a failed step the
        sequences that were part of it run alone."""
        tokens, rows = self._max_num_batched_tokens, self._max_logit_rows
        chunks: list[Chunk] = []
        prompts: list[Sequence] = []
        for sequence in self._suspects[:1] or self.running[:]:
            if sequence.slot is None:
                continue  # it gave way to one before it
            if len(sequence.token_ids) - sequence.num_computed > 1 or not sequence.max_tokens:
                prompts.append(sequence)
            elif self.tree.reserve(sequence.slot, 1) or self._reserve_or_preempt(sequence):
                chunks.append(Chunk(sequence, 1, 1))
        if prompts:
            prompts = [sequence for sequence in prompts if sequence.slot is not None]
            shared = prompt_chunks(prompts, tokens - len(chunks), rows - len(chunks))
            chunks += [chunk for chunk in shared if self._reserve(chunk.sequence, chunk.num_tokens)]
        return make_plan(chunks, has_prompts=bool(prompts))

    def _reserve_or_preempt(self, sequence: Sequence) -> bool:
        """One token more for a stream; the least urgent give way for it, itself in the end (then False)."""
        while not self._reserve(sequence, 1):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True


def _slot(sequence: Sequence) -> int:
    """The slot of a running sequence."""
    assert sequence.slot is not None
    return sequence.slot


def _urgency(sequence: Sequence) -> tuple[int, float, int]:
    """The smaller, the sooner: priority, then age, then the number of the choice."""
    request = sequence.request
    return request.params.priority, request.arrived, sequence.index
