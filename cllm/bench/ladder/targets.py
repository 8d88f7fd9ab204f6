"""What the ladder is measured against: the predecessor's figures, its goals, and the targets of `--check`."""

from __future__ import annotations

from dataclasses import dataclass

from .measure import Climb

# What the predecessor measured at the stage that each rung corresponds to, in output tokens a second.
PREDECESSOR = {
    0: "120.2 backend",
    2: "105.2 batch processor; 49, later 81 batch manager",
    3: "107.8 executor",
    4: "111.6 (at first a crash; 105-115 going around it)",
    5: "108.4 engine",
    7: "105.2 endpoint, 103.5 handler",
    8: "47-55",
}
GPU_RUN = "its GPU run of 160 requests, 5 at a time: 52.6 tokens/s, 4.7 s a request, 160 of 160 answered"
# One at a time where llama-bench had 55.3 and 133.6 tokens/s.
ONE_AT_A_TIME = "one at a time it ran 37.1 tokens/s (CPU; llama-bench 55.3) and 25.6 (GPU; llama-bench 133.6)"
GOAL_TOKENS_PER_S = 80.0
GOAL_OF_LLAMA_BENCH = 0.8

LLAMA_BENCH = "llama-bench"
BATCHED_BENCH = "llama-batched-bench"
LLAMA_SERVER = "llama-server"


@dataclass(frozen=True, slots=True)
class Target:
    """The speed of rung `rung` is to be at least `least` times that of `base`: a rung's number or a program's name."""

    rung: int
    base: int | str
    least: float


def targets_for(backend: str, concurrency: int, *, is_gpu: bool) -> list[Target]:
    """Those that are set for this backend and load."""
    if is_gpu:
        batched = {8: 0.90, 64: 0.80}.get(concurrency)
        found = [Target(6, BATCHED_BENCH, batched)] if batched else []
        return found + ([Target(9, 6, 0.85)] if concurrency == 64 else [])
    if backend not in ("llama", "kylin") or concurrency not in (1, 8):
        return []
    of_raw = 0.95 if backend == "llama" or concurrency == 1 else 0.93
    found = [Target(8, 0, of_raw), Target(8, LLAMA_SERVER, 1.0 if backend == "llama" else 2.5)]
    if concurrency == 8:
        found += [Target(8, 6, 0.97), Target(9, 6, 0.95)]
        if backend == "llama":
            found.insert(0, Target(6, 0, 0.97))
    return found


def index_of(climb: Climb, which: int | str) -> int | None:
    """The place of a rung or a program; None where it was not measured."""
    for index, rung in enumerate(climb.rungs):
        if which in (rung.number, rung.name):
            return index
    return None


def judge(climb: Climb, targets: list[Target]) -> list[dict[str, object]]:
    """For each target its ratio and whether it is met; None where the other program was not measured."""
    found: list[dict[str, object]] = []
    for target in targets:
        rung, base = index_of(climb, target.rung), index_of(climb, target.base)
        ratio = climb.ratio(rung, base) if rung is not None and base is not None else None
        found.append(
            {
                "rung": target.rung,
                "base": target.base,
                "least": target.least,
                "ratio": None if ratio is None else ratio._asdict(),
                "is_met": None if ratio is None else ratio.value >= target.least,
            }
        )
    return found
