"""Rungs 0 to 6: the raw backend, and one layer of the engine more each time, up to `LLM`. All in this process.

Rungs 0 to 3 compute full batches, all sequences together, as nothing but a benchmark does; from rung 4 on requests
come and go. One model serves all, and the thread of its engine runs the lower rungs as well: see `Engine.call`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np

from ...backends.base import Backend
from ...batch import Batch, BatchManager
from ...errors import CLLMError
from ...executor import Executor, make_scheduler
from ...llm import LLM
from ...outputs import RequestOutput
from ...params import SamplingParams
from ...plan import Chunk, Plan, SlotOperation
from ...sampler import Sampled
from ...scheduler import Scheduler
from ...sequence import Request
from ...sequence import Sequence as Answer
from .load import Load, Outcome, Part, Prompt, Timing, full_steps, make_prompts

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Rung:
    """One rung. `number` is None for another program that is measured beside ours."""

    number: int | None
    name: str
    run: Callable[[], Outcome]


@dataclass(slots=True)
class Rig:
    """What the rungs share. `answers`: the tokens that the engine gave before; rungs below sampling are fed them.

    `clock`: seconds, for a run's whole time.
    """

    llm: LLM
    load: Load
    prompts: list[Prompt]
    answers: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    clock: Clock = time.perf_counter

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=self.load.output_len, ignore_eos=True)

    @property
    def backend(self) -> Backend:
        return self.llm._engine._executor.backend

    def requests(self, deliver: Callable[[list[Any]], None]) -> list[Request]:
        """The requests of the load, made before the clock starts. They arrive when a rung says so."""
        return [self.llm.make_request(prompt.token_ids, self.params, deliver) for prompt in self.prompts]

    def scheduler(self, kind: type[Scheduler]) -> Scheduler:
        """A scheduler with the settings of the engine's."""
        return make_scheduler(self.llm.info, max_num_seqs=self.load.concurrency, max_idle_tokens=0, kind=kind)


def make_rig(llm: LLM, load: Load, seed: int, clock: Clock = time.perf_counter) -> Rig:
    """A rig whose answers are known. Raises `CLLMError` where the engine does not answer the load whole."""
    rig = Rig(llm, load, make_prompts(llm.tokenizer, load, seed), clock=clock)
    outputs = llm.generate([prompt.token_ids for prompt in rig.prompts], rig.params, use_tqdm=False)
    for output in outputs:
        answer = output.outputs[0]
        if len(answer.token_ids) != load.output_len:
            raise CLLMError(f"a request ended after {len(answer.token_ids)} tokens: {output.error}")
        rig.answers.append(answer.token_ids)
        rig.texts.append(answer.text)
    return rig


def engine_rungs(rig: Rig) -> list[Rung]:
    """Rungs 0 to 6."""

    def on_its_thread(run: Callable[[], Outcome]) -> Callable[[], Outcome]:
        return lambda: rig.llm._engine.call(run)

    return [
        Rung(0, "raw backend", on_its_thread(_raw(rig))),
        Rung(1, "Backend.launch", on_its_thread(lambda: _launch(rig))),
        Rung(2, "batch manager", on_its_thread(lambda: _batch_manager(rig))),
        Rung(3, "executor, sampling", on_its_thread(lambda: _full_executor(rig))),
        Rung(4, "scheduler, arrivals", on_its_thread(lambda: _scheduler(rig))),
        Rung(5, "engine thread", lambda: _engine(rig)),
        Rung(6, "LLM", lambda: _llm(rig)),
    ]


@contextmanager
def recorded_steps(backend: Backend) -> Iterator[list[float]]:
    """Rows of logits in each step launched inside. Not for measured runs: it costs a call a step."""
    counts: list[float] = []
    launch = backend.launch

    def counted(batch: Batch) -> Any:
        counts.append(float(len(batch.logit_rows)))
        return launch(batch)

    backend.launch = counted  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        backend.launch = launch  # type: ignore[method-assign]


# --- full batches ---


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


def _raw(rig: Rig) -> Callable[[], Outcome]:
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


def _launch(rig: Rig) -> Outcome:
    """The contract: checks, steps, logits as arrays."""
    return _launch_all(rig, _batches(rig))


def _launch_all(rig: Rig, batches: list[list[Batch]]) -> Outcome:
    backend = rig.backend

    def clear(slots: range) -> None:
        for slot in slots:
            backend.free(slot)

    return _run_waves(rig, batches, lambda batch: backend.launch(batch).logits(), clear)


