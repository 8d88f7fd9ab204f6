"""Log-probabilities in OpenAI's two shapes, and in our own. It knows tokens and their texts, and no HTTP.

Shapes: https://platform.openai.com/docs/api-reference/completions/object (tokens, token_logprobs, top_logprobs,
text_offset) and https://platform.openai.com/docs/api-reference/chat/object (content, a list of objects).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..outputs import Logprob, PositionLogprobs
from ..tokenizer import StreamDecoder, Tokenizer

_LOWEST = -9999.0  # OpenAI's number for what JSON cannot hold, minus infinity


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's text; part of a character is spelled as OpenAI does, "bytes:\\xe4\\xbd", so that names differ."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionLogprobs:
    """`logprobs` of one choice of a completion, piece by piece: `text_offset` goes on from piece to piece.

    `skip_special`: whether the text leaves control tokens out.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer, skip_special=skip_special)
        self._offset = offset  # characters

    def make(self, token_ids: Iterable[int], positions: Iterable[PositionLogprobs | None]) -> dict[str, Any]:
        """The object for `token_ids`; a position without log-probabilities (a prompt's first) has null entries."""
        tokens, chosen, tops, offsets = [], [], [], []
        for token_id, position in zip(token_ids, positions, strict=True):
            name = token_name(self._tokenizer, token_id)
            tokens.append(name)
            chosen.append(None if position is None else _finite(position[token_id]))
            tops.append(None if position is None else self._by_name(position))
            piece = self._decoder.push(token_id)
            # A broken character before the token comes in the same piece.
            own = len(name) if piece.endswith(name) else len(piece)
            offsets.append(self._offset + len(piece) - own)
            self._offset += len(piece)
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets}

    def _by_name(self, position: PositionLogprobs) -> dict[str, float]:
        named: dict[str, float] = {}
        for token_id, entry in position.items():  # the best first: of equal names it is the one to keep
            named.setdefault(token_name(self._tokenizer, token_id), _finite(entry))
        return named


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Iterable[int], positions: Iterable[PositionLogprobs], num_top: int
) -> dict[str, Any]:
    """`logprobs` of one choice of a chat: each token with its `num_top` likeliest alternatives."""

    def describe(token_id: int, entry: Logprob) -> dict[str, Any]:
        name, data = token_name(tokenizer, token_id), list(tokenizer.token_bytes(token_id))
        return {"token": name, "logprob": _finite(entry), "bytes": data}

    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        top = [describe(other, entry) for other, entry in position.items() if entry.rank <= num_top]
        content.append(describe(token_id, position[token_id]) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def native_logprobs(positions: Iterable[PositionLogprobs]) -> list[list[dict[str, Any]]]:
    """For each position its tokens, the best first: token_id, text, logprob, rank."""
    return [
        [
            {"token_id": id, "text": entry.decoded_token, "logprob": _finite(entry), "rank": entry.rank}
            for id, entry in position.items()
        ]
        for position in positions
    ]


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, _LOWEST)
