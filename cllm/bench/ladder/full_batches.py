"""Rungs 0 to 3, which compute full batches, all sequences of a wave together, as nothing but a benchmark does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...backends.base import Backend
from ...batch import Batch, BatchManager
from ...errors import CLLMError
from ...executor import Executor
from ...plan import Chunk, Plan, SlotOperation
from ...sampler import Sampled
from ...scheduler import Scheduler
from ...sequence import Sequence as Answer
from .load import Outcome, Part, Timing, full_steps
from .rig import Rig, timing_of


def _batches(rig: Rig) -> list[list[Batch]]:
    """The batches of each wave, filled."""
    return [
        [
            _fill(parts, [rig.prompts[i].token_ids + rig.answers[i] for i in wave])
            for parts in _steps(rig, wave)
        ]
        for wave in rig.load.waves
    ]


def _steps(rig: Rig, wave: range) -> Iterator[list[Part]]:
    return full_steps(len(wave), rig.load, rig.llm.info.max_num_batched_tokens)


def _fill(parts: Sequence[Part], token_ids: Sequence[Sequence[int]]) -> Batch:
    ids = [i for index, start, count, _ in parts for i in token_ids[index][start : start + count]]
    positions = [p for _, start, count, _ in parts for p in range(start, start + count)]
    slots = [index for index, _, count, _ in parts for _ in range(count)]
    ends = np.cumsum([part.num_tokens for part in parts]) - 1
    rows = ends[[part.is_sampled for part in parts]]
    return Batch(*(np.array(values, np.int32) for values in (ids, positions, slots, rows)))


def _run_waves(
    rig: Rig, waves: Iterable[list[Any]], step: Callable[[Any], object], clear: Callable[[range], None]
) -> Outcome:
    """Runs each wave's steps. All of a wave arrive together, have a token after the prompts and end together."""
    clock, timings = rig.clock, list[Timing]()
    started = clock()
    for numbers, steps in zip(rig.load.waves, waves, strict=True):
        began, first = clock(), 0.0
        last_of_prompts = len(steps) - rig.load.output_len
        for number, one in enumerate(steps):
            step(one)
            if number == last_of_prompts:
                first = clock() - began
        clear(range(len(numbers)))
        latency = clock() - began
        timings += [Timing(latency, first, rig.load.output_len) for _ in numbers]
    return Outcome(clock() - started, timings)


def raw(rig: Rig) -> Callable[[], Outcome]:
    """The backend without anything of ours: on llama `llama_decode`; elsewhere `launch`, which is the backend."""
    batches = _batches(rig)
    if rig.llm.config.backend != "llama":
        return lambda: _launch_all(rig, batches)
    from ...backends.llama import LlamaBackend
    from ...backends.llama_bare import LlamaBareLoop

    assert isinstance(rig.backend, LlamaBackend)
    loop = LlamaBareLoop(rig.backend)
    prepared = [[loop.prepare(batch) for batch in wave] for wave in batches]
    occupancy = [float(len(batch.logit_rows)) for wave in batches for batch in wave]

    def run() -> Outcome:
        outcome = _run_waves(rig, prepared, loop.decode, loop.clear)
        outcome.occupancy = occupancy
        return outcome

    return run


def launch(rig: Rig) -> Outcome:
    """The contract: checks, steps, logits as arrays."""
    return _launch_all(rig, _batches(rig))


def _launch_all(rig: Rig, batches: list[list[Batch]]) -> Outcome:
    backend = rig.backend
    return _run_waves(rig, batches, lambda batch: backend.launch(batch).logits(), partial(_free, backend))


def batch_manager(rig: Rig) -> Outcome:
    """Batches built step by step from sequences; their next tokens are known."""
    backend, batches = rig.backend, BatchManager(rig.llm.info.max_num_batched_tokens)
    requests = rig.requests(print)
    waves = []
    for wave in rig.load.waves:
        sequences = [requests[i].sequences[0] for i in wave]
        known = [rig.answers[i] for i in wave]
        for slot, sequence in enumerate(sequences):
            sequence.slot = slot
        waves.append([(sequences, known, parts) for parts in _steps(rig, wave)])

    def step(of: tuple[list[Answer], list[list[int]], list[Part]]) -> None:
        sequences, known, parts = of
        plan = _plan(sequences, parts)
        backend.launch(batches.build(plan)).logits()
        for sequence, num_tokens, _ in plan.chunks:
            sequence.num_computed += num_tokens
        for part in parts:
            if part.is_sampled:
                sequence = sequences[part.member]
                sequence.token_ids.append(known[part.member][sequence.num_output])

    return _run_waves(rig, waves, step, partial(_free, backend))


def _free(backend: Backend, slots: range) -> None:
    for slot in slots:
        backend.free(slot)


def _plan(sequences: Sequence[Answer], parts: Sequence[Part]) -> Plan:
    chunks = [Chunk(sequences[index], count, int(is_sampled)) for index, _, count, is_sampled in parts]
    sampled = [chunk.sequence for chunk in chunks if chunk.num_rows]
    return Plan(chunks, sampled, [chunk.sequence for chunk in chunks if not chunk.num_rows], False)


class FullBatches(Scheduler):
    """A scheduler without policy, for the rung below it: the steps of a wave as they were planned before."""

    def begin(self, sequences: list[Answer], steps: Iterator[list[Part]]) -> None:
        self._sequences, self._steps = sequences, steps
        for slot, sequence in enumerate(sequences):
            sequence.slot = slot

    def schedule(self) -> Plan:
        return _plan(self._sequences, next(self._steps))

    def plan_ahead(self, plan: Plan) -> None:
        """Nothing is known ahead: `schedule` gives the steps one by one. On a GPU rung 4 gains by what it knows."""

    def commit(self, plan: Plan, samples: Iterable[Sampled | CLLMError], now: float) -> list[Answer]:
        for sequence, num_tokens, _ in plan.chunks:
            sequence.num_computed += num_tokens
        for sequence, sample in zip(plan.sampled, samples, strict=True):
            if isinstance(sample, CLLMError):
                raise sample
            sequence.append(sample, now)
        self._operations = [SlotOperation(slot) for slot, s in enumerate(self._sequences) if s.finish_reason]
        return plan.sampled


def full_executor(rig: Rig) -> Outcome:
    """The executor's step with sampling, and text made of the tokens, over full batches."""
    scheduler = rig.scheduler(FullBatches)
    assert isinstance(scheduler, FullBatches)
    executor = Executor(rig.backend, scheduler, BatchManager(rig.llm.info.max_num_batched_tokens))
    requests, steps = rig.requests(print), [list(_steps(rig, wave)) for wave in rig.load.waves]
    started = rig.clock()
    for wave, planned in zip(rig.load.waves, steps, strict=True):
        sequences = [requests[i].sequences[0] for i in wave]
        for request in (requests[i] for i in wave):
            request.arrived = time.perf_counter()
        scheduler.begin(sequences, iter(planned))
        for _ in planned:
            executor.step()
        executor.settle()
    seconds = rig.clock() - started
    return Outcome(seconds, [timing_of(rig, i, request) for i, request in enumerate(requests)])
