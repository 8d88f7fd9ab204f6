"""A server in this process on a free port, and plain requests to it, for the tests of `cllm.server`."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from engine_helpers import assert_baseline

from cllm import LLM
from cllm.server.app import make_app
from cllm.server.draining import DrainingServer
from cllm.server.service import Service

# A test runner's own proxies and certificates have no part in this.
CLIENT = {"trust_env": False, "timeout": 60}


class Running(httpx.Client):
    """A client of one running server; `service` is the server's own."""

    def __init__(self, url: str, service: Service) -> None:
        super().__init__(base_url=url, **CLIENT)
        self.url, self.service = url, service

    @property
    def llm(self) -> LLM:
        return self.service.llm

    def ask(self, path: str, **body: Any) -> Any:
        """The reply to a `POST` that must succeed."""
        answer = self.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refuse(self, path: str, status: int, **body: Any) -> dict[str, Any]:
        """The error of a `POST` that must fail with `status`."""
        answer = self.post(path, json=body)
        return error_of(answer, status)

    def events(self, path: str, **body: Any) -> list[Any]:
        """The events of a stream; "[DONE]" stays text."""
        answer = self.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.content.endswith(b"\n\n")
        lines = answer.text.removesuffix("\n\n").split("\n\n")
        assert all(line.startswith("data: ") for line in lines)
        return [
            line[6:] if line == "data: [DONE]" else json.loads(line.removeprefix("data: ")) for line in lines
        ]

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        """A bare connection, with a small buffer perhaps, so that the server notices a reader who is slow."""
        address = httpx.URL(self.url)
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(30)
        connection.connect((address.host, address.port))
        return connection


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error in OpenAI's shape that a reply with `status` carries."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert list(body) == ["error"]
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    found: dict[str, Any] = body["error"]
    return found


@contextlib.contextmanager
def serve(
    llm: LLM | None, *, model_id: str = "test", max_queue: int = 256, **options: Any
) -> Iterator[Running]:
    """A server for `llm` (None: still loading) until the block ends."""
    service = Service(model_id, max_queue=max_queue)
    if llm is not None:
        service.attach(llm)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # accepted connections inherit it
    server = DrainingServer(make_app(service, **options), service, drain_seconds=1)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        until(lambda: server.started)
        with Running(f"http://127.0.0.1:{listener.getsockname()[1]}", service) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
    assert not thread.is_alive()


def until(condition: Any, seconds: float = 30) -> None:
    """Waits for `condition()`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


def chat_llm(folder: Path, **config: Any) -> LLM:
    """A mock with bytes as tokens and a chat template."""
    from command_helpers import write_chat_vocabulary

    return LLM(str(write_chat_vocabulary(folder / "chat.gguf")), backend="mock", **config)


def assert_idle(llm: LLM) -> None:
    """Nothing runs or waits any more, and all is back where it was."""
    until(lambda: llm.health()["num_running"] == llm.health()["num_waiting"] == 0)
    assert_baseline(llm)
