"""The measurement: paired rounds in shuffled order, a guard against drift, losses that add up.

It knows rungs as things that can be run, and nothing of what they run.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .load import Load, Outcome
from .rig import Rung

CONFIDENCE = 0.95
_RESAMPLES = 2000


class Estimate(NamedTuple):
    """A value with its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(slots=True)
class Climb:
    """What was measured: `outcomes[i]` of `rungs[i]`, one a round; `guard`: speeds of rung 0 at start, middle and end.

    Rungs come in ascending order; those without a number (other programs) after the others. The bootstrap of each
    interval resamples whole rounds, so that it sees that the rungs of a round were measured together.
    """

    load: Load
    rungs: list[Rung]
    outcomes: list[list[Outcome]]
    occupancy: list[list[float]] = field(default_factory=list)
    guard: list[float] = field(default_factory=list)

    @property
    def drift(self) -> float:
        """How far the guard's speeds lie apart, as a share of their median."""
        return (max(self.guard) - min(self.guard)) / statistics.median(self.guard)

    def speeds(self, index: int) -> NDArray[np.float64]:
        """Output tokens a second in each round."""
        return np.array([outcome.tokens_per_s for outcome in self.outcomes[index]])

    def speed(self, index: int) -> Estimate:
        """Output tokens a second: the median over rounds."""
        return _estimate(lambda rounds: np.median(self.speeds(index)[rounds], axis=-1), self._num_rounds)

    def ratio(self, first: int, second: int) -> Estimate:
        """The median over rounds of the speed of one rung over that of another in the same round."""
        return _estimate(self._median(self.speeds(first) / self.speeds(second)), self._num_rounds)

    def loss(self, index: int) -> Estimate:
        """Against rung 0, as a share of its speed: 1 - ratio."""
        return self._difference(self._losses(index), np.zeros(self._num_rounds))

    def loss_below(self, index: int) -> Estimate:
        """Against the rung below, as a share of rung 0's speed, so that the losses of all rungs add up."""
        return self._difference(self._losses(index), self._losses(index - 1))

    def microseconds(self, index: int, base: int) -> Estimate:
        """Time a token that the rung `index` takes longer than `base`."""
        here, below = (1e6 / self.speeds(i) - 1e6 / self.speeds(0) for i in (index, base))
        return self._difference(here, below)

    @property
    def drift_us(self) -> float:
        """The drift as time a token."""
        return self.drift * 1e6 / self.speed(0).value

    @property
    def _num_rounds(self) -> int:
        return len(self.outcomes[0])

    def _losses(self, index: int) -> NDArray[np.float64]:
        return 1 - self.speeds(index) / self.speeds(0)

    def _difference(self, here: NDArray[np.float64], below: NDArray[np.float64]) -> Estimate:
        # The difference of medians, not the median of differences, which would not add up.
        first, second = self._median(here), self._median(below)
        return _estimate(lambda rounds: first(rounds) - second(rounds), self._num_rounds)

    @staticmethod
    def _median(values: NDArray[np.float64]) -> Callable[[NDArray[np.int64]], NDArray[np.float64]]:
        return lambda rounds: np.median(values[rounds], axis=-1)


def _estimate(statistic: Callable[[NDArray[np.int64]], NDArray[np.float64]], num_rounds: int) -> Estimate:
    """The statistic of all rounds, and its percentile bootstrap, drawn from a fixed seed."""
    resamples = np.random.default_rng(0).integers(0, num_rounds, (_RESAMPLES, num_rounds))
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(statistic(resamples), [tail, 100 - tail])
    value = statistic(np.arange(num_rounds)[None])
    return Estimate(float(value[0]), float(low), float(high))


def climb(
    rungs: Sequence[Rung],
    load: Load,
    rounds: int,
    seed: int,
    *,
    warm_up: Callable[[Rung], list[float]],
    tell: Callable[[str], None] = lambda text: None,
) -> Climb:
    """Runs every rung once to warm up, then `rounds` times, each round in another order, drawn from `seed`.

    `warm_up(rung)` runs it and returns its occupancy. `tell` is told how far it is.
    """
    found = Climb(load, list(rungs), [[] for _ in rungs])
    for rung in rungs:
        tell(f"warming up: {rung.name}")
        found.occupancy.append(warm_up(rung))
    order, draw = list(range(len(rungs))), random.Random(seed)

    def guard() -> None:
        found.guard.append(rungs[0].run().tokens_per_s)

    guard()
    for number in range(rounds):
        tell(f"round {number + 1} of {rounds}")
        draw.shuffle(order)
        for place, index in enumerate(order):
            if number == rounds // 2 and place == len(order) // 2 * (rounds % 2):
                guard()  # the middle of the run: within the middle round where their number is odd
            found.outcomes[index].append(rungs[index].run())
    guard()
    return found
