"""One step: schedule, build, launch, sample, commit. It owns the circle and nothing that stands on it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from .backends.base import Backend, BackendInfo, Floats, Step
from .batch import BatchManager
from .errors import BackendError
from .plan import Plan
from .sampler import sample_rows, top_logprobs
from .scheduler import Scheduler
from .sequence import Sequence
from .stats import EngineStats

logger = logging.getLogger(__name__)


class Executor:
    """Runs the sequences given to `scheduler.add` on one backend. Not thread-safe: one thread owns it.

    `deliver(sequences)` receives those that gained a token or ended in a step, with their text: at the step's end,
    or, where the backend launches early, while it computes the next one. `settle` must come before anything else
    happens to them.
    """

    def __init__(self, backend: Backend, scheduler: Scheduler, batches: BatchManager) -> None:
        self.backend, self.scheduler, self.batches = backend, scheduler, batches
        self.deliver: Callable[[list[Sequence]], None] = lambda sequences: None
        self.stats = EngineStats()
        self._unsettled: list[Sequence] = []

    def step(self) -> list[Sequence]:
        """Computes one step; returns the sequences that gained a token or ended in it."""
        plan = self.scheduler.schedule()
        if not plan.chunks:
            self.settle()
            return []
        self.apply_operations()
        launched = self._launch(plan)
        surplus = self.settle(plan)
        touched = self._unsettled = self._finish(plan, launched, surplus)
        if not self.backend.info.launches_early:
            self.settle()
        return touched

    def settle(self, plan: Plan | None = None) -> list[Sequence]:
        """Makes text of the last step's tokens and delivers it, once.

        Returns the sequences that a stop string in it ended although `plan`, under way, computes one token more.
        """
        settled, self._unsettled = self._unsettled, []
        stopped = [sequence for sequence in settled if sequence.read()]
        surplus: list[Sequence] = []
        for sequence in stopped:
            is_under_way = plan is not None and any(chunk.sequence is sequence for chunk in plan.chunks)
            if is_under_way:
                surplus.append(sequence)
            else:
                self.scheduler.retire(sequence)
        if len(stopped) > len(surplus):
            self.apply_operations()
        if settled:
            self.deliver(settled)
        return surplus

    def _launch(self, plan: Plan) -> Step:
        """The step under way; one that could not be launched fails when its logits are asked for."""
        try:
            return self.backend.launch(self.batches.build(plan))
        except Exception as error:
            return _Failed(error)

    def _finish(self, plan: Plan, launched: Step, surplus: list[Sequence]) -> list[Sequence]:
        """Waits for the step, samples and commits; what `surplus` sequences gain is dropped. Returns those touched."""
        try:
            logits = launched.logits()
        except Exception as error:
            return self._recover(plan, surplus, error)
        if plan.scores:
            logits = self._score(plan, logits)
        samplers = [sequence.sampler for sequence in plan.sampled]
        samples = sample_rows(logits, samplers, self.backend.argmax)
        now = time.perf_counter()
        touched = self.scheduler.commit(plan, samples, now)
        self.stats.count_step(plan, self.scheduler.max_num_seqs, now)
        self.apply_operations()
        return [sequence for sequence in touched if sequence not in surplus] if surplus else touched

    @staticmethod
    def _score(plan: Plan, logits: Floats) -> Floats:
        """Gives prompts the log-probabilities of their tokens; returns the rows to sample from."""
        sampled_rows, end = [], 0
        for sequence, _, num_rows in plan.chunks:
            end += num_rows
            request = sequence.request
            if sequence.wants_prompt_logprobs:
                rows = logits[end - num_rows : end]
                scored = sequence.token_ids[request.num_scored : sequence.num_prompt]
                try:
                    for row, token_id in zip(
                        rows, scored, strict=False
                    ):  # a last row samples, scores nothing
                        top = top_logprobs(row, request.params.prompt_logprobs or 0, token_id)
                        request.prompt_logprobs.append(sequence.named(top))
                except BackendError as error:
                    sequence.fail(error)
            if sequence in plan.sampled:
                sampled_rows.append(end - 1)
        return logits[sampled_rows]

    def apply_operations(self) -> None:
        """Frees and copies slots as the scheduler decided."""
        for slot, source, length in self.scheduler.take_operations():
            if source is None:
                self.backend.free(slot)
            else:
                self.backend.copy_prefix(source, slot, length)

    def _recover(self, plan: Plan, surplus: list[Sequence], error: Exception) -> list[Sequence]:
        """After a failed step its sequences run one by one; only one that fails again, alone, ends."""
        nothing_changed = isinstance(error, BackendError) and error.nothing_changed
        failed = self.scheduler.suspect(plan, nothing_changed=nothing_changed)
        logger.warning("step of %d sequences failed: %s", len(plan.chunks), error, exc_info=error)
        failed = [sequence for sequence in failed if sequence not in surplus]
        for sequence in failed:
            sequence.fail(error)
        for sequence in failed + surplus:
            self.scheduler.retire(sequence)
        self.apply_operations()
        return failed


def make_scheduler(
    info: BackendInfo, *, max_num_seqs: int, max_idle_tokens: int | None, kind: type[Scheduler] = Scheduler
) -> Scheduler:
    """A scheduler within the limits of a backend."""
    return kind(
        max_num_seqs=max_num_seqs,
        num_slots=info.num_slots,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_logit_rows=info.max_logit_rows,
        kv_capacity=info.kv_capacity,
        kv_block=info.kv_block,
        max_idle_tokens=max_idle_tokens,
    )


@dataclass(frozen=True, slots=True)
class _Failed:
    """A step that could not be launched."""

    error: Exception

    def logits(self) -> Floats:
        raise self.error
