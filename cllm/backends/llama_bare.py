"""llama.cpp alone: `llama_decode` over batches that were filled before, for benchmarks to compare an engine with.

It uses the engine's own context, so that KV cache, threads and settings are the same ones. No checks, no contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..batch import Batch
from .llama import LlamaBackend
from .llama_context import batch_over
from .llama_library import load_library


class LlamaBareLoop:
    """Decodes prepared batches on the context of `backend`, which must be idle and empty, and is so afterwards."""

    def __init__(self, backend: LlamaBackend) -> None:
        self._library: Any = load_library()
        context: Any = backend._context
        self._context, self._memory = context._pointer, context._memory

    def prepare(self, batch: Batch) -> Any:
        """The `llama_batch` of `batch`, over arrays of its own."""
        token_ids, positions, slots = (
            np.array(part, np.int32) for part in (batch.token_ids, batch.positions, batch.slots)
        )
        is_output = np.zeros(len(token_ids), np.int8)
        is_output[batch.logit_rows] = 1
        return batch_over(token_ids, positions, slots, is_output)

    def decode(self, batch: Any) -> None:
        """One step of `prepare`'s batches, with its logits there at the end (on a GPU `llama_decode` returns before).

        Raises `RuntimeError` with llama.cpp's code."""
        code = self._library.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama_decode failed (code {code})")
        self._library.llama_get_logits(self._context)

    def clear(self, slots: Sequence[int]) -> None:
        """Empties the slots."""
        for slot in slots:
            self._library.llama_memory_seq_rm(self._memory, slot, -1, -1)
