"""How one request is to be sampled and when it ends, checked once and frozen. It knows no arrays and no
model: what depends on the vocabulary is checked by `SamplingParams.check_vocabulary`.

Names, defaults and ranges follow vLLM's `SamplingParams`; `priority` and `deadline_s` are added:
https://docs.vllm.ai/en/latest/api/vllm/sampling_params.html
"""

from __future__ import annotations

import contextlib
import math
import numbers
import operator
import reprlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from cllm.errors import InvalidRequestError

GREEDY_BELOW = 1e-5  # vLLM's _SAMPLING_EPS
MAX_LOGPROBS = 20  # OpenAI's limit and vLLM's default
MAX_CHOICES = 128  # OpenAI's limit
MAX_BIAS = 100.0  # OpenAI's limit


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The settings of one request. Lists become tuples, so a value never changes after it was checked.

    Raises `InvalidRequestError`, which names the field, for a wrong type, a NaN, an infinity or a value out
    of range. A boolean is no number here, and neither is a number in a string.
    """

    n: int = 1  # choices; each draws from a random stream of its own
    temperature: float = 1.0  # below 1e-5: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None  # None: different at every call
    stop: str | Collection[str] | None = None  # kept as a tuple, or None
    stop_token_ids: Collection[int] | None = None  # kept as a tuple, or None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: as many as the context holds
    min_tokens: int = 0  # before that many no end token and none of `stop_token_ids` is sampled
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    # Kept as a private dict, which has no hash. The ids may come as the decimal strings of JSON.
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Collection[int] | None = None  # kept as a tuple, or None for all
    skip_special_tokens: bool = True
    priority: int = 0  # the smaller, the sooner
    deadline_s: float | None = None  # seconds since the request was submitted

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            if getattr(self, name) is not _DEFAULTS[name]:  # most are left alone, and right as they are
                self._check_number(name)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _refusal(name, "True or False", getattr(self, name))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refusal("min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens)
        if self.stop is not None:
            self._set("stop", _stop_strings(self.stop))
        if self.stop_token_ids is not None:
            self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise _refusal("allowed_token_ids", "at least one token id, or None for all", allowed)
            self._set("allowed_token_ids", allowed)
        if self.logit_bias is not None:
            self._set("logit_bias", _biases(self.logit_bias))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken: no random number is drawn."""
        return self.temperature < GREEDY_BELOW

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises `InvalidRequestError` for a token id outside the vocabulary. A larger `top_k` means all."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            outside = [token_id for token_id in getattr(self, name) or () if token_id >= vocab_size]
            if outside:
                ids = f"token ids below {vocab_size}, the size of the vocabulary"
                raise _refusal(name, ids, outside[0])

    def _check_number(self, name: str) -> None:
        convert, in_range, expected = _NUMBERS[name]
        value = getattr(self, name)
        if value is None and expected.endswith("None"):
            return
        try:
            number = convert(value)
        except (TypeError, ValueError, OverflowError):
            raise _refusal(name, expected, value) from None
        if not in_range(number):
            raise _refusal(name, expected, value)
        self._set(name, number)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _refusal(name: str, expected: str, value: object) -> InvalidRequestError:
    try:
        found = reprlib.repr(value)  # shortened: the value comes from outside
    except Exception:  # a foreign __repr__, or an integer of too many digits to print
        found = f"a {type(value).__name__}"
    return InvalidRequestError(f"{name} must be {expected}; found {found}", field=name)


def _integer(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number


def _items(name: str, value: Any, expected: str) -> tuple[Any, ...]:
    if isinstance(value, Collection) and not isinstance(value, (str, bytes, bytearray, Mapping)):
        with contextlib.suppress(TypeError):  # an array of no dimension
            return tuple(value)
    raise _refusal(name, expected, value)


def _stop_strings(value: Any) -> tuple[str, ...]:
    expected = "a string or a list of strings, none of them empty"
    strings = (value,) if isinstance(value, str) else _items("stop", value, expected)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise _refusal("stop", expected, string)
    return strings


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    expected = "a list of token ids (integers of at least 0)"
    return tuple(_token_id(name, item, expected) for item in _items(name, value, expected))


def _token_id(name: str, value: Any, expected: str) -> int:
    try:
        token_id = _integer(value)
    except TypeError:
        raise _refusal(name, expected, value) from None
    if token_id < 0:
        raise _refusal(name, expected, value)
    return token_id


def _biases(value: Any) -> dict[int, float]:
    expected = f"a mapping of token ids to numbers from -{MAX_BIAS:g} to {MAX_BIAS:g}"
    if not isinstance(value, Mapping):
        raise _refusal("logit_bias", expected, value)
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20:
            key = int(key)
        token_id = _token_id("logit_bias", key, expected)
        if token_id in biases:
            raise _refusal("logit_bias", "given once for each token id", token_id)
        try:
            biases[token_id] = _float(bias)
        except (TypeError, ValueError, OverflowError):
            raise _refusal("logit_bias", expected, bias) from None
        if abs(biases[token_id]) > MAX_BIAS:
            raise _refusal("logit_bias", expected, bias)
    return biases


# name: (converter, test of the range, the range in words); None is accepted where the words end with it.
_NUMBERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], bool], str]] = {
    "n": (_integer, lambda x: 1 <= x <= MAX_CHOICES, f"an integer from 1 to {MAX_CHOICES}"),
    "temperature": (_float, lambda x: x >= 0, "a finite number of at least 0"),
    "top_p": (_float, lambda x: 0 < x <= 1, "a number above 0 and at most 1"),
    "top_k": (_integer, lambda x: x >= -1, "an integer of at least 1, or 0 or -1 for all tokens"),
    "min_p": (_float, lambda x: 0 <= x <= 1, "a number from 0 to 1"),
    "presence_penalty": (_float, lambda x: -2 <= x <= 2, "a number from -2 to 2"),
    "frequency_penalty": (_float, lambda x: -2 <= x <= 2, "a number from -2 to 2"),
    "repetition_penalty": (_float, lambda x: x > 0, "a finite number above 0"),
    "seed": (_integer, lambda x: 0 <= x < 2**64, "an integer from 0 to 2**64 - 1, or None"),
    "max_tokens": (_integer, lambda x: x >= 0, "an integer of at least 0, or None"),
    "min_tokens": (_integer, lambda x: x >= 0, "an integer of at least 0"),
    "logprobs": (_integer, lambda x: 0 <= x <= MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}, or None"),
    "prompt_logprobs": (
        _integer,
        lambda x: 0 <= x <= MAX_LOGPROBS,
        f"an integer from 0 to {MAX_LOGPROBS}, or None",
    ),
    "priority": (_integer, lambda x: True, "an integer"),
    "deadline_s": (_float, lambda x: x > 0, "a finite number of seconds above 0, or None"),
}
_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
