"""One step: schedule, build, launch, sample, commit. It owns the circle and nothing that stands on it."""

from __future__ import annotations

import logging
import time

from .backends.base import Backend, Floats
from .batch import BatchManager
from .errors import BackendError
from .plan import Plan
from .sampler import sample_rows, top_logprobs
from .scheduler import Scheduler
from .sequence import Sequence
from .stats import EngineStats

logger = logging.getLogger(__name__)


class Executor:
    """Runs the sequences given to `scheduler.add` on one backend. Not thread-safe: one thread owns it."""

    def __init__(self, backend: Backend, scheduler: Scheduler, batches: BatchManager) -> None:
        self.backend, self.scheduler, self.batches = backend, scheduler, batches
        self.stats = EngineStats()

    def step(self) -> list[Sequence]:
        """Computes one step; returns the sequences that gained a token or ended in it."""
        plan = self.scheduler.schedule()
        if not plan.chunks:
            return []
        self.apply_operations()
        batch = self.batches.build(plan)
        try:
            logits = self.backend.launch(batch).logits()
        except Exception as error:
            return self._recover(plan, error)
        if plan.scores:
            logits = self._score(plan, logits)
        samples = sample_rows(logits, [sequence.sampler for sequence in plan.sampled])
        now = time.perf_counter()
        touched = self.scheduler.commit(plan, samples, now)
        self.stats.count_step(plan, self.scheduler.max_num_seqs, now)
        self.apply_operations()
        return touched

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

    def _recover(self, plan: Plan, error: Exception) -> list[Sequence]:
        """After a failed step its sequences run one by one; only one that fails again, alone, ends."""
        nothing_changed = isinstance(error, BackendError) and error.nothing_changed
        failed = self.scheduler.suspect(plan, nothing_changed=nothing_changed)
        logger.warning("step of %d sequences failed: %s", len(plan.chunks), error, exc_info=error)
        for sequence in failed:
            sequence.fail(error)
            self.scheduler.retire(sequence)
        self.apply_operations()
        return failed
