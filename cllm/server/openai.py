"""OpenAI's routes: `/v1/models`, `/v1/completions`, `/v1/chat/completions`, streaming and not, in OpenAI's shapes.

Where vLLM adds fields they are vLLM's. It must not know threads or how bytes travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request as WebRequest
from starlette.responses import Response

from ..errors import InvalidRequestError
from ..outputs import CompletionOutput, RequestOutput
from ..params import SamplingParams
from ..sequence import Request
from .failures import HTTPError
from .logprobs import chat_logprobs
from .openai_events import ChatEvents, CompletionEvents, Echo, usage
from .schemas import ChatBody, CompletionBody
from .service import Call, Service
from .sse import stream
from .web import read_body, reply


async def list_models(request: WebRequest) -> Response:
    """`GET /v1/models`."""
    return reply({"object": "list", "data": [_model(request.app.state.service)]})


async def get_model(request: WebRequest) -> Response:
    """`GET /v1/models/{model}`."""
    service: Service = request.app.state.service
    _check_model(service, request.path_params["model"])
    return reply(_model(service))


async def completions(request: WebRequest) -> Response:
    """`POST /v1/completions`."""
    service: Service = request.app.state.service
    body, size = await read_body(request, CompletionBody)
    with service.timed("validate"):
        _check_model(service, body.model)
        params, prompts, with_usage = _completion_params(body), read_prompts(body.prompt), body.includes_usage
    requests = await service.prepare(
        lambda: _make_requests(service, prompts, params, bool(body.stream)), size * len(prompts) * params.n
    )
    call = service.submit(requests, request.receive)
    envelope = _envelope(service, call, "cmpl-", "text_completion")
    if body.stream:
        tokenizer, is_echo = service.llm.tokenizer, bool(body.echo)
        writer = CompletionEvents(call, envelope, tokenizer, with_usage=with_usage, is_echo=is_echo)
        return await stream(service, call, writer)
    return await _whole(
        service, call, envelope, lambda r, o, a: _completion_choice(service, r, a, bool(body.echo))
    )


async def chat_completions(request: WebRequest) -> Response:
    """`POST /v1/chat/completions`."""
    service: Service = request.app.state.service
    body, _ = await read_body(request, ChatBody)
    with service.timed("validate"):
        _check_model(service, body.model)
        params, with_usage, tools = _chat_params(body), body.includes_usage, _read_tools(body)
    num_top = body.top_logprobs or 0

    def prepare() -> list[Request]:
        prompt = service.llm.render(
            body.messages, tools=tools, chat_template_kwargs=body.chat_template_kwargs
        )
        with _renaming(prompt="messages"):
            return _make_requests(service, [prompt], params, bool(body.stream))

    call = service.submit(await service.prepare(prepare), request.receive)
    if body.stream:
        envelope = _envelope(service, call, "chatcmpl-", "chat.completion.chunk")
        tokenizer = service.llm.tokenizer
        writer = ChatEvents(call, envelope, tokenizer, with_usage=with_usage, num_top=num_top)
        return await stream(service, call, writer)
    envelope = _envelope(service, call, "chatcmpl-", "chat.completion")
    return await _whole(service, call, envelope, lambda r, o, a: _chat_choice(service, a, num_top))


def read_prompts(prompt: Any) -> list[Any]:
    """A text, a list of texts, one list of token ids or a list of such lists, as a list of prompts.

    Raises `InvalidRequestError` for a mixture or for none.
    """
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]
    if kinds in ({str}, {list}):
        return list(prompt)
    found = "an empty list" if not kinds else "a list of several kinds"
    raise InvalidRequestError(
        f"prompt must be a text, a list of texts, a list of token ids or a list of such lists; found {found}",
        field="prompt",
    )


def _make_requests(
    service: Service, prompts: Sequence[Any], params: SamplingParams, is_stream: bool
) -> list[Request]:
    """A checked request for each prompt. Raises `InvalidRequestError`."""
    llm = service.llm
    if len(prompts) > llm.config.max_queue:
        raise InvalidRequestError(
            f"{len(prompts)} prompts in one request; at most {llm.config.max_queue} fit the queue",
            field="prompt",
        )
    with _renaming(prompt_token_ids="prompt"):
        return [service.make_request(prompt, params, streaming=is_stream) for prompt in prompts]


async def _whole(
    service: Service,
    call: Call,
    envelope: dict[str, Any],
    choice: Callable[[Request, RequestOutput, CompletionOutput], dict[str, Any]],
) -> Response:
    """The reply that is not a stream."""
    try:
        outputs = await call.outputs()
    finally:
        call.close()
    with service.timed("respond"):
        choices: list[dict[str, Any]] = []
        for request, output in zip(call.requests.values(), outputs, strict=True):
            for answer in output.outputs:
                choices.append({"index": len(choices)} | choice(request, output, answer))
        total = usage(
            sum(len(output.prompt_token_ids) for output in outputs),
            sum(len(answer.token_ids) for output in outputs for answer in output.outputs),
            sum(output.num_cached_tokens for output in outputs),
        )
        headers = {"x-request-id": call.id}
        return reply(envelope | {"choices": choices, "usage": total}, headers=headers)


def _completion_choice(
    service: Service, request: Request, answer: CompletionOutput, is_echo: bool
) -> dict[str, Any]:
    echo = Echo(request, service.llm.tokenizer)
    text, logprobs = answer.text, None
    if answer.logprobs is not None:
        maker = echo.continuation(is_echo)
        logprobs = maker.make(answer.token_ids, answer.logprobs)
    if is_echo:
        text = echo.text + text
        before = echo.logprobs()
        if before is not None and logprobs is not None:
            logprobs = {name: before[name] + values for name, values in logprobs.items()}
    return {"text": text, "logprobs": logprobs, "finish_reason": answer.finish_reason}


def _chat_choice(service: Service, answer: CompletionOutput, num_top: int) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    logprobs = None
    if answer.logprobs is not None:
        logprobs = chat_logprobs(service.llm.tokenizer, answer.token_ids, answer.logprobs, num_top)
    return {"message": message, "logprobs": logprobs, "finish_reason": answer.finish_reason}


def _completion_params(body: CompletionBody) -> SamplingParams:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise _unsupported("best_of", "other than n")
    if body.suffix:
        raise _unsupported("suffix", "of any length")
    scores = body.echo and body.logprobs is not None
    return body.sampling(logprobs=body.logprobs, prompt_logprobs=body.logprobs if scores else None)


def _chat_params(body: ChatBody) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", field="top_logprobs")
    if body.response_format is not None and body.response_format.get("type") != "text":
        raise _unsupported("response_format", "other than text")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    with _renaming(logprobs="top_logprobs", max_tokens=limit):
        return body.sampling(max_tokens=max_tokens, logprobs=logprobs)


def _read_tools(body: ChatBody) -> list[dict[str, Any]] | None:
    """The tools that the template is to tell of. The answer's text is not searched for calls."""
    if body.tool_choice not in (None, "auto", "none"):
        raise _unsupported("tool_choice", "other than auto and none")
    return None if body.tool_choice == "none" else body.tools


