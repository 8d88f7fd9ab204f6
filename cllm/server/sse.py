"""Server-sent events: a raw ASGI response that writes what a step brought as soon as it is there.

It must not know the shape of any event: a `Writer` turns pieces into bytes. A writer prepares each choice's event
once, so that a token costs the encoding of its text and a join.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..outputs import StreamPiece
from .failures import ClientGone, HTTPError
from .service import Call, Service
from .web import encode

logger = logging.getLogger(__name__)

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Writer(Protocol):
    """Makes the events of one call."""

    def events(self, pieces: Sequence[StreamPiece]) -> bytes: ...
    def end(self) -> bytes: ...


def event(value: Any) -> bytes:
    """One event that carries `value` as JSON."""
    return b"data: " + encode(value) + b"\n\n"


def template(value: Any, hole: str) -> tuple[bytes, bytes]:
    """The event of `value` before and after the JSON string `hole` in it, which must occur once."""
    before, after = event(value).split(encode(hole))
    return before, after


class EventStream(Response):
    """Writes the events of `call`; its status is 200, so `first` must be there already."""

    def __init__(self, service: Service, call: Call, writer: Writer, first: list[StreamPiece]) -> None:
        super().__init__()
        self._service, self._call, self._writer, self._first = service, call, writer, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call, pieces = self._call, self._first
        try:
            request_id = (b"x-request-id", call.id.encode())
            await send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS, request_id]})
            while True:
                body, is_done = self._write(pieces), call.is_done
                if body or is_done:  # tokens inside a character bring no text
                    await send({"type": "http.response.body", "body": body, "more_body": not is_done})
                if is_done:
                    break
                pieces = await call.take()
        except ClientGone:
            logger.debug("the client of %s went away", call.id)
        finally:
            call.close()

    def _write(self, pieces: list[StreamPiece]) -> bytes:
        started = time.perf_counter()
        body = self._writer.events(pieces)
        if self._call.is_done:
            body += self._writer.end()
        self._service.count("respond", started)
        return body


async def stream(service: Service, call: Call, writer: Writer) -> EventStream:
    """The response for `call`, when its first piece is there. Raises `HTTPError` where it failed before that."""
    try:
        return EventStream(service, call, writer, await call.first_pieces())
    except BaseException:
        call.close()
        raise


def failure_event(failure: HTTPError) -> bytes:
    """What tells the reader of a stream that its answer failed."""
    return event(failure.body())
