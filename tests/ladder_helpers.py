"""What the tests of the ladder share: a clock that only moves when told, and rungs on a mock that move it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from server_helpers import serve

from cllm import LLM
from cllm.bench.ladder.load import Load
from cllm.bench.ladder.rig import Rig, Rung, make_rig
from cllm.bench.ladder.rungs import engine_rungs
from cllm.bench.ladder.web import web_rungs
from cllm.server.service import Service

STEP_S = 0.010  # what a step of the mock takes on the clock


class Clock:
    """Seconds that pass only by `advance`, on any thread: a busy machine changes no result."""

    def __init__(self) -> None:
        self.now = 0.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        with self._lock:
            self.now += seconds

    def delaying(self, function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        """`function`, which takes so much longer."""

        def delayed(*args: Any, **kwargs: Any) -> Any:
            self.advance(seconds)
            return function(*args, **kwargs)

        return delayed


def mock_llm(load: Load) -> LLM:
    context = load.input_len + load.output_len + 16
    return LLM(
        backend="mock", max_num_seqs=load.concurrency, context_length=context, enable_prefix_caching=False
    )


def steps_take(llm: LLM, clock: Clock) -> None:
    """Each step of the mock takes `STEP_S`."""
    backend = llm._engine._executor.backend
    backend.launch = clock.delaying(backend.launch, STEP_S)  # type: ignore[method-assign]


@contextlib.contextmanager
def mock_ladder(load: Load) -> Iterator[tuple[Rig, list[Rung], Clock]]:
    """All ten rungs on mocks, HTTP to a server in this process, and the clock that measures them."""
    clock = Clock()
    with mock_llm(load) as llm, mock_llm(load) as served:
        service = Service("test")
        service.attach(llm)
        rig = make_rig(llm, load, seed=0, clock=clock)
        steps_take(llm, clock)
        steps_take(served, clock)
        with serve(served) as server:
            yield rig, engine_rungs(rig) + web_rungs(rig, service, server.url), clock
        service.close()
