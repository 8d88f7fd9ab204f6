"""A backend without a model, for tests of everything above it: answers that can be predicted, faults on demand.

It is public: users test their own programs with it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..batch import Batch
from ..config import EngineConfig
from ..errors import BackendError
from ..kylin.kv_cache import BLOCK, blocks_for
from ..tokenizer import BYTE_OF_CHAR, Tokenizer, load_tokenizer, make_tokenizer
from .base import BackendInfo, Floats, HistoryBackend, Step

_PEAK = 9.0  # the logit of the next token; those of the others lie between 0 and 1


def load_mock(config: EngineConfig, script: MockScript | None = None) -> tuple[MockBackend, Tokenizer]:
    """A mock with the tokenizer of `config.model`, or with a byte vocabulary where that is "demo"."""
    is_bare = config.model == "demo"
    tokenizer = make_tokenizer(byte_vocabulary()) if is_bare else load_tokenizer(config.model)
    context = config.context_length or 4096
    info = BackendInfo(
        architecture="mock",
        vocab_size=tokenizer.vocab_size,
        trained_context=context,
        context_length=context,
        num_slots=config.num_slots(),
        kv_capacity=blocks_for(config.kv_cache_tokens or context * config.max_num_seqs) * BLOCK,
        kv_block=BLOCK,
        max_num_batched_tokens=config.batched_tokens(),
        max_logit_rows=max(64, config.max_num_seqs),
        max_idle_tokens=None,
        can_truncate=True,
        launches_early=script is not None and script.launches_early,
        description="mock",
    )
    return MockBackend(info, script), tokenizer


def byte_vocabulary() -> dict[str, Any]:
    """GGUF metadata of a tokenizer with one token a byte, `<|im_start|>`, `<|im_end|>` and `<|endoftext|>`."""
    tokens = sorted(BYTE_OF_CHAR, key=BYTE_OF_CHAR.__getitem__)  # the character of each byte
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens + specials,
        "tokenizer.ggml.token_type": np.array([1] * 256 + [3] * 3, np.int32),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 258,
    }


@dataclass
class MockScript:
    """What happens in which step; steps are counted from 0.

    `failures`: steps whose `logits()` raise. `refusals`: steps whose launch is refused. `nans`: steps that
    return NaN. `delays`: seconds that a step takes longer; `delay` is for every step. `tokens`: what follows a
    sequence of so many tokens, instead of the token that its history gives. `launches_early`: be served as a GPU
    is, which is read when the mock is loaded.
    """

    failures: set[int] = field(default_factory=set)
    refusals: set[int] = field(default_factory=set)
    nans: set[int] = field(default_factory=set)
    delays: Mapping[int, float] = field(default_factory=dict)
    delay: float = 0.0
    tokens: Mapping[int, int] = field(default_factory=dict)
    launches_early: bool = False


class MockBackend(HistoryBackend):
    """Logits are a pure function of the token ids of a slot, so equal histories give equal answers.

    After each history one token, `next_token(history)`, is far likelier than the others.
    """

    def __init__(self, info: BackendInfo, script: MockScript | None = None) -> None:
        super().__init__(info)
        self.script = script or MockScript()
        self.num_steps = 0
        # A few fixed rows of noise: cheap, and enough for sampling at a temperature to have choices.
        self._noise = np.random.default_rng(0).random((16, info.vocab_size), np.float32)

    def next_token(self, history: list[int]) -> int:
        """The likeliest token after `history`."""
        return self._next_token(self._mix(history, len(history)), len(history))

    def _next_token(self, mixed: int, length: int) -> int:
        scripted = self.script.tokens.get(length)
        return mixed % self.info.vocab_size if scripted is None else scripted

    @staticmethod
    def _mix(history: list[int], length: int) -> int:
        # Of the last tokens and the length: depends on all that matters, costs the same at any length. The hash of a
        # tuple of integers is the same in every process.
        return hash((length, *history[length - 8 if length > 8 else 0 : length]))

    def history_logits(self, histories: list[list[int]], positions: list[int]) -> Floats:
        lengths = [position + 1 for position in positions]
        mixed = [*map(self._mix, histories, lengths)]
        rows = np.array([number % len(self._noise) for number in mixed], np.intp)
        logits = self._noise.take(rows, axis=0)
        for row, token_id in enumerate(map(self._next_token, mixed, lengths)):
            logits[row, token_id] = _PEAK
        return logits

    def launch(self, batch: Batch) -> Step:
        number, self.num_steps = self.num_steps, self.num_steps + 1
        if number in self.script.refusals:
            raise BackendError(f"scripted refusal of step {number}", nothing_changed=True)
        return _MockStep(super().launch(batch), self.script, number)


@dataclass(slots=True)
class _MockStep:
    step: Step
    script: MockScript
    number: int

    def logits(self) -> Floats:
        delay = self.script.delay + self.script.delays.get(self.number, 0.0)
        if delay:
            time.sleep(delay)
        if self.number in self.script.failures:
            raise BackendError(f"scripted failure of step {self.number}")
        logits = self.step.logits()
        if self.number in self.script.nans:
            logits[:] = np.nan
        return logits
