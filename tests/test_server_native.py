"""Our own routes on the mock: generation with timings, the tokenizer, information, metrics, the benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_helpers import Running, chat_llm, error_of, serve

import cllm
from cllm import RequestMetrics, SamplingParams
from cllm.server.native import timings

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("server")
    with chat_llm(folder, context_length=512) as llm, serve(llm, has_benchmark=True) as running:
        yield running


def test_generate(server: Running) -> None:
    found = server.ask("/generate", prompt="Hi 你好", **GREEDY)
    (output,) = server.llm.generate("Hi 你好", SamplingParams(**GREEDY))
    (expected,) = output.outputs
    assert list(found) == ["text", "token_ids", "finish_reason", "stop_reason", "usage", "timings"]
    assert (found["text"], found["token_ids"]) == (expected.text, expected.token_ids)
    assert (found["finish_reason"], found["stop_reason"]) == ("length", None)
    assert found["usage"]["completion_tokens"] == found["timings"]["predicted_n"] == 12
    ids = server.llm.encode("Hi 你好")
    again = server.ask("/generate", prompt_token_ids=ids, stop=[found["text"][-1]], **GREEDY)
    assert again["text"] == found["text"].partition(found["text"][-1])[0]
    assert (again["finish_reason"], again["stop_reason"]) == ("stop", found["text"][-1])


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_generate_stream(server: Running, path: str) -> None:
    whole = server.ask("/generate", prompt="Hi", logprobs=2, **GREEDY)
    events = server.events(path, prompt="Hi", logprobs=2, stream=True, **GREEDY)
    assert "".join(event["text"] for event in events) == whole["text"]
    assert [id for event in events for id in event["token_ids"]] == whole["token_ids"]
    assert [entry for event in events for entry in event["logprobs"]] == whole["logprobs"]
    assert [event["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert list(events[-1])[:3] + list(events[-1])[4:] == [
        *("text", "token_ids", "finish_reason"),
        *("stop_reason", "usage", "timings"),
    ]
    assert events[-1]["timings"]["predicted_n"] == 12
    best = whole["logprobs"][0][0]
    assert (best["token_id"], best["rank"]) == (whole["token_ids"][0], 1)


def test_timings_add_up() -> None:
    metrics = RequestMetrics(queue_s=1.0, time_to_first_token_s=1.5, decode_tokens_per_s=20.0, total_s=3.0)
    assert timings(100, 28, 11, metrics) == {
        "cache_n": 28,
        "prompt_n": 100,
        "prompt_ms": 500.0,
        "prompt_per_token_ms": 5.0,
        "prompt_per_second": 200.0,
        "predicted_n": 11,
        "predicted_ms": 500.0,
        "predicted_per_token_ms": 50.0,
        "predicted_per_second": 20.0,
    }


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "prompt_token_ids": [1]}, "prompt"),
        ({"prompt": "x", "n": 2}, "n"),
        ({"prompt_token_ids": [999]}, "prompt_token_ids"),
        ({"prompt_token_ids": "x"}, "prompt_token_ids"),
        ({"prompt": "x", "top_p": 0}, "top_p"),
    ],
)
def test_generate_refuses(server: Running, body: dict[str, Any], param: str) -> None:
    assert server.refuse("/generate", 400, **body)["param"] == param


def test_tokenizer_routes(server: Running) -> None:
    text = "Hi 你好 🎉"
    for path in ("/tokenize", "/encode"):
        for name in ("prompt", "content"):
            found = server.ask(path, **{name: text})
            assert found == {"tokens": list(text.encode()), "count": 14, "max_model_len": 512}
    assert server.ask("/detokenize", tokens=found["tokens"]) == {"prompt": text, "content": text}
    assert server.ask("/tokenize", prompt="<|im_end|>", parse_special=True)["tokens"] == [258]
    chat = server.ask("/tokenize", messages=[{"role": "user", "content": "x"}])
    assert chat["tokens"] == server.llm.render([{"role": "user", "content": "x"}]).token_ids
    assert server.refuse("/tokenize", 400)["param"] == "prompt"
    assert server.refuse("/tokenize", 400, prompt="x", content="y")["param"] == "prompt"
    assert server.refuse("/tokenize", 400, prompt="x", add_special_tokens=True)["param"] == "add_bos"
    assert server.refuse("/detokenize", 400, tokens=[259])["param"] == "prompt_token_ids"
    info = server.get("/tokenizer_info").json()
    assert (info["vocab_size"], info["eos_id"], info["add_bos"]) == (259, 258, False)
    assert info["end_of_generation"] == {"<|endoftext|>": 256, "<|im_end|>": 258}
    assert "im_start" in info["chat_template"]


def test_information(server: Running) -> None:
    assert server.get("/health").json()["status"] == "ready"
    assert server.get("/version").json() == {"version": cllm.__version__}
    info = server.get("/model/info").json()
    assert (info["model"], info["backend"], info["context_length"]) == ("test", "mock", 512)
    root = server.get("/").json()
    assert root["name"] == "cLLM"
    assert set(root["routes"]) == set(server.get("/openapi.json").json()["paths"])


def test_unknown_routes_and_methods(server: Running) -> None:
    assert "not found" in error_of(server.get("/nothing"), 404)["message"]
    answer = server.get("/v1/completions")
    assert "not allowed" in error_of(answer, 405)["message"]
    assert answer.headers["allow"] == "POST"


def test_metrics(server: Running) -> None:
    before = _samples(server)
    server.ask("/v1/completions", prompt="Hi", **GREEDY)
    server.events("/generate_stream", prompt="Hi there", **GREEDY)
    after = _samples(server)

    def grown(name: str, **labels: str) -> float:
        key = (name, frozenset({"model_name": "test", **labels}.items()))
        return after[key] - before.get(key, 0.0)

    assert grown("cllm:generation_tokens_total") == 24
    assert grown("cllm:prompt_tokens_total") == 10
    assert grown("cllm:request_success_total", finished_reason="length") == 2
    assert grown("cllm:time_to_first_token_seconds_count") == 2
    assert grown("cllm:time_to_first_token_seconds_bucket", le="+Inf") == 2
    assert grown("cllm:time_to_first_token_seconds_bucket", le="2560.0") == 2
    assert grown("cllm:inter_token_latency_seconds_count") == 22
    for stage in ("prepare", "queue", "prefill", "decode"):
        assert grown("cllm:stage_seconds_count", stage=stage) == 2
        assert grown("cllm:stage_seconds_sum", stage=stage) > 0
    assert grown("cllm:stage_seconds_count", stage="validate") == 1
    assert after[("cllm:num_requests_running", frozenset({("model_name", "test")}))] == 0


def _samples(server: Running) -> dict[Any, float]:
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(answer.text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def test_benchmark(server: Running) -> None:
    found = server.ask("/benchmark", num_requests=6, concurrency=3, prompt_tokens=8, output_tokens=5)
    assert (found["num_requests"], found["output_tokens"]) == (6, 30)
    assert found["output_tokens_per_s"] == pytest.approx(30 / found["seconds"])
    assert server.refuse("/benchmark", 400, num_requests=0)["param"] == "num_requests"
    assert server.refuse("/benchmark", 400, prompt_tokens=600)["code"] == "context_length_exceeded"


def test_no_benchmark_unless_asked_for(server: Running) -> None:
    with serve(server.llm) as other:
        assert "--enable-benchmark" in other.refuse("/benchmark", 404)["message"]
