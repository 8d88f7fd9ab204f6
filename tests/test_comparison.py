"""The statistics of two rows of logits against slow twins in plain Python, their summary, and the limits."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from cllm import ConfigError, EngineConfig
from cllm.comparison import Comparison, Limits, Side, compare_rows, summarise


def slow_log_softmax(row: list[float]) -> list[float]:
    total = math.fsum(math.exp(x) for x in row)
    return [x - math.log(total) for x in row]


def slow_kld(first: list[float], second: list[float]) -> float:
    pairs = zip(slow_log_softmax(first), slow_log_softmax(second), strict=True)
    return math.fsum(math.exp(p) * (p - q) for p, q in pairs)


@pytest.mark.parametrize("seed", range(5))
def test_compare_rows_matches_slow_twin(seed: int) -> None:
    rng = np.random.default_rng(seed)
    first = rng.normal(0, 4, 300).astype(np.float32)
    second = first + rng.normal(0, 0.5, 300).astype(np.float32)
    found = compare_rows(first, second, 17)
    x, y = first.tolist(), second.tolist()
    ranks = [sorted(range(300), key=row.__getitem__, reverse=True) for row in (x, y)]
    assert found.kld == pytest.approx(slow_kld(x, y), rel=1e-10)
    assert found.first_nll == pytest.approx(-slow_log_softmax(x)[17], rel=1e-12)
    assert found.second_nll == pytest.approx(-slow_log_softmax(y)[17], rel=1e-12)
    assert found.same_top1 == (ranks[0][0] == ranks[1][0])
    assert found.same_top5 == len(set(ranks[0][:5]) & set(ranks[1][:5])) / 5
    assert found.is_near_tie == (x[ranks[0][0]] - x[ranks[0][1]] < 0.5)
    assert found.squared_error == pytest.approx(
        math.fsum((b - a) ** 2 for a, b in zip(x, y, strict=True)), rel=1e-10
    )
    assert found.squared_size == pytest.approx(math.fsum(a * a for a in x), rel=1e-10)


def test_compare_rows_of_large_logits() -> None:
    """Logits far from 0 neither overflow nor lose the divergence, which does not depend on a common offset."""
    row = np.array([0, 1, 2, 3, 4], np.float32)
    near, far = compare_rows(row, row * 2, 0), compare_rows(row + 4096, row * 2 - 4096, 0)
    assert far.kld == pytest.approx(near.kld, rel=1e-9)
    assert far.first_nll == pytest.approx(near.first_nll, rel=1e-9)


def test_summary_of_known_positions() -> None:
    """101 positions; the likeliest token changes at 3, of which 1 is a near-tie."""
    row = compare_rows(np.zeros(9, np.float32), np.zeros(9, np.float32), None)
    positions = [
        row._replace(
            kld=float(i),
            first_nll=math.nan if i == 100 else math.log(8),
            second_nll=math.nan if i == 100 else math.log(i % 2 * 3 + 1),  # mean ln 2
            same_top1=i not in (4, 5, 6),
            same_top5=0.6,
            is_near_tie=i in (6, 7),
            squared_error=1.0,
            squared_size=50.0,
        )
        for i in range(101)
    ]
    assert summarise(positions) == pytest.approx(
        {
            "num_tokens": 101,
            "mean_kld": 50.0,
            "median_kld": 50.0,
            "kld_99": 99.0,
            "max_kld": 100.0,
            "first_perplexity": 8.0,
            "second_perplexity": 2.0,
            "same_top1": 98 / 101,
            "same_top5": 0.6,
            "near_ties": 2 / 101,
            "num_clear_changes": 2,
            "nmse": 0.02,
        }
    )


def test_limits() -> None:
    row = compare_rows(np.arange(9, dtype=np.float32), np.arange(9, dtype=np.float32), 0)
    side = Side(EngineConfig(backend="mock"), "mock")
    found = Comparison(
        first=side,
        second=side,
        num_prompts=1,
        num_greedy_tokens=0,
        greedy_differences=(),
        **summarise([row]),
    )
    worse = dataclasses.replace(found, mean_kld=0.011, kld_99=0.051, same_top1=0.929)
    assert Limits().exceeded(found) == []
    assert [phrase.split(" is ")[0] for phrase in Limits().exceeded(worse)] == [
        "Mean KLD 0.011000",
        "99.0% KLD 0.051000",
        "Same top p 92.900%",
    ]
    assert Limits(max_kld=0.011, max_kld_99=0.051, min_top1=0.929).exceeded(worse) == []


@pytest.mark.parametrize(
    "limits", [{"max_kld": -0.1}, {"max_kld_99": math.nan}, {"min_top1": 1.5}, {"min_top1": math.nan}]
)
def test_limits_that_cannot_be(limits: dict[str, float]) -> None:
    (name,) = limits
    with pytest.raises(ConfigError, match=f"{name} should be from 0 to"):
        Limits(**limits)
