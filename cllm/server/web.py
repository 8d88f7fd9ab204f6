"""From bytes to checked bodies and from values to replies. It knows HTTP and msgspec, and no route or engine."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from .failures import ClientGone, HTTPError

logger = logging.getLogger(__name__)

Body = TypeVar("Body", bound=msgspec.Struct)

BODY_TIMEOUT_S = 30.0  # for the whole body to arrive
_encoder = msgspec.json.Encoder()


async def read_body(request: Request, kind: type[Body]) -> tuple[Body, int]:
    """The checked body of `request` and its bytes; unknown fields are ignored with a line in the log.

    Raises `HTTPError` or `ClientGone`.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Browsers send other types across origins without asking: a page on the web must not reach a local server.
    if content_type != "application/json":
        raise HTTPError(415, f"expected content-type application/json, found {content_type or 'none'}")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            data = await _receive_body(request.receive, request.app.state.max_body)
    except TimeoutError:
        raise HTTPError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    return decode_body(data, kind), len(data)


async def _receive_body(receive: Receive, limit: int) -> bytes:
    """As many bytes as there are. One that is somewhat too long is read to its end, since many a client reads no
    reply before it has sent everything."""
    chunks, size, more = [], 0, True
    while more and size <= 2 * limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size <= limit:
            chunks.append(chunk)
    if size > limit:
        raise HTTPError(413, f"the body is longer than {limit} bytes, the limit of this server (--max-body)")
    return b"".join(chunks)


def decode_body(data: bytes, kind: type[Body]) -> Body:
    """`data` as a `kind`. Raises `HTTPError` that names the field."""
    try:
        value = msgspec.json.decode(data)
        if isinstance(value, dict):
            unknown = value.keys() - kind.__struct_fields__
            if unknown:
                logger.info("ignored unknown fields: %.200r", sorted(unknown))
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested without end
        raise HTTPError(400, f"the body is no valid JSON: {error}", code="invalid_json") from None


def _refusal(message: str) -> HTTPError:
    """msgspec's words, with the field in front: "Expected `int`, got `str` - at `$.n`"."""
    reason, _, place = message.partition(" - at `$")
    missing = re.search(r"missing required field `(\w+)`", reason)
    param = missing[1] if missing else place.rstrip("`").lstrip(".") or None
    return HTTPError(400, f"{param}: {reason}" if param else reason, param=param)


def encode(value: Any) -> bytes:
    """`value` as JSON in UTF-8; what has no UTF-8 (half a surrogate pair that a client sent) is escaped."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value).encode()


def reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A reply in JSON."""
    return Response(encode(value), status, headers, "application/json")
