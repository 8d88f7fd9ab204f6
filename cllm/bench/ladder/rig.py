"""What the rungs share: the model, the load, the answers that are known before, and what a rung is.

It must not know what any rung does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ...backends.base import Backend
from ...batch import Batch
from ...errors import CLLMError
from ...executor import make_scheduler
from ...llm import LLM
from ...params import SamplingParams
from ...scheduler import Scheduler
from ...sequence import Request
from .load import Load, Outcome, Prompt, Timing, make_prompts

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


def timing_of(rig: Rig, number: int, request: Request) -> Timing:
    sequence = request.sequences[0]
    first, last = sequence.first_token_at, sequence.last_token_at
    if first is None or last is None:
        return Timing(0.0, None, 0, str(request.error or "no token"))
    error = None if request.error is None else str(request.error)
    is_same = sequence.token_ids[sequence.num_prompt :] == rig.answers[number]
    return Timing(last - request.arrived, first - request.arrived, sequence.num_output, error, is_same)
