"""llama.cpp as a backend: settings chosen for a file, slots as its sequences, steps as its batches.

| contract               | llama.h                                                    |
|------------------------|------------------------------------------------------------|
| `launch`, `logits()`   | `llama_decode`, `llama_get_logits_ith`                     |
| `copy_prefix`          | `llama_memory_seq_cp`                                      |
| `truncate`, `free`     | `llama_memory_seq_rm`                                      |
| `info.kv_capacity`     | `n_ctx` (shared out in `llama_cells.py`)                   |
| `info.can_truncate`    | `llama_model_is_recurrent`, `_is_hybrid`, `_n_swa`         |
| `close`                | `llama_free`, `llama_model_free`                           |

It knows no requests, text or sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..batch import Batch
from ..config import EngineConfig
from ..errors import BackendError, ConfigError, ModelFileError
from ..kylin.gguf import GGUFFile, read_gguf
from ..machine import available_cores, available_memory
from ..row_argmax import RowArgmax
from ..tokenizer import Tokenizer, make_tokenizer
from ..vocabulary import is_supported
from .base import Backend, BackendInfo, Floats, Step, count_new_tokens
from .llama_anchor import Anchor
from .llama_cells import Cells, bytes_a_cell, share_out
from .llama_context import LlamaContext
from .llama_library import LlamaModel, free_gpu_memory, load_library
from .llama_tokenizer import LlamaTokenizer

MAX_LOGIT_ROWS = 64
# More find the largest logits no sooner, and slow `llama_decode` down, which runs between them (64 rows on a machine of
# 16 hardware threads, of a core each two: 8 threads 6,500 tokens/s, 16 threads 6,100 and at worst 4,500).
MAX_ARGMAX_THREADS = 8
MAX_BLOCKS = 512  # LLAMA_MAX_LAYERS in llama.cpp


def load_llama(config: EngineConfig) -> tuple[Backend, Tokenizer]:
    """The model that `config` names on llama.cpp, and its tokenizer: ours, or llama.cpp's for other kinds.

    Raises `ConfigError` where llama-cpp-python is missing or cannot serve a setting, `ModelFileError` for the
    file.
    """
    _check_config(config)
    file = read_gguf(config.model)  # llama.cpp would say less of a damaged file, or end the process
    _check_sizes(file.metadata, config.model)
    tokenizer = (
        make_tokenizer(file.metadata)
        if is_supported(file.metadata)
        else LlamaTokenizer(config.model, file.metadata)
    )
    return LlamaBackend(file, config), tokenizer


class LlamaBackend(Backend):
    """One model with one context of llama.cpp."""

    def __init__(self, file: GGUFFile, config: EngineConfig) -> None:
        num_gpu_layers = _num_gpu_layers(config)
        num_cores = config.num_threads or available_cores()
        self._model = LlamaModel(config.model, num_gpu_layers=num_gpu_layers)
        encoder = ModelFileError("expected a model that generates text, found an encoder", path=config.model)
        if load_library().llama_model_has_encoder(self._model.pointer):
            raise encoder
        is_all_on_gpu = not 0 <= num_gpu_layers <= load_library().llama_model_n_layer(self._model.pointer)
        # What is left for the CPU, a look at a table, is done before more threads have met at a barrier.
        num_threads = config.num_threads or (1 if is_all_on_gpu else num_cores)
        has_anchor = (
            bool(num_gpu_layers) and self._model.keeps_tokens and config.max_num_seqs < _most_sequences()
        )
        info, cells = _info(file, config, self._model, num_gpu_layers, num_threads)
        info = replace(info, num_slots=min(info.num_slots, _most_sequences() - has_anchor))
        num_sequences = info.num_slots + has_anchor
        self._context = LlamaContext(
            self._model,
            num_tokens=info.kv_capacity,
            is_unified=cells.own is None,
            num_slots=num_sequences,
            batch_tokens=info.max_num_batched_tokens,
            max_outputs=max(info.max_logit_rows, num_sequences),  # llama.cpp insists on one a sequence
            num_threads=num_threads,
            kv_dtype=config.kv_cache_dtype,
        )
        if not self._context.has_memory:
            raise encoder
        self.info = replace(info, can_truncate=self._context.can_truncate())
        self._lengths = [0] * info.num_slots
        self._anchor: Anchor | None = None
        if has_anchor:
            self._anchor = Anchor(self._context, info.num_slots)
        self._argmax: RowArgmax | None = None
        if info.launches_early:  # with steps of a few milliseconds, what one thread needs for it counts
            num_threads = min(max(1, num_cores // 2), MAX_ARGMAX_THREADS)
            self._argmax = RowArgmax(num_threads, info.max_logit_rows, info.vocab_size)

    def launch(self, batch: Batch) -> Step:
        new = count_new_tokens(batch, self._lengths, self.info)
        if self._anchor is not None:
            self._anchor.before_step(sum(self._lengths) + len(batch.token_ids))
        step = _LlamaStep(self._context, batch, self._lengths, new)
        if self.info.launches_early:
            step.start()
        return step

    def argmax(self, logits: Floats) -> NDArray[np.int64]:
        return super().argmax(logits) if self._argmax is None else self._argmax(logits)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self._check_slots(source, target)
        have = self._lengths[source]
        shortest = 0 if self.info.can_truncate else have  # a state cannot be cut
        if self._lengths[target] or not shortest <= length <= have:
            raise BackendError(
                f"cannot copy {length} tokens of slot {source} ({have} tokens) to slot {target} "
                f"({self._lengths[target]} tokens)"
            )
        self._context.copy(source, target, length)
        self._lengths[target] = length

    def truncate(self, slot: int, length: int) -> None:
        self._check_slots(slot)
        have = self._lengths[slot]
        if self._anchor is not None and length < have:
            self._anchor.before_removal(slot, have, sum(self._lengths))
        # Also where nothing is counted: a failed step may have left tokens behind.
        if not 0 <= length <= have or not self._context.remove(slot, length):
            raise BackendError(f"cannot truncate slot {slot} of {have} tokens to {length}")
        self._lengths[slot] = length

    def warm_up(self) -> None:
        """Runs one token: the first step of a context allocates, and on a GPU loads kernels."""
        zero = np.zeros(1, np.int32)
        self.launch(Batch(token_ids=zero, positions=zero, slots=zero, logit_rows=zero)).logits()
        self.free(0)

    def close(self) -> None:
        if self._argmax is not None:
            self._argmax.close()
        self._context.close()
        self._model.close()

    def _check_slots(self, *slots: int) -> None:
        # llama.cpp takes a negative sequence for all of them, and ends the process for one past the last.
        for slot in slots:
            if not 0 <= slot < self.info.num_slots:
                raise BackendError(f"slot {slot} does not exist: there are {self.info.num_slots}")


class _LlamaStep:
    """One batch, decoded in parts of at most n_batch tokens (nearly always one)."""

    def __init__(self, context: LlamaContext, batch: Batch, lengths: list[int], new: dict[int, int]) -> None:
        self._context, self._batch, self._lengths, self._new = context, batch, lengths, new
        # llama.cpp gives each row once and in order, which is how they are nearly always asked for.
        rows = batch.logit_rows
        self._is_in_order = bool((rows[1:] > rows[:-1]).all())
        self._rows = rows if self._is_in_order else np.unique(rows)
        self._finished: list[Floats] = []  # logits of all parts but the last, copied
        self._last_rows = self._rows  # of the last part, counted from its beginning
        self._is_started = False

    def start(self) -> None:
        """Decodes. The slots' lengths grow only where all of it succeeds."""
        self._is_started = True
        batch, size = self._batch, self._context.batch_tokens
        rows = self._rows
        for start in range(0, len(batch.token_ids), size):
            if start:
                self._finished.append(self._context.logits(self._last_rows).copy())
            part = slice(start, start + size)
            self._last_rows = rows[(rows >= start) & (rows < start + size)] - start
            try:
                self._context.decode(
                    batch.token_ids[part], batch.positions[part], batch.slots[part], self._last_rows
                )
            except BackendError as error:
                error.nothing_changed = error.nothing_changed and start == 0
                raise
        for slot, count in self._new.items():
            self._lengths[slot] += count

    def logits(self) -> Floats:
        if not self._is_started:
            self.start()
        logits = self._context.logits(self._last_rows)
        if self._finished:
            logits = np.concatenate([*self._finished, logits])
        if self._is_in_order:
            return logits
        return logits[np.searchsorted(self._rows, self._batch.logit_rows)]


