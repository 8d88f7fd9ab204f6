"""Arrays that begin a cache line: a vector that lies across two of them takes two loads. It knows no kernel."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

LINE_BYTES = 64


def zeros(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """As `np.zeros`; of a large one the system hands out memory as it is first used."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(num_bytes + LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % LINE_BYTES
    return memory[start : start + num_bytes].view(dtype).reshape(shape)
