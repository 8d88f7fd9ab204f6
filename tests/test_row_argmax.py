"""The largest logit of each row, by threads: the place that `np.argmax` finds, whatever stands in the row."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from cllm import row_argmax
from cllm.kylin.team import Team
from cllm.row_argmax import RowArgmax

# One logit, one block and a bit, several chunks.
SIZES = (1, 1025, 40_000)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("vocab_size", SIZES)
def test_it_matches_numpy(monkeypatch: pytest.MonkeyPatch, num_threads: int, vocab_size: int) -> None:
    monkeypatch.setattr(row_argmax, "_FEW", 0)
    search = RowArgmax(num_threads, 5, vocab_size)

    @settings(max_examples=30, deadline=None, database=None)
    @given(
        seed=st.integers(0, 2**32 - 1),
        num_rows=st.integers(1, 5),
        odd=st.lists(
            st.sampled_from([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 9.0, 3e38]), min_size=0, max_size=6
        ),
        scale=st.sampled_from([0.0, -0.0, 1.0, 1e-39, 1e38]),
        whole=st.booleans(),
    )
    def check(seed: int, num_rows: int, odd: list[float], scale: float, whole: bool) -> None:
        rng = np.random.default_rng(seed)
        logits = rng.standard_normal((num_rows, vocab_size)).astype(np.float32) - np.float32(2 * (seed % 3))
        if whole:  # many are equal
            logits = np.round(logits)
        with np.errstate(over="ignore"):
            logits *= np.float32(scale)
        for value in odd:
            logits[rng.integers(num_rows), rng.integers(vocab_size)] = value
        assert search(logits).tolist() == logits.argmax(axis=1).tolist()

    try:
        check()
        nothing = np.full((2, vocab_size), -np.inf, np.float32)
        assert search(nothing).tolist() == [0, 0]
    finally:
        search.close()


def test_a_member_that_sleeps_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members that never come, as if the system did not wake them: the caller finds all alone, job after job."""
    monkeypatch.setattr(Team, "enlist", lambda team, serve, arguments: None)
    search = RowArgmax(3, 4, 100_000)
    monkeypatch.setattr(row_argmax, "_FEW", 0)
    rng = np.random.default_rng(0)
    for num_rows in (4, 1, 3):
        logits = rng.standard_normal((num_rows, 100_000)).astype(np.float32)
        assert search(logits).tolist() == logits.argmax(axis=1).tolist()
    search.close()


def test_jobs_follow_each_other_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members come late, into a later job of another size than the one that they were woken for."""
    monkeypatch.setattr(row_argmax, "_FEW", 0)
    search = RowArgmax(4, 8, 70_000)
    rng = np.random.default_rng(0)
    jobs = [rng.standard_normal((rows, 70_000)).astype(np.float32) for rows in (8, 1, 5, 2)]
    expected = [logits.argmax(axis=1).tolist() for logits in jobs]
    for _ in range(300):
        for logits, ids in zip(jobs, expected, strict=True):
            assert search(logits).tolist() == ids
    search.close()
