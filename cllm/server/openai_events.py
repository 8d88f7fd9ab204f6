"""OpenAI's streams: the chunks of completions and of chats, as bytes.

Shapes: https://platform.openai.com/docs/api-reference/completions and .../chat-streaming. A chunk without text,
log-probabilities and end is left out. It must not know HTTP or how requests are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..outputs import StreamPiece
from ..sequence import Request
from ..tokenizer import Tokenizer
from .failures import failure_of
from .logprobs import CompletionLogprobs, chat_logprobs
from .service import Call
from .sse import event, failure_event, template
from .web import encode

_DONE = b"data: [DONE]\n\n"
_HOLE = "\ue000 the text \ue000"


def usage(num_prompt: int, num_completion: int, num_cached: int) -> dict[str, Any]:
    """OpenAI's `usage`, in tokens."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


class _Events:
    """What both kinds of stream share: numbers of choices, usage, the end."""

    kind: str

    def __init__(self, call: Call, envelope: dict[str, Any], *, with_usage: bool) -> None:
        self._requests = call.requests
        self._envelope = envelope
        self._with_usage = with_usage
        self._num_completion = 0
        first = 0
        self._first_choice: dict[str, int] = {}  # of each request
        for request_id, request in call.requests.items():
            self._first_choice[request_id] = first
            first += len(request.sequences)
        self._choices: dict[int, Any] = {}

    def events(self, pieces: Sequence[StreamPiece]) -> bytes:
        """The chunks of what a step, or several, brought."""
        parts: list[bytes] = []
        for piece in pieces:
            index = self._first_choice[piece.request_id] + piece.index
            self._num_completion += len(piece.token_ids)
            if piece.finish_reason == "error" and piece.error is not None:
                parts.append(failure_event(failure_of(piece.error)))
            else:
                self._write(parts, piece, index)
        return b"".join(parts)

    def end(self) -> bytes:
        """The usage, where asked for, and the mark of the end."""
        if not self._with_usage:
            return _DONE
        requests = self._requests.values()
        num_prompt = sum(len(request.prompt_token_ids) for request in requests)
        num_cached = sum(request.num_cached_tokens for request in requests)
        total = usage(num_prompt, self._num_completion, num_cached)
        return event(self._envelope | {"choices": [], "usage": total}) + _DONE

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """A chunk with one choice; where the usage comes at the end, the others say so with null."""
        return self._envelope | {"choices": [choice]} | ({"usage": None} if self._with_usage else {})

    def _write(self, parts: list[bytes], piece: StreamPiece, index: int) -> None:
        raise NotImplementedError


class CompletionEvents(_Events):
    """Chunks of `/v1/completions`; with `is_echo` the first of each choice is its prompt."""

    def __init__(
        self,
        call: Call,
        envelope: dict[str, Any],
        tokenizer: Tokenizer,
        *,
        with_usage: bool,
        is_echo: bool,
    ) -> None:
        super().__init__(call, envelope, with_usage=with_usage)
        self._tokenizer = tokenizer
        self._is_echo = is_echo
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def _write(self, parts: list[bytes], piece: StreamPiece, index: int) -> None:
        known = self._choices.get(index)
        if known is None:
            known = self._choices[index] = template(self._chunk(_completion_choice(index, _HOLE)), _HOLE)
            echo = Echo(self._requests[piece.request_id], self._tokenizer)
            self._logprobs[index] = echo.continuation(self._is_echo)
            if self._is_echo:
                parts.append(event(self._chunk(_completion_choice(index, echo.text, echo.logprobs()))))
        if piece.logprobs is None and piece.finish_reason is None:
            if piece.text:
                parts += (known[0], encode(piece.text), known[1])
            return
        logprobs = None
        if piece.logprobs is not None:
            logprobs = self._logprobs[index].make(piece.token_ids, piece.logprobs)
        parts.append(event(self._chunk(_completion_choice(index, piece.text, logprobs, piece.finish_reason))))


class ChatEvents(_Events):
    """Chunks of `/v1/chat/completions`; the first of each choice tells the role, the last why it ended."""

    def __init__(
        self,
        call: Call,
        envelope: dict[str, Any],
        tokenizer: Tokenizer,
        *,
        with_usage: bool,
        num_top: int,
    ) -> None:
        super().__init__(call, envelope, with_usage=with_usage)
        self._tokenizer, self._num_top = tokenizer, num_top

    def _write(self, parts: list[bytes], piece: StreamPiece, index: int) -> None:
        known = self._choices.get(index)
        if known is None:
            made = self._chunk(_chat_choice(index, {"content": _HOLE}))
            known = self._choices[index] = template(made, _HOLE)
            parts.append(event(self._chunk(_chat_choice(index, {"role": "assistant", "content": ""}))))
        if piece.logprobs is None and not piece.reasoning:
            if piece.content:
                parts += (known[0], encode(piece.content), known[1])
        else:
            self._write_delta(parts, piece, index)
        if piece.finish_reason is not None:
            parts.append(event(self._chunk(_chat_choice(index, {}, None, piece.finish_reason))))

    def _write_delta(self, parts: list[bytes], piece: StreamPiece, index: int) -> None:
        delta: dict[str, str | None] = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
        if piece.content or not delta:
            delta["content"] = piece.content
        logprobs = None
        if piece.logprobs is not None:
            logprobs = chat_logprobs(self._tokenizer, piece.token_ids, piece.logprobs, self._num_top)
        if piece.token_ids or piece.text:
            parts.append(event(self._chunk(_chat_choice(index, delta, logprobs))))


class Echo:
    """The prompt as the beginning of an answer. `text`: as it came, or what its token ids mean."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._request, self._tokenizer = request, tokenizer
        text = request.prompt
        self.text: str = tokenizer.decode(request.prompt_token_ids) if text is None else text

    def logprobs(self) -> dict[str, Any] | None:
        """Those of the prompt's tokens, where the request asked for them."""
        request = self._request
        if request.params.logprobs is None:
            return None
        # A text holds no control tokens; a BOS that the file's rule put before it is no part of it.
        maker = CompletionLogprobs(self._tokenizer, skip_special=request.prompt is not None)
        return maker.make(request.prompt_token_ids, request.prompt_logprobs)

    def continuation(self, is_echo: bool) -> CompletionLogprobs:
        """Makes the log-probabilities of the answer, whose text begins after the prompt's where that is echoed."""
        skip_special, offset = self._request.params.skip_special_tokens, len(self.text) if is_echo else 0
        return CompletionLogprobs(self._tokenizer, skip_special=skip_special, offset=offset)


def _completion_choice(
    index: int, text: str, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _chat_choice(
    index: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
