"""How many members take part in a step: fewer where waiting holds them up, if that is faster; all again after it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cllm.kylin.attendance import FEW_TOKENS, LONGEST_REST, REST, TRIAL, WINDOW, Attendance

Machine = Callable[[int], tuple[int, int]]  # members -> time of a step, time waited by all together


def run(attendance: Attendance, machine: Machine, num_steps: int, num_tokens: int = 1) -> list[int]:
    """The number of members in each step."""
    present = []
    for _ in range(num_steps):
        present.append(attendance.of_step(num_tokens))
        time, waited = machine(present[-1])
        if waited or attendance.is_watching:
            attendance.learn(num_tokens, time, waited)
    return present


def quiet(present: int) -> tuple[int, int]:
    return 1000 // present, 5


def crowded(num_others: int, num_cores: int) -> Machine:
    """Whoever shares a core has all wait for as long again."""

    def machine(present: int) -> tuple[int, int]:
        if present + num_others <= num_cores:
            return 1000 // present, 0
        return 2200 // present, 1000 // present * (present - 1)

    return machine


@pytest.mark.parametrize("num_members", [1, 2, 5])
def test_all_are_there_where_nobody_waits(num_members: int) -> None:
    assert set(run(Attendance(num_members), quiet, 1000)) == {num_members}


@pytest.mark.parametrize(("num_members", "num_others", "expected"), [(2, 1, 1), (8, 1, 7), (8, 3, 4)])
def test_some_stay_away_from_a_crowded_machine(num_members: int, num_others: int, expected: int) -> None:
    attendance = Attendance(num_members)
    present = run(attendance, crowded(num_others, num_members), 3000)
    assert present[:WINDOW] == [num_members] * WINDOW
    assert present[WINDOW : WINDOW + TRIAL] == [num_members - 1] * TRIAL
    assert present[1000:].count(expected) > 0.95 * 2000
    # Then it is quiet again.
    present = run(attendance, quiet, LONGEST_REST + 1000)
    assert set(present[LONGEST_REST + 1 :]) == {num_members}
    # What was learnt of the time before counts no more.
    present = run(attendance, crowded(1, num_members), 200)
    first = present.index(num_members - 1)
    assert present[first : first + TRIAL + REST] == [num_members - 1] * (TRIAL + REST)
    assert present[first + TRIAL + REST] == num_members


def test_who_does_not_help_by_staying_away_comes_back() -> None:
    """Waiting that has other reasons, as where three heads are shared by two members."""
    present = run(Attendance(2), lambda present: (1000 // present, 400 * (present - 1)), 3000)
    assert present[WINDOW : WINDOW + TRIAL] == [1] * TRIAL
    assert present.count(2) > 0.97 * 3000


def test_a_moment_of_waiting_is_no_reason() -> None:
    attendance = Attendance(2)
    for number in range(1000):
        assert attendance.of_step(1) == 2
        attendance.learn(1, *(crowded(1, 2) if number % 3 == 0 else quiet)(2))


def test_prompts_are_for_all_and_other_batches_are_not_compared() -> None:
    attendance = Attendance(2)
    assert set(run(attendance, crowded(1, 2), 100, FEW_TOKENS + 1)) == {2}
    run(attendance, crowded(1, 2), WINDOW)
    assert (attendance.of_step(1), attendance.of_step(FEW_TOKENS + 1)) == (1, 2)
    attendance.learn(1, 900, 0)
    attendance.learn(2, 900, 0)  # the batch has changed during the trial
    assert attendance.of_step(2) == 2
    for number in range(100):  # it never stays the same for long enough
        assert attendance.of_step(1 + number % 2) == 2
        attendance.learn(1 + number % 2, *crowded(1, 2)(2))
