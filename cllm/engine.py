"""The engine: one thread that owns an executor, and the queue through which requests and cancellations reach it.

Callers never touch the executor. The thread sleeps on a condition while there is nothing to do.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from .errors import BackendError, QueueFullError
from .executor import Executor
from .sequence import Request, Sequence

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Clients that were answered together ask again together. One that came first would be computed alone, and stay a step
# ahead of the others.
GATHER_S = 0.002
_LOOK_EVERY_S = 0.0002


class Engine:
    """Runs requests until `close()`. All methods may be called from any thread."""

    def __init__(self, executor: Executor, *, max_queue: int) -> None:
        self._executor = executor
        executor.deliver = self._deliver
        executor.must_pause = self._must_pause
        self._max_queue = max_queue
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._calls: list[Future[Any]] = []  # those of `call` that wait for their turn
        self._open: dict[str, Request] = {}  # every request that has not been delivered whole
        self._news: dict[Callable[[list[Any]], None], dict[Sequence, None]] = {}  # of streams, by receiver
        self._deadlines: list[tuple[float, str]] = []  # a heap of (time, request id)
        self._num_arriving = 0  # sequences on their way to the scheduler
        self._most_open = 0  # requests at once since there was last nothing to do
        self._closing = False
        self._refusing: str | None = None  # why no new request is taken
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="cllm-engine", daemon=True)
        self._thread.start()

    def submit(self, requests: Iterable[Request]) -> None:
        """Queues the requests. Raises `QueueFullError` where too many wait, `BackendError` after the engine died."""
        requests = list(requests)
        with self._wake:
            self._check_alive()
            if len(self._open) + len(requests) > self._max_queue:  # else there is room, whoever runs
                waiting = sum(request.started is None for request in list(self._open.values()))
                if waiting + len(requests) > self._max_queue:
                    raise QueueFullError(f"{waiting} requests wait already; the limit is {self._max_queue}")
            for request in requests:
                # In this order: an interrupt between the two must not leave an open request that was never added.
                self._inbox.append(lambda request=request: self._add(request))  # type: ignore[misc]
                self._num_arriving += len(request.sequences)
                self._open[request.request_id] = request
            self._most_open = max(self._most_open, len(self._open))
            self._wake.notify_all()

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Ends the requests with finish_reason "abort"; ids that are unknown or finished are ignored."""
        request_ids = list(request_ids)
        with self._wake:
            self._inbox.append(lambda: self._abort(request_ids))
            self._wake.notify_all()

    def call(self, work: Callable[[], T]) -> T:
        """Runs `work()` on the engine's thread, between two steps; returns what it returns or raises what it raises.

        For whatever uses the backend beside requests. That must not be done on another thread: OpenMP, with which
        llama.cpp computes, keeps helpers for each thread that ever called it, and where they are more than the cores
        it lets all of them sleep at each barrier. Raises `BackendError` where the engine is closed, or dies before.
        """
        done: Future[T] = Future()

        def command() -> None:
            self._calls.remove(done)
            try:
                done.set_result(work())
            except BaseException as error:  # the caller's to raise
                done.set_exception(error)

        with self._wake:
            if self._error is not None or self._closing:  # one that drains still has its thread
                self._check_alive()
            self._calls.append(done)
            self._inbox.append(command)
            self._wake.notify_all()
        return done.result()

    def drain(self, timeout: float | None = None) -> bool:
        """Refuses new requests and waits until the others have ended; False where `timeout` seconds went by."""
        with self._wake:
            self._refusing = self._refusing or "the engine is draining"
            return self._wake.wait_for(lambda: not self._open, timeout)

    def close(self) -> None:
        """Aborts what runs, ends the thread and closes the backend. May be called twice."""
        with self._wake:
            self._closing, self._refusing = True, "the engine is closed"
            self._wake.notify_all()
        self._thread.join()

    def health(self) -> dict[str, Any]:
        """`status`: "ready", "draining", "closed" or "dead" (then with its `error`); and what is under way."""
        status = (
            "dead"
            if self._error
            else "closed"
            if self._closing
            else "draining"
            if self._refusing
            else "ready"
        )
        scheduler = self._executor.scheduler
        return {
            "status": status,
            "error": None if self._error is None else str(self._error),
            "num_running": len(scheduler.running),
            "num_waiting": self._num_waiting(),
        }

    def metrics(self) -> dict[str, Any]:
        """vLLM's metrics by name: numbers, a dict by finish reason, and `Histogram`s."""
        scheduler = self._executor.scheduler
        numbers = {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": self._num_waiting(),
            "kv_cache_usage_perc": scheduler.tree.usage,
            "prefix_cache_queries_total": scheduler.counts.num_prompt_tokens,
            "prefix_cache_hits_total": scheduler.counts.num_cached_tokens,
            "num_preemptions_total": scheduler.counts.num_preemptions,
            "num_evictions_total": scheduler.counts.num_evictions,
            "prompt_tokens_total": scheduler.counts.num_prompt_tokens,
            **self._executor.stats.snapshot(),
        }
        return {f"cllm:{name}": value for name, value in numbers.items()}

    def _num_waiting(self) -> int:
        return len(self._executor.scheduler.waiting) + self._num_arriving

    def _check_alive(self) -> None:
        if self._error is not None:
            raise BackendError(f"the engine died: {self._error}") from self._error
        if self._refusing:
            raise BackendError(self._refusing)

    # Everything below runs on the engine's thread.

    def _run(self) -> None:
        try:
            while self._receive():
                self._expire(time.perf_counter())
                self._executor.step()
            self._abort(list(self._open))
        except BaseException as error:  # a bug: nobody may be left waiting
            logger.exception("the engine died")
            with self._wake:
                self._error = error
            for call in self._calls:
                call.set_exception(BackendError(f"the engine died: {error}"))
            with contextlib.suppress(Exception):
                self._executor.settle()
            for request in list(self._open.values()):
                open_ones = [sequence for sequence in request.sequences if sequence.finish_reason is None]
                for sequence in open_ones:
                    sequence.fail(BackendError(f"the engine died: {error}"))
                self._deliver(open_ones)
            self._deliver([])  # what has waited
        finally:
            self._executor.backend.close()

    def _receive(self) -> bool:
        """Takes in what has arrived, after waiting where there is nothing to run; False when closing."""
        executor = self._executor
        if not executor.scheduler.has_work:
            executor.settle()
            self._wait()
        with self._wake:
            commands = list(self._inbox)
            self._inbox.clear()
            self._num_arriving = 0
            is_closing = self._closing
        if commands or is_closing:
            executor.settle()  # what they cancel has been delivered as far as it came
        for command in commands:
            command()
        return not is_closing

    def _wait(self) -> None:
        """Sleeps until there is something to do; then for as many requests as there were last, which may come too."""
        with self._wake:
            expected = min(self._most_open, self._executor.scheduler.max_num_seqs)
            self._most_open = len(self._open)
            self._wake.wait_for(lambda: self._inbox or self._closing)
        given_up = time.perf_counter() + GATHER_S
        while len(self._inbox) < expected and not self._closing and time.perf_counter() < given_up:
            time.sleep(_LOOK_EVERY_S)

    def _must_pause(self) -> bool:
        """Whether there is something to do before a further step."""
        return bool(self._inbox) or self._closing or self._is_one_due(time.perf_counter())

    def _is_one_due(self, now: float) -> bool:
        return bool(self._deadlines) and self._deadlines[0][0] <= now

    def _expire(self, now: float) -> None:
        """Ends the requests whose deadline has passed, in the queue or running."""
        while self._is_one_due(now):
            self._executor.settle()
            self._abort([heapq.heappop(self._deadlines)[1]], "deadline")

    def _add(self, request: Request) -> None:
        if request.params.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.arrived + request.params.deadline_s, request.request_id))
        for sequence in request.sequences:
            self._executor.scheduler.add(sequence)

    def _abort(self, request_ids: list[str], reason: str | None = None) -> None:
        for request_id in request_ids:
            request = self._open.get(request_id)
            if request is None:
                continue
            aborted = [sequence for sequence in request.sequences if sequence.finish_reason is None]
            for sequence in aborted:
                sequence.finish("abort", reason)
                self._executor.scheduler.retire(sequence)
            self._executor.apply_operations()
            self._deliver(aborted)

    def _deliver(self, touched: list[Sequence]) -> None:
        """Hands over what a step brought, once for each receiver, but for pieces that may wait for the next step's."""
        updates: defaultdict[Callable[[list[Any]], None], list[Any]] = defaultdict(list)
        for sequence in touched:
            request = sequence.request
            if request.streaming:
                self._news.setdefault(request.deliver, {})[sequence] = None
            if (
                sequence.finish_reason
                and request.finished
                and self._open.pop(request.request_id, None) is not None
            ):
                self._executor.stats.count_request(request, time.perf_counter())
                if not request.streaming:
                    updates[request.deliver].append(request.output())
        goes_on = self._error is None and self._executor.scheduler.has_work
        for deliver, sequences in list(self._news.items()):
            may_wait = next(iter(sequences)).request.may_wait
            if not (goes_on and may_wait is not None and may_wait()):
                updates[deliver] += [sequence.take_piece() for sequence in sequences]
                del self._news[deliver]
        for deliver, values in updates.items():
            try:
                deliver(values)
            except Exception:  # the receiver's fault is its own; the others' answers go on
                logger.exception("a receiver of answers failed")
        if not self._open:
            with self._wake:
                self._wake.notify_all()  # for `drain`
