"""What a step brings on its way from the engine's thread to the event loop. It knows updates, and nothing of HTTP.

Steps of a real model are handed over one by one, at once. What quicker ones bring waits in the engine, where each
answer's tokens become one piece: events and writes cost more than tokens, and whatever one thread made another core
must fetch.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

EVERY_S = 0.002  # for steps that follow each other faster

# The engine sleeps so long where the event loop has not come since it was called a step ago. An engine that computes
# in Python without a pause (on a mock) keeps it out: CPython has a thread let go after the switch interval, but counts
# anew whenever NumPy lets go for a moment. With real models the loop has its turn while the backend computes.
YIELD_S = 0.0003


class HandOver:
    """Calls `take` on `loop` for each update given to `deliver`; both methods are for one thread, the engine's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[Any], None]) -> None:
        self._loop, self._take = loop, take
        self._lock = threading.Lock()  # guards the next two
        self._waiting: list[Any] = []
        self._is_called = False  # whether a dispatch has been asked for and has not come yet
        self._delivered_at = 0.0

    def may_wait(self) -> bool:
        """Whether the last updates have been delivered just now. Gives the loop its turn where it needs it."""
        if self._is_called:
            time.sleep(YIELD_S)
        return time.monotonic() < self._delivered_at + EVERY_S

    def deliver(self, updates: list[Any]) -> None:
        """Takes what a step brought."""
        with self._lock:
            self._waiting += updates
            was_called, self._is_called = self._is_called, True
        self._delivered_at = time.monotonic()
        if not was_called:
            self._loop.call_soon_threadsafe(self._dispatch)

    def _dispatch(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
            self._is_called = False
        for update in waiting:
            self._take(update)
