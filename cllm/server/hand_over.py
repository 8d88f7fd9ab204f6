"""What a step brings on its way from the engine's thread to the event loop. It knows updates, and nothing of HTTP.

Steps of a real model are handed over one by one, at once. Quicker ones share a dispatch, in which each answer has one
piece: events and writes cost more than tokens, and whatever one thread made another core must fetch.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

DISPATCH_EVERY_S = 0.002  # for steps that follow each other faster

# The engine sleeps so long where the event loop has not come since it was called a step ago. An engine that computes
# in Python without a pause (on a mock) keeps it out: CPython has a thread let go after the switch interval, but counts
# anew whenever NumPy lets go for a moment. With real models the loop has its turn while the backend computes.
YIELD_S = 0.0003


class HandOver:
    """Calls `take` on `loop` for each update given to `deliver`, which any one thread may call."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[Any], None]) -> None:
        self._loop, self._take = loop, take
        self._lock = threading.Lock()  # guards all that follows
        self._waiting: dict[tuple[str, int | None], Any] = {}  # updates by request and choice
        self._num_steps = 0  # that brought them
        self._is_called = False  # whether a dispatch has been asked for and has not come yet
        self._timer: asyncio.TimerHandle | None = None  # of one that comes by itself
        self._last_dispatch = 0.0

    def deliver(self, updates: list[Any]) -> None:
        """Takes what a step brought. A piece becomes part of the one before it, where that still waits."""
        with self._lock:
            for update in updates:
                key = update.request_id, getattr(update, "index", None)  # a whole output has no index
                waiting = self._waiting.setdefault(key, update)
                if waiting is not update:
                    waiting.absorb(update)
            self._num_steps += 1
            was_called = self._is_called
            self._is_called = was_called or self._timer is None or not self._is_soon()
        if was_called:
            time.sleep(YIELD_S)
        elif self._is_called:
            self._loop.call_soon_threadsafe(self._dispatch)

    def _dispatch(self) -> None:
        with self._lock:
            is_quick = self._num_steps > 1 or (self._num_steps == 1 and self._is_soon())
            if self._num_steps:
                self._last_dispatch = time.monotonic()
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_later(DISPATCH_EVERY_S, self._dispatch) if is_quick else None
            waiting, self._waiting = self._waiting, {}
            self._num_steps, self._is_called = 0, False
        for update in waiting.values():
            self._take(update)

    def _is_soon(self) -> bool:
        """Whether the last dispatch that brought something was just now."""
        return time.monotonic() < self._last_dispatch + DISPATCH_EVERY_S
