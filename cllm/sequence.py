"""One request and its answers while they are being made: their tokens, where they stand, why they ended.

It knows neither the backend nor the scheduler's policy; the tools it needs (sampler, text) are handed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from .outputs import CompletionOutput, PositionLogprobs, RequestMetrics, RequestOutput, StreamPiece
from .params import SamplingParams


class TextMaker(Protocol):
    """Turns the tokens of one answer into text, piece by piece (`cllm.answer_text.AnswerText`)."""

    stop: str | None

    def push(self, token_id: int, *, may_stop: bool = True) -> str: ...
    def flush(self) -> str: ...
    def token_text(self, token_id: int) -> str: ...
    def split(self, text: str, start: int) -> tuple[str | None, str]: ...


class SampledToken(Protocol):
    """What a sampler gives (`cllm.sampler.Sampled`)."""

    @property
    def token_id(self) -> int: ...
    @property
    def logprob(self) -> float | None: ...
    @property
    def top(self) -> PositionLogprobs | None: ...


@dataclass(slots=True)
class Request:
    """What was asked. `deliver(updates)` is called from the engine's thread with what a step brought.

    `streaming`: deliver `StreamPiece`s step by step; otherwise one `RequestOutput` at the end. `may_wait()`, asked
    after a step, once for each `deliver`: whether what is new in its streams may come together with the next step's.
    `prompt_logprobs`: filled as the prompt is computed, where `params` ask for it.
    Times are of `time.perf_counter`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    deliver: Callable[[list[Any]], None]
    streaming: bool = False
    may_wait: Callable[[], bool] | None = None
    is_chat: bool = False
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] = field(default_factory=lambda: [None])
    num_cached_tokens: int = 0
    error: Exception | None = None
    arrived: float = field(default_factory=time.perf_counter)
    started: float | None = None

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason for sequence in self.sequences)

    @property
    def num_scored(self) -> int:
        """Prompt tokens whose log-probability is known, or that have none."""
        return len(self.prompt_logprobs)

    def output(self) -> RequestOutput:
        """The state of all answers."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[sequence.output() for sequence in self.sequences],
            finished=self.finished,
            metrics=self.sequences[0].metrics(),
            prompt_logprobs=None if self.params.prompt_logprobs is None else self.prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            error=self.error,
        )


class Sequence:
    """One answer to a request.

    `token_ids`: prompt and output. `num_computed`: how many of them the backend has in `slot`.
    """

    __slots__ = (
        "_cumulative_logprob",
        "_end_ids",
        "_eog_ids",
        "_is_unread",
        "_logprobs",
        "_min_tokens",
        "_num_sent",
        "_pieces",
        "_text",
        "finish_reason",
        "first_token_at",
        "index",
        "last_token_at",
        "max_tokens",
        "num_computed",
        "num_prompt",
        "request",
        "sampler",
        "slot",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        request: Request,
        index: int,
        *,
        sampler: Any,
        text: TextMaker,
        eog_ids: frozenset[int],
        max_tokens: int,
    ) -> None:
        self.request = request
        self.index = index
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt = len(self.token_ids)
        self.num_computed = 0
        self.slot: int | None = None
        self.sampler = sampler
        self.max_tokens = max_tokens
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self._text = text
        self._min_tokens = request.params.min_tokens
        self._eog_ids = frozenset() if request.params.ignore_eos else eog_ids
        self._end_ids = self._eog_ids | frozenset(request.params.stop_token_ids or ())
        self._pieces: list[str] = []
        self._logprobs: list[PositionLogprobs] = []
        self._cumulative_logprob = 0.0
        self._num_sent = (0, 0, 0)  # pieces, characters and tokens already given to `take_piece`
        self._is_unread = False  # whether the last token is no text yet
        request.sequences.append(self)

    @property
    def num_pending(self) -> int:
        """Tokens that the backend has still to see."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the prompt's own tokens have still to be scored."""
        wanted = self.request.params.prompt_logprobs is not None and self.index == 0
        return wanted and self.request.num_scored < self.num_prompt

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def append(self, sampled: SampledToken, now: float) -> None:
        """Takes one sampled token and finishes the answer where it ends it, but for stop strings: see `read`."""
        token_id = sampled.token_id
        self.token_ids.append(token_id)
        num_output = len(self.token_ids) - self.num_prompt
        self.last_token_at = now
        if num_output == 1:
            self.first_token_at = now
        if sampled.top is not None and sampled.logprob is not None:
            self._cumulative_logprob += sampled.logprob
            self._logprobs.append(self.named(sampled.top))
        if self.ends_with(token_id):
            self._end_at(token_id)
            return
        self._is_unread = True
        if num_output >= self.max_tokens:
            self.finish("length")

    def ends_with(self, token_id: int) -> bool:
        """Whether this token, as the next one, ends the answer by itself."""
        return token_id in self._end_ids

    def read(self) -> bool:
        """Makes text of the last token, where that has not been done; True where it ended the answer.

        To be called once between two tokens. It is apart from `append` because the next step needs no text.
        """
        if not self._is_unread:
            return False
        self._is_unread = False
        text = self._text
        piece = text.push(self.token_ids[-1], may_stop=self.num_output > self._min_tokens)
        if piece:
            self._pieces.append(piece)
        if text.stop is None:
            return False
        self.finish("stop", text.stop)
        return True

    def _end_at(self, token_id: int) -> None:
        """The answer ends with this token: the model's own end, or one of `stop_token_ids`."""
        if token_id in self._eog_ids:
            self.finish("stop")
            return
        if self.request.params.include_stop_str_in_output:
            self._pieces.append(self._text.push(token_id))
        self.finish("stop", token_id)

    def named(self, top: PositionLogprobs) -> PositionLogprobs:
        """The same log-probabilities with the text of each token."""
        return {id: entry._replace(decoded_token=self._text.token_text(id)) for id, entry in top.items()}

    def finish(self, reason: str, stop_reason: str | int | None = None) -> None:
        """Ends the answer; what its text still held back is released. A stop string in it is the first reason."""
        if self.finish_reason is None and not self.read():
            self.finish_reason, self.stop_reason = reason, stop_reason
            self._pieces.append(self._text.flush())

    def fail(self, error: Exception) -> None:
        """Ends the answer with an error, which becomes the request's."""
        if self.finish_reason is None:
            self.request.error = error
            self.finish("error")

    def take_piece(self) -> StreamPiece:
        """What the answer gained since the last call."""
        pieces, chars, tokens = self._num_sent
        request, token_ids = self.request, self.token_ids[self.num_prompt + tokens :]
        text = "".join(self._pieces[pieces:])
        self._num_sent = (len(self._pieces), chars + len(text), tokens + len(token_ids))
        piece = StreamPiece(request.request_id, self.index, text, token_ids)
        if request.params.logprobs is not None:
            piece.logprobs = self._logprobs[tokens:]
        if request.is_chat:
            piece.reasoning, piece.content = self._text.split(text, chars)
        if self.finish_reason is not None:
            piece.finish_reason, piece.stop_reason = self.finish_reason, self.stop_reason
            piece.metrics = self.metrics()
        piece.error = request.error
        return piece

    def output(self) -> CompletionOutput:
        text, wants_logprobs = self.text, self.request.params.logprobs is not None
        reasoning, content = self._text.split(text, 0) if self.request.is_chat else (None, None)
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.token_ids[self.num_prompt :],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            cumulative_logprob=self._cumulative_logprob if wants_logprobs else None,
            logprobs=list(self._logprobs) if wants_logprobs else None,
            reasoning=reasoning,
            content=content,
        )

    def metrics(self) -> RequestMetrics:
        request, first, last = self.request, self.first_token_at, self.last_token_at
        decode_s = last - first if first is not None and last is not None else 0.0
        return RequestMetrics(
            queue_s=None if request.started is None else request.started - request.arrived,
            time_to_first_token_s=None if first is None else first - request.arrived,
            decode_tokens_per_s=(self.num_output - 1) / decode_s if decode_s > 0 else None,
            total_s=time.perf_counter() - request.arrived,
        )
