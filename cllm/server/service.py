"""The engine as the routes see it: requests go in, their updates come back on the event loop.

It owns the model while it is served: loading, ready, draining. It must not know routes or the shape of any reply.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.types import Receive

from ..chat import ChatPrompt
from ..errors import QueueFullError
from ..llm import LLM
from ..outputs import CompletionOutput, RequestOutput, StreamPiece
from ..params import SamplingParams
from ..request_maker import Prompt
from ..sequence import Request as EngineRequest
from .failures import ClientGone, deadline_passed, failure_of, unavailable
from .hand_over import HandOver

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Bytes of requests that are read on the event loop: 30 microseconds, in which no other Python thread could run anyway.
# Another thread's turn, and back, would take 70 more.
SMALL = 1024

_random = random.Random()  # for ids; to ask the system each time would let go of the interpreter


class Service:
    """One model being served.

    Until `attach` hands the model over, every use of `llm` is a 503.
    `stages`: seconds and count of each stage of the server's own work, for `/metrics`.
    """

    def __init__(self, model_id: str, *, max_queue: int = 256) -> None:
        self.model_id = model_id
        self.created = int(time.time())
        self.stages = {"validate": [0.0, 0], "prepare": [0.0, 0], "respond": [0.0, 0]}
        self._max_queue = max_queue
        self._llm: LLM | None = None
        self._is_draining = False
        self._calls: dict[str, Call] = {}  # by the id of each open request
        self._num_preparing = 0
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="cllm-prepare")
        self._hand_over: HandOver | None = None

    def start(self) -> None:
        """Binds the running event loop, on which all updates will arrive."""
        self._hand_over = HandOver(asyncio.get_running_loop(), self._take)

    def attach(self, llm: LLM) -> None:
        """The model is loaded. Any thread may call this."""
        self._llm = llm

    @property
    def llm(self) -> LLM:
        """The model. Raises `HTTPError` (503) while it loads."""
        if self._llm is None:
            raise unavailable("the model is still loading; try again soon", "loading", retry_after_s=2)
        return self._llm

    def health(self) -> dict[str, Any]:
        """`LLM.health`, or the status "loading"."""
        if self._llm is not None:
            return self._llm.health()
        status = "draining" if self._is_draining else "loading"
        return {"status": status, "error": None, "num_running": 0, "num_waiting": 0}

    async def prepare(self, work: Callable[[], T], size: int | None = None) -> T:
        """Runs `work` (templates, tokenising) off the event loop, unless `size`, its cost in bytes, is small.

        Raises `HTTPError` where nothing is taken now.
        """
        self._check_open()
        if self._num_preparing >= self._max_queue:
            raise QueueFullError(f"{self._num_preparing} requests are being read already")
        self._num_preparing += 1
        try:
            with self.timed("prepare"):
                if size is not None and size <= SMALL:
                    return work()
                return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._num_preparing -= 1

    def make_request(
        self, prompt: Prompt | ChatPrompt, params: SamplingParams, *, streaming: bool = False
    ) -> EngineRequest:
        """A request for `submit`; any thread may call this. Raises `InvalidRequestError`."""
        assert self._hand_over is not None
        hand_over = self._hand_over
        return self.llm.make_request(
            prompt, params, hand_over.deliver, streaming=streaming, may_wait=hand_over.may_wait
        )

    def submit(self, requests: Sequence[EngineRequest], receive: Receive) -> Call:
        """Queues `requests` of `make_request`; `receive` tells when the client goes.

        Raises `HTTPError` or `QueueFullError`. The caller must close the call.
        """
        self._check_open()
        call = Call(self, requests, receive)
        self._calls.update((request.request_id, call) for request in requests)
        try:
            self.llm.submit(requests)
        except BaseException:
            call.close()
            raise
        call.watch()
        return call

    def _take(self, update: StreamPiece | RequestOutput) -> None:
        call = self._calls.get(update.request_id)
        if call is not None:
            call.put(update)

    def drain(self, seconds: float) -> None:
        """Takes no new request; what still runs after `seconds` is aborted."""
        self._is_draining = True
        if self._llm is not None:
            self._llm.drain(0)
        asyncio.get_running_loop().call_later(seconds, self.abort_all)

    def abort_all(self) -> None:
        """Ends every request with finish_reason "abort"."""
        if self._llm is not None and self._calls:
            self._llm.cancel(self._calls)

    def forget(self, call: Call, open_ids: list[str]) -> None:
        """The call is over; those of its requests that still run are cancelled."""
        for request_id in call.requests:
            self._calls.pop(request_id, None)
        if open_ids and self._llm is not None:
            self._llm.cancel(open_ids)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Counts the time spent inside."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.count(stage, started)

    def count(self, stage: str, started: float) -> None:
        """The stage began at `started` (`time.perf_counter`) and ends now."""
        total = self.stages[stage]
        total[0] += time.perf_counter() - started
        total[1] += 1

    def close(self) -> None:
        """Ends what runs and gives the model's memory back."""
        self._pool.shutdown(cancel_futures=True)
        if self._llm is not None:
            self._llm.close()

    def _check_open(self) -> None:
        status = self.llm.health()["status"]
        if self._is_draining or status in ("draining", "closed"):
            raise unavailable("the server is shutting down", "draining", retry_after_s=5)


