"""The ASGI application: routes, who may use them, and one shape for every failure. It knows no engine."""

from __future__ import annotations

import contextlib
import hmac
import http
import logging
from collections.abc import AsyncIterator, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import CLLMError
from .failures import ClientGone, HTTPError, failure_of
from .routes import ENDPOINTS
from .service import Service
from .web import reply

logger = logging.getLogger(__name__)

MAX_BODY = 16 * 2**20  # bytes
_OPEN_PATHS = frozenset({"/health"})  # for those who only ask whether the server lives


def make_app(
    service: Service,
    *,
    api_key: str | None = None,
    cors_origins: Sequence[str] = (),
    max_body: int = MAX_BODY,
    has_benchmark: bool = False,
) -> Starlette:
    """The application that serves `service`.

    `api_key`: what clients must send as "Authorization: Bearer KEY", but to `/health`. `cors_origins`: pages of
    these origins may use it from a browser, "*" for all. `max_body`: bytes of a request.
    """
    middleware = []
    if cors_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
        middleware.append(cors)
    if api_key:
        middleware.append(Middleware(_KeyCheck, api_key=api_key))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.start()
        yield

    # Routes are tried one after the other: first those that most requests go to.
    by_use = sorted(ENDPOINTS, key=lambda end: (end.body is None, not end.path.startswith("/v1/")))
    app = Starlette(
        routes=[Route(end.path, end.handle, methods=[end.method]) for end in by_use],
        middleware=middleware,
        exception_handlers={
            CLLMError: _on_error,
            HTTPError: _on_error,
            HTTPException: _on_http_error,
            ClientGone: _on_client_gone,
            Exception: _on_error,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.service, app.state.max_body, app.state.has_benchmark = service, max_body, has_benchmark
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    failure = failure_of(error)
    if failure.status == 500:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return reply(failure.body(), failure.status, failure.headers)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """No such route, or not with this method."""
    assert isinstance(error, HTTPException)
    words = http.HTTPStatus(error.status_code).phrase.lower()
    failure = HTTPError(
        error.status_code, f"{request.method} {request.url.path}: {words}; GET / lists the routes"
    )
    return reply(failure.body(), failure.status, error.headers)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # for the log: nobody reads it


class _KeyCheck:
    """Refuses whoever does not know the key; the comparison takes the same time wherever keys differ."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app, self._expected = app, f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                message = "a wrong or no API key; send the header Authorization: Bearer KEY"
                body = HTTPError(401, message, code="invalid_api_key").body()
                await reply(body, 401, {"www-authenticate": "Bearer"})(scope, receive, send)
                return
        await self._app(scope, receive, send)
