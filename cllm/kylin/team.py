"""Threads that share the rows of one operation. It knows neither arrays nor kernels.

Work is cut into contiguous ranges. Which thread takes which range never changes a result, since every output
element is made by one thread in one fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait


class Team:
    """`num_threads` threads: the caller and `num_threads - 1` helpers."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._helpers = ThreadPoolExecutor(num_threads - 1, "cllm-kylin") if num_threads > 1 else None

    def run(self, work: Callable[[int, int], None], num_items: int) -> None:
        """Calls `work(begin, end)` over ranges that together cover `range(num_items)`; returns when all are done.

        An exception of any range is raised here, after the others have ended.
        """
        parts = min(self.num_threads, num_items)
        if self._helpers is None or parts <= 1:
            work(0, num_items)
            return
        bounds = [num_items * part // parts for part in range(parts + 1)]
        futures = [self._helpers.submit(work, bounds[part], bounds[part + 1]) for part in range(1, parts)]
        try:
            work(bounds[0], bounds[1])
        finally:
            wait(futures)
        for future in futures:
            future.result()

    def close(self) -> None:
        """Ends the helpers."""
        if self._helpers is not None:
            self._helpers.shutdown()