def _check_config(config: EngineConfig) -> None:
    """Raises `ConfigError` for what this build of llama.cpp cannot do."""
    library = load_library()
    if config.max_num_seqs > _most_sequences():
        message = f"llama.cpp runs at most {_most_sequences()} sequences at once"
        raise ConfigError(message, field="max_num_seqs")
    if config.num_gpu_layers and not library.llama_supports_gpu_offload():
        raise ConfigError(
            f"num_gpu_layers is {config.num_gpu_layers}, but this llama-cpp-python has no GPU: leave it out, or "
            f"install a build for the GPU",
            field="num_gpu_layers",
        )


def _most_sequences() -> int:
    return int(load_library().llama_max_parallel_sequences())


def _check_sizes(metadata: Mapping[str, Any], path: str) -> None:
    """Refuses the sizes over which llama.cpp ends the process; others it refuses itself, with a reason."""
    architecture = metadata.get("general.architecture")

    def size(key: str, default: int) -> int:
        value = metadata.get(f"{architecture}.{key}", default)
        return value if isinstance(value, int) else default  # another type llama.cpp refuses

    blocks = size("block_count", 1)
    if not 1 <= blocks <= MAX_BLOCKS:
        raise ModelFileError(f"block_count is {blocks}; llama.cpp takes 1..{MAX_BLOCKS}", path=path)
    if architecture not in ("qwen2", "qwen3"):
        return
    even_share = size("embedding_length", 0) // max(1, size("attention.head_count", 1))
    head_width = size("attention.key_length", even_share)
    rotated = size("rope.dimension_count", head_width)
    if rotated != head_width or (architecture == "qwen2" and head_width != even_share):
        raise ModelFileError(
            f"expected one head width, found {even_share} (embedding_length / head_count), {head_width} "
            f"(key_length) and {rotated} (rope.dimension_count)",
            path=path,
        )


