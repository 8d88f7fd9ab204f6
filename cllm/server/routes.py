"""The table of routes, and `GET /openapi.json`, which is made from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .. import __version__
from . import native, openai
from .benchmark import benchmark
from .metrics import metrics
from .schemas import (
    BenchmarkBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ErrorBody,
    GenerateBody,
    TokenizeBody,
)
from .web import reply


class Endpoint(NamedTuple):
    """One route; `body` is the type of what is posted, `media` that of a success, `failures` what may come besides."""

    method: str
    path: str
    handle: Callable[[Request], Awaitable[Response]]
    body: type[msgspec.Struct] | None = None
    media: tuple[str, ...] = ("application/json",)
    failures: tuple[int, ...] = ()


_JSON, _EVENTS = "application/json", "text/event-stream"
_WORK = (400, 401, 408, 413, 415, 500, 503)  # of every route that reads a body
_MODEL = (401, 500, 503)  # of those that need the model


async def openapi(request: Request) -> Response:
    """`GET /openapi.json`."""
    return reply(_document())


ENDPOINTS = (
    Endpoint("GET", "/", native.index, failures=(401,)),
    Endpoint("GET", "/health", native.health, failures=(503,)),
    Endpoint("GET", "/version", native.version, failures=(401,)),
    Endpoint("GET", "/metrics", metrics, media=("text/plain",), failures=_MODEL),
    Endpoint("GET", "/openapi.json", openapi, failures=(401,)),
    Endpoint("GET", "/model/info", native.model_info, failures=_MODEL),
    Endpoint("GET", "/tokenizer_info", native.tokenizer_info, failures=_MODEL),
    Endpoint("POST", "/generate", native.generate, GenerateBody, (_JSON, _EVENTS), (*_WORK, 504)),
    Endpoint("POST", "/generate_stream", native.generate_stream, GenerateBody, (_EVENTS,), (*_WORK, 504)),
    Endpoint("POST", "/encode", native.tokenize, TokenizeBody, failures=_WORK),
    Endpoint("POST", "/tokenize", native.tokenize, TokenizeBody, failures=_WORK),
    Endpoint("POST", "/detokenize", native.detokenize, DetokenizeBody, failures=_WORK),
    Endpoint("POST", "/benchmark", benchmark, BenchmarkBody, failures=(*_WORK, 404, 504)),
    Endpoint("GET", "/v1/models", openai.list_models, failures=_MODEL),
    Endpoint("GET", "/v1/models/{model}", openai.get_model, failures=(*_MODEL, 404)),
    Endpoint(
        "POST", "/v1/completions", openai.completions, CompletionBody, (_JSON, _EVENTS), (*_WORK, 404, 504)
    ),
    Endpoint(
        "POST",
        "/v1/chat/completions",
        openai.chat_completions,
        ChatBody,
        (_JSON, _EVENTS),
        (*_WORK, 404, 504),
    ),
)


@cache
def _document() -> dict[str, Any]:
    """The description of all routes, by OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.0)."""
    bodies = {endpoint.body for endpoint in ENDPOINTS if endpoint.body} | {ErrorBody}
    ordered = sorted(bodies, key=lambda kind: kind.__name__)
    _, schemas = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    schemes = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "cLLM", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": schemes},
        "security": [{}, {"key": []}],
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
    responses: dict[str, Any] = {"200": {"description": "done", "content": {m: {} for m in endpoint.media}}}
    for status in endpoint.failures:
        content = {_JSON: {}} if endpoint.path == "/health" else error
        responses[str(status)] = {"description": "failed", "content": content}
    summary = (endpoint.handle.__doc__ or "").strip().splitlines()[0]
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if endpoint.body is not None:
        schema = {"$ref": f"#/components/schemas/{endpoint.body.__name__}"}
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    if "{model}" in endpoint.path:
        model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        operation["parameters"] = [model]
    return operation
