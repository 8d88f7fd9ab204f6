"""Opens GGUF bytes through the reader, for its tests, and checks what every opened file must satisfy."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from cllm.kylin.gguf import GGUFFile, read_gguf


@contextmanager
def file_of(data: bytes) -> Iterator[str]:
    """The path of a new file: writing another over a mapped file would pull it from under its views."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.gguf")
        path.write_bytes(data)
        yield str(path)


def read_bytes(data: bytes) -> GGUFFile:
    with file_of(data) as path:
        return read_gguf(path)


def arrays_of(file: GGUFFile) -> list[np.ndarray]:
    """Every array of a file, at any depth."""
    arrays = [tensor.data for tensor in file.tensors.values()]
    pending = list(file.metadata.values())
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, np.ndarray):
            arrays.append(value)
    return arrays


def check_views(file: GGUFFile, size: int) -> None:
    """Every array is read-only, and a copy or inside the file's `size` bytes."""
    for array in arrays_of(file):
        assert not array.flags.writeable
        if array.base is not None:
            assert isinstance(array.base, np.ndarray)
            assert array.base.size == size
            low, high = np.lib.array_utils.byte_bounds(array)
            first, last = np.lib.array_utils.byte_bounds(array.base)
            assert array.size == 0 or first <= low <= high <= last
