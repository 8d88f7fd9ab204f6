"""Rungs 7 to 9: the server's application called in this process, then real HTTP to a server in its own process.

It knows HTTP and how `cllm serve` is started, and nothing of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...config import EngineConfig
from ...errors import CLLMError
from ...serve import SWITCH_INTERVAL_S
from ..answers import read_answer
from ..http import make_bodies
from ..load import Exchange, ask, closed_loop, open_client
from .load import Outcome, Timing, under_way
from .rig import Rig, Rung

HTTP_RUNGS = {8, 9}  # need a server
PATH = "/v1/completions"
LOADING_S = 600.0  # for a server to load its model


def web_rungs(rig: Rig, service: Any, url: str) -> list[Rung]:
    """Rungs 7 to 9. `service`: a `Service` with the rig's `LLM`; `url`: of a server with a model of its own."""
    from ...server.app import make_app

    app = make_app(service)
    return [
        Rung(7, "endpoint in process", lambda: _endpoint(rig, app, service)),
        Rung(8, "HTTP", lambda: over_http(rig, url)),
        Rung(9, "HTTP, streaming", lambda: over_http(rig, url, is_stream=True)),
    ]


def _bodies(rig: Rig, *, is_stream: bool, **extra: Any) -> list[bytes]:
    texts = [prompt.text for prompt in rig.prompts]
    return make_bodies("", texts, rig.load.output_len, is_stream=is_stream, extra=extra)


def _endpoint(rig: Rig, app: Any, service: Any) -> Outcome:
    """The application without sockets: parsing, tokenising, the engine, decoding, JSON."""
    bodies = _bodies(rig, is_stream=False)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as `cllm serve` does
    try:
        seconds, exchanges = asyncio.run(_call_all(rig, app, service, bodies))
    finally:
        sys.setswitchinterval(interval)
    return _outcome(rig, seconds, exchanges, is_stream=False)


async def _call_all(rig: Rig, app: Any, service: Any, bodies: list[bytes]) -> tuple[float, list[Exchange]]:
    service.start()
    exchanges = [Exchange() for _ in bodies]
    numbers = iter(range(len(bodies)))

    async def worker() -> None:
        for number in numbers:
            await _call(app, bodies[number], exchanges[number])

    started = rig.clock()
    await asyncio.gather(*(worker() for _ in range(rig.load.concurrency)))
    return rig.clock() - started, exchanges


async def _call(app: Any, body: bytes, exchange: Exchange) -> None:
    """One request, as an ASGI server would hand it over."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": PATH,
        "raw_path": PATH.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
    }
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()  # this client never goes away
        return {}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            exchange.status = message["status"]
        elif message.get("body"):
            exchange.pieces.append((time.perf_counter(), message["body"]))

    exchange.started = time.perf_counter()
    await app(scope, receive, send)
    exchange.ended = time.perf_counter()


def over_http(rig: Rig, url: str, *, is_stream: bool = False, **extra: Any) -> Outcome:
    """The load over loopback, by the load generator of `cllm bench http`. `extra`: further fields of the bodies."""
    bodies = _bodies(rig, is_stream=is_stream, **extra)

    async def load() -> tuple[float, list[Exchange]]:
        with open_client(url) as client:
            messages = [client.message("POST", PATH, body) for body in bodies]
            started = rig.clock()
            exchanges = await closed_loop(client, messages, rig.load.concurrency)
            return rig.clock() - started, exchanges

    seconds, exchanges = asyncio.run(load())
    return _outcome(rig, seconds, exchanges, is_stream=is_stream)


def _outcome(rig: Rig, seconds: float, exchanges: Sequence[Exchange], *, is_stream: bool) -> Outcome:
    timings, spans = [], []
    for number, exchange in enumerate(exchanges):
        answer = read_answer(exchange, rig.load.input_len, is_stream=is_stream)
        ttft = answer.ttft if answer.times else None
        is_same = answer.text == rig.texts[number] if answer.error is None else None
        timings.append(Timing(answer.latency, ttft, answer.num_output, answer.error, is_same))
        spans.append((exchange.started, exchange.ended))
    return Outcome(seconds, timings, under_way(spans))


@contextlib.contextmanager
def cllm_serve(config: EngineConfig) -> Iterator[str]:
    """`cllm serve` with these settings in its own process; gives its URL.

    Raises `CLLMError` where it does not start.
    """
    settings = {
        f"CLLM_{name.upper()}": _text(value) for name, value in asdict(config).items() if value is not None
    }
    # What is not set here must not come from outside either.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("CLLM_")}
    with server_process([sys.executable, "-m", "cllm.serve", "-q"], outside | settings) as url:
        yield url


def _text(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


@contextlib.contextmanager
def server_process(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """Runs a server, which takes `--host` and `--port` and has `GET /health`, until the block ends; gives its URL.

    Raises `CLLMError` with its last line where it ends before it is healthy, or is not within `LOADING_S`.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                env=environment,
                stdout=log,
                stderr=log,
            )
        except OSError as error:
            raise CLLMError(f"cannot start {command[0]}: {error.strerror or error}") from None
        try:
            if not asyncio.run(_becomes_healthy(url, process)):
                log.seek(0)
                said = [line.strip() for line in log if line.strip()] or ["it said nothing"]
                raise CLLMError(f"{Path(command[0]).name} did not start: {said[-1]}")
            yield url
        finally:
            _end(process)


async def _becomes_healthy(url: str, process: subprocess.Popen[bytes]) -> bool:
    end = time.monotonic() + LOADING_S
    with open_client(url) as client:
        while process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(CLLMError):
                await ask(client, "GET", "/health")
                return True
            await asyncio.sleep(0.1)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
