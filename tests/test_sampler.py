"""The sampler against a slow float64 twin of its whole pipeline, and the rules that it promises."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from slow_sampler import INFINITY, twin_choice, twin_kept, uniform_of

from cllm.errors import BackendError, InvalidRequestError
from cllm.params import SamplingParams
from cllm.sampler import Sampled, TokenSampler, apply_penalties, best_token, sample_rows, top_logprobs
from cllm.sampler_kernels import BLOCK, draw, kept_tokens, make_blocks

NAN = math.nan
FLOAT32_MAX = float(np.finfo(np.float32).max)


def make_row(values: Any) -> np.ndarray:
    """A read-only row: a sampler that wrote to it would raise."""
    row = np.array(values, np.float32)
    row.flags.writeable = False
    return row


def make_sampler(
    vocab_size: int, *, prompt: Any = (), unused: Any = (), eog: Any = (), index: int = 0, **params: Any
) -> TokenSampler:
    return TokenSampler(
        SamplingParams(**{"max_tokens": 100, **params}),
        prompt_token_ids=prompt,
        vocab_size=vocab_size,
        unused_ids=np.array(unused, np.int64),
        eog_ids=frozenset(eog),
        index=index,
    )


def sample_many(sampler: TokenSampler, row: np.ndarray, count: int) -> list[int]:
    return [sampler.sample(row).token_id for _ in range(count)]


# Closer than this to an edge, rounding in float32 may fall on either side.
EDGE = 1e-5


@st.composite
def rows(draw_from: st.DrawFn) -> tuple[np.ndarray, list[int]]:
    """A row and its unused ids: few or many blocks, with and without ties and masked entries."""
    vocab_size = draw_from(st.sampled_from([1, 2, 7, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3]))
    random = np.random.default_rng(draw_from(st.integers(0, 2**32 - 1)))
    values = random.standard_normal(vocab_size) * draw_from(st.sampled_from([0.0, 1.0, 5.0]))
    step = draw_from(st.sampled_from([0.0, 0.5]))
    values = np.round(values / step) * step if step else values  # many ties, 0.0 and -0.0 among them
    values[random.random(vocab_size) < draw_from(st.sampled_from([0.0, 0.3]))] = -INFINITY
    unused = np.flatnonzero(random.random(vocab_size) < draw_from(st.sampled_from([0.0, 0.01, 0.3])))
    usable = np.delete(np.arange(vocab_size), unused)
    assume(len(usable) and values[usable].max() > -INFINITY)
    return make_row(values), unused.tolist()


FILTERS = {
    "temperature": st.sampled_from([1e-5, 0.3, 1.0, 2.0, 1e6]),
    "min_p": st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    "top_k": st.sampled_from([0, 0, 1, 2, 5, 40, 10**6]),
    "top_p": st.sampled_from([1.0, 1.0, 0.95, 0.5, 1e-6]),
}


def is_filtered(row: np.ndarray, filters: dict[str, Any]) -> bool:
    return filters["min_p"] > 0 or 0 < filters["top_k"] < len(row) or filters["top_p"] < 1


@settings(max_examples=150, deadline=None)
@given(case=rows(), filters=st.fixed_dictionaries(FILTERS))
def test_kept_tokens_match_twin(case: tuple[np.ndarray, list[int]], filters: dict[str, Any]) -> None:
    row, unused = case
    assume(is_filtered(row, filters))
    expected, margin = twin_kept(row, unused=unused, **filters)
    assume(margin > EDGE)
    peak = float(row[best_token(row, np.array(unused, np.int64))])
    ids, cumulative = kept_tokens(row, make_blocks(len(row), np.array(unused, np.int64)), peak, **filters)
    assert ids.tolist() == list(expected)
    probabilities = np.diff(cumulative, prepend=0) / cumulative[-1]
    # Limits: float32 exponents of up to 87 are rounded by 87 * 2^-24; sums up to 1 lose what is below 2^-53.
    np.testing.assert_allclose(probabilities, list(expected.values()), rtol=2e-5, atol=1e-15)


@settings(max_examples=150, deadline=None)
@given(case=rows(), filters=st.fixed_dictionaries(FILTERS), seed=st.integers(0, 2**64 - 1))
def test_choice_matches_twin(case: tuple[np.ndarray, list[int]], filters: dict[str, Any], seed: int) -> None:
    row, unused = case
    kept, margin = twin_kept(row, unused=unused, **filters)
    expected, draw_margin = twin_choice(kept, uniform_of(seed), by_id=not is_filtered(row, filters))
    assume(min(margin, draw_margin) > EDGE)
    assert make_sampler(len(row), unused=unused, seed=seed, **filters).sample(row).token_id == expected


@settings(max_examples=100, deadline=None)
@given(case=rows())
def test_greedy_matches_twin(case: tuple[np.ndarray, list[int]]) -> None:
    row, unused = case
    best = min((i for i in range(len(row)) if i not in unused), key=lambda i: (-float(row[i]), i))
    assert make_sampler(len(row), unused=unused, temperature=0).sample(row).token_id == best


@settings(max_examples=100, deadline=None)
@given(case=rows(), k=st.integers(0, 20), pick=st.integers(0, 10**6))
def test_logprobs_match_twin(case: tuple[np.ndarray, list[int]], k: int, pick: int) -> None:
    row, token_id = case[0], pick % len(case[0])
    order = sorted(range(len(row)), key=lambda i: (-float(row[i]), i))
    log_total = math.log(math.fsum(math.exp(float(x) - float(row.max())) for x in row)) + float(row.max())
    top = top_logprobs(row, k, token_id)
    best = [i for i in order[:k] if row[i] > -INFINITY]
    assert list(top) == [*best, *([] if token_id in best else [token_id])]
    for i, (logprob, rank, text) in top.items():
        assert (rank, text) == (order.index(i) + 1, None)
        assert logprob == float(row[i]) - log_total or abs(logprob - float(row[i]) + log_total) < 1e-6


def test_draws_follow_the_distribution() -> None:
    row = make_row([0.0, 1.0, 2.0, -1.0, -INFINITY, 0.5])
    for filters in ({}, {"top_k": 4}, {"temperature": 1.7, "top_p": 0.9}, {"min_p": 0.2}):
        settings_ = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0, **filters}
        expected, _ = twin_kept(row, **settings_)
        counts = np.bincount(sample_many(make_sampler(6, seed=7, **settings_), row, 5000), minlength=6)
        assert {i for i in range(6) if counts[i]} == set(expected)
        chi_square = sum((counts[i] - 5000 * p) ** 2 / (5000 * p) for i, p in expected.items())
        assert (
            chi_square < 20.5
        )  # 5 degrees of freedom at most: exceeded once in a thousand seeds; this one is fixed


@pytest.mark.parametrize("count", [1, 2, 3])
def test_ties_at_the_edge_of_top_k_and_top_p_keep_the_lowest_ids(count: int) -> None:
    row = make_row([1.0, 3.0, 3.0, 3.0, 3.0])
    for filters in ({"top_k": count}, {"top_p": count / 4, "top_k": 4}):
        tokens = sample_many(make_sampler(5, seed=1, **filters), row, 100)
        assert set(tokens) == set(range(1, 1 + count))


def test_min_p_compares_without_rounding() -> None:
    below = np.float32(-0.1)  # by 1.5e-9
    row, blocks = make_row([0.0, below, np.nextafter(below, np.float32(0))]), make_blocks(3, np.arange(0))
    ids, _ = kept_tokens(row, blocks, 0.0, temperature=1.0, min_p=math.exp(-0.1), top_k=0, top_p=1.0)
    assert ids.tolist() == [0, 2]


@pytest.mark.parametrize(("uniform", "expected"), [(0.0, 2), (0.5, 4), (1 - 2**-53, 4)])
def test_a_draw_at_the_edges_skips_what_has_no_weight(uniform: float, expected: int) -> None:
    row = make_row([*[-INFINITY] * (BLOCK + 2), 0.0, -INFINITY, 0.0, -INFINITY])
    ranges = make_blocks(len(row), np.arange(0)).ranges
    assert draw(row, ranges, 0.0, 1.0, uniform) == BLOCK + expected


def test_zero_and_minus_zero_are_equal() -> None:
    row = make_row([-1.0, -0.0, 0.0, -0.0])
    assert make_sampler(4, temperature=0).sample(row).token_id == 1
    assert make_sampler(4, top_k=1, seed=0).sample(row).token_id == 1
    assert list(top_logprobs(row, 3, 0)) == [1, 2, 3, 0]


@pytest.mark.parametrize("temperature", [1e-5, 1.0, 1e6, 1e300])
def test_extreme_logits_and_temperatures(temperature: float) -> None:
    row = make_row([-1e30, 1e30, -INFINITY])
    tokens = sample_many(make_sampler(3, seed=3, temperature=temperature), row, 50)
    assert set(tokens) == ({0, 1} if temperature > 1e290 else {1})


def test_temperature_just_at_the_greedy_limit_draws() -> None:
    row = make_row([1.0, 1.0, 0.0])
    assert set(sample_many(make_sampler(3, seed=1, temperature=1e-5), row, 50)) == {0, 1}
    assert set(sample_many(make_sampler(3, seed=1, temperature=0.9e-5), row, 50)) == {0}


def test_a_seed_gives_the_same_tokens_whatever_runs_beside_it() -> None:
    random = np.random.default_rng(5)
    steps = [make_row(random.standard_normal((8, 3 * BLOCK)) * 3) for _ in range(6)]
    kinds: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9},
        {"temperature": 0.0},
        {"min_p": 0.1, "repetition_penalty": 1.3},
    ]

    def make(row: int) -> TokenSampler:
        return make_sampler(3 * BLOCK, seed=row, **kinds[row % 4])

    together = [make(row) for row in range(8)]
    expected = [sample_rows(step, together) for step in steps]
    for row in range(8):
        alone = make(row)
        assert [alone.sample(step[row]) for step in steps] == [results[row] for results in expected]
    backwards = [make(row) for row in reversed(range(8))]
    assert [sample_rows(step[::-1], backwards)[::-1] for step in steps] == expected


def test_streams_differ_by_seed_and_index() -> None:
    row = make_row(np.zeros(1000))
    streams = [(0, 0), (0, 1), (1, 0), (2**64 - 1, 0), (None, 0), (None, 0)]
    answers = {tuple(sample_many(make_sampler(1000, seed=s, index=i), row, 8)) for s, i in streams}
    assert len(answers) == len(streams)
    assert sample_many(make_sampler(1000, seed=3, index=2), row, 1) == [int(uniform_of(3, 2) * 1000)]


def test_one_number_is_drawn_for_each_token() -> None:
    row, single = make_row(np.zeros(1000)), make_row([0.0, *[-INFINITY] * 999])
    expected = sample_many(make_sampler(1000, seed=9), row, 5)
    sampler = make_sampler(1000, seed=9)
    assert sampler.sample(single).token_id == 0  # one possible token still draws
    assert sample_many(sampler, row, 4) == expected[1:]


@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": 1}, {"seed": 1, "top_k": 3}], ids=str)
@pytest.mark.parametrize("unused", [[0], [4, 5, 6, 7], [0, 3, 5], list(range(1, 8))])
def test_unused_ids_never_win(params: dict[str, Any], unused: list[int]) -> None:
    row = make_row([50.0 if i in unused else -50.0 for i in range(8)])
    tokens = sample_many(make_sampler(8, unused=unused, logit_bias={unused[0]: 100}, **params), row, 50)
    assert not set(tokens) & set(unused)


def test_logprobs_are_of_the_raw_row_over_all_ids() -> None:
    row = make_row([0.0, 1.0, 2.0])
    params: dict[str, Any] = {
        "temperature": 0,
        "logprobs": 1,
        "logit_bias": {0: 100},
        "repetition_penalty": 2.0,
    }
    token_id, logprob, top = make_sampler(3, prompt=[2], unused=[2], **params).sample(row)
    assert token_id == 0
    assert top is not None
    assert list(top) == [2, 0]  # the best, though unused, then the sampled one
    assert logprob == top[0].logprob == pytest.approx(-math.log(1 + math.e + math.e**2), abs=1e-6)
    assert (top[2].rank, top[0].rank) == (1, 3)
    assert make_sampler(3, temperature=0).sample(row) == Sampled(2, None, None)


def test_penalties_follow_their_formulas() -> None:
    row = make_row([2.0, -2.0, 2.0, -2.0, 5.0, -INFINITY])
    ids, counts = np.array([0, 1, 2, 3, 5]), np.array([0, 0, 3, 1, 1])
    penalised = apply_penalties(row, ids, counts, repetition=2.0, frequency=0.5, presence=0.25)
    expected = [2 / 2, -2 * 2, 2 / 2 - 0.5 * 3 - 0.25, -2 * 2 - 0.5 - 0.25, 5.0, -INFINITY]
    np.testing.assert_array_equal(penalised, np.array(expected, np.float32))


@pytest.mark.parametrize("repetition", [5e-324, 1e-30, 1e30, 1e308])
def test_extreme_repetition_penalties_stay_finite(repetition: float) -> None:
    row, ids, counts = make_row([FLOAT32_MAX, -FLOAT32_MAX, 0.0]), np.arange(3), np.ones(3, np.int64)
    assert np.isfinite(
        apply_penalties(row, ids, counts, repetition=repetition, frequency=2, presence=2)
    ).all()


def test_repetition_counts_prompt_and_output_and_the_others_the_output_only() -> None:
    row = make_row([4.0, 3.0, 2.5])
    assert sample_many(make_sampler(3, prompt=[0, 0], temperature=0, repetition_penalty=2), row, 3) == [
        1,
        2,
        0,
    ]
    assert sample_many(make_sampler(3, prompt=[0, 0], temperature=0, presence_penalty=2), row, 4) == [
        0,
        1,
        2,
        0,
    ]
    # 4, then 4 - 1.2 < 3, then 3 - 1.2 < 2.8, then 4 - 2.4 < 2.5, then 2.5 - 1.2 < 1.8
    assert sample_many(make_sampler(3, prompt=[0], temperature=0, frequency_penalty=1.2), row, 5) == [
        0,
        1,
        0,
        2,
        1,
    ]


def test_bias_of_100_forces_and_of_minus_100_bans() -> None:
    row = make_row(np.linspace(-20, 20, 50))
    for params in ({"temperature": 0}, {"seed": 1}, {"seed": 1, "top_p": 0.9}):
        assert set(sample_many(make_sampler(50, logit_bias={0: 100}, **params), row, 30)) == {0}
        assert 49 not in sample_many(make_sampler(50, logit_bias={49: -100}, **params), row, 30)
    assert make_sampler(50, temperature=0, logit_bias={"48": 0.9}).sample(row).token_id == 48


def test_bias_is_applied_before_the_penalties() -> None:
    row = make_row([1.0, 0.0])  # (1 + 2) / 4 < 1.5 < 1 / 4 + 2
    params: dict[str, Any] = {"temperature": 0, "repetition_penalty": 4.0, "logit_bias": {0: 2.0, 1: 1.5}}
    assert make_sampler(2, prompt=[0], **params).sample(row).token_id == 1


def test_only_allowed_ids_are_sampled() -> None:
    row = make_row(np.zeros(20))
    assert set(sample_many(make_sampler(20, seed=1, allowed_token_ids=[3, 17, 3]), row, 60)) == {3, 17}
    assert make_sampler(20, temperature=0, allowed_token_ids=[17]).sample(row).token_id == 17
    assert make_sampler(20, unused=[3], temperature=0, allowed_token_ids=[3, 17]).sample(row).token_id == 17


def test_min_tokens_holds_back_end_and_stop_tokens() -> None:
    row = make_row([0.0, 1.0, 2.0, 3.0])
    params: dict[str, Any] = {"temperature": 0, "min_tokens": 2, "stop_token_ids": [3]}
    assert sample_many(make_sampler(4, eog=[2], **params), row, 4) == [1, 1, 3, 3]
    assert sample_many(make_sampler(4, eog=[2], ignore_eos=True, **params), row, 3) == [1, 1, 3]


@pytest.mark.parametrize(
    "params", [{"allowed_token_ids": [5, 6]}, {"allowed_token_ids": [2, 3, 5], "min_tokens": 1}], ids=str
)
def test_a_request_that_can_sample_nothing_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="allowed_token_ids leaves no token") as caught:
        make_sampler(8, unused=[5, 6], eog=[2], stop_token_ids=[3], **params)
    assert caught.value.field == "allowed_token_ids"


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="stop_token_ids must be token ids below 8"):
        make_sampler(8, stop_token_ids=[8])


NEGATIVE_NAN = np.array([0xFFC00000], np.uint32).view(np.float32)[0]


@pytest.mark.parametrize("bad", [NAN, NEGATIVE_NAN, INFINITY], ids=["nan", "negative-nan", "infinity"])
@pytest.mark.parametrize("at", [0, 300, 599])
@pytest.mark.parametrize(
    "params", [{"temperature": 0}, {"seed": 1}, {"seed": 1, "top_k": 3, "logprobs": 2}], ids=str
)
def test_non_finite_logits_fail_their_own_row_only(bad: float, at: int, params: dict[str, Any]) -> None:
    logits = np.random.default_rng(1).standard_normal((3, 600)).astype(np.float32)
    broken = logits.copy()
    broken[1, at] = bad
    samplers, undisturbed = ([make_sampler(600, unused=[599], **params) for _ in range(3)] for _ in range(2))
    expected = sample_rows(logits, undisturbed)
    first, error, last = sample_rows(broken, samplers)
    assert [first, last] == [expected[0], expected[2]]
    assert isinstance(error, BackendError)
    assert "expected finite logits" in str(error)
    assert f"token id {at}" in str(error)
    assert samplers[1].sample(logits[1]) == expected[1]  # the failure took nothing from the stream


def test_a_best_id_that_is_unused_changes_its_own_row_only() -> None:
    logits = np.random.default_rng(1).standard_normal((3, 600)).astype(np.float32)
    best = logits[:, :599].argmax(axis=1).tolist()
    logits[1, 599] = 9
    samplers = [make_sampler(600, temperature=0, unused=unused) for unused in ([599], [599], [])]
    assert sample_rows(logits, samplers) == [Sampled(token_id) for token_id in best]


def test_rows_with_nothing_to_sample_fail() -> None:
    samplers = [
        make_sampler(3, seed=1),
        make_sampler(3, seed=1, unused=[0, 1, 2]),
        make_sampler(3, temperature=0),
    ]
    rows = make_row([[-INFINITY] * 3, [0.0] * 3, [-INFINITY, -INFINITY, -1e30]])
    all_masked, all_unused, one_left = sample_rows(rows, samplers)
    assert isinstance(all_masked, BackendError)
    assert isinstance(all_unused, BackendError)
    assert "no token can be sampled" in str(all_masked)
    assert one_left == Sampled(2)


def test_a_row_of_another_length_fails() -> None:
    with pytest.raises(BackendError, match="for each of 4 ids"):
        make_sampler(4).sample(make_row([0.0] * 5))


def test_greedy_sampling_loads_no_numba() -> None:
    code = (
        "import sys, numpy as np\n"
        "from cllm.params import SamplingParams; from cllm.sampler import TokenSampler\n"
        "params = SamplingParams(temperature=0, presence_penalty=1)\n"
        "s = TokenSampler(params, prompt_token_ids=[1], vocab_size=3, unused_ids=[0], eog_ids=[2])\n"
        "assert s.sample(np.zeros(3, np.float32)).token_id == 1; assert 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
