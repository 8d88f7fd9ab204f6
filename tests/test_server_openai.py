"""OpenAI's routes on the mock: exact shapes, streams that equal whole answers, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from server_helpers import Running, chat_llm, serve

from cllm import SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
HELLO = [{"role": "user", "content": "Hello 你好 🎉"}]
USAGE = {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("server")
    with chat_llm(folder, context_length=512, max_queue=40) as llm, serve(llm) as running:
        yield running


def test_completion_shape(server: Running) -> None:
    found = server.ask(COMPLETIONS, prompt="Hi", model="test", **GREEDY)
    assert list(found) == ["id", "object", "created", "model", "choices", "usage"]
    assert found["id"].startswith("cmpl-")
    assert (found["object"], found["model"]) == ("text_completion", "test")
    (choice,) = found["choices"]
    (expected,) = server.llm.generate("Hi", SamplingParams(**GREEDY))
    text = expected.outputs[0].text
    assert choice == {"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}
    assert set(found["usage"]) == USAGE
    assert [found["usage"][f"{name}_tokens"] for name in ("prompt", "completion", "total")] == [2, 12, 14]


def test_completion_stream_is_the_text(server: Running) -> None:
    whole = server.ask(COMPLETIONS, prompt="Hi", **GREEDY)
    *chunks, done = server.events(COMPLETIONS, prompt="Hi", stream=True, **GREEDY)
    assert done == "[DONE]"
    assert {tuple(chunk) for chunk in chunks} == {("id", "object", "created", "model", "choices")}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert {tuple(choice) for choice in choices} == {("index", "text", "logprobs", "finish_reason")}
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]


def test_usage_at_the_end_of_a_stream(server: Running) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, _ = server.events(COMPLETIONS, prompt="Hi", **options, **GREEDY)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert set(last["usage"]) == USAGE
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (2, 12)
    *_, last, _ = server.events(CHAT, messages=HELLO, **options, **GREEDY)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12


def test_chat_shape(server: Running) -> None:
    found = server.ask(CHAT, messages=HELLO, **GREEDY)
    assert list(found) == ["id", "object", "created", "model", "choices", "usage"]
    assert found["id"].startswith("chatcmpl-")
    assert found["object"] == "chat.completion"
    (choice,) = found["choices"]
    (expected,) = server.llm.chat(HELLO, SamplingParams(**GREEDY))
    message = {"role": "assistant", "content": expected.outputs[0].content, "refusal": None}
    assert choice == {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}


def test_chat_stream_is_the_text(server: Running) -> None:
    whole = server.ask(CHAT, messages=HELLO, **GREEDY)
    *chunks, done = server.events(CHAT, messages=HELLO, stream=True, **GREEDY)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert all(list(choice["delta"]) == ["content"] for choice in middle)
    assert (last["delta"], last["finish_reason"]) == ({}, "length")
    text = "".join(choice["delta"]["content"] for choice in middle)
    assert text == whole["choices"][0]["message"]["content"]


def test_kinds_of_prompts(server: Running) -> None:
    ids = server.llm.encode("Hi")
    single = server.ask(COMPLETIONS, prompt="Hi", **GREEDY)["choices"][0]["text"]
    for prompt in ("Hi", ["Hi"], ids, [ids]):
        (choice,) = server.ask(COMPLETIONS, prompt=prompt, **GREEDY)["choices"]
        assert choice["text"] == single
    several = server.ask(COMPLETIONS, prompt=["Hi", "other", "Hi"], n=2, **GREEDY)
    assert [choice["index"] for choice in several["choices"]] == list(range(6))
    assert [choice["text"] == single for choice in several["choices"]] == [True] * 2 + [False] * 2 + [
        True
    ] * 2
    assert several["usage"]["completion_tokens"] == 6 * 12
    assert several["usage"]["prompt_tokens"] == 2 + 5 + 2


def test_several_choices_stream_side_by_side(server: Running) -> None:
    whole = server.ask(COMPLETIONS, prompt=["Hi", "other"], n=2, seed=5, **GREEDY | {"temperature": 1.5})
    chunks = server.events(
        COMPLETIONS, prompt=["Hi", "other"], n=2, seed=5, stream=True, **GREEDY | {"temperature": 1.5}
    )[:-1]
    texts = ["", "", "", ""]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert texts[0] != texts[1]


def test_stop_strings_and_ids(server: Running) -> None:
    text = server.ask(COMPLETIONS, prompt="Hi", **GREEDY)["choices"][0]["text"]
    stop = text[3]
    (choice,) = server.ask(COMPLETIONS, prompt="Hi", stop=[stop], **GREEDY)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")
    kept = server.ask(COMPLETIONS, prompt="Hi", stop=stop, include_stop_str_in_output=True, **GREEDY)
    assert kept["choices"][0]["text"] == text[: text.index(stop) + 1]
    first = server.llm.generate("Hi", SamplingParams(**GREEDY))[0].outputs[0].token_ids[0]
    (choice,) = server.ask(COMPLETIONS, prompt="Hi", stop_token_ids=[first], **GREEDY)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def test_completion_logprobs(server: Running) -> None:
    found = server.ask(COMPLETIONS, prompt="Hi", logprobs=3, **GREEDY)
    (choice,) = found["choices"]
    logprobs = choice["logprobs"]
    (expected,) = server.llm.generate("Hi", SamplingParams(**GREEDY, logprobs=3))
    answer = expected.outputs[0]
    assert list(logprobs) == ["tokens", "token_logprobs", "top_logprobs", "text_offset"]
    assert {len(values) for values in logprobs.values()} == {12}
    pairs = zip(answer.token_ids, answer.logprobs, strict=True)
    assert logprobs["token_logprobs"] == [position[id].logprob for id, position in pairs]
    for token, value, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert len(top) == 3
        assert top[token] == value == max(top.values())
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    for token, offset in zip(logprobs["tokens"], offsets, strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
    assert any(token.startswith("bytes:\\x") for token in logprobs["tokens"])


@pytest.mark.parametrize("echo", [False, True])
def test_streamed_logprobs_are_the_whole_ones(server: Running, echo: bool) -> None:
    asked = {"prompt": "Hi 你", "logprobs": 2, "echo": echo, "n": 2, **GREEDY}
    whole = server.ask(COMPLETIONS, **asked)["choices"]
    joined: list[dict[str, list[Any]]] = [{}, {}]
    texts = ["", ""]
    for chunk in server.events(COMPLETIONS, stream=True, **asked)[:-1]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        for name, values in choice["logprobs"].items():
            joined[choice["index"]].setdefault(name, []).extend(values)
    assert texts == [choice["text"] for choice in whole]
    assert joined == [choice["logprobs"] for choice in whole]


def test_echo_scores_the_prompt(server: Running) -> None:
    prompt = "Hi 你好"
    (choice,) = server.ask(COMPLETIONS, prompt=prompt, echo=True, logprobs=1, max_tokens=0)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (prompt, "length")
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    (scored,) = server.llm.generate(prompt, params)
    expected = [None] + [
        position[id].logprob
        for id, position in zip(scored.prompt_token_ids[1:], scored.prompt_logprobs[1:], strict=True)
    ]
    assert choice["logprobs"]["token_logprobs"] == expected
    assert choice["logprobs"]["top_logprobs"][0] is None
    ids = server.llm.encode(prompt)
    (again,) = server.ask(COMPLETIONS, prompt=ids, echo=True, logprobs=1, max_tokens=0)["choices"]
    assert again == choice
    (plain,) = server.ask(COMPLETIONS, prompt=prompt, echo=True, **GREEDY)["choices"]
    assert plain["text"].startswith(prompt)
    assert plain["logprobs"] is None


def test_chat_logprobs(server: Running) -> None:
    asked = {"messages": HELLO, "logprobs": True, "top_logprobs": 2, **GREEDY}
    (choice,) = server.ask(CHAT, **asked)["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 12
    for entry in content:
        assert list(entry) == ["token", "logprob", "bytes", "top_logprobs"]
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
        assert math.isfinite(entry["logprob"])
    shown = [entry["bytes"] for entry in content if not entry["token"].startswith("<|")]
    joined = b"".join(map(bytes, shown))
    assert joined.decode(errors="replace") == choice["message"]["content"]
    streamed: list[Any] = []
    for chunk in server.events(CHAT, stream=True, **asked)[:-1]:
        streamed += (chunk["choices"][0]["logprobs"] or {}).get("content", [])
    assert streamed == content
    (bare,) = server.ask(CHAT, messages=HELLO, logprobs=True, **GREEDY)["choices"]
    assert all(entry["top_logprobs"] == [] for entry in bare["logprobs"]["content"])


def test_chat_takes_what_clients_send(server: Running) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "you"}]},
        {"role": "assistant", "content": None, "reasoning": "so", "refusal": None},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    body = {"messages": messages, "temperature": 0, "user": "me", "stop": None, "n": None, "seed": 1}
    found = server.ask(CHAT, max_completion_tokens=3, ignore_eos=True, unknown_field={"a": 1}, **body)
    assert found["usage"]["completion_tokens"] == 3
    plain = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello you"},
        *messages[2:],
    ]
    same = server.ask(CHAT, messages=plain, temperature=0, max_tokens=3, ignore_eos=True)
    assert same["choices"] == found["choices"]
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
    told = server.ask(CHAT, messages=plain, max_tokens=1, **kwargs)
    assert told["usage"]["prompt_tokens"] == found["usage"]["prompt_tokens"] + len("at once: ")


def test_seed_and_bias(server: Running) -> None:
    asked = {"prompt": "Hi", "temperature": 2.0, "max_tokens": 12, "ignore_eos": True, "seed": 3}
    first, second = (server.ask(COMPLETIONS, **asked)["choices"] for _ in range(2))
    assert first == second
    (choice,) = server.ask(COMPLETIONS, prompt="Hi", logit_bias={"97": 100}, **GREEDY)["choices"]
    assert choice["text"] == "a" * 12


def test_models(server: Running) -> None:
    (model,) = server.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("test", "model", 512)
    assert server.get("/v1/models/test").json() == model
    assert server.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (COMPLETIONS, {}, "prompt", "missing"),
        (COMPLETIONS, {"prompt": 5}, "prompt", "got `int`"),
        (COMPLETIONS, {"prompt": []}, "prompt", "empty list"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "empty"),
        (COMPLETIONS, {"prompt": ["a", 1]}, "prompt", "several kinds"),
        (COMPLETIONS, {"prompt": [999]}, "prompt", "0..258, found 999"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt", "0..258, found -1"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": "5"}, "max_tokens", "got `str`"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": True}, "max_tokens", "got `bool`"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": -1}, "max_tokens", "at least 0"),
        (COMPLETIONS, {"prompt": "x", "temperature": -1}, "temperature", "at least 0"),
        (COMPLETIONS, {"prompt": "x", "n": 0}, "n", "from 1 to 128"),
        (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs", "from 0 to 20"),
        (COMPLETIONS, {"prompt": "x", "stop": [""]}, "stop", "none of them empty"),
        (COMPLETIONS, {"prompt": "x", "stop": [1]}, "stop[0]", "got `int`"),
        (COMPLETIONS, {"prompt": "x", "best_of": 3}, "best_of", "not supported"),
        (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {"900": 1}}, "logit_bias", "below 259"),
        (COMPLETIONS, {"prompt": "x", "stream_options": {}}, "stream_options", "set stream to true"),
        (COMPLETIONS, {"prompt": ["x"] * 41}, "prompt", "at most 40"),
        (CHAT, {}, "messages", "missing"),
        (CHAT, {"messages": []}, "messages", "at least one message"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", "a role"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "a string or a list"),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": -1}, "max_completion_tokens", "at least 0"),
        (
            CHAT,
            {"messages": HELLO, "response_format": {"type": "json_object"}},
            "response_format",
            "not supported",
        ),
        (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice", "not supported"),
        (
            CHAT,
            {"messages": HELLO, "chat_template_kwargs": {"messages": 1}},
            "chat_template_kwargs",
            "may not",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused(
    server: Running, path: str, body: dict[str, Any], param: str, words: str, stream: bool
) -> None:
    if "stream_options" in body and stream:
        body = {"prompt": "x", "stream_options": 5}
        words = "got `int`"
    error = server.refuse(path, 400, stream=stream, **body)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert words in error["message"]
    assert param.partition("[")[0] in error["message"]


def test_too_long_for_the_context(server: Running) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "x" * 512}), (CHAT, {"messages": HELLO * 30})):
        error = server.refuse(path, 400, **body)
        assert error["code"] == "context_length_exceeded"
        assert "512" in error["message"]


def test_other_models_do_not_exist(server: Running) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HELLO})):
        error = server.refuse(path, 404, model="gpt-4", **body)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "'test'" in error["message"]
