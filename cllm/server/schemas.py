"""The bodies of requests as types, from which they are checked and `/openapi.json` is made.

Types only: ranges are checked by `SamplingParams`, messages by `ChatTemplate`. A null means the default. It must not
know the engine. Fields: https://platform.openai.com/docs/api-reference and, for the further ones,
https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ..errors import InvalidRequestError
from ..params import SamplingParams

Text = str
TokenIds = list[int]


class SamplingFields(msgspec.Struct, kw_only=True):
    """The fields of `SamplingParams` under their own names, which every generating route takes."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    deadline_s: float | None = None

    def sampling(self, **overrides: Any) -> SamplingParams:
        """The settings of this body. Raises `InvalidRequestError` naming the field."""
        given = {name: getattr(self, name) for name in SamplingFields.__struct_fields__}
        settings = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**(settings | overrides))


class StreamOptions(msgspec.Struct, kw_only=True):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = None


class OpenAIFields(SamplingFields, kw_only=True):
    """What both of OpenAI's generating routes take."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage. Raises `InvalidRequestError` where there is no stream."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options is for streams; set stream to true or leave it out", field="stream_options"
            )
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(OpenAIFields, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class ChatBody(OpenAIFields, kw_only=True):
    """`POST /v1/chat/completions`. `max_completion_tokens` is `max_tokens`; without both the context is the limit."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class GenerateBody(SamplingFields, kw_only=True):
    """`POST /generate` and `/generate_stream`: one of `prompt` and `prompt_token_ids`."""

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: int | None = None
    stream: bool | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: one of `prompt`, `content` (llama-server's name for it) and `messages`."""

    prompt: str | None = None
    content: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None  # None: the file's own rule for BOS
    parse_special: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[int]


class BenchmarkBody(msgspec.Struct, kw_only=True):
    """`POST /benchmark`: lengths in tokens."""

    num_requests: int = 40
    concurrency: int = 8
    prompt_tokens: int = 32
    output_tokens: int = 50


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong, in OpenAI's shape."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, kw_only=True):
    """The body of every reply that is not a success."""

    error: ErrorDetail
