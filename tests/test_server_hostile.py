"""Bodies and clients that mean no good: each gets its refusal, and the others never notice."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import select
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from command_helpers import ENDLESS, patch_mock, resident_bytes
from server_helpers import CLIENT, Running, assert_idle, error_of, serve, until

from cllm import LLM
from cllm.backends.mock import MockScript
from cllm.sequence import Request, Sequence
from cllm.server import web

COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        patch_mock(monkeypatch, MockScript(tokens=ENDLESS))
        with LLM(backend="mock", max_num_seqs=8) as llm, serve(llm, max_body=6_000_000) as running:
            yield running
            assert_idle(llm)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no valid JSON"),
        (b"{", "no valid JSON"),
        (b'{"prompt": NaN}', "no valid JSON"),
        (b'{"prompt": "x", "temperature": Infinity}', "no valid JSON"),
        (b'{"prompt": "x", "temperature": 1e999}', "out of range"),
        (b'{"prompt": "x", "seed": 1' + b"0" * 5000 + b"}", "out of range"),
        (b'{"prompt": "\xff"}', "no valid JSON"),
        (b'{"prompt": "\\ud800"}', "no valid JSON"),
        (b'{"prompt": "x", "n": ' + b"[" * 100_000, "no valid JSON"),
        (b'{"messages": ' + b'{"a":' * 100_000, "no valid JSON"),
        (b"[" * 100_000 + b"]" * 100_000, "no valid JSON"),
        (b"null", "got `null`"),
        (b"[]", "got `array`"),
        (b'"x"', "got `str`"),
    ],
)
def test_bad_bodies(server: Running, data: bytes, words: str) -> None:
    for path in (COMPLETIONS, "/v1/chat/completions", "/generate", "/tokenize"):
        answer = server.post(path, content=data, headers=JSON)
        assert words in error_of(answer, 400)["message"]


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "json"])
def test_other_content_types(server: Running, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    answer = server.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
    assert "expected content-type application/json" in error_of(answer, 415)["message"]
    fine = {"content-type": "Application/JSON; charset=utf-8"}
    assert server.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=fine).status_code == 200


def test_many_stops(server: Running) -> None:
    stops = [f"stop number {number}" for number in range(1000)]
    (choice,) = server.ask(COMPLETIONS, prompt="x", stop=[*stops, "ef"], max_tokens=40, temperature=0)[
        "choices"
    ]
    assert choice["text"] == "bcd"


def test_deep_messages(server: Running) -> None:
    deep: Any = "x"
    for _ in range(400):
        deep = {"a": [deep]}
    body = {"messages": [{"role": "user", "content": "x", "extra": deep}]}
    assert server.refuse("/v1/chat/completions", 400, **body)["message"]


def test_a_body_over_the_limit(server: Running) -> None:
    for size in (6_000_001, 9_000_000, 40_000_000):
        try:
            answer = server.post(COMPLETIONS, content=b" " * size, headers=JSON)
        except httpx.WriteError:  # far too long: the server does not read on
            assert size == 40_000_000
        else:
            assert "6000000 bytes" in error_of(answer, 413)["message"]
    chunks = (b" " * 1_000_000 for _ in range(7))
    answer = server.post(COMPLETIONS, content=chunks, headers=JSON)
    assert answer.status_code == 413
    assert server.ask(COMPLETIONS, prompt="x")["choices"]


def test_health_beside_a_huge_prompt(server: Running) -> None:
    done: list[httpx.Response] = []

    def ask() -> None:
        body = {"prompt": "hello wor " * 500_000}
        done.append(httpx.post(server.url + COMPLETIONS, json=body, trust_env=False, timeout=300))

    thread = threading.Thread(target=ask)
    thread.start()
    slowest, count = 0.0, 0
    while thread.is_alive():
        started = time.perf_counter()
        assert server.get("/health").status_code == 200
        slowest, count = max(slowest, time.perf_counter() - started), count + 1
        time.sleep(0.01)
    assert error_of(done[0], 400)["code"] == "context_length_exceeded"
    assert slowest < 1  # the promise of this server
    assert count > 5


def test_half_a_request(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "BODY_TIMEOUT_S", 0.1)
    head = (
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    )
    with server.connect() as connection:
        connection.sendall(head + b'{"prompt"')
        reply = connection.recv(4096)
        assert reply.startswith(b"HTTP/1.1 408")
    with server.connect() as connection:
        connection.sendall(head + b'{"prompt"')
    with server.connect() as connection:
        connection.sendall(b"POST /gen")
    with server.connect() as connection:
        connection.sendall(b"\x00\xff nonsense\r\n\r\n")
        assert b"400" in connection.recv(4096)
    assert server.ask("/generate", prompt="x")["text"]


@pytest.mark.parametrize(
    "start", [b"GET /", b"GET / HTTP/1.1\r\nHost: x\r\nX: ", b"GET / HTTP/1.1\r\nX: 1\r\nX: 1\r\n"]
)
def test_a_head_without_end_is_cut_off(server: Running, start: bytes) -> None:
    more = b"X: 1\r\n" * 1000 if start.endswith(b"\n") else b"x" * 6000
    taken, answer = 0, b""
    with server.connect() as connection:
        connection.sendall(start)
        with contextlib.suppress(ConnectionError):  # where it was closed while more was under way
            while not select.select([connection], [], [], 0.001)[0]:
                connection.sendall(more)
                taken += len(more)
                assert taken < 2 * 10**6
            answer = connection.recv(4096)
    assert not answer or answer.startswith(b"HTTP/1.1 431")
    assert server.ask("/generate", prompt="x")["text"]


def test_names_with_odd_characters(server: Running) -> None:
    error = server.refuse(COMPLETIONS, 404, prompt="x", model="a\n\x00" * 500)
    assert len(error["message"]) < 400
    assert server.get("/v1/models/%00%ff").status_code == 404


def post(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def test_two_hundred_streams_half_of_them_slow(server: Running) -> None:
    """Slow readers read nothing until the others are done; everyone gets the whole text."""
    body = {"prompt": "x", "max_tokens": 150, "ignore_eos": True, "temperature": 0, "stream": True}
    expected = server.llm.generate("x", _params(150))[0].outputs[0].text
    slow = [server.connect(receive_buffer=4096) for _ in range(100)]
    for connection in slow:
        # Log-probabilities make it twice what all buffers hold.
        connection.sendall(post(COMPLETIONS, body | {"logprobs": 20}))
    texts: list[str] = []

    def read() -> None:
        with httpx.Client(base_url=server.url, **CLIENT) as client:
            texts.extend(_text(client.post(COMPLETIONS, json=body).content) for _ in range(10))

    threads = [threading.Thread(target=read) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    until(lambda: server.llm.health()["num_running"] == server.llm.health()["num_waiting"] == 0)
    until(lambda: len(server.service._calls) == 100)  # computed, but for want of readers not written
    for connection in slow:
        with connection:
            data = b""
            while b"[DONE]" not in data:
                more = connection.recv(65536)
                assert more
                data += more
            texts.append(_text(data))
    assert len(texts) == 200
    assert set(texts) == {expected}
    assert_idle(server.llm)


def test_stuck_readers_do_not_hold_up_the_end(
    server: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": "x", "max_tokens": 150, "ignore_eos": True, "stream": True, "logprobs": 20}
    with serve(server.llm) as other:
        monkeypatch.setattr(server.llm, "drain", lambda seconds: True)  # the other tests go on with it
        stuck = [other.connect(receive_buffer=4096) for _ in range(20)]
        for connection in stuck:
            connection.sendall(post(COMPLETIONS, body))
        until(lambda: len(other.service._calls) == 20)
        until(lambda: server.llm.health()["num_running"] == server.llm.health()["num_waiting"] == 0)
    assert not other.service._calls
    assert [record.getMessage() for record in caplog.records] == [
        "cut off a client that stopped reading"
    ] * 20
    for connection in stuck:
        connection.close()


def test_two_thousand_requests_with_random_ends(server: Running) -> None:
    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(250):
            body = {
                "prompt": "x" * draw.randrange(1, 60),
                "max_tokens": draw.randrange(1, 60),
                "temperature": 0,
            }
            body |= {"ignore_eos": True, "stream": draw.random() < 0.5}
            with server.connect() as connection:
                connection.sendall(post(draw.choice([COMPLETIONS, "/generate"]), body))
                if draw.random() < 0.7:
                    connection.recv(draw.choice([10, 500, 5000]))

    def run(seeds: range) -> int:
        """Bytes that the process has resident afterwards."""
        threads = [threading.Thread(target=work, args=(seed,)) for seed in seeds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        server.ask(COMPLETIONS, prompt="x", max_tokens=1)  # behind whatever still lies in a socket
        until(lambda: not server.service._calls and not server.service._num_preparing)
        assert_idle(server.llm)
        gc.collect()
        alive = [thing for thing in gc.get_objects() if type(thing) in (Request, Sequence)]
        assert len(alive) <= 16  # the engine may hold what its last step touched
        return resident_bytes()

    before = run(range(4))  # with what is made once
    assert run(range(4, 8)) < before + 16 * 2**20  # a kept request is 20 KB: 1,000 of them would show
    assert server.ask(COMPLETIONS, prompt="x")["choices"]


def _params(max_tokens: int) -> Any:
    from cllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def _text(data: bytes) -> str:
    lines = [line for line in data.decode().split("\n") if line.startswith("data: {")]
    return "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines)
