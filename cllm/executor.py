"""One step: schedule, build, launch, sample, commit; on a GPU the next launch goes before commit. It owns the circle
and nothing that stands on it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from .backends.base import Backend, BackendInfo, Floats, Step
from .batch import Batch, BatchManager
from .errors import BackendError
from .plan import Plan
from .sampler import Sampled, sample_rows, top_logprobs
from .scheduler import Scheduler
from .sequence import Sequence
from .stats import EngineStats

logger = logging.getLogger(__name__)


class _UnderWay(NamedTuple):
    """A step that has been launched."""

    plan: Plan
    step: Step


class Executor:
    """Runs the sequences given to `scheduler.add` on one backend. Not thread-safe: one thread owns it.

    `deliver(sequences)` receives those that gained a token or ended in a step, with their text: at the step's end,
    or, where the backend launches early, while it computes the next one. There the next step is launched as soon as
    its tokens are known, unless `must_pause()`. `settle` must come before anything else happens to a sequence.
    """

    def __init__(self, backend: Backend, scheduler: Scheduler, batches: BatchManager) -> None:
        self.backend, self.scheduler, self.batches = backend, scheduler, batches
        self.deliver: Callable[[list[Sequence]], None] = lambda sequences: None
        self.must_pause: Callable[[], bool] = lambda: False
        self.stats = EngineStats()
        self._under_way: _UnderWay | None = None
        self._unsettled: list[Sequence] = []

    def step(self) -> list[Sequence]:
        """Computes one step; returns the sequences that gained a token or ended in it."""
        under_way = self._under_way or self._begin()
        if under_way is None:
            self.settle()
            return []
        touched = self._finish(*under_way, goes_on=self.backend.info.launches_early)
        if not self.backend.info.launches_early:
            self.settle()
        return touched

    def settle(self) -> None:
        """Finishes the step under way, if there is one; makes text of the last tokens and delivers it, once."""
        if self._under_way is not None:
            self._finish(*self._under_way, goes_on=False)
        self._hand_over(None)

    def _hand_over(self, plan: Plan | None) -> list[Sequence]:
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

    def _begin(self) -> _UnderWay | None:
        """Schedules and launches a step; None where there is nothing to compute."""
        plan = self.scheduler.schedule()
        if not plan.chunks:
            return None
        self.apply_operations()
        return _UnderWay(plan, self._launch(lambda: self.batches.build(plan)))

    def _launch(self, build: Callable[[], Batch]) -> Step:
        """The step under way; one that could not be launched fails when its logits are asked for."""
        try:
            return self.backend.launch(build())
        except Exception as error:
            return _Failed(error)

    def _finish(self, plan: Plan, launched: Step, *, goes_on: bool) -> list[Sequence]:
        """Settles the step before, waits for this one, samples and commits; returns those touched.

        `goes_on`: the next step may be launched before this one is committed. What sequences gain that the text of
        the step before has ended is dropped.
        """
        self._under_way = None
        surplus = self._hand_over(plan)
        ahead = self.scheduler.plan_ahead(plan) if goes_on and not surplus else None
        try:
            logits = launched.logits()
        except Exception as error:
            if ahead is not None:
                self.scheduler.unreserve(ahead.chunks)
            self._unsettled = self._recover(plan, surplus, error)
            return self._unsettled
        if plan.scores:
            logits = self._score(plan, logits)
        samplers = [sequence.sampler for sequence in plan.sampled]
        samples = sample_rows(logits, samplers, self.backend.argmax)
        under_way = None if ahead is None else self._launch_after(plan, samples, ahead)
        now = time.perf_counter()
        touched = self.scheduler.commit(plan, samples, now)
        self.stats.count_step(plan, self.scheduler.max_num_seqs, now)
        self.apply_operations()
        # Not before: whoever settles after a fault in what stands above must find no step on top of a lost one.
        self._under_way = under_way
        self._unsettled = [one for one in touched if one not in surplus] if surplus else touched
        return self._unsettled

    def _launch_after(
        self, plan: Plan, samples: list[Sampled | BackendError], ahead: Plan
    ) -> _UnderWay | None:
        """Launches `ahead`, unless a sample ends its sequence or there is something to do before it."""
        token_ids = [sample.token_id for sample in samples if isinstance(sample, Sampled)]
        ends = len(token_ids) < len(samples) or any(map(Sequence.ends_with, plan.sampled, token_ids))
        if ends or self.must_pause():
            self.scheduler.unreserve(ahead.chunks)
            return None
        return _UnderWay(ahead, self._launch(lambda: self.batches.build_after(plan, token_ids)))

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
        """Cuts and copies slots as the scheduler decided."""
        for slot, source, length in self.scheduler.take_operations():
            if source is None:
                self.backend.truncate(slot, length)
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
