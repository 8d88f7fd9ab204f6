"""Steps on a backend, without an engine: what the tests of the backends share."""

from __future__ import annotations

import numpy as np

from cllm.backends import load_backend
from cllm.backends.base import Backend
from cllm.batch import Batch
from cllm.config import EngineConfig

Chunk = tuple[int, int, list[int]]  # slot, first position, token ids


def load(model: object, backend: str, **settings: object) -> Backend:
    config = {"context_length": 256, "max_num_seqs": 4, "num_threads": 1, **settings}
    return load_backend(EngineConfig(model=str(model), backend=backend, **config))[0]


def make_batch(*chunks: Chunk, rows: list[int] | None = None) -> Batch:
    """One batch of the chunks; `rows` None: the logits of each chunk's last token."""
    ends = np.cumsum([len(ids) for _, _, ids in chunks])
    arrays = (
        [token_id for _, _, ids in chunks for token_id in ids],
        [start + index for _, start, ids in chunks for index in range(len(ids))],
        [slot for slot, _, ids in chunks for _ in ids],
        (ends - 1).tolist() if rows is None else rows,
    )
    return Batch(*(np.array(array, np.int32) for array in arrays))


def run(backend: Backend, *chunks: Chunk, rows: list[int] | None = None) -> np.ndarray:
    """The logits of one step, copied."""
    return backend.launch(make_batch(*chunks, rows=rows)).logits().copy()


def nmse(actual: np.ndarray, expected: np.ndarray) -> float:
    """Mean square of the difference over the mean square of what was expected."""
    difference = np.square(actual - expected, dtype=np.float64).sum()
    return float(difference / np.square(expected, dtype=np.float64).sum())
