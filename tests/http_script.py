"""A server that says, byte for byte, what a test wants it to, for tests of the load generator."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator

Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


@contextlib.contextmanager
def scripted_server(handle: Handler) -> Iterator[str]:
    """Calls `handle(request, writer)` for each request of each connection; gives the server's URL."""
    loop = asyncio.new_event_loop()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.lower().split(b"\r\n")
                size = [int(line[15:]) for line in lines if line.startswith(b"content-length:")]
                await handle(head + await reader.readexactly(size[0] if size else 0), writer)
                await writer.drain()
        writer.close()

    started = threading.Event()
    port = 0

    async def run() -> None:
        nonlocal port
        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    assert started.wait(30)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.run_until_complete(asyncio.sleep(0.01))  # transports that were closed are let go
        loop.close()


def whole(body: bytes, status: str = "200 OK") -> bytes:
    """A reply with a length."""
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


def chunked(*chunks: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    """A reply in chunks."""
    framed = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + framed + end


def events(*texts: str, num_prompt: int = 3) -> list[bytes]:
    """The events of a completion, a token each, with its usage."""
    made = [b'data: {"choices":[{"text":"%s","finish_reason":null}]}\n\n' % text.encode() for text in texts]
    usage = b'{"prompt_tokens":%d,"completion_tokens":%d}' % (num_prompt, len(texts))
    return [*made, b'data: {"choices":[],"usage":%s}\n\n' % usage, b"data: [DONE]\n\n"]
