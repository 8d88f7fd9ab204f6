"""What an engine counts: vLLM's metrics under the prefix `cllm:`, as plain numbers. It knows no HTTP and no format.

Source of names and buckets: https://docs.vllm.ai/en/latest/usage/metrics/
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .plan import Plan
from .sequence import Request

_LATENCY = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
)
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_BETWEEN_TOKENS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(slots=True)
class Histogram:
    """Counts of values at most each bound, Prometheus' way; the last count is of those above all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(slots=True)
class SchedulerCounts:
    """What a scheduler did since the start."""

    num_preemptions: int = 0
    num_evictions: int = 0
    num_prompt_tokens: int = 0  # of admitted prompts
    num_cached_tokens: int = 0  # of those, found in the cache


class EngineStats:
    """Counted by the engine's thread, read by any other (each number is read whole)."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._last_step_at: float | None = None
        self.occupancy = 0.0  # of the last step: the share of the places for sequences that got a token
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        self.histograms = {
            "time_to_first_token_seconds": Histogram(_FIRST_TOKEN),
            "inter_token_latency_seconds": Histogram(_BETWEEN_TOKENS),
            "e2e_request_latency_seconds": Histogram(_LATENCY),
            "request_queue_time_seconds": Histogram(_LATENCY),
            "request_prefill_time_seconds": Histogram(_LATENCY),
            "request_decode_time_seconds": Histogram(_LATENCY),
            "request_prompt_tokens": Histogram(_TOKENS),
            "request_generation_tokens": Histogram(_TOKENS),
            "iteration_tokens_total": Histogram(_STEP_TOKENS),
        }

    def count_step(self, plan: Plan, max_num_seqs: int, now: float) -> None:
        """One step that has just been computed; `now`: the time that its tokens carry."""
        num_sampled = len(plan.sampled)
        num_further = num_sampled - sum([sequence.first_token_at == now for sequence in plan.sampled])
        if num_further and self._last_step_at is not None:
            # Who has a token before this one got it in the step before this one.
            self.histograms["inter_token_latency_seconds"].observe(now - self._last_step_at, num_further)
        self._last_step_at = now
        self.num_steps += 1
        self.occupancy = num_sampled / max_num_seqs
        self.generation_tokens += num_sampled
        self.histograms["iteration_tokens_total"].observe(sum([chunk.num_tokens for chunk in plan.chunks]))

    def count_request(self, request: Request, now: float) -> None:
        """A request that ended."""
        histograms = self.histograms
        for sequence in request.sequences:
            self.finished[sequence.finish_reason or "abort"] += 1
            histograms["request_generation_tokens"].observe(sequence.num_output)
            first, last = sequence.first_token_at, sequence.last_token_at
            if first is not None and last is not None:
                histograms["request_decode_time_seconds"].observe(last - first)
        histograms["request_prompt_tokens"].observe(len(request.prompt_token_ids))
        histograms["e2e_request_latency_seconds"].observe(now - request.arrived)
        if request.started is not None:
            histograms["request_queue_time_seconds"].observe(request.started - request.arrived)
            first = request.sequences[0].first_token_at
            if first is not None:
                histograms["time_to_first_token_seconds"].observe(first - request.arrived)
                histograms["request_prefill_time_seconds"].observe(first - request.started)

    def snapshot(self) -> dict[str, Any]:
        """Counters, gauges and histograms by name, without the prefix."""
        return {
            "generation_tokens_total": self.generation_tokens,
            "num_steps_total": self.num_steps,
            "batch_occupancy": self.occupancy,
            "request_success_total": dict(self.finished),
            **self.histograms,
        }