def _batch_manager(rig: Rig) -> Outcome:
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

    def clear(slots: range) -> None:
        for slot in slots:
            backend.free(slot)

    return _run_waves(rig, waves, step, clear)


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

    def commit(self, plan: Plan, samples: Iterable[Sampled | CLLMError], now: float) -> list[Answer]:
        for sequence, num_tokens, _ in plan.chunks:
            sequence.num_computed += num_tokens
        for sequence, sample in zip(plan.sampled, samples, strict=True):
            if isinstance(sample, CLLMError):
                raise sample
            sequence.append(sample, now)
        self._operations = [SlotOperation(slot) for slot, s in enumerate(self._sequences) if s.finish_reason]
        return plan.sampled


def _full_executor(rig: Rig) -> Outcome:
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
    return Outcome(seconds, [_timing_of(rig, i, request) for i, request in enumerate(requests)])


# --- requests that come and go ---


def _scheduler(rig: Rig) -> Outcome:
    """The real scheduler. As with clients, the first request comes alone and the others while it is computed;
    whenever one ends, the next takes its place."""
    scheduler = rig.scheduler(Scheduler)
    executor = Executor(rig.backend, scheduler, BatchManager(rig.llm.info.max_num_batched_tokens))
    requests = rig.requests(print)
    waiting = iter(requests)

    def arrive(count: int) -> None:
        for _, request in zip(range(count), waiting, strict=False):
            request.arrived = time.perf_counter()
            scheduler.add(request.sequences[0])

    started = rig.clock()
    arrive(1)
    executor.step()
    arrive(rig.load.concurrency - 1)
    while scheduler.has_work:
        touched = executor.step()
        arrive(sum(sequence.finish_reason is not None for sequence in touched))
    executor.settle()
    seconds = rig.clock() - started
    return Outcome(seconds, [_timing_of(rig, i, request) for i, request in enumerate(requests)])


def _timing_of(rig: Rig, number: int, request: Request) -> Timing:
    sequence = request.sequences[0]
    first, last = sequence.first_token_at, sequence.last_token_at
    if first is None or last is None:
        return Timing(0.0, None, 0, str(request.error or "no token"))
    error = None if request.error is None else str(request.error)
    is_same = sequence.token_ids[sequence.num_prompt :] == rig.answers[number]
    return Timing(last - request.arrived, first - request.arrived, sequence.num_output, error, is_same)


def _engine(rig: Rig) -> Outcome:
    """Requests handed to the engine's thread; the caller waits for answers and asks the next."""
    engine = rig.llm._engine
    inbox: SimpleQueue[list[RequestOutput]] = SimpleQueue()
    requests = rig.requests(inbox.put)
    numbers = {request.request_id: i for i, request in enumerate(requests)}
    waiting = iter(requests)
    timings: dict[int, Timing] = {}

    def submit() -> None:
        for request in waiting:
            request.arrived = time.perf_counter()
            engine.submit([request])
            return

    started = rig.clock()
    for _ in range(rig.load.concurrency):
        submit()
    while len(timings) < len(requests):
        for output in inbox.get():
            submit()
            number = numbers[output.request_id]
            timings[number] = _timing_of_output(rig, number, output, has_queued=False)
    seconds = rig.clock() - started
    return Outcome(seconds, [timings[i] for i in range(len(requests))])


def _llm(rig: Rig) -> Outcome:
    """One call of `LLM.generate` with all prompts. Times of a request are without its wait in the queue."""
    prompts = [prompt.token_ids for prompt in rig.prompts]
    started = rig.clock()
    outputs = rig.llm.generate(prompts, rig.params, use_tqdm=False)
    seconds = rig.clock() - started
    return Outcome(
        seconds, [_timing_of_output(rig, i, output, has_queued=True) for i, output in enumerate(outputs)]
    )


def _timing_of_output(rig: Rig, number: int, output: RequestOutput, *, has_queued: bool) -> Timing:
    answer, metrics = output.outputs[0], output.metrics
    queued = (metrics.queue_s or 0.0) if has_queued else 0.0
    ttft = metrics.time_to_first_token_s
    error = None if output.error is None else str(output.error)
    is_same = answer.token_ids == rig.answers[number]
    return Timing(
        metrics.total_s - queued,
        None if ttft is None else ttft - queued,
        len(answer.token_ids),
        error,
        is_same,
    )
