"""Rungs 0 to 6: the raw backend, and one layer of the engine more each time, up to `LLM`. All in this process.

From rung 4 on requests come and go; those below are in `full_batches.py`. One model serves all, and the thread of its
engine runs the lower rungs as well: see `Engine.call`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import SimpleQueue

from ...batch import BatchManager
from ...executor import Executor
from ...outputs import RequestOutput
from ...scheduler import Scheduler
from . import full_batches
from .load import Outcome, Timing
from .rig import Rig, Rung, timing_of


def engine_rungs(rig: Rig) -> list[Rung]:
    """Rungs 0 to 6."""

    def on_its_thread(run: Callable[[], Outcome]) -> Callable[[], Outcome]:
        return lambda: rig.llm._engine.call(run)

    return [
        Rung(0, "raw backend", on_its_thread(full_batches.raw(rig))),
        Rung(1, "Backend.launch", on_its_thread(lambda: full_batches.launch(rig))),
        Rung(2, "batch manager", on_its_thread(lambda: full_batches.batch_manager(rig))),
        Rung(3, "executor, sampling", on_its_thread(lambda: full_batches.full_executor(rig))),
        Rung(4, "scheduler, arrivals", on_its_thread(lambda: _scheduler(rig))),
        Rung(5, "engine thread", lambda: _engine(rig)),
        Rung(6, "LLM", lambda: _llm(rig)),
    ]


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
    return Outcome(seconds, [timing_of(rig, i, request) for i, request in enumerate(requests)])


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