class Call:
    """The requests of one HTTP request on their way through the engine; lives on the event loop.

    `id`: a random one, for the reply. `requests`: by their id in the engine, in the order of the prompts.
    """

    def __init__(self, service: Service, requests: Sequence[EngineRequest], receive: Receive) -> None:
        self.id = f"{_random.getrandbits(128):032x}"
        self.created = int(time.time())
        self.requests = {request.request_id: request for request in requests}
        self._service = service
        # How many last updates are still to come, by request: one for each choice of a stream.
        self._open = {r.request_id: len(r.sequences) if r.streaming else 1 for r in requests}
        self._receive = receive
        self._updates: list[Any] = []
        self._waiter: asyncio.Future[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._is_client_gone = False

    @property
    def is_done(self) -> bool:
        """Whether the engine has nothing more to give."""
        return not self._open

    def watch(self) -> None:
        """Begins to look out for the client's going."""
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._is_client_gone = True
        self.close()
        self._wake()

    def put(self, update: StreamPiece | RequestOutput) -> None:
        """Takes one update of the engine."""
        if isinstance(update, RequestOutput) or update.finish_reason is not None:
            self._open[update.request_id] -= 1
            if not self._open[update.request_id]:
                del self._open[update.request_id]
        self._updates.append(update)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Any]:
        """All updates since the last call, at least one. Raises `ClientGone`."""
        if not self._updates and not self._is_client_gone:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._is_client_gone:
            raise ClientGone
        updates, self._updates = self._updates, []
        return updates

    async def first_pieces(self) -> list[StreamPiece]:
        """The first pieces of a stream. Raises `HTTPError` where there is nothing to stream, `ClientGone`."""
        pieces: list[StreamPiece] = await self.take()
        for piece in pieces:
            check_answers(piece.error, [piece])
        return pieces

    async def outputs(self) -> list[RequestOutput]:
        """The whole outputs, in the order of the requests. Raises `HTTPError` where one failed, `ClientGone`."""
        found: dict[str, RequestOutput] = {}
        while len(found) < len(self.requests):
            found.update((output.request_id, output) for output in await self.take())
        for output in found.values():
            check_answers(output.error, output.outputs)
        return [found[request_id] for request_id in self.requests]

    def close(self) -> None:
        """Cancels what still runs. May be called twice."""
        if self._watcher is not None and self._watcher is not asyncio.current_task():
            self._watcher.cancel()
        self._service.forget(self, list(self._open))
        self._open.clear()


def check_answers(error: Exception | None, answers: Sequence[StreamPiece | CompletionOutput]) -> None:
    """Raises the `HTTPError` of a request that failed, or that was ended before any token was there."""
    if error is not None:
        raise failure_of(error)
    if any(answer.finish_reason != "abort" or answer.token_ids for answer in answers):
        return
    if any(answer.stop_reason == "deadline" for answer in answers):
        raise deadline_passed()
    raise unavailable("the server is shutting down", "draining", retry_after_s=5)
