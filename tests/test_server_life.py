"""What happens beside answers: clients that leave, full queues, deadlines, loading, faults, keys, origins, the end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from command_helpers import ENDLESS, patch_mock
from server_helpers import CLIENT, Running, assert_idle, error_of, serve, until

from cllm import LLM
from cllm.backends.mock import MockScript
from cllm.server.hand_over import EVERY_S, HandOver

ANSWERING = ("/v1/completions", "/generate")
LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> MockScript:
    """Letters without end, 5 ms each."""
    return patch_mock(monkeypatch, MockScript(delay=0.005, tokens=ENDLESS))


@pytest.fixture
def llm(script: MockScript) -> Iterator[LLM]:
    with LLM(backend="mock", max_num_seqs=2, max_queue=3) as llm:
        yield llm


@pytest.fixture
def server(llm: LLM) -> Iterator[Running]:
    with serve(llm) as running:
        yield running
        assert_idle(llm)
        assert not running.service._calls


def send(server: Running, path: str, body: dict[str, Any]) -> Any:
    """A bare connection over which `body` has been posted."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection = server.connect()
    connection.sendall(head.encode() + data)
    return connection


def num_running(server: Running) -> int:
    return int(server.llm.health()["num_running"])


@pytest.mark.parametrize("path", ANSWERING)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_cancelled(server: Running, path: str, stream: bool) -> None:
    connection = send(server, path, LONG | {"stream": stream})
    until(lambda: num_running(server) == 1)
    if stream:
        assert b"200 OK" in connection.recv(4096)
    connection.close()
    until(lambda: num_running(server) == 0, 2)  # 3,000 tokens would take 15 s
    assert server.llm.metrics()["cllm:request_success_total"] == {"abort": 1}


def test_a_client_that_leaves_the_queue(server: Running) -> None:
    running = [send(server, "/generate", LONG) for _ in range(2)]
    until(lambda: num_running(server) == 2)
    waiting = send(server, "/v1/completions", LONG | {"stream": True, "prompt": ["a", "b"]})
    until(lambda: server.llm.health()["num_waiting"] == 2)
    waiting.close()
    until(lambda: server.llm.health()["num_waiting"] == 0, 2)
    assert num_running(server) == 2
    for connection in running:
        connection.close()


def test_a_full_queue(server: Running) -> None:
    busy = [send(server, "/generate", LONG) for _ in range(2)]
    until(lambda: num_running(server) == 2)
    busy += [send(server, "/generate", LONG) for _ in range(3)]
    until(lambda: server.llm.health()["num_waiting"] == 3)
    for stream in (False, True):
        answer = server.post("/v1/completions", json={"prompt": "x", "stream": stream})
        error = error_of(answer, 503)
        assert (error["code"], error["type"]) == ("queue_full", "server_error")
        assert answer.headers["retry-after"] == "1"
    for connection in busy:
        connection.close()
    assert_idle(server.llm)
    assert server.ask("/v1/completions", prompt="x", max_tokens=2)["choices"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_before_the_first_token(server: Running, stream: bool) -> None:
    busy = [send(server, "/generate", LONG) for _ in range(2)]
    until(lambda: num_running(server) == 2)
    body = {"prompt": "x", "deadline_s": 0.05, "stream": stream}
    for path in ANSWERING:
        answer = server.post(path, json=body)
        assert error_of(answer, 504)["code"] == "deadline_exceeded"
        assert answer.headers["x-should-retry"] == "false"
    for connection in busy:
        connection.close()


def test_a_deadline_after_the_first_token(server: Running) -> None:
    body = LONG | {"deadline_s": 0.2}
    (choice,) = server.ask("/v1/completions", **body)["choices"]
    assert choice["finish_reason"] == "abort"
    assert 0 < len(choice["text"]) < 3000
    *_, last, done = server.events("/v1/completions", stream=True, **body)
    assert (last["choices"][0]["finish_reason"], done) == ("abort", "[DONE]")
    native = server.ask("/generate", **body)
    assert (native["finish_reason"], native["stop_reason"]) == ("abort", "deadline")


def test_a_failing_step(server: Running, script: MockScript) -> None:
    step = server.llm._engine._executor.backend.num_steps
    script.failures |= set(range(step, step + 2))
    error = server.refuse("/v1/completions", 500, prompt="x")
    assert (error["type"], error["code"]) == ("server_error", "engine_error")
    step = server.llm._engine._executor.backend.num_steps
    script.failures |= set(range(step, step + 2))
    assert server.refuse("/v1/completions", 500, prompt="x", stream=True)["code"] == "engine_error"
    step = server.llm._engine._executor.backend.num_steps
    script.failures |= set(range(step + 3, step + 6))
    *pieces, last, done = server.events("/v1/completions", stream=True, **LONG | {"max_tokens": 9})
    assert len(pieces) == 3
    assert last["error"]["code"] == "engine_error"
    assert done == "[DONE]"
    assert server.ask("/v1/completions", prompt="x", max_tokens=2)["choices"]


def test_while_the_model_loads(llm: LLM) -> None:
    with serve(None) as server:
        answer = server.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "loading")
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/generate", {"prompt": "x"})):
            answer = server.post(path, json=body)
            assert error_of(answer, 503)["code"] == "loading"
            assert answer.headers["retry-after"] == "2"
        assert server.get("/version").status_code == 200
        assert error_of(server.get("/metrics"), 503)["code"] == "loading"
        server.service.attach(llm)
        assert server.get("/health").status_code == 200
        assert server.ask("/v1/completions", prompt="x", max_tokens=2)["choices"]


