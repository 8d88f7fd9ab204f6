"""One `llama_context`: its settings, the batch arrays that every step fills again, and its memory (KV cache).

It speaks in llama.cpp's terms and maps its return codes to errors. It knows no scheduler and no configuration.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from ..batch import Ids
from ..errors import BackendError, ConfigError
from .llama_library import LlamaModel, load_library, log

_KV_FULL, _REFUSED = 1, -1  # return codes of llama_decode in llama.h after which nothing has changed


class LlamaContext:
    """Decodes batches over `num_tokens` cells of KV cache: unified, which all sequences share, or not, and each has an
    equal part of its own.

    Its sequences are 0 .. num_slots - 1; llama.cpp ends the process for any other, for more than
    `batch_tokens` tokens in a batch and for more than `max_outputs` rows of logits: the caller checks.
    """

    def __init__(
        self,
        model: LlamaModel,
        *,
        num_tokens: int,
        is_unified: bool,
        num_slots: int,
        batch_tokens: int,
        max_outputs: int,
        num_threads: int,
        kv_dtype: str,
    ) -> None:
        """`num_tokens`, and each sequence's part of it, are multiples of 256.

        Raises `ConfigError` with llama.cpp's reason where it cannot serve these settings.
        """
        library = load_library()
        params = library.llama_context_default_params()
        params.n_ctx = num_tokens
        params.n_batch = batch_tokens
        params.n_ubatch = min(512, batch_tokens)
        params.n_seq_max = num_slots
        params.n_threads = params.n_threads_batch = num_threads
        params.type_k = params.type_v = GGMLQuantizationType[kv_dtype.upper()]
        if kv_dtype == "f32":  # flash attention would round it to f16; elsewhere llama.cpp decides
            params.flash_attn_type = library.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.kv_unified = is_unified
        if hasattr(params, "n_outputs_max"):  # newer builds: a smaller compute buffer
            params.n_outputs_max = max_outputs
        log.clear()
        pointer = library.llama_init_from_model(model.pointer, params)
        if not pointer:
            raise ConfigError(
                f"llama.cpp cannot set up a KV cache of {num_tokens} tokens in {kv_dtype}: {log.reason()}"
            )
        self.close = weakref.finalize(self, library.llama_free, pointer)
        self.close.atexit = False
        self._library, self._pointer, self._model, self._is_unified = library, pointer, model, is_unified
        self._memory = library.llama_get_memory(pointer)
        self.has_memory = bool(self._memory)  # encoders and diffusion models have none, and must not `decode`
        self._vocab_size = library.llama_vocab_n_tokens(model.vocab)
        self.capacity: int = library.llama_n_ctx(pointer)
        self.batch_tokens: int = library.llama_n_batch(pointer)
        self._make_batch()

    def can_truncate(self) -> bool:
        """Whether tokens can be dropped from a sequence's end: not where a state or a window replaced them."""
        return self._model.keeps_tokens and bool(self._library.llama_memory_can_shift(self._memory))

    def decode(self, token_ids: Ids, positions: Ids, slots: Ids, rows: Ids) -> None:
        """Computes 1 .. batch_tokens tokens. `rows`: the entries whose logits are wanted, ascending.

        On a GPU it returns before the work is done. Raises `BackendError`.
        """
        count = len(token_ids)
        self._batch.n_tokens = count
        self._token_ids[:count] = token_ids
        self._positions[:count] = positions
        self._slots[:count] = slots
        self._is_output[:count] = 0
        self._is_output[rows] = 1
        log.clear()
        code = self._library.llama_decode(self._pointer, self._batch)
        if code == _KV_FULL:
            raise BackendError(
                f"KV cache full: no room for {count} more tokens in {self.capacity}", nothing_changed=True
            )
        if code == _REFUSED:
            raise BackendError(f"llama.cpp refused the batch: {log.reason()}", nothing_changed=True)
        if code:
            raise BackendError(f"llama.cpp failed in a step (code {code}): {log.reason()}")

    def logits(self, rows: Ids) -> NDArray[np.float32]:
        """Waits; the logits of the last `decode` for its `rows`, [len(rows), V]: a view until the next one."""
        if not len(rows):
            return np.empty((0, self._vocab_size), np.float32)
        # llama.cpp keeps the rows of a batch in order, one behind the other.
        first = self._library.llama_get_logits_ith(self._pointer, int(rows[0]))
        if not first:
            raise BackendError(f"llama.cpp has no logits: {log.reason()}")
        return np.ctypeslib.as_array(first, (len(rows), self._vocab_size))

    def copy(self, source: int, target: int, end: int, start: int = 0) -> None:
        """Sequence `target`, which is empty, has the tokens start <= position < end of `source`, in the same cells.

        Without a unified cache, from 0 on, and in cells of its own: the next step copies all that `source` has.
        """
        if self._is_unified:
            self._library.llama_memory_seq_cp(self._memory, source, target, start, end)
        else:
            self._library.llama_memory_seq_cp(self._memory, source, target, -1, -1)
            self.remove(target, end)

    def remove(self, slot: int, start: int) -> bool:
        """Drops the tokens of a sequence from `start` on; False where the model cannot."""
        return bool(self._library.llama_memory_seq_rm(self._memory, slot, start, -1))

    def _make_batch(self) -> None:
        """A `llama_batch` over arrays of our own, so that filling them is four copies."""
        size = self.batch_tokens
        self._token_ids, self._positions, self._slots = np.zeros((3, size), np.int32)
        self._is_output = np.zeros(size, np.int8)
        self._batch = batch_over(self._token_ids, self._positions, self._slots, self._is_output)


def batch_over(token_ids: Ids, positions: Ids, slots: Ids, is_output: NDArray[np.int8]) -> Any:
    """A `llama_batch` of all entries of the arrays [T], which it reads where they lie and keeps alive."""
    ones = np.ones(len(token_ids), np.int32)  # each token belongs to one sequence
    each = slots.ctypes.data + slots.itemsize * np.arange(len(slots), dtype=np.uintp)
    int32s = ctypes.POINTER(ctypes.c_int32)
    batch = load_library().llama_batch(
        n_tokens=len(token_ids),
        token=token_ids.ctypes.data_as(int32s),
        embd=None,
        pos=positions.ctypes.data_as(int32s),
        n_seq_id=ones.ctypes.data_as(int32s),
        seq_id=each.ctypes.data_as(ctypes.POINTER(int32s)),
        logits=is_output.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
    )
    batch.kept = (token_ids, positions, slots, is_output, ones, each)
    return batch
