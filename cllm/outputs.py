"""The values that a request gives back. It knows nothing of how they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Logprob(NamedTuple):
    """One token's natural log-probability over the whole vocabulary, before temperature and other settings.

    `rank` is 1 for the most likely token; of equally likely ones the lowest id ranks first.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


# Of one position: the sampled (or given) token and the most likely ones, by token id.
PositionLogprobs = dict[int, Logprob]


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one request, in seconds; None where it did not get that far.

    `queue_s`: from submission to its first step. `time_to_first_token_s`: from submission.
    `decode_tokens_per_s`: tokens after the first, over the time that they took.
    """

    queue_s: float | None
    time_to_first_token_s: float | None
    decode_tokens_per_s: float | None
    total_s: float


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer. `finish_reason`: "stop", "length", "abort", "error", or None while it runs.

    `text`: the raw answer. `reasoning` and `content`: for a chat, the two parts of it without their tags
    (`reasoning` None where there is none). `stop_reason`: the stop string or token id that ended it,
    "deadline", or None. `logprobs`: for each token, where asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    reasoning: str | None = None
    content: str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One request's answers. `error`: what ended it, where `finish_reason` is "error".

    `prompt_logprobs`: for each prompt token, given those before it; the first is None.
    `num_cached_tokens`: prompt tokens that were not computed again.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    error: Exception | None = None


@dataclass(slots=True)  # not frozen, which would make it three times as expensive: there is one a token
class StreamPiece:
    """What one answer gained in a step, or in several. The `text`s of an answer, joined, are the whole answer's text.

    So with `reasoning` and `content` in a chat. `logprobs`: of these tokens, where asked for.
    `metrics` comes with the last piece.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    reasoning: str | None = None
    content: str | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    metrics: RequestMetrics | None = None
    error: Exception | None = None
