"""Keeps the number of KV cells that llama.cpp looks at the same from step to step, for the sake of CUDA graphs.

A step looks at all cells up to the highest used one, rounded up to 256. Where that number changes, llama.cpp builds
the step anew and launches its kernels one by one, twice, before it has a CUDA graph again: 2 ms of 9 with 64 sequences
on an H200. So when a wave of answers ends, one token near the top stays where it is, under a sequence of its own.
Measured without the prefix cache; with it, the tokens of answers that have ended stay there anyway.
"""

from __future__ import annotations

from .llama_context import LlamaContext

STEPS = 100  # with less than half as many tokens in use, until the cell is given up


class Anchor:
    """Holds one cell for `sequence`, which no slot may be, in the cache of `context`."""

    def __init__(self, context: LlamaContext, sequence: int) -> None:
        self._context, self._sequence = context, sequence
        self._level = 0  # tokens in use when the cell was taken, which is about where it lies
        self._num_low_steps = 0

    def before_step(self, num_tokens: int) -> None:
        """A step comes after which `num_tokens` tokens are in use."""
        self._num_low_steps = self._num_low_steps + 1 if 2 * num_tokens < self._level else 0
        if self._num_low_steps >= STEPS or num_tokens >= self._context.capacity:
            self.release()

    def before_removal(self, slot: int, length: int, num_tokens: int) -> None:
        """The `length` tokens of `slot` are about to go, or some of them, while `num_tokens` are in use."""
        if num_tokens > self._level:
            self.release()
            self._context.copy(slot, self._sequence, length, start=length - 1)
            self._level = num_tokens

    def release(self) -> None:
        """Gives the cell up."""
        self._context.remove(self._sequence, 0)
        self._level = self._num_low_steps = 0
