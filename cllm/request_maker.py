"""From prompts and parameters to checked requests. What can be wrong with one is found here, before it is queued.

It knows the tokenizer and the model's limits, no engine and no backend.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .answer_text import AnswerText
from .backends.base import BackendInfo
from .chat import ChatPrompt
from .errors import ContextLengthError, InvalidRequestError
from .params import SamplingParams
from .reasoning import ReasoningSplitter
from .sampler import TokenSampler
from .sequence import Request
from .sequence import Sequence as Answer
from .tokenizer import Tokenizer

Prompt = str | Sequence[int]


class Checked(NamedTuple):
    """A prompt that nothing is wrong with, and its parameters."""

    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    is_chat: bool


class RequestMaker:
    """Makes the requests for one model. `fits`: whether a sequence of so many tokens fits the KV cache, alone."""

    def __init__(self, tokenizer: Tokenizer, info: BackendInfo, fits: Callable[[int], bool]) -> None:
        self._tokenizer, self._info, self._fits = tokenizer, info, fits
        self._ids = itertools.count()

    def check_all(
        self,
        prompts: Sequence[Prompt | ChatPrompt],
        params: SamplingParams | Sequence[SamplingParams],
    ) -> list[Checked]:
        """Every prompt with its parameters: one for all, or one for each.

        Raises `InvalidRequestError`, which names the index of the prompt where there are several.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InvalidRequestError(
                f"{len(prompts)} prompts, but {len(each)} sampling_params", field="sampling_params"
            )
        checked: list[Checked] = []
        for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
            try:
                if not checked or one is not each[index - 1]:
                    self.sampler(one, [], 0)  # whatever it refuses, the prompt plays no part
                checked.append(self.check(prompt, one))
            except InvalidRequestError as error:
                if len(prompts) > 1:
                    error.args = (f"prompt {index}: {error}",)
                raise
        return checked

    def check(self, prompt: Prompt | ChatPrompt, params: SamplingParams) -> Checked:
        """All that can be wrong with a request, but for what `sampler` refuses. Raises `InvalidRequestError`."""
        text, token_ids = self._read_prompt(prompt)
        self._check_length(len(token_ids))
        room = self._info.context_length - len(token_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        need, capacity = len(token_ids) + max_tokens, self._info.kv_capacity
        if not self._fits(need):
            raise InvalidRequestError(
                f"prompt ({len(token_ids)} tokens) and max_tokens ({max_tokens}) need {need} tokens of KV cache; "
                f"it holds {capacity}. Raise kv_cache_tokens or lower max_tokens",
                field="max_tokens",
            )
        return Checked(text, token_ids, params, max_tokens, isinstance(prompt, ChatPrompt))

    def make(
        self,
        checked: Checked,
        deliver: Callable[[list[Any]], None],
        *,
        streaming: bool = False,
        may_wait: Callable[[], bool] | None = None,
    ) -> Request:
        """The request, with a new id and its sequences. Raises `InvalidRequestError` for its parameters."""
        text, token_ids, params, max_tokens, is_chat = checked
        request = Request(
            request_id=str(next(self._ids)),
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            deliver=deliver,
            streaming=streaming,
            may_wait=may_wait,
            is_chat=is_chat,
        )
        for index in range(params.n):
            answer_text = AnswerText(
                self._tokenizer,
                stop=params.stop or (),
                include_stop=params.include_stop_str_in_output,
                skip_special=params.skip_special_tokens,
                splitter=ReasoningSplitter(self._tokenizer, token_ids) if is_chat else None,
            )
            Answer(
                request,
                index,
                sampler=self.sampler(params, token_ids, index),
                text=answer_text,
                eog_ids=self._tokenizer.eog_ids,
                max_tokens=max_tokens,
            )
        return request

    def sampler(self, params: SamplingParams, prompt_ids: list[int], index: int) -> TokenSampler:
        """The sampler of choice number `index`. Raises `InvalidRequestError` for what this model cannot do."""
        return TokenSampler(
            params,
            prompt_token_ids=prompt_ids,
            vocab_size=self._info.vocab_size,
            unused_ids=self._tokenizer.unused_ids,
            eog_ids=self._tokenizer.eog_ids,
            index=index,
        )

    def _read_prompt(self, prompt: Prompt | ChatPrompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, ChatPrompt):
            return prompt.text, prompt.token_ids
        if isinstance(prompt, str):
            return prompt, self._tokenizer.encode(prompt)
        try:
            token_ids = list(prompt)
        except TypeError:
            kind = type(prompt).__name__
            raise InvalidRequestError(
                f"a prompt is a text or a list of token ids; found {kind}", field="prompt"
            ) from None
        self._tokenizer.check_ids(token_ids)
        return None, [int(token_id) for token_id in token_ids]

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens == 0:
            raise InvalidRequestError("the prompt is empty: it needs at least one token", field="prompt")
        if num_tokens >= self._info.context_length:
            raise ContextLengthError(
                f"the prompt has {num_tokens} tokens; the context holds {self._info.context_length}, and at least one "
                f"is needed for the answer",
                num_tokens=num_tokens,
                limit=self._info.context_length,
            )
