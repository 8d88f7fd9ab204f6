"""The load generator: many HTTP requests at once, each timed byte by byte, on bare asyncio.

While the load runs it only keeps what arrives, with the time; answers are parsed afterwards (`answers.py`), so that it
costs less than the server it measures. It knows HTTP/1.1 and no shape of any body.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from ..errors import CLLMError, ConfigError


@dataclass(slots=True)
class Exchange:
    """One request and what came back. Times are of `time.perf_counter`, in seconds.

    `pieces`: the body as it arrived, without the framing of HTTP. `error`: why there is no whole reply, or None.
    """

    started: float = 0.0
    ended: float = 0.0
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    error: str | None = None

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)


class Client:
    """Sends requests to one server over as many connections as are needed at once; they are used again."""

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        """`base_url`: http(s)://HOST[:PORT][/PREFIX]. Raises `ConfigError`."""
        try:
            parts = urlsplit(base_url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"argument --base-url: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"argument --base-url: expected http://HOST:PORT, found {base_url!r}")
        self.host, self._is_tls = parts.hostname, parts.scheme == "https"
        self.port = port or (443 if self._is_tls else 80)
        self._prefix = parts.path.rstrip("/")
        key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = f"host: {parts.netloc.rpartition('@')[2]}\r\naccept: */*\r\n{key}"
        self._idle: list[_Connection] = []

    def message(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a request, made before the load begins."""
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}"
        if body:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        return head.encode() + b"\r\n" + body

    async def send(self, message: bytes) -> Exchange:
        """One request; never raises for what the server or the network does (`Exchange.error`).

        A server may close an idle connection at any time, also while a request is on its way to it: one that was
        used before and brings no byte back is not its answer, and the request goes out again (RFC 9112, 9.3.1).
        """
        started = time.perf_counter()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                exchange = await self._send_on(connection, message, started)
                if connection.has_answered:
                    return exchange
        loop, tls = asyncio.get_running_loop(), True if self._is_tls else None
        try:
            _, opened = await loop.create_connection(_Connection, self.host, self.port, ssl=tls)
        except OSError as error:
            reason = f"cannot connect to {self.host}, port {self.port}: {error.strerror or error}"
            return Exchange(started, time.perf_counter(), error=reason)
        return await self._send_on(opened, message, started)

    async def _send_on(self, connection: _Connection, message: bytes, started: float) -> Exchange:
        exchange = await connection.send(message, started)
        if connection.is_reusable:
            self._idle.append(connection)
        return exchange

    def close(self) -> None:
        """Closes the connections; a later request opens new ones."""
        while self._idle:
            self._idle.pop().close()


class _Connection(asyncio.Protocol):
    """One connection, one request at a time. Reads status, headers and a body of any framing."""

    def __init__(self) -> None:
        self.is_reusable = True
        self.has_answered = False  # any byte to the last request
        self._transport: asyncio.Transport | None = None
        self._exchange = Exchange()
        self._done: asyncio.Future[None] | None = None
        self._buffer = bytearray()
        self._read_more = self._read_head
        self._left = 0  # bytes of the body, or of a chunk with its line end

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    async def send(self, message: bytes, started: float) -> Exchange:
        assert self._transport is not None
        self._exchange = exchange = Exchange(started)
        self.has_answered = False
        self._read_more = self._read_head
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        try:
            await self._done
        except BaseException:  # whoever waited gave up: the rest of the reply must not meet the next request
            self.close()
            raise
        return exchange

    def close(self) -> None:
        self.is_reusable = False
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self.has_answered = True
        self._buffer += data
        try:
            while self._read_more(now):
                pass
        except ValueError as error:
            self._end(now, f"not HTTP/1.1: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_reusable = False
        now, exchange = time.perf_counter(), self._exchange
        if self._read_more == self._read_to_end and error is None:
            self._end(now)
            return
        cause = f" ({error})" if error else ""
        size = sum(len(piece) for _, piece in exchange.pieces)
        self._end(now, f"the connection was dropped after {size} bytes of the reply{cause}")

    def _end(self, now: float, error: str | None = None) -> None:
        done, exchange = self._done, self._exchange
        if done is not None and not done.done():
            exchange.ended, exchange.error = now, error
            done.set_result(None)

    def _keep(self, now: float, size: int) -> None:
        if size:
            self._exchange.pieces.append((now, bytes(self._buffer[:size])))

    # Each reads one part from the buffer; True where the next part may be there too.

    def _read_head(self, now: float) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, *lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError(f"the reply begins with {first[:40]!r}")
        status = int(rest[:3])
        if status < 200:  # an interim reply
            return True
        self._exchange.status = status
        headers = {name.strip().lower(): value.strip().lower() for name, _, value in map(_split, lines)}
        if headers.get("connection") == "close" or version == "HTTP/1.0":
            self.is_reusable = False
        if headers.get("transfer-encoding") == "chunked":
            self._read_more = self._read_chunk_size
        elif "content-length" in headers or status in (204, 304):
            self._left = int(headers.get("content-length", 0))
            self._read_more = self._read_body
        else:
            self.is_reusable = False
            self._read_more = self._read_to_end
        return True

    def _read_body(self, now: float) -> bool:
        size = min(len(self._buffer), self._left)
        self._keep(now, size)
        del self._buffer[:size]
        self._left -= size
        if not self._left:
            self._end(now)
        return False

    def _read_to_end(self, now: float) -> bool:
        self._keep(now, len(self._buffer))
        self._buffer.clear()
        return False

    def _read_chunk_size(self, now: float) -> bool:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            return False
        size = int(bytes(self._buffer[:end]).partition(b";")[0], 16)
        del self._buffer[: end + 2]
        self._left = size + 2
        self._read_more = self._read_chunk if size else self._read_trailer
        return True

    def _read_chunk(self, now: float) -> bool:
        if len(self._buffer) < self._left:
            return False
        self._keep(now, self._left - 2)
        del self._buffer[: self._left]
        self._read_more = self._read_chunk_size
        return True

    def _read_trailer(self, now: float) -> bool:
        end = self._buffer.find(b"\r\n")
        if end < 0:
            return False
        del self._buffer[: end + 2]
        if end == 0:
            self._end(now)
        return end > 0


def _split(line: str) -> tuple[str, str, str]:
    return line.partition(":")


async def closed_loop(client: Client, messages: Sequence[bytes], concurrency: int) -> list[Exchange]:
    """All messages, `concurrency` under way at any time; the exchanges in the messages' order."""
    exchanges: list[Exchange] = [Exchange()] * len(messages)
    numbers = iter(range(len(messages)))

    async def worker() -> None:
        for number in numbers:
            exchanges[number] = await client.send(messages[number])

    await asyncio.gather(*(worker() for _ in range(min(concurrency, len(messages)))))
    return exchanges


async def open_loop(
    client: Client, messages: Sequence[bytes], rate: float, seed: int, concurrency: int | None = None
) -> list[Exchange]:
    """All messages, `rate` a second on average, whatever the answers do: a Poisson process, drawn from `seed`.

    With `concurrency` no more than that are under way; the time that one waits for its turn counts for it.
    """
    gaps, places = random.Random(seed), asyncio.Semaphore(concurrency or len(messages) or 1)

    async def send(message: bytes) -> Exchange:
        arrived = time.perf_counter()
        async with places:
            exchange = await client.send(message)
        exchange.started = arrived
        return exchange

    tasks, due = [], time.perf_counter()
    for message in messages:
        # Measured against the plan, so that lateness does not add up.
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(send(message)))
        due += gaps.expovariate(rate)
    return list(await asyncio.gather(*tasks))


async def ask(client: Client, method: str, path: str) -> bytes:
    """The body of a request that must succeed. Raises `CLLMError`."""
    exchange = await client.send(client.message(method, path))
    if exchange.error or exchange.status != 200:
        raise CLLMError(f"{method} {path}: {exchange.error or f'status {exchange.status}'}")
    return exchange.body


@contextmanager
def open_client(base_url: str, api_key: str | None = None) -> Iterator[Client]:
    """A client whose connections are closed at the end."""
    client = Client(base_url, api_key)
    try:
        yield client
    finally:
        client.close()
