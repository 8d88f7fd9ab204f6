"""How a request over HTTP fails: one exception that carries status and body, and which of our errors becomes which.

It must not know routes. The shape is OpenAI's: https://platform.openai.com/docs/guides/error-codes
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import BackendError, ContextLengthError, InvalidRequestError, QueueFullError


class HTTPError(Exception):
    """A request ends with `status`; `param` names the field at fault, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class ClientGone(Exception):  # noqa: N818, it is no error: nobody is left to be told
    """The client closed its connection."""


def unavailable(message: str, code: str, retry_after_s: int = 1) -> HTTPError:
    """503: the same request may succeed later."""
    return HTTPError(503, message, code=code, headers={"retry-after": str(retry_after_s)})


def deadline_passed() -> HTTPError:
    """504; a client that tried again would wait as long once more."""
    message = "the deadline (deadline_s) passed before the first token; allow more time or send less at once"
    return HTTPError(504, message, code="deadline_exceeded", headers={"x-should-retry": "false"})


def failure_of(error: Exception) -> HTTPError:
    """What the client is told of `error`; of a bug no more than that there is one."""
    if isinstance(error, HTTPError):
        return error
    if isinstance(error, ContextLengthError):
        return HTTPError(400, str(error), param=error.field, code="context_length_exceeded")
    if isinstance(error, InvalidRequestError):
        return HTTPError(400, str(error), param=error.field)
    if isinstance(error, QueueFullError):
        return unavailable(f"{error}; try again later", "queue_full")
    if isinstance(error, BackendError):
        return HTTPError(500, f"the engine failed: {error}", code="engine_error")
    return HTTPError(500, "an error in the server; its log has the details", code="internal_error")
