"""Real clients against a server: openai-python, langchain-openai, lm-eval's requests, schemathesis."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from command_helpers import patch_mock
from hypothesis import HealthCheck, settings
from server_helpers import CLIENT, Running, chat_llm, serve

from cllm import SamplingParams
from cllm.backends.mock import MockScript

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
HELLO: Any = [{"role": "user", "content": "Hello 你好 🎉"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("server")
    with chat_llm(folder, context_length=512) as llm, serve(llm, api_key="sesame") as running:
        running.headers["authorization"] = "Bearer sesame"
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with (
        httpx.Client(**CLIENT) as http_client,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesame", http_client=http_client) as client,
    ):
        yield client


def text_of(server: Running) -> str:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return server.llm.chat(HELLO, params)[0].outputs[0].content or ""


def test_openai_whole_and_streamed(server: Running, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["test"]
    chat = client.chat.completions.create(model="test", messages=HELLO, **GREEDY)
    assert chat.choices[0].message.content == text_of(server)
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 12
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model="test", messages=HELLO, **options, **GREEDY))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text_of(server)
    assert chunks[-1].usage == chat.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    whole = client.completions.create(model="test", prompt="Hi", logprobs=2, **GREEDY)
    pieces = client.completions.create(model="test", prompt="Hi", stream=True, **GREEDY)
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert len(whole.choices[0].logprobs.token_logprobs) == 12


def test_openai_async(server: Running) -> None:
    async def ask() -> tuple[list[str], str]:
        async with (
            httpx.AsyncClient(**CLIENT) as http_client,
            openai.AsyncOpenAI(
                base_url=f"{server.url}/v1", api_key="sesame", http_client=http_client
            ) as client,
        ):
            create = client.chat.completions.create
            chats = await asyncio.gather(*(create(model="test", messages=HELLO, **GREEDY) for _ in range(5)))
            pieces = await create(model="test", messages=HELLO, stream=True, **GREEDY)
            streamed = [piece.choices[0].delta.content or "" async for piece in pieces]
            return [chat.choices[0].message.content for chat in chats], "".join(streamed)

    whole, streamed = asyncio.run(ask())
    assert whole == [text_of(server)] * 5
    assert streamed == text_of(server)


def test_openai_errors(server: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="test", prompt="x" * 600)
    assert (bad.value.code, bad.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.NotFoundError, match="serves 'test'"):
        client.completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_openai_leaves_a_stream(server: Running, client: openai.OpenAI) -> None:
    with client.completions.create(
        model="test", prompt="Hi", stream=True, max_tokens=400, extra_body={"ignore_eos": True}
    ) as pieces:
        next(iter(pieces))
    assert client.completions.create(model="test", prompt="Hi", **GREEDY).choices[0].text


def test_openai_tries_again(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503 while loading, then an answer; a deadline that passed is not tried again."""
    patch_mock(monkeypatch, MockScript(delay=0.02))
    with chat_llm(tmp_path_factory.mktemp("again"), max_num_seqs=1) as llm, serve(None) as server:
        asked: list[str] = []

        def watch(request: httpx.Request) -> None:
            asked.append(request.headers["x-stainless-retry-count"])
            if len(asked) == 2:
                server.service.attach(llm)

        with httpx.Client(**CLIENT, event_hooks={"request": [watch]}) as http_client:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", http_client=http_client)
            client = client.with_options(max_retries=1)
            assert client.completions.create(model="test", prompt="Hi", max_tokens=1).choices
            assert asked == ["0", "1"]
            long = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
            with client.completions.create(model="test", prompt="Hi", stream=True, **long) as pieces:
                next(iter(pieces))
                with pytest.raises(openai.APIStatusError) as late:
                    client.completions.create(model="test", prompt="x", extra_body={"deadline_s": 0.05})
            assert late.value.status_code == 504
            assert asked == ["0", "1", "0", "0"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_langchain(server: Running) -> None:
    from langchain_openai import ChatOpenAI, OpenAI

    with httpx.Client(**CLIENT) as http_client:
        common: dict[str, Any] = {
            "base_url": f"{server.url}/v1",
            "api_key": "sesame",
            "model": "test",
            "temperature": 0,
            "max_tokens": 12,
            "extra_body": {"ignore_eos": True},
            "http_client": http_client,
        }
        chat = ChatOpenAI(**common)
        answer = chat.invoke("Hello 你好 🎉")
        assert answer.content == text_of(server)
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["output_tokens"] == 12
        assert "".join(str(piece.content) for piece in chat.stream("Hello 你好 🎉")) == text_of(server)
        assert OpenAI(**common).invoke("Hi")


@pytest.mark.parametrize("batch", [1, 4])
def test_lm_eval_scores(server: Running, batch: int) -> None:
    """lm-eval's `local-completions`: the request it sends and how it reads the reply (`api_models.py`)."""
    pairs = [("The sky is", " blue"), ("你好", "世界 🎉"), ("2+2=", "4"), ("a", " long continuation")]
    found: list[tuple[float, bool]] = []
    for start in range(0, len(pairs), batch):
        tokens = [server.llm.encode(before + after) for before, after in pairs[start : start + batch]]
        body = {"model": "test", "prompt": tokens, "temperature": 0, "max_tokens": 1, "logprobs": 1}
        reply = server.ask("/v1/completions", **body, seed=1234, echo=True)
        for choice, ids, (before, _) in zip(
            sorted(reply["choices"], key=lambda choice: choice["index"]),
            tokens,
            pairs[start : start + batch],
            strict=True,
        ):
            logprobs = choice["logprobs"]
            assert {len(values) for values in logprobs.values()} == {len(ids) + 1}
            num_context = len(server.llm.encode(before))
            chosen = logprobs["token_logprobs"][num_context:-1]
            tops = logprobs["top_logprobs"][num_context:-1]
            is_greedy = all(value == max(top.values()) for value, top in zip(chosen, tops, strict=True))
            found.append((sum(chosen), is_greedy))
    for (before, after), (total, is_greedy) in zip(pairs, found, strict=True):
        expected_total, expected_greedy = score(server, before, after)
        assert total == expected_total
        assert is_greedy == expected_greedy


def test_lm_eval_knows_greedy_continuations(server: Running) -> None:
    ids = server.llm.encode("The sky is")
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    ids += server.llm.generate([ids], params)[0].outputs[0].token_ids
    reply = server.ask("/v1/completions", prompt=[ids], max_tokens=1, logprobs=1, temperature=0, echo=True)
    logprobs = reply["choices"][0]["logprobs"]
    pairs = zip(logprobs["token_logprobs"][-7:], logprobs["top_logprobs"][-7:], strict=True)
    assert all(value == max(top.values()) for value, top in pairs)


def score(server: Running, before: str, after: str) -> tuple[float, bool]:
    """The log-likelihood of `after`, and whether greedy sampling gives it, computed in this process."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    (output,) = server.llm.generate(before + after, params)
    assert output.prompt_logprobs is not None
    start = len(server.llm.encode(before))
    scored = zip(output.prompt_token_ids[start:], output.prompt_logprobs[start:], strict=True)
    entries = [position[id] for id, position in scored if position is not None]
    total = sum(entry.logprob for entry in entries)
    assert math.isfinite(total)
    return total, all(entry.rank == 1 for entry in entries)


def test_schemathesis(server: Running) -> None:
    """Whatever the description allows, or just does not: no 500, only statuses and types that it names."""
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        negative_data_rejection,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [
        not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        response_schema_conformance,
        negative_data_rejection,
    ]
    document = server.get("/openapi.json").json()
    schema = schemathesis.openapi.from_dict(json.loads(json.dumps(document)))
    for operation in schema.get_all_operations():
        run_cases(operation.ok(), server, checks)


def run_cases(operation: Any, server: Running, checks: list[Any]) -> None:
    from hypothesis import given
    from schemathesis import GenerationMode

    # Without parameters and body there is nothing to get wrong.
    modes = GenerationMode if operation.body else [GenerationMode.POSITIVE]
    for mode in modes:

        @settings(max_examples=8, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            if isinstance(case.body, dict):  # what takes long is tried elsewhere
                case.body.update(
                    {name: 2 for name in ("max_tokens", "n") if isinstance(case.body.get(name), int)}
                )
            case.call_and_validate(
                base_url=server.url, headers={"authorization": "Bearer sesame"}, checks=checks
            )

        check()
