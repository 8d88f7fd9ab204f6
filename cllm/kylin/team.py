"""Threads that share the work of one operation or of one whole step. It knows neither arrays nor kernels.

Which thread takes which piece never changes a result, since every output element is made by one thread in one
fixed order. There are two ways to share. `Team.run` hands Python callables to a pool: an operation at a time.
`Team.enlist` starts threads that stay in compiled code: each waits in `wait_for_step`, does its share of a step
between barriers, and waits again, so that a step of hundreds of phases never touches Python or its lock.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .jit import inlined, kernel
from .memory import zeros
from .native import (
    atomic_add,
    atomic_load,
    atomic_store,
    cycles,
    pause,
    sched_yield,
    sem_init,
    sem_post,
    sem_trywait,
    sem_wait,
)

CAN_ENLIST = sys.platform == "linux"  # unnamed semaphores

_Work = tuple[Callable[[int, int], None], int, int]
_LINE = 8  # int64s of a cache line: what different threads write stands on different lines
# Places in a team's state: whether it ends; who takes part in the step; barriers that member 0 had come to before it;
# cycles waited; the step that members were called for; steps begun; and a line for each member: the number of the last
# barrier that it came to, and its semaphore.
_STOP, _PRESENT, _BEFORE, _WAITED, _CALLED = range(5)
_BEGUN, _MEMBERS = _LINE, 2 * _LINE
_SEMAPHORE = 1  # behind the number
_SPINS = 1000  # before a waiting thread offers its core to others
_POLLS = 1400  # before a member sleeps: 0.2 ms, longer than Python takes between two steps


class Team:
    """`num_threads` threads: the caller and `num_threads - 1` helpers."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._inboxes: list[SimpleQueue[_Work | None]] = []
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self.state = zeros((_MEMBERS + _LINE * num_threads,), np.int64)
        self._helpers: list[threading.Thread] = []
        self._members: list[threading.Thread] = []
        threads = (self._inboxes, self._helpers, self._members)
        self._end = weakref.finalize(self, _end_threads, self.state, *threads)

    def run(self, work: Callable[[int, int], None], num_items: int) -> None:
        """Calls `work(begin, end)` over ranges that together cover `range(num_items)`; returns when all are done.

        An exception of any range is raised here, after the others have ended.
        """
        parts = min(self.num_threads, num_items)
        if parts <= 1:
            work(0, num_items)
            return
        self._start_helpers()
        bounds = [num_items * part // parts for part in range(parts + 1)]
        for part in range(1, parts):
            self._inboxes[part - 1].put((work, bounds[part], bounds[part + 1]))
        errors: list[BaseException | None] = []
        try:
            work(bounds[0], bounds[1])
        finally:
            errors += [self._done.get() for _ in range(1, parts)]
        for error in errors:
            if error is not None:
                raise error

    def _start_helpers(self) -> None:
        for number in range(len(self._inboxes) + 1, self.num_threads):
            inbox: SimpleQueue[_Work | None] = SimpleQueue()
            self._inboxes.append(inbox)
            name = f"cllm-kylin-helper-{number}"
            helper = threading.Thread(target=_help, args=(inbox, self._done), name=name, daemon=True)
            self._helpers.append(helper)
            helper.start()

    def enlist(self, serve: Callable[..., None], arguments: Sequence[Any]) -> None:
        """Starts `serve(state, member, *arguments)` for the members 1, 2, .. of the team, once.

        `serve` is a kernel of the form `while wait_for_step(state, member) > 0: ...; barrier(state, member, num)`. The
        caller is member 0, which begins each step with `begin_step`.
        """
        if self._members:
            raise ValueError("the team has been enlisted already")
        _init_semaphores(self.state, self.num_threads)
        for member in range(1, self.num_threads):
            # A daemon, so that interpreter exit does not wait for it: `_end` ends it then.
            thread = threading.Thread(
                target=serve, args=(self.state, member, *arguments), name=f"cllm-kylin-{member}", daemon=True
            )
            self._members.append(thread)
            thread.start()

    def close(self) -> None:
        """Ends the helpers."""
        self._end()


def _help(inbox: SimpleQueue[_Work | None], done: SimpleQueue[BaseException | None]) -> None:
    """A helper of `Team.run`: takes work until there is none to come."""
    while (item := inbox.get()) is not None:
        work, begin, end = item
        try:
            work(begin, end)
            done.put(None)
        except BaseException as error:  # the caller's to raise
            done.put(error)


def _end_threads(
    state: NDArray[np.int64],
    inboxes: list[SimpleQueue[_Work | None]],
    helpers: list[threading.Thread],
    members: list[threading.Thread],
) -> None:
    for inbox in inboxes:
        inbox.put(None)
    if members:
        state[_STOP] = 1
        begin_step(state, len(members) + 1)
    for thread in [*helpers, *members]:
        if thread is not threading.current_thread():  # on which the last reference to the team may have gone
            thread.join()


@kernel
def _init_semaphores(state, num_members):  # type: ignore[no-untyped-def]
    for member in range(num_members):
        sem_init(_line_of(state, member) + 8 * _SEMAPHORE, np.int32(0), np.uint32(0))


@inlined
def _line_of(state, member):  # type: ignore[no-untyped-def]
    return state.ctypes.data + 8 * (_MEMBERS + _LINE * member)


@inlined
def call_members(state, num_members):  # type: ignore[no-untyped-def]
    """Wakes the members 1, 2, .. of a team below `num_members`: they and the caller take part in the next step. Until
    `start_step`, which must follow, the caller may prepare it: one that sleeps takes 30 to 45 microseconds to wake."""
    state[_PRESENT] = num_members
    state[_BEFORE] = atomic_load(_line_of(state, 0))
    state[_CALLED] = atomic_load(state.ctypes.data + 8 * _BEGUN) + 1
    for member in range(1, num_members):
        sem_post(_line_of(state, member) + 8 * _SEMAPHORE)


@inlined
def start_step(state):  # type: ignore[no-untyped-def]
    """Lets the members begin. What was written before is visible to them."""
    atomic_add(state.ctypes.data + 8 * _BEGUN, 1)


@kernel
def begin_step(state, num_members):  # type: ignore[no-untyped-def]
    """`call_members` and `start_step`."""
    call_members(state, num_members)
    start_step(state)


@kernel
def wait_for_step(state, member):  # type: ignore[no-untyped-def]
    """Waits, outside Python, until a step begins; how many take part in it, 0 when the team ends instead.

    It sleeps, but not at once: to wake a thread takes its caller 30 microseconds, and the thread longer.
    """
    line = _line_of(state, member)
    semaphore, polls = line + 8 * _SEMAPHORE, 0
    while (sem_trywait(semaphore) if polls < _POLLS else sem_wait(semaphore)) != 0:
        polls += 1  # a signal may have woken it, too
        if polls < _SPINS:
            pause()
        elif polls < _POLLS:
            sched_yield()
    wait_for_count(state.ctypes.data + 8 * _BEGUN, state[_CALLED])
    atomic_store(line, state[_BEFORE])
    return 0 if state[_STOP] else state[_PRESENT]


@inlined
def barrier(state, member, num_members):  # type: ignore[no-untyped-def]
    """Returns when all who take part have come here as often as this one; what they wrote is visible then.

    Each writes to a line of its own, and goes on without waiting for the write: a counter that all add to costs the way
    to another core and back before the first look at it.
    """
    if num_members == 1:
        return
    line = _line_of(state, member)
    number = atomic_load(line) + 1
    atomic_store(line, number)
    for turn in range(1, num_members):
        waited = wait_for_count(_line_of(state, (member + turn) % num_members), number)
        if waited:
            atomic_add(state.ctypes.data + 8 * _WAITED, waited)


@inlined
def take_waited(state):  # type: ignore[no-untyped-def]
    """Cycles that members have waited at barriers since the last call, but for waits of some microseconds."""
    waited, state[_WAITED] = state[_WAITED], 0
    return waited


@inlined
def wait_for_count(address, target):  # type: ignore[no-untyped-def]
    """Returns when the counter at an address has come to `target`: cycles since others were offered the core, or 0."""
    spins, since = 0, 0
    while atomic_load(address) < target:
        spins += 1
        if spins < _SPINS:
            pause()
        else:
            if spins == _SPINS:
                since = cycles()
            sched_yield()
    return cycles() - since if spins >= _SPINS else 0
