"""Where the largest logit of each row is, found by several threads: what greedy sampling costs beside a GPU, where a
step takes a few milliseconds and one core needs one of them for 64 rows of 150,000 logits.

The threads sleep outside Python, so that a busy interpreter does not hold them up. It knows no model and no request.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .kylin.jit import inlined, kernel
from .kylin.native import atomic_add, atomic_load, atomic_store, carray, pointer
from .kylin.team import CAN_ENLIST, Team, begin_step, wait_for_count, wait_for_step

_INFINITY = 0x7F800000  # its bits
_BLOCK = 1024  # logits whose maximum is taken before it is looked for
_CHUNK = 16 * _BLOCK  # what a thread takes at a time
_FEW = 2**18  # logits that are not worth waking threads for
# Places in a job, each on a cache line of its own: chunks that nobody has taken, and all that were ever finished.
_LEFT, _FINISHED, _JOB = 8, 16, 24


class RowArgmax:
    """`logits.argmax(axis=1)` on `num_threads` threads, for at most `max_rows` rows of `vocab_size`."""

    def __init__(self, num_threads: int, max_rows: int, vocab_size: int) -> None:
        self._team = Team(num_threads if CAN_ENLIST else 1)
        num_chunks = max_rows * -(-vocab_size // _CHUNK)
        self._job = np.zeros(_JOB, np.int64)  # address, rows, columns
        self._found: tuple[Any, ...] = (np.zeros(num_chunks, np.float32), np.zeros(num_chunks, np.int64))
        self._team.enlist(_serve, (self._job, *self._found))

    def __call__(self, logits: NDArray[np.float32]) -> NDArray[np.int64]:
        """int64[R]: the first id with the largest logit of each row of float32[R, V], contiguous; the first NaN where
        there is one."""
        if logits.size < _FEW:
            few: NDArray[np.int64] = logits.argmax(axis=1)
            return few
        assert logits.flags.c_contiguous
        self._job[:3] = logits.ctypes.data, *logits.shape
        ids = np.empty(len(logits), np.int64)
        _find(self._team.state, self._team.num_threads, self._job, *self._found, ids)
        return ids

    def close(self) -> None:
        """Ends the threads."""
        self._team.close()


@kernel
def _find(state, num_members, job, values, places, ids):
    """Waits for the chunks and not for the members: the system may take milliseconds to wake one of them."""
    num_chunks = (job[2] + _CHUNK - 1) // _CHUNK
    finished = atomic_load(job.ctypes.data + 8 * _FINISHED) + job[1] * num_chunks
    atomic_store(job.ctypes.data + 8 * _LEFT, job[1] * num_chunks)
    begin_step(state, num_members)
    _search(job, values, places)
    wait_for_count(job.ctypes.data + 8 * _FINISHED, finished)
    for row in range(job[1]):
        best = row * num_chunks
        for chunk in range(best + 1, best + num_chunks):
            value = values[chunk]
            if values[best] == values[best] and not value <= values[best]:
                best = chunk
        ids[row] = places[best]


@kernel
def _serve(state, member, job, values, places):
    while wait_for_step(state, member):
        _search(job, values, places)


@inlined
def _search(job, values, places):
    """Value and place of the largest logit of each chunk that no other member has taken.

    A member may come late, into another job than it was woken for. What the job is it reads behind its claim only:
    until a claimed chunk is finished the job stays, and without a claim it is none of the member's business.
    """
    left, finished = job.ctypes.data + 8 * _LEFT, job.ctypes.data + 8 * _FINISHED
    item = atomic_add(left, -1) - 1
    while item >= 0:
        num_columns = job[2]
        num_chunks = (num_columns + _CHUNK - 1) // _CHUNK
        row, chunk = item // num_chunks, item % num_chunks
        begin = chunk * _CHUNK
        count = min(_CHUNK, num_columns - begin)
        address = job[0] + 4 * (row * num_columns + begin)
        logits, bits = carray(pointer(address), count, np.float32), carray(pointer(address), count, np.int32)
        best, place = np.float32(-np.inf), 0
        for block in range(0, count, _BLOCK):
            largest = _largest(bits[block : block + _BLOCK])
            if not largest <= best:
                best, place = largest, block
                if best != best:
                    break
        # Of equal ones the first; 0 equals -0, and a NaN only itself.
        while logits[place] != best and (best == best or logits[place] == logits[place]):
            place += 1
        values[item], places[item] = best, begin + place
        atomic_add(finished, 1)
        item = atomic_add(left, -1) - 1


@inlined
def _largest(bits):
    """The largest float32 of those with these `bits`, NaN where there is one.

    As integers they are compared by vector instructions: a float's order is that of its bits, once those below the
    sign are turned over where it is set; then NaNs lie beyond the infinities, at either end.
    """
    top, low = np.int32(-(2**31)), np.int32(2**31 - 1)
    for i in range(len(bits)):
        key = np.int32(bits[i] ^ ((bits[i] >> 31) & 0x7FFFFFFF))
        top = key if key > top else top
        low = key if key < low else low
    if top > _INFINITY or low < -_INFINITY - 1:
        return np.float32(np.nan)
    found = np.empty(1, np.int32)
    found[0] = top ^ ((top >> 31) & 0x7FFFFFFF)
    return found.view(np.float32)[0]