def test_a_dead_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(backend="mock") as llm, serve(llm) as server:
        monkeypatch.setattr(llm._scheduler, "schedule", None)  # a bug in our own code
        assert "died" in server.refuse("/v1/completions", 500, prompt="x")["message"]
        answer = server.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "dead")
        assert server.refuse("/v1/completions", 500, prompt="x")["code"] == "engine_error"


def test_a_bug_tells_no_secrets(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr(server.llm, "make_request", broken)
    error = server.refuse("/v1/completions", 500, prompt="x")
    assert error["code"] == "internal_error"
    assert "secret" not in error["message"]


def test_draining_lets_answers_end(server: Running) -> None:
    found: list[Any] = []
    body = LONG | {"max_tokens": 60, "stream": True}
    thread = threading.Thread(target=lambda: found.extend(server.events("/v1/completions", **body)))
    thread.start()
    until(lambda: num_running(server) == 1)
    drain(server, 30)
    answer = httpx.post(server.url + "/v1/completions", json={"prompt": "x"}, **CLIENT)
    assert error_of(answer, 503)["code"] == "draining"
    assert httpx.get(server.url + "/health", **CLIENT).status_code == 503
    thread.join(30)
    assert found[-2]["choices"][0]["finish_reason"] == "length"
    assert sum(len(event["choices"][0]["text"]) for event in found[:-1]) == 60


def test_draining_ends_in_time(server: Running) -> None:
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.extend(server.events("/v1/completions", stream=True, **LONG))
    )
    thread.start()
    until(lambda: num_running(server) == 1)
    started = time.monotonic()
    drain(server, 0.1)
    thread.join(30)
    assert time.monotonic() - started < 5
    assert found[-2]["choices"][0]["finish_reason"] == "abort"
    assert found[-1] == "[DONE]"


def drain(server: Running, seconds: float) -> None:
    """`Service.drain` on the server's own event loop."""
    assert server.service._hand_over is not None
    server.service._hand_over._loop.call_soon_threadsafe(server.service.drain, seconds)
    until(lambda: server.llm.health()["status"] == "draining")