@contextmanager
def _renaming(**names: str) -> Iterator[None]:
    """Errors raised inside are told under the names that these fields have in OpenAI's API."""
    try:
        yield
    except InvalidRequestError as error:
        old, new = error.field, names.get(error.field or "")
        if new is not None and new != old:
            text = str(error)
            error.args = (
                new + text.removeprefix(str(old)) if text.startswith(str(old)) else f"{new}: {text}",
            )
            error.field = new
        raise


def _unsupported(field: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field} {what} is not supported; leave it out", field=field)


def _check_model(service: Service, name: str | None) -> None:
    """Raises `HTTPError` (404) for a model that is not served; no name means the one that is."""
    if name and name != service.model_id:
        message = f"the model {name!r:.200} does not exist; this server serves {service.model_id!r}"
        raise HTTPError(404, message, param="model", code="model_not_found")


def _model(service: Service) -> dict[str, Any]:
    model = {"id": service.model_id, "object": "model", "created": service.created, "owned_by": "cllm"}
    return model | {"max_model_len": service.llm.info.context_length}


def _envelope(service: Service, call: Call, prefix: str, kind: str) -> dict[str, Any]:
    """What every reply and chunk has around its choices."""
    created, model = call.created, service.model_id
    return {"id": prefix + call.id, "object": kind, "created": created, "model": model}
