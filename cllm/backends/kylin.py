"""kylin as a backend: a model file's weights, the KV cache and the forward pass behind the contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from tqdm import tqdm

from ..batch import Batch
from ..config import EngineConfig
from ..kylin.gguf import GGUFFile
from ..kylin.kv_cache import BLOCK, KVCache, block_bytes, blocks_for
from ..kylin.model import Model
from ..kylin.reference import forward
from ..kylin.team import Team
from ..kylin.weights import ModelShape, Weights, load_weights
from ..machine import available_cores, available_memory
from .base import Backend, BackendInfo, Floats, HistoryBackend, Step, count_new_tokens

MAX_LOGIT_ROWS = 64


def load_kylin(file: GGUFFile, config: EngineConfig) -> KylinBackend | ReferenceBackend:
    """The model in `file` on the kernels that `config` names, still to be prepared.

    Raises `ModelFileError` or `ConfigError`.
    """
    weights = load_weights(file)
    info = _info(weights.shape, config)
    if config.kernels == "numpy":
        return ReferenceBackend(weights, replace(info, description="kylin, kernels numpy (the reference)"))
    return KylinBackend(weights, info, config)


class KylinBackend(Backend):
    """The forward pass over the block cache, computed on the calling thread and its team."""

    def __init__(self, weights: Weights, info: BackendInfo, config: EngineConfig) -> None:
        self.info = info
        shape = weights.shape
        self._cache = KVCache(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_width=shape.head_width,
            num_blocks=info.kv_capacity // BLOCK,
            num_slots=info.num_slots,
            slot_tokens=info.context_length,
            dtype=config.kv_cache_dtype,
        )
        self._team = Team(config.num_threads or available_cores())
        self._model = Model(weights, self._cache, self._team, info.context_length, config.kernels)
        description = info.description.replace("kylin,", f"kylin, kernels {self._model.description},", 1)
        self.info = replace(info, description=description)

    def prepare(self) -> None:
        """Compiles and repacks, with a bar on a terminal where that takes long. Must come before the first step."""
        with tqdm(
            delay=0.5, leave=False, disable=None, bar_format="{desc} {percentage:3.0f}% |{bar}| {elapsed}"
        ) as bar:

            def show(stage: str, done: int, total: int) -> None:
                bar.desc, bar.n, bar.total = stage, done, total
                bar.refresh()

            self._model.prepare(show)

    def launch(self, batch: Batch) -> Step:
        self._cache.extend(count_new_tokens(batch, self._cache.lengths, self.info))
        return _Recorded(lambda: self._model.forward(batch))

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self._cache.copy_prefix(source, target, length)

    def truncate(self, slot: int, length: int) -> None:
        self._cache.truncate(slot, length)

    def warm_up(self) -> None:
        """Runs one token, so that the rest is compiled that loading the model has not."""
        zero = np.zeros(1, np.int32)
        self._cache.extend({0: 1})
        self._model.forward(Batch(token_ids=zero, positions=zero, slots=zero, logit_rows=zero))
        self._cache.free(0)

    def phase_cycles(self) -> dict[str, int]:
        """Cycles by phase of a step, of all steps so far; empty on the plain kernels."""
        return self._model.phase_cycles()

    def close(self) -> None:
        self._team.close()
        del self._model, self._cache  # their memory goes, also while somebody keeps the closed engine


class ReferenceBackend(HistoryBackend):
    """The reference in plain NumPy, which computes a sequence from its beginning for every new token."""

    def __init__(self, weights: Weights, info: BackendInfo) -> None:
        super().__init__(info)
        self._weights = weights

    def prepare(self) -> None:
        """Nothing: it computes from the file."""

    def history_logits(self, histories: list[list[int]], positions: list[int]) -> Floats:
        rows = [np.empty((0, self.info.vocab_size), np.float32)]
        for _, of_one in groupby(zip(histories, positions, strict=True), key=lambda row: id(row[0])):
            (token_ids, *_), wanted = zip(*of_one, strict=True)
            rows.append(forward(self._weights, token_ids[: max(wanted) + 1])[list(wanted)])
        return np.concatenate(rows)

    def close(self) -> None:
        del self._weights


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A step that runs when its logits are asked for."""

    logits: Callable[[], Floats]


def _info(shape: ModelShape, config: EngineConfig) -> BackendInfo:
    context = config.context_within(shape.context_length)
    bytes_a_block = block_bytes(shape.num_layers, shape.num_kv_heads, shape.head_width, config.kv_cache_dtype)
    if config.kv_cache_tokens is None:
        wanted = blocks_for(context) * config.max_num_seqs
        num_blocks = max(1, min(wanted, available_memory() // 4 // bytes_a_block))
    else:
        num_blocks = blocks_for(config.kv_cache_tokens)
    threads = config.num_threads or available_cores()
    return BackendInfo(
        architecture=shape.architecture,
        vocab_size=shape.vocab_size,
        trained_context=shape.context_length,
        context_length=context,
        num_slots=config.num_slots(),
        kv_capacity=num_blocks * BLOCK,
        kv_block=BLOCK,
        max_num_batched_tokens=config.batched_tokens(),
        max_logit_rows=max(MAX_LOGIT_ROWS, config.max_num_seqs),
        max_idle_tokens=None,  # blocks that no sequence of a step uses are not touched by it
        can_truncate=True,
        launches_early=False,
        description=f"kylin, {threads} threads, KV cache of {num_blocks * BLOCK} tokens "
        f"({num_blocks * bytes_a_block / 2**20:.0f} MiB, {config.kv_cache_dtype})",
    )
