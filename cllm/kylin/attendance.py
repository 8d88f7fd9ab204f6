"""How many members of a team take part in a step: fewer where other processes keep some of them from their cores.

Members meet hundreds of times a step, so one that the system does not run holds all of them up: beside one busy process
two members on two cores made half of their speed, and one alone makes more. It knows times, not threads or work.
"""

from __future__ import annotations

from statistics import median

FEW_TOKENS = 32  # steps of more are left alone: a trial would cost more than it can bring
WINDOW = 8  # steps that are looked at, from one that was held up on, before anything is tried
TRIAL = 4  # steps with fewer members
REST = 32  # steps for which what a trial has shown holds; twice as many each further time
LONGEST_REST = 256
_IS_LONG = 0.1  # waiting, as a share of a step


class Attendance:
    """Of a team of `num_members`. What a step computes must not depend on their number.

    Where most steps are held up, a few run with one member less. If they took less time it stays away for a while;
    otherwise more of them do the next time.
    """

    def __init__(self, num_members: int) -> None:
        self._all = self._present = num_members
        self._num_tokens = 0
        self._recent: list[tuple[int, bool]] = []  # time and whether held up, of a window or a trial
        self._before: tuple[int, float] | None = None  # during a trial: members and time before it
        self._fewer = 1  # by which the next trial has fewer members
        self._rest = 0  # steps for which the last trial still holds
        self._last_rest = 0  # as it began; 0 where most steps since were not held up

    def of_step(self, num_tokens: int) -> int:
        """How many members are to take part in a step of so many tokens."""
        return self._present if num_tokens <= FEW_TOKENS else self._all

    @property
    def is_watching(self) -> bool:
        """Whether it is to learn of steps, too, in which nobody waited."""
        return bool(self._recent or self._before or self._last_rest)

    def learn(self, num_tokens: int, time: int, waited: int) -> None:
        """Such a step took `time`, in which the members together waited for each other for `waited`."""
        is_held_up = waited > _IS_LONG * time * (self._present - 1)
        if num_tokens > FEW_TOKENS or not (is_held_up or self.is_watching):
            return
        if self._rest:
            self._rest -= 1
            if not self._rest:
                self._present = self._all
            return
        if num_tokens != self._num_tokens:  # not to be compared with those before
            self._num_tokens = num_tokens
            self._end_trial(has_helped=False)
        self._recent.append((time, is_held_up))
        if self._before is not None:
            if len(self._recent) == TRIAL:
                self._rest = self._last_rest = min(max(REST, 2 * self._last_rest), LONGEST_REST)
                self._end_trial(has_helped=self._usual_time() < self._before[1])
        elif len(self._recent) == WINDOW:
            self._look_back()

    def _look_back(self) -> None:
        """Begins a trial where most steps were held up."""
        if sum(is_held_up for _, is_held_up in self._recent) >= WINDOW * 3 // 4:
            self._before = self._present, self._usual_time()
            self._present = max(self._present - self._fewer, 1)
        else:
            self._last_rest, self._fewer = 0, 1
        self._recent.clear()

    def _end_trial(self, *, has_helped: bool) -> None:
        if self._before is not None and not has_helped:
            self._present = self._before[0]
            self._fewer = min(2 * self._fewer, self._all - 1)
        self._before = None
        self._recent.clear()

    def _usual_time(self) -> float:
        return median(time for time, _ in self._recent)
