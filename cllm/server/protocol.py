"""HTTP/1.1 as uvicorn reads it with httptools, and a limit to what may come before a body, which both lack."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 64 * 2**10  # bytes of a request line and headers, beyond the first read from the socket
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """One connection; a head that does not end is answered with 431 and cut off."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_head = False
        self._head_bytes = 0

    def on_message_begin(self) -> None:
        self._is_in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        was_in_head = self._is_in_head
        super().data_received(data)
        if was_in_head and self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD:
                self.transport.write(_TOO_LARGE)
                self.transport.close()
