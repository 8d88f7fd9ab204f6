"""Teams: work is shared out once, members meet at barriers, and nothing is left behind when a team ends."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numba import njit, types

from cllm.kylin.native import cycles
from cllm.kylin.team import (
    CAN_ENLIST,
    Team,
    barrier,
    begin_step,
    call_members,
    start_step,
    take_waited,
    wait_for_step,
)

usleep = types.ExternalFunction("usleep", types.int32(types.uint32))
NUM_PHASES = 50
needs_enlisting = pytest.mark.skipif(not CAN_ENLIST, reason="threads cannot be parked on this system")


@njit(nogil=True)
def work(state, member, num_members, counts):  # type: ignore[no-untyped-def]
    """Each phase, every member adds the sum of all that the phase before wrote: wrong if one runs ahead."""
    for phase in range(1, NUM_PHASES):
        total = 0
        for other in range(num_members):
            total += counts[phase - 1, other]
        counts[phase, member] = total // num_members + 1
        barrier(state, member, num_members)


@njit(nogil=True)
def serve(state, member, counts):  # type: ignore[no-untyped-def]
    num_members = wait_for_step(state, member)
    while num_members:
        work(state, member, num_members, counts)
        num_members = wait_for_step(state, member)


@njit(nogil=True)
def lead(state, num_members, counts):  # type: ignore[no-untyped-def]
    begin_step(state, num_members)
    work(state, 0, num_members, counts)


@njit(nogil=True)
def lead_slowly(state, num_members, counts):  # type: ignore[no-untyped-def]
    """As `lead`, with what the first phase adds up written long after the members were called."""
    call_members(state, num_members)
    usleep(np.uint32(20_000))
    counts[0] = 10
    start_step(state)
    work(state, 0, num_members, counts)


def enlisted(num_threads: int) -> tuple[Team, np.ndarray]:
    team, counts = Team(num_threads), np.zeros((NUM_PHASES, 8), np.int64)
    lead(np.zeros(64, np.int64), 1, counts)  # compiled before a thread needs it
    team.enlist(serve, (counts,))
    return team, counts


def check_steps(team: Team, counts: np.ndarray, num_steps: int = 20) -> None:
    for step in range(num_steps):
        counts[...] = 0
        present = team.num_threads - step % team.num_threads  # the others stay away
        lead(team.state, present, counts)
        expected = np.repeat(np.arange(NUM_PHASES)[:, None], present, axis=1)
        np.testing.assert_array_equal(counts[:, :present], expected)
        assert not counts[:, present:].any()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    gc.collect()
    assert not {t for t in set(threading.enumerate()) - before if t.name.startswith("cllm-kylin")}


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("num_items", [0, 1, 2, 7])
def test_run_covers_every_item_once(num_threads: int, num_items: int) -> None:
    team, seen = Team(num_threads), []
    team.run(lambda begin, end: seen.extend(range(begin, end)), num_items)
    team.close()
    assert sorted(seen) == list(range(num_items))


def test_run_raises_what_a_helper_raised() -> None:
    def fail(begin: int, end: int) -> None:
        if begin:
            raise ValueError("in a helper")

    team = Team(2)
    with pytest.raises(ValueError, match="in a helper"):
        team.run(fail, 2)
    team.run(lambda begin, end: None, 2)
    team.close()


@needs_enlisting
@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_members_meet_at_every_barrier(num_threads: int) -> None:
    team, counts = enlisted(num_threads)
    check_steps(team, counts)
    team.close()


@needs_enlisting
def test_members_that_were_called_wait_for_the_start() -> None:
    team, counts = enlisted(3)
    lead_slowly(np.zeros(64, np.int64), 1, counts.copy())
    for _ in range(3):
        counts[...] = 0
        lead_slowly(team.state, 3, counts)
        expected = np.repeat(10 + np.arange(NUM_PHASES)[:, None], 3, axis=1)
        np.testing.assert_array_equal(counts[:, :3], expected)
    team.close()


@needs_enlisting
def test_teams_do_not_disturb_each_other() -> None:
    """Two engines, each with its own calling thread, and more threads than cores."""
    teams = [enlisted(3) for _ in range(2)]
    threads = [threading.Thread(target=check_steps, args=team) for team in teams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for team, counts in teams:
        check_steps(team, counts, 1)
        team.close()


@needs_enlisting
def test_a_forgotten_team_ends() -> None:
    team, counts = enlisted(2)
    check_steps(team, counts, 1)
    del team  # `no_thread_is_left` looks


@needs_enlisting
def test_a_team_closes_twice_but_enlists_once() -> None:
    team, counts = enlisted(2)
    with pytest.raises(ValueError, match="enlisted already"):
        team.enlist(serve, (counts,))
    team.close()
    team.close()


@needs_enlisting
def test_interpreter_exit_ends_a_team() -> None:
    code = """
from test_team import check_steps, enlisted
team, counts = enlisted(2)
check_steps(team, counts, 2)
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=Path(__file__).parent,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    assert (done.stdout, done.stderr) == ("done\n", "")


@njit(nogil=True)
def late(state, member):  # type: ignore[no-untyped-def]
    num_members = wait_for_step(state, member)
    while num_members:
        usleep(np.uint32(20_000))
        barrier(state, member, num_members)
        num_members = wait_for_step(state, member)


@njit(nogil=True)
def lead_late(state, num_members):  # type: ignore[no-untyped-def]
    begin_step(state, num_members)
    began = cycles()
    barrier(state, 0, num_members)
    return cycles() - began, take_waited(state)


@needs_enlisting
def test_long_waits_are_counted() -> None:
    team = Team(2)
    lead_late(np.zeros(64, np.int64), 1)
    team.enlist(late, ())
    for _ in range(2):
        time, waited = lead_late(team.state, 2)
        assert 0.5 * time < waited <= time
    assert lead_late(team.state, 1)[1] == 0  # nobody to wait for
    team.close()
