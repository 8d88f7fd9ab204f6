"""Our own routes: what is served and how it is, generation with tokens and timings, the tokenizer.

`timings` has llama-server's fields (https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md).
It must not know threads or how bytes travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as WebRequest
from starlette.responses import Response

from .. import __version__
from ..errors import InvalidRequestError
from ..outputs import RequestMetrics, StreamPiece
from ..sequence import Request
from .failures import failure_of
from .logprobs import native_logprobs, token_name
from .openai_events import usage
from .schemas import DetokenizeBody, GenerateBody, TokenizeBody
from .service import Call, Service
from .sse import event, failure_event, stream
from .web import read_body, reply


async def index(request: WebRequest) -> Response:
    """`GET /`: what this is."""
    service: Service = request.app.state.service
    routes = sorted(route.path for route in request.app.routes)
    status = service.health()["status"]
    return reply(
        {
            "name": "cLLM",
            "version": __version__,
            "model": service.model_id,
            "status": status,
            "routes": routes,
        }
    )


async def health(request: WebRequest) -> Response:
    """`GET /health`: 200 where requests are taken, else 503."""
    found = request.app.state.service.health()
    if found["status"] == "ready":
        return reply(found)
    return reply(found, 503, {"retry-after": "2"})


async def version(request: WebRequest) -> Response:
    """`GET /version`."""
    return reply({"version": __version__})


async def model_info(request: WebRequest) -> Response:
    """`GET /model/info`."""
    service: Service = request.app.state.service
    llm, info = service.llm, service.llm.info
    return reply(
        {
            "model": service.model_id,
            "backend": llm.config.backend,
            "architecture": info.architecture,
            "description": info.description,
            "vocab_size": info.vocab_size,
            "trained_context": info.trained_context,
            "context_length": info.context_length,
            "kv_cache_tokens": info.kv_capacity,
            "max_num_seqs": llm.config.max_num_seqs,
            "max_num_batched_tokens": info.max_num_batched_tokens,
            "max_queue": llm.config.max_queue,
        }
    )


async def generate(request: WebRequest) -> Response:
    """`POST /generate`: one answer, streamed where the body asks for it."""
    return await _generate(request, may_stream=None)


async def generate_stream(request: WebRequest) -> Response:
    """`POST /generate_stream`: one answer as server-sent events."""
    return await _generate(request, may_stream=True)


async def _generate(request: WebRequest, may_stream: bool | None) -> Response:
    service: Service = request.app.state.service
    body, size = await read_body(request, GenerateBody)
    is_stream = bool(may_stream or body.stream)
    requests = await service.prepare(lambda: [_make_request(service, body, is_stream)], size)
    call = service.submit(requests, request.receive)
    if is_stream:
        return await stream(service, call, _Events(call))
    try:
        (output,) = await call.outputs()
    finally:
        call.close()
    with service.timed("respond"):
        (answer,) = output.outputs
        found: dict[str, Any] = {"text": answer.text, "token_ids": answer.token_ids}
        if answer.logprobs is not None:
            found["logprobs"] = native_logprobs(answer.logprobs)
        found |= _ending(
            requests[0], answer.finish_reason, answer.stop_reason, len(answer.token_ids), output.metrics
        )
        return reply(found, headers={"x-request-id": call.id})


def _make_request(service: Service, body: GenerateBody, is_stream: bool) -> Request:
    if (body.prompt is None) == (body.prompt_token_ids is None):
        raise InvalidRequestError("give one of prompt (a text) and prompt_token_ids", field="prompt")
    if body.n not in (None, 1):
        raise InvalidRequestError("n above 1 is not supported here; use /v1/completions", field="n")
    prompt = body.prompt if body.prompt is not None else body.prompt_token_ids or []
    params = body.sampling(logprobs=body.logprobs)
    return service.make_request(prompt, params, streaming=is_stream)


class _Events:
    """Events of `/generate_stream`: text and token_ids; the last has what `/generate` replies besides."""

    def __init__(self, call: Call) -> None:
        (self._request,) = call.requests.values()
        self._num_tokens = 0

    def events(self, pieces: Sequence[StreamPiece]) -> bytes:
        return b"".join(map(self._event, pieces))

    def end(self) -> bytes:
        return b""

    def _event(self, piece: StreamPiece) -> bytes:
        if piece.finish_reason == "error" and piece.error is not None:
            return failure_event(failure_of(piece.error))
        self._num_tokens += len(piece.token_ids)
        found: dict[str, Any] = {"text": piece.text, "token_ids": piece.token_ids, "finish_reason": None}
        if piece.logprobs is not None:
            found["logprobs"] = native_logprobs(piece.logprobs)
        if piece.finish_reason is not None and piece.metrics is not None:
            found |= _ending(
                self._request, piece.finish_reason, piece.stop_reason, self._num_tokens, piece.metrics
            )
        return event(found)


def _ending(
    request: Request,
    finish_reason: str | None,
    stop_reason: str | int | None,
    num_tokens: int,
    metrics: RequestMetrics,
) -> dict[str, Any]:
    num_prompt, num_cached = len(request.prompt_token_ids), request.num_cached_tokens
    return {
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
        "usage": usage(num_prompt, num_tokens, num_cached),
        "timings": timings(num_prompt - num_cached, num_cached, num_tokens, metrics),
    }


def timings(num_prompt: int, num_cached: int, num_tokens: int, metrics: RequestMetrics) -> dict[str, Any]:
    """llama-server's `timings`: of the prompt's computed tokens up to the first new one, and of those after it."""
    queue_s, first_s, rate = metrics.queue_s, metrics.time_to_first_token_s, metrics.decode_tokens_per_s
    prompt_ms = 1000 * (first_s - queue_s) if first_s is not None and queue_s is not None else 0.0
    decode_ms = 1000 * (num_tokens - 1) / rate if rate else 0.0
    return {
        "cache_n": num_cached,
        "prompt_n": num_prompt,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / num_prompt if num_prompt else 0.0,
        "prompt_per_second": 1000 * num_prompt / prompt_ms if prompt_ms else 0.0,
        "predicted_n": num_tokens,
        "predicted_ms": decode_ms,
        "predicted_per_token_ms": 1000 / rate if rate else 0.0,
        "predicted_per_second": rate or 0.0,
    }


async def tokenize(request: WebRequest) -> Response:
    """`POST /tokenize` and `/encode`: token ids of a text or of a rendered conversation."""
    service: Service = request.app.state.service
    body, _ = await read_body(request, TokenizeBody)
    tokens = await service.prepare(lambda: _tokenize(service, body))
    return reply({"tokens": tokens, "count": len(tokens), "max_model_len": service.llm.info.context_length})


def _tokenize(service: Service, body: TokenizeBody) -> list[int]:
    given = [value for value in (body.prompt, body.content, body.messages) if value is not None]
    if len(given) != 1:
        raise InvalidRequestError("give one of prompt, content (both texts) and messages", field="prompt")
    (value,) = given
    if isinstance(value, str):
        parse_special = bool(body.parse_special)
        return service.llm.encode(value, parse_special=parse_special, add_bos=body.add_special_tokens)
    return service.llm.render(value, chat_template_kwargs=body.chat_template_kwargs).token_ids


async def detokenize(request: WebRequest) -> Response:
    """`POST /detokenize`: the text of token ids, under vLLM's name and llama-server's."""
    service: Service = request.app.state.service
    body, _ = await read_body(request, DetokenizeBody)
    text = await service.prepare(lambda: service.llm.decode(body.tokens))
    return reply({"prompt": text, "content": text})


async def tokenizer_info(request: WebRequest) -> Response:
    """`GET /tokenizer_info`."""
    tokenizer = request.app.state.service.llm.tokenizer
    ends = sorted(tokenizer.eog_ids)
    return reply(
        {
            "vocab_size": tokenizer.vocab_size,
            "bos_id": tokenizer.bos_id,
            "eos_id": tokenizer.eos_id,
            "add_bos": tokenizer.add_bos,
            "end_of_generation": {token_name(tokenizer, token_id): token_id for token_id in ends},
            "chat_template": tokenizer.chat_template,
        }
    )
