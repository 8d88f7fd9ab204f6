"""`SamplingParams`: what is accepted and how it is kept, and one clear line for everything else."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from cllm.errors import InvalidRequestError
from cllm.params import SamplingParams

NAN, INFINITY = float("nan"), float("inf")


class Hostile:
    """A value whose repr raises."""

    def __repr__(self) -> str:
        raise RuntimeError("never shown")


DEFAULTS = {
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "seed": None,
    "stop": None,
    "stop_token_ids": None,
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "skip_special_tokens": True,
    "priority": 0,
    "deadline_s": None,
}

REFUSED: dict[str, list[Any]] = {
    "n": [0, -1, 129, 1.0, True, None, "1"],
    "temperature": [-0.1, NAN, INFINITY, -INFINITY, "0.7", True, None, 10**400, 1j, [1.0]],
    "top_p": [0, 0.0, -0.5, 1.0001, NAN, INFINITY, "1", False, None],
    "top_k": [-2, 1.5, 20.0, NAN, "20", True, None],
    "min_p": [-0.1, 1.1, NAN, INFINITY, "0", True, None],
    "presence_penalty": [-2.1, 2.1, NAN, INFINITY, "0", None],
    "frequency_penalty": [-2.1, 2.1, NAN, -INFINITY, "0", None],
    "repetition_penalty": [0, 0.0, -1.0, NAN, INFINITY, "1", None],
    "seed": [-1, 2**64, 1.0, "1", True, np.float32(1)],
    "stop": ["", [""], ["a", ""], [1], b"x", {"a": 1}, 5, [None], np.array("a")],
    "stop_token_ids": [
        [-1],
        ["1"],
        [1.0],
        [True],
        "12",
        b"12",
        5,
        {1: 2},
        [[1]],
        np.array([1.0]),
        [Hostile()],
    ],
    "include_stop_str_in_output": [1, 0, None, "true"],
    "ignore_eos": [1, None, "yes"],
    "max_tokens": [-1, 1.0, NAN, "16", True, 16.5],
    "min_tokens": [-1, 17, 1.0, None, True, "1"],
    "logprobs": [-1, 21, True, 1.0, "5"],
    "prompt_logprobs": [-1, 21, True, 1.0, "5"],
    "logit_bias": [
        {1: 100.5},
        {1: -101},
        {1: NAN},
        {1: INFINITY},
        {1: "5"},
        {1: None},
        {1: True},
        {-1: 1},
        {1.5: 1},
        {"a": 1},
        {"-1": 1},
        {" 1": 1},
        {"1_0": 1},
        {"\u0663": 1},  # int() would take this Arabic digit
        {"9" * 5000: 1},
        {1: 1.0, "1": 2.0},
        {True: 1},
        {None: 1},
        [(1, 2)],
        "1",
        5,
    ],
    "allowed_token_ids": [[], (), [-1], ["1"], [1.0], "1", 5, {1: 1}, [None]],
    "skip_special_tokens": [1, None],
    "priority": [1.0, None, "0", True, NAN],
    "deadline_s": [0, -1, NAN, INFINITY, "5", True],
}


def test_defaults() -> None:
    assert dataclasses.asdict(SamplingParams()) == DEFAULTS


def test_every_field_has_refused_values() -> None:
    assert REFUSED.keys() == DEFAULTS.keys()


CASES = [
    pytest.param(name, value, id=f"{name}-{i}") for name in REFUSED for i, value in enumerate(REFUSED[name])
]


@pytest.mark.parametrize(("name", "value"), CASES)
def test_refuses(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert caught.value.field == name
    assert message.startswith(f"{name} must be ")
    assert "; found " in message
    assert "\n" not in message
    assert len(message) < 250


@pytest.mark.parametrize(
    "value", [Hostile(), 10**5000, "x" * 100_000, [0.5] * 100_000], ids=["hostile", "digits", "text", "list"]
)
def test_the_value_found_is_shown_only_if_short(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="temperature must be ") as caught:
        SamplingParams(temperature=value)
    assert len(str(caught.value)) < 250


def test_the_message_says_field_range_and_value() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(top_p=1.5)
    assert str(caught.value) == "top_p must be a number above 0 and at most 1; found 1.5"


def test_unknown_fields_and_positional_values_are_type_errors() -> None:
    with pytest.raises(TypeError, match="tempurature"):
        SamplingParams(tempurature=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        SamplingParams(1)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"temperature": 0}, 0.0),
        ({"temperature": 1e6}, 1e6),
        ({"temperature": np.float32(0.5)}, 0.5),
        ({"top_p": 1e-300}, 1e-300),
        ({"top_k": -1}, -1),
        ({"top_k": np.int64(20)}, 20),
        ({"top_k": 10**30}, 10**30),
        ({"min_p": 1}, 1.0),
        ({"presence_penalty": -2}, -2.0),
        ({"n": 128}, 128),
        ({"seed": 2**64 - 1}, 2**64 - 1),
        ({"max_tokens": 0}, 0),
        ({"max_tokens": None}, None),
        ({"logprobs": 0}, 0),
        ({"prompt_logprobs": 20}, 20),
        ({"deadline_s": 5}, 5.0),
        ({"priority": -7}, -7),
        ({"stop": "END"}, ("END",)),
        ({"stop": ["a", "b"]}, ("a", "b")),
        ({"stop": []}, ()),
        ({"stop_token_ids": [3, 1]}, (3, 1)),
        ({"stop_token_ids": np.array([3, 1])}, (3, 1)),
        ({"allowed_token_ids": range(3)}, (0, 1, 2)),
        ({"logit_bias": {5: -100, "6": 100, np.int32(7): np.float32(0.5)}}, {5: -100.0, 6: 100.0, 7: 0.5}),
    ],
    ids=str,
)
def test_accepts_and_normalises(given: dict[str, Any], kept: Any) -> None:
    (name,) = given
    value = getattr(SamplingParams(**given), name)
    assert value == kept
    assert type(value) is type(kept)
    if isinstance(kept, (tuple, dict)):
        assert [type(item) for item in value] == [type(item) for item in kept]


def test_min_tokens_may_reach_max_tokens() -> None:
    assert SamplingParams(min_tokens=16).min_tokens == 16
    assert SamplingParams(min_tokens=99, max_tokens=None).min_tokens == 99
    with pytest.raises(InvalidRequestError, match=r"at most max_tokens \(16\); found 17"):
        SamplingParams(min_tokens=17)


def test_is_frozen_and_keeps_copies() -> None:
    bias, stops = {1: 2.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stops)
    bias[1], stops[0] = 3.0, "b"
    assert params.logit_bias == {1: 2.0}
    assert params.stop == ("a",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]


def test_values_are_hashable_comparable_and_can_be_copied() -> None:
    params = SamplingParams(logit_bias={1: 2}, stop=["a"], seed=1)
    assert hash(params) == hash(SamplingParams(logit_bias={1: 2}, stop="a", seed=1))
    assert params == pickle.loads(pickle.dumps(params)) == copy.deepcopy(params)
    assert params == dataclasses.replace(params)
    assert params != dataclasses.replace(params, seed=2)
    with pytest.raises(InvalidRequestError, match="top_p"):
        dataclasses.replace(params, top_p=2)


@pytest.mark.parametrize(("temperature", "is_greedy"), [(0, True), (9.9e-6, True), (1e-5, False), (1, False)])
def test_greedy_lies_below_1e_5(temperature: float, is_greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is is_greedy


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
def test_ids_outside_the_vocabulary(field: str) -> None:
    params = SamplingParams(**{field: [0, 9]})
    params.check_vocabulary(10)
    with pytest.raises(InvalidRequestError, match=r"below 9, .* found 9$") as caught:
        params.check_vocabulary(9)
    assert caught.value.field == field


def test_biased_ids_outside_the_vocabulary() -> None:
    params = SamplingParams(logit_bias={9: 1.0}, top_k=1000)
    params.check_vocabulary(10)  # a top_k above it means all
    with pytest.raises(InvalidRequestError, match="logit_bias must be token ids below 9"):
        params.check_vocabulary(9)
