"""From an output to its reasoning and its answer.

This module tells by token id which part of an output's raw text is reasoning. It must not know templates,
requests or HTTP, and it strips nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cllm.tokenizer import StreamDecoder, Tokenizer


class Answer(NamedTuple):
    """An output in its two fields; `reasoning` is None where the model did not reason."""

    reasoning: str | None
    content: str


class ReasoningSplitter:
    """Finds by token id where the reasoning of one output lies in its raw text.

    raw text = opening tag + reasoning + closing tag + content, always: nothing is stripped, either tag may be missing.
    Reasoning opens with `<think>` as the very first token, or in the prompt; the first `</think>` closes it. Other
    tags, and all of them in a vocabulary that lacks one of the two tokens, are content.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._open_id, self._close_id = _find_think_ids(tokenizer)
        self._length = 0  # characters pushed; those below are offsets among them
        self._is_first = True
        self._start: int | None = 0 if self._is_open_after(prompt_ids) else None
        self._end: int | None = None
        self._content = 0

    def push(self, token_id: int, piece: str) -> None:
        """Takes the next token and `piece`, the text that `StreamDecoder.push` returned for it."""
        self._length += len(piece)
        if self._is_first and self._start is None and token_id == self._open_id:
            self._start = self._length
        elif self._start is not None and self._end is None and token_id == self._close_id:
            tag = self._tokenizer.token_bytes(token_id).decode()
            # A character that the tag cut short comes in the same piece; a skipped tag has no text.
            self._end = self._length - (len(tag) if piece.endswith(tag) else 0)
            self._content = self._length
        self._is_first = False

    def split(self, text: str, start: int = 0) -> Answer:
        """Splits `text`, the part of the raw text that begins at character `start`; either field may be "".

        Its tokens must have been pushed, but the text may lag behind them or end sooner (stop strings).
        """
        if self._start is None:
            return Answer(None, text)
        first = max(self._start - start, 0)
        if self._end is None:
            return Answer(text[first:], "")
        return Answer(text[first : max(self._end - start, 0)], text[max(self._content - start, 0) :])

    def _is_open_after(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the template left a `<think>` open: what a user typed lies before a control token."""
        for token_id in reversed(prompt_ids):
            if token_id == self._open_id:
                return True
            if token_id == self._close_id or token_id in self._tokenizer.control_ids:
                return False
        return False


def split_reasoning(
    tokenizer: Tokenizer,
    token_ids: Iterable[int],
    *,
    prompt_ids: Sequence[int] = (),
    skip_special: bool = True,
) -> Answer:
    """Returns the reasoning and the content of a whole output, exact slices of its decoded text.

    Raises `InvalidRequestError` for an id outside the vocabulary.
    """
    decoder = StreamDecoder(tokenizer, skip_special=skip_special)
    splitter = ReasoningSplitter(tokenizer, prompt_ids)
    pieces = []
    for token_id in token_ids:
        pieces.append(decoder.push(token_id))
        splitter.push(token_id, pieces[-1])
    return splitter.split("".join([*pieces, decoder.flush()]))


def _find_think_ids(tokenizer: Tokenizer) -> tuple[int | None, int | None]:
    found = [tokenizer.encode(tag, parse_special=True, add_bos=False) for tag in ("<think>", "</think>")]
    if any(len(ids) != 1 for ids in found):
        return None, None
    return found[0][0], found[1][0]