def test_the_key(llm: LLM) -> None:
    with serve(llm, api_key="sesame") as server:
        for headers in ({}, {"authorization": "Bearer sesam"}, {"authorization": "sesame"}):
            for path in ("/v1/models", "/metrics", "/", "/nothing"):
                answer = server.get(path, headers=headers)
                assert error_of(answer, 401)["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        assert server.get("/v1/models", headers={"authorization": "Bearer sesame"}).status_code == 200
        assert server.get("/health").status_code == 200
        odd = server.get("/v1/models", headers={"authorization": "Bearer ü".encode()})
        error_of(odd, 401)


def test_origins(llm: LLM) -> None:
    preflight = {
        "origin": "https://page.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type,authorization",
    }
    with serve(llm) as server:
        answer = server.options("/v1/completions", headers=preflight)
        assert answer.status_code == 405
        assert not [name for name in answer.headers if name.startswith("access-control")]
    with serve(llm, cors_origins=["https://page.example"], api_key="sesame") as server:
        answer = server.options("/v1/completions", headers=preflight)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        other = server.options("/v1/completions", headers=preflight | {"origin": "https://evil.example"})
        assert other.status_code == 400
        refused = server.post("/v1/completions", headers={"origin": "https://page.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://page.example"


def test_one_hand_over_a_step(server: Running, script: MockScript, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    taken: list[Any] = []
    hand_over = server.service._hand_over
    assert hand_over is not None
    deliver, take = hand_over.deliver, hand_over._take

    def delivered(updates: list[Any]) -> None:
        calls.append(len(updates))
        deliver(updates)

    def took(update: Any) -> None:
        taken.append(update)
        take(update)

    monkeypatch.setattr(hand_over, "deliver", delivered)
    monkeypatch.setattr(hand_over, "_take", took)
    backend = server.llm._engine._executor.backend
    body = {"prompt": ["one", "two"], "max_tokens": 40, "ignore_eos": True, "temperature": 0, "stream": True}
    for script.delay in (0.005, 0.0):
        calls.clear()
        taken.clear()
        step = backend.num_steps
        events = server.events("/v1/completions", **body, stream_options={"include_usage": True})
        assert events[-2]["usage"]["completion_tokens"] == 80
        assert len(calls) <= backend.num_steps - step <= 42
        assert sum(len(piece.token_ids) for piece in taken) == 80
        assert len(taken) == sum(calls)
        assert (len(taken) == 80) == bool(script.delay)  # quick steps share


def test_only_small_requests_are_read_on_the_event_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    make_request = server.llm.make_request

    def noted(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread().name)
        return make_request(*args, **kwargs)

    monkeypatch.setattr(server.llm, "make_request", noted)

    def is_small(path: str, **body: Any) -> bool:
        threads.clear()
        assert server.post(path, json={"max_tokens": 1} | body).status_code == 200
        assert len(threads) == (len(body["prompt"]) if isinstance(body["prompt"], list) else 1)
        return not threads[0].startswith("cllm-prepare")

    assert is_small("/v1/completions", prompt="x")
    assert is_small("/v1/completions", prompt=["x", "y"], n=2)
    assert is_small("/generate", prompt="x")
    assert not is_small("/v1/completions", prompt=900 * "x", n=2)
    assert not is_small("/v1/completions", prompt=3 * [120 * "x"])
    assert not is_small("/v1/completions", prompt="x", logit_bias={str(i): 1 for i in range(200)})
    assert not is_small("/generate", prompt=1100 * "x")


def test_only_steps_in_quick_succession_share_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        """The time and the event loop: time stands still, and what is called for is kept."""

        def __init__(self) -> None:
            self.now, self.calls, self.slept = 100.0, list[Any](), 0

        def monotonic(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            self.slept += 1

        def call_soon_threadsafe(self, work: Any) -> None:
            self.calls.append(work)

    def dispatched() -> list[Any]:
        """What the dispatches that were called for bring."""
        taken.clear()
        while clock.calls:
            clock.calls.pop(0)()
        return taken

    clock, taken = Clock(), list[Any]()
    monkeypatch.setattr("cllm.server.hand_over.time", clock)
    hand_over = HandOver(clock, taken.append)  # type: ignore[arg-type]
    for update in "ab":  # steps of a real model
        assert not hand_over.may_wait()
        hand_over.deliver([update])
        assert dispatched() == [update]
        clock.now += 1.1 * EVERY_S
    hand_over.deliver(["c"])
    assert dispatched() == ["c"]
    clock.now += 0.9 * EVERY_S
    assert hand_over.may_wait()
    clock.now += 0.2 * EVERY_S
    assert not hand_over.may_wait()
    hand_over.deliver(["d"])
    assert (len(clock.calls), clock.slept) == (1, 0)
    # The loop does not come: the engine makes room for it, and calls no second time.
    assert hand_over.may_wait()
    assert clock.slept == 1
    hand_over.deliver(["e", "f"])
    assert len(clock.calls) == 1
    assert dispatched() == ["d", "e", "f"]
    assert hand_over.may_wait()
    assert clock.slept == 1
