"""The text of an answer: stop strings found whatever the pieces, nothing given out that must be taken back."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from cllm.answer_text import AnswerText, StopMatcher
from cllm.backends.mock import byte_vocabulary
from cllm.tokenizer import make_tokenizer

TOKENIZER = make_tokenizer(byte_vocabulary())


def first_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The slow twin: the text before the first stop string to be complete, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def read(pieces: Sequence[str], stops: Sequence[str]) -> tuple[str, str | None, list[str]]:
    """(the text given out, the stop string, what was given out after each piece)."""
    matcher, settled = StopMatcher(stops), []
    for piece in pieces:
        text, stop = matcher.feed(piece)
        settled.append(text)
        if stop is not None:
            return "".join(settled), stop, settled
    return "".join(settled) + matcher.release(), None, settled


def split(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


SMALL = st.text("ab", max_size=20)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


@given(SMALL, STOPS, st.lists(st.integers(0, 30), max_size=6))
@example("aabab", ["abab", "b"], [2])
@example("aab", ["ab", "aab"], [1])
def test_matcher_equals_slow_twin_for_every_split(text: str, stops: list[str], cuts: list[int]) -> None:
    given_out, stop, settled = read(split(text, cuts), stops)
    assert (given_out, stop) == first_stop(text, stops)
    # Text is held back only while it may still match: what is held begins a stop string.
    if stop is None:
        held = text[len("".join(settled)) :]
        assert not held or any(one.startswith(held) and one != held for one in stops)
        assert not any(
            one.startswith(text[at:]) for one in stops for at in range(len(text) - len(held)) if text[at:]
        )


@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=3), max_size=3), st.booleans())
def test_stream_is_the_text(text: str, stops: list[str], include: bool) -> None:
    """Law 4, over a byte vocabulary: every character is split over its bytes."""
    text = text.encode("utf-8", "replace").decode()
    answer = AnswerText(TOKENIZER, stop=stops, include_stop=include)
    pieces = []
    for token_id in TOKENIZER.encode(text):
        pieces.append(answer.push(token_id))
        if answer.stop is not None:
            break
    pieces.append(answer.flush())
    expected, stop = first_stop(text, stops)
    assert answer.stop == stop
    assert "".join(pieces) == expected + (stop if stop and include else "")


def test_mutants_are_seen() -> None:
    """A matcher that drops what it held, or cuts one character late, does not pass the comparison above."""

    class Drops(StopMatcher):
        def release(self) -> str:
            super().release()
            return ""

    class CutsLate(StopMatcher):
        def feed(self, text: str) -> tuple[str, str | None]:
            settled, stop = super().feed(text)
            return (settled + stop[0], stop) if stop else (settled, stop)

    for mutant in (Drops, CutsLate):
        differs = False
        rng = random.Random(0)
        for _ in range(200):
            text = "".join(rng.choices("ab", k=8))
            matcher = mutant(["abb", "ba"])
            settled, stop = matcher.feed(text)
            differs |= (settled + ("" if stop else matcher.release()), stop) != first_stop(
                text, ["abb", "ba"]
            )
        assert differs, mutant.__name__


def test_many_long_stop_strings_stay_cheap() -> None:
    """Work is one step a character: a thousand stop strings that nearly match cost as much as one."""
    steps = 0

    class Counting(StopMatcher):
        def _step(self, state: int, char: str) -> int:
            nonlocal steps
            steps += 1
            return super()._step(state, char)

    matcher = Counting(["a" * 50 + str(i) for i in range(1000)])
    steps = 0
    for _ in range(1000):
        assert matcher.feed("aaaaaaaaaa")[1] is None
    assert steps == 10_000


def test_before_min_tokens_a_stop_string_passes() -> None:
    answer = AnswerText(TOKENIZER, stop=["bb"])
    text = "".join(answer.push(ord(char), may_stop=at >= 2) for at, char in enumerate("bbabb"))
    assert (text + answer.flush(), answer.stop) == ("bba", "bb")


@pytest.mark.parametrize("tail", [b"\xe4\xbd", b"\xf0\x9f\x98"])
def test_a_broken_character_at_the_end_is_replaced(tail: bytes) -> None:
    answer = AnswerText(TOKENIZER, stop=["never"])
    text = "".join(answer.push(byte) for byte in b"ne" + tail)
    assert text + answer.flush() == "ne" + tail.decode("utf-8", "replace")
