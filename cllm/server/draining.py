"""The end of a server: answers may go on for a while, then they are aborted, then connections are cut.

It knows uvicorn and the service, and no signals or flags.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import uvicorn

from .protocol import BoundedProtocol
from .service import Service

logger = logging.getLogger(__name__)

_WRITING_S = 1.0  # for aborted answers to be written


class DrainingServer(uvicorn.Server):
    """A server of `app` that lets what runs end, for `drain_seconds` at most; `settings` are uvicorn's."""

    def __init__(self, app: Any, service: Service, drain_seconds: float, **settings: Any) -> None:
        settings |= {
            "http": BoundedProtocol,
            "log_config": None,
            "server_header": False,
            "date_header": False,
        }
        super().__init__(uvicorn.Config(app, **settings))
        self._service, self._drain_seconds = service, drain_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.drain(self._drain_seconds)
        asyncio.get_running_loop().call_later(self._drain_seconds + _WRITING_S, self._cut_off)
        await super().shutdown(sockets)

    def _cut_off(self) -> None:
        """Whoever has not read an answer by now will not."""
        for connection in list(self.server_state.connections):
            logger.warning("cut off a client that stopped reading")
            connection.transport.abort()