def _num_gpu_layers(config: EngineConfig) -> int:
    if config.num_gpu_layers is not None:
        return config.num_gpu_layers
    return -1 if load_library().llama_supports_gpu_offload() else 0


def _info(
    file: GGUFFile, config: EngineConfig, model: LlamaModel, num_gpu_layers: int, num_threads: int
) -> tuple[BackendInfo, Cells]:
    """What is chosen before there is a context."""
    library = load_library()
    trained = library.llama_model_n_ctx_train(model.pointer)
    context = config.context_within(trained)
    memory = free_gpu_memory() if num_gpu_layers else available_memory()
    bytes_a_token = bytes_a_cell(file.metadata, config.kv_cache_dtype)
    cells = share_out(
        config,
        context=context,
        affordable=memory // 4 // bytes_a_token,
        may_split=not num_gpu_layers and model.keeps_tokens,
    )
    info = BackendInfo(
        architecture=str(file.metadata.get("general.architecture")),
        vocab_size=library.llama_vocab_n_tokens(model.vocab),
        trained_context=trained,
        context_length=context,
        num_slots=cells.num_slots,
        kv_capacity=cells.capacity,
        kv_block=cells.block,
        max_num_batched_tokens=config.batched_tokens(2048 if num_gpu_layers else 512),
        max_logit_rows=max(MAX_LOGIT_ROWS, cells.num_slots),
        max_idle_tokens=cells.max_idle_tokens(context),
        can_truncate=False,  # known when there is a context
        # On a CPU `llama_decode` is the work itself, so it waits for logits().
        launches_early=num_gpu_layers != 0,
        description=f"llama.cpp (llama-cpp-python {library.__version__}), "
        f"{num_threads} threads, "
        f"{'all' if num_gpu_layers == -1 else num_gpu_layers} layers on the GPU, {cells} "
        f"({cells.capacity * bytes_a_token / 2**20:.0f} MiB, {config.kv_cache_dtype})",
    )
    return info, cells
