"""`cllm bench http`: how it reads HTTP, what it counts, how it fails. No speed is asserted."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from command_helpers import clear_environment, run_main
from http_script import chunked, events, scripted_server, whole
from server_helpers import chat_llm, serve

from cllm import LLM
from cllm.backends.mock import MockScript
from cllm.bench import http, main
from cllm.bench.answers import Answer, percentile, read_answer, result_block, summarize
from cllm.bench.load import Exchange, closed_loop, open_client, open_loop

SMALL = ("--num-prompts", "12", "--input-len", "7", "--output-len", "5", "--concurrency", "3", "--ignore-eos")


def exchange(
    *replies: bytes, byte_by_byte: bool = False, is_stream: bool = True, close: bool = False
) -> list[Answer]:
    """The answers to as many requests as there are replies, one after the other."""
    left = list(replies)

    async def handle(request: bytes, writer: asyncio.StreamWriter) -> None:
        reply = left.pop(0)
        for part in [reply[i : i + 1] for i in range(len(reply))] if byte_by_byte else [reply]:
            writer.write(part)
            await writer.drain()
        if close:
            writer.close()

    async def ask(url: str) -> list[Exchange]:
        with open_client(url) as client:
            return await closed_loop(client, [client.message("POST", "/", b"{}")] * len(replies), 1)

    with scripted_server(handle) as url:
        found = asyncio.run(ask(url))
    return [read_answer(one, 3, is_stream=is_stream) for one in found]


# --- HTTP ---


@pytest.mark.parametrize("byte_by_byte", [False, True])
def test_every_framing_is_read(byte_by_byte: bool) -> None:
    made = events("a", "b")
    joined = b"".join(made)
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    odd = chunked(joined[:10], joined[10:11], joined[11:], end=b"0;x=1\r\nTrailer: 1\r\n\r\n")
    answers = exchange(chunked(*made), interim + odd, whole(joined), byte_by_byte=byte_by_byte)
    assert [(answer.text, answer.num_output, answer.error) for answer in answers] == [("ab", 2, None)] * 3
    assert all(0 < answer.ttft <= answer.latency and len(answer.itls) == 1 for answer in answers)


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    reply = b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(events("a"))
    (answer,) = exchange(reply, close=True)
    assert (answer.text, answer.error) == ("a", None)


def test_a_connection_is_used_again_and_one_that_was_closed_is_not() -> None:
    numbers: list[int] = []

    async def handle(request: bytes, writer: asyncio.StreamWriter) -> None:
        numbers.append(writer.get_extra_info("peername")[1])
        writer.write(whole(b"x"))
        if len(numbers) == 2:
            writer.close()

    async def ask(url: str) -> list[Exchange]:
        with open_client(url) as client:
            message = client.message("GET", "/")
            first = await closed_loop(client, [message] * 2, 1)
            await asyncio.sleep(0.05)  # the end of the connection arrives
            return first + await closed_loop(client, [message], 1)

    with scripted_server(handle) as url:
        found = asyncio.run(ask(url))
    assert [one.error for one in found] == [None] * 3
    assert numbers[0] == numbers[1] != numbers[2]


def test_a_request_that_meets_the_end_of_an_idle_connection_goes_out_again() -> None:
    numbers: list[int] = []

    async def handle(request: bytes, writer: asyncio.StreamWriter) -> None:
        numbers.append(writer.get_extra_info("peername")[1])
        if len(numbers) == 2:
            writer.close()
        else:
            writer.write(whole(b"x"))

    async def ask(url: str) -> list[Exchange]:
        with open_client(url) as client:
            return await closed_loop(client, [client.message("GET", "/")] * 2, 1)

    with scripted_server(handle) as url:
        found = asyncio.run(ask(url))
    assert [(one.error, one.body) for one in found] == [(None, b"x")] * 2
    assert numbers[0] == numbers[1] != numbers[2]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (chunked(*events("a", "b")[:1], end=b""), "dropped after 55 bytes"),
        (b"", "dropped after 0 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", "dropped after 3 bytes"),
        (b"SSH-2.0 hello\r\n\r\n", "not HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "not HTTP/1.1"),
        (whole(b'{"error":{"message":"too many"}}', "503 Busy"), "status 503: too many"),
        (whole(b"<html>", "502 Bad Gateway"), "status 502: <html>"),
        (whole(b"", "500 Oh"), "status 500: no reason given"),
        (chunked(b'data: {"error":{"message":"it broke"}}\n\n'), "failed while it was streamed: it broke"),
        (chunked(*events("a")[:1]), "ended before the answer did"),
        (chunked(b"data: [DONE]\n\n"), "ended before the answer did"),
        (chunked(b"data: not JSON\n\n"), "not a reply of OpenAI's shape"),
        (chunked(b'data: {"choices":[7]}\n\n'), "not a reply of OpenAI's shape"),
    ],
)
def test_failures_have_reasons(reply: bytes, reason: str) -> None:
    (answer,) = exchange(reply, close=True)
    assert answer.error is not None
    assert reason in answer.error


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    async def ask() -> list[Exchange]:
        with open_client(f"http://127.0.0.1:{port}") as client:
            return await closed_loop(client, [client.message("GET", "/")] * 2, 2)

    answers = [read_answer(one, 3, is_stream=True) for one in asyncio.run(ask())]
    assert all(f"cannot connect to 127.0.0.1, port {port}" in str(answer.error) for answer in answers)


# --- load ---


def peak_load(open_at_once: int, **how: Any) -> int:
    """The most requests under way; the server answers when so many have come, or have waited a while."""
    now = peak = 0
    full = asyncio.Event()

    async def handle(request: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal now, peak
        now += 1
        peak = max(peak, now)
        if now == open_at_once:
            full.set()
        await asyncio.wait_for(full.wait(), 30)
        now -= 1
        writer.write(whole(b"x"))

    async def ask(url: str) -> list[Exchange]:
        with open_client(url) as client:
            messages = [client.message("GET", "/")] * 12
            if "rate" in how:
                return await open_loop(client, messages, seed=0, **how)
            return await closed_loop(client, messages, **how)

    with scripted_server(handle) as url:
        assert [one.error for one in asyncio.run(ask(url))] == [None] * 12
    return peak


def test_a_closed_loop_keeps_so_many_under_way() -> None:
    assert peak_load(4, concurrency=4) == 4


def test_an_open_loop_does_not_wait_for_answers() -> None:
    assert peak_load(12, rate=1000.0) == 12
    assert peak_load(3, rate=1000.0, concurrency=3) == 3


def test_arrivals_are_poisson_and_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sent = [0.0], list[float]()

    class Recorder:
        async def send(self, message: bytes) -> Exchange:
            sent.append(clock[0])
            return Exchange()

    async def sleep(seconds: float) -> None:
        clock[0] += seconds
        await real_sleep(0)

    real_sleep = asyncio.sleep
    monkeypatch.setattr("cllm.bench.load.asyncio.sleep", sleep)
    monkeypatch.setattr("cllm.bench.load.time.perf_counter", lambda: clock[0])
    runs = []
    for seed in (1, 1, 2):
        clock[0] = 0.0
        sent.clear()
        asyncio.run(open_loop(Recorder(), [b""] * 2000, 50.0, seed))  # type: ignore[arg-type]
        runs.append([after - before for before, after in itertools.pairwise(sent)])
    assert runs[0] == pytest.approx(runs[1])
    assert runs[0] != pytest.approx(runs[2])
    mean = sum(runs[0]) / len(runs[0])
    assert mean == pytest.approx(1 / 50, rel=0.1)
    variance = sum((gap - mean) ** 2 for gap in runs[0]) / len(runs[0])
    assert variance == pytest.approx(mean**2, rel=0.2)  # as of an exponential distribution


def test_the_generator_costs_less_than_the_server() -> None:
    prompts = http.random_prompts(40, 7, 0)

    async def load(url: str) -> float:
        with open_client(url) as client:
            bodies = http.make_bodies("test", prompts, 50)
            messages = [client.message("POST", "/v1/completions", body) for body in bodies]
            started = time.thread_time()
            exchanges = await closed_loop(client, messages, 8)
            answers = [read_answer(one, 7, is_stream=True) for one in exchanges]
            spent = time.thread_time() - started
        assert all(answer.num_output == 50 for answer in answers)
        return spent

    script = MockScript(delay=0.002, tokens=dict.fromkeys(range(64), 97))
    with LLM(backend="mock", context_length=64) as llm, serve(llm) as server:
        llm._engine._executor.backend.script = script  # type: ignore[attr-defined]
        before = time.process_time()
        of_generator = asyncio.run(load(server.url))
        of_server = time.process_time() - before - of_generator
    assert of_generator < of_server  # measured: a fifth, streaming a token an event


# --- figures ---


def test_figures_are_those_of_vllm() -> None:
    answers = [
        Answer(0.5, 10, 5, times=[0.1, 0.2, 0.3, 0.4, 0.5]),
        Answer(0.9, 10, 3, times=[0.3, 0.5, 0.9]),
        Answer(0.2, error="status 503: busy"),
    ]
    figures = summarize(answers, 2.0, is_stream=True)
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (20, 8)
    assert figures["request_throughput"] == 1.0
    assert (figures["output_throughput"], figures["total_token_throughput"]) == (4.0, 14.0)
    assert figures["mean_ttft_ms"] == pytest.approx(200)
    assert figures["mean_tpot_ms"] == pytest.approx((100 + 300) / 2)  # a request counts once
    assert figures["mean_itl_ms"] == pytest.approx((4 * 100 + 200 + 400) / 6)  # a token counts once
    assert figures["std_ttft_ms"] == pytest.approx(100)
    assert figures["p99_e2el_ms"] == pytest.approx(896)
    assert figures["errors"] == ["", "", "status 503: busy"]
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0


BLOCK = """\
============ Serving Benchmark Result ============
Successful requests:                     1
Failed requests:                         2
Maximum request concurrency:             8
Benchmark duration (s):                  2.00
Total input tokens:                      10
Total generated tokens:                  3
Request throughput (req/s):              0.50
Output token throughput (tok/s):         1.50
Total token throughput (tok/s):          6.50
---------------Time to First Token----------------
Mean TTFT (ms):                          250.00
Median TTFT (ms):                        250.00
P99 TTFT (ms):                           250.00
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          375.00
Median TPOT (ms):                        375.00
P99 TPOT (ms):                           375.00
---------------Inter-token Latency----------------
Mean ITL (ms):                           375.00
Median ITL (ms):                         375.00
P99 ITL (ms):                            497.50
----------------End-to-end Latency----------------
Mean E2EL (ms):                          1000.00
Median E2EL (ms):                        1000.00
P99 E2EL (ms):                           1000.00
==================================================
failed: 2 x busy"""


def test_the_block_is_that_of_vllm() -> None:
    answers = [
        Answer(1.0, 10, 3, times=[0.25, 0.5, 1.0]),
        Answer(0.1, error="busy"),
        Answer(0.1, error="busy"),
    ]
    figures = summarize(answers, 2.0, is_stream=True) | {"max_concurrency": 8, "request_rate": None}
    assert result_block(figures) == BLOCK


# --- the command, on a server ---


@pytest.mark.parametrize("extra", [(), ("--no-stream",), ("--request-rate", "200")])
def test_lengths_are_exact(extra: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(backend="mock", context_length=64) as llm, serve(llm) as server:
        assert main(["http", "--base-url", server.url, "--json", *SMALL, *extra]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["completed"], figures["failed"], figures["model_id"]) == (12, 0, "test")
    assert figures["input_lens"] == [7] * 12
    assert figures["output_lens"] == [5] * 12
    assert ("ttfts" in figures) == ("--no-stream" not in extra)


def test_chats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with chat_llm(tmp_path, context_length=256) as llm, serve(llm) as server:
        argv = ["http", "--base-url", server.url, "--json", *SMALL, "--endpoint", "/v1/chat/completions"]
        assert main(argv) == 0
        assert json.loads(capsys.readouterr().out)["output_lens"] == [5] * 12
        assert main([*argv, "--no-stream"]) == 0
        assert json.loads(capsys.readouterr().out)["output_lens"] == [5] * 12


def test_failed_requests_are_counted_and_end_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(backend="mock", context_length=8) as llm, serve(llm) as server:
        argv = ["--base-url", server.url, "--model", "test", "--num-prompts", "2", "--input-len", "9"]
        done = run_main(capsys, http.main, *argv)
    assert done.status == 1
    assert "Failed requests:                         2" in done.out
    assert "failed: 2 x status 400: the prompt has 9 tokens" in done.out


def test_the_key_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clear_environment(monkeypatch)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with LLM(backend="mock", context_length=64) as llm, serve(llm, api_key="secret") as server:
        argv = ["--base-url", server.url, "--num-prompts", "1"]
        refused = run_main(capsys, http.main, *argv)
        assert (refused.status, refused.error) == (1, "error: GET /v1/models: status 401\n")
        assert run_main(capsys, http.main, *argv, "--api-key", "secret").status == 0
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        assert run_main(capsys, http.main, *argv).status == 0


@pytest.mark.parametrize(
    "argv",
    [
        ["--num-prompts", "0"],
        ["--concurrency", "0"],
        ["--request-rate", "0"],
        ["--request-rate", "nan"],
        ["--base-url", "127.0.0.1:8000"],
        ["--base-url", "http://127.0.0.1:99999"],
        ["--endpoint", "v1/completions"],
        ["--api-key", "a\nb"],
        ["--nothing"],
    ],
)
def test_wrong_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    done = run_main(capsys, http.main, *argv)
    assert done.status == 2
    assert argv[0] in done.error


def test_prompts_are_seeded() -> None:
    first, again, other = (http.random_prompts(3, 5, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert all(len(prompt) == 5 and max(prompt) < http.NUM_IDS for prompt in first)


def test_help_lists_the_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "http" in capsys.readouterr().out
