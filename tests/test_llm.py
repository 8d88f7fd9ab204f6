"""The whole circle on the mock backend: answers, streams, faults, cancellation, and that nothing leaks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from engine_helpers import assert_baseline

from cllm import (
    LLM,
    BackendError,
    ConfigError,
    ContextLengthError,
    InvalidRequestError,
    SamplingParams,
    sampler_kernels,
)
from cllm.backends.mock import MockScript
from cllm.sequence import Request

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture
def llm(script: MockScript) -> Iterator[LLM]:
    with LLM(backend="mock", context_length=256, max_num_seqs=4) as llm:
        yield llm
        assert_baseline(llm)


def texts(outputs: list[Any]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_batched_equals_solo_and_stream_equals_generate(llm: LLM) -> None:
    prompts = ["one", "two two", "three three three", "Four", "5", "six " * 30]
    batched = llm.generate(prompts, GREEDY)
    assert texts(batched) == [texts(llm.generate(prompt, GREEDY))[0] for prompt in prompts]
    for prompt, output in zip(prompts, batched, strict=True):
        pieces = list(llm.stream(prompt, GREEDY))
        assert "".join(piece.text for piece in pieces) == output.outputs[0].text
        assert [id for piece in pieces for id in piece.token_ids] == output.outputs[0].token_ids
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        assert output.prompt == prompt
        assert output.prompt_token_ids == llm.encode(prompt)
        assert output.outputs[0].finish_reason == "length"
        assert output.metrics.time_to_first_token_s is not None


def test_seeded_sampling_does_not_depend_on_neighbours(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, seed=7, max_tokens=20, ignore_eos=True)
    alone = llm.generate("a prompt", params)
    beside = llm.generate(["other", "a prompt", "third"], params)
    assert beside[1].outputs[0].token_ids == alone[0].outputs[0].token_ids
    assert texts(llm.generate("a prompt", SamplingParams(temperature=1.5, seed=8, max_tokens=20))) != texts(
        alone
    )


def test_end_of_generation_stops(llm: LLM, script: MockScript) -> None:
    script.tokens = {6: 65, 7: 66, 8: 258}
    (output,) = llm.generate("prompt", SamplingParams(temperature=0, max_tokens=20))
    (answer,) = output.outputs
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("AB", [65, 66, 258], "stop")


def test_answers_end_at_the_context(llm: LLM) -> None:
    (output,) = llm.generate("x" * 250, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 6
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ("x" * 256, ContextLengthError, "256 tokens; the context holds 256"),
        ("", InvalidRequestError, "empty"),
        ([], InvalidRequestError, "empty"),
        ([1, 259], InvalidRequestError, "259"),
        ([1, -1], InvalidRequestError, "-1"),
        ([1, 2.5], InvalidRequestError, "2.5"),
        ([True], InvalidRequestError, "True"),
    ],
)
def test_bad_prompts_are_refused_before_any_work(llm: LLM, prompt: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        list(llm.stream(prompt))
    assert texts(llm.generate("fine", GREEDY))


def test_more_prompts_than_the_queue_holds(script: MockScript) -> None:
    with LLM(backend="mock", max_num_seqs=2, max_queue=3) as llm:
        prompts = [f"prompt {i}" for i in range(30)]
        assert texts(llm.generate(prompts, GREEDY)) == [texts(llm.generate(p, GREEDY))[0] for p in prompts]


def test_a_failing_step_is_retried_and_changes_no_answer(llm: LLM, script: MockScript) -> None:
    prompts = ["one", "two", "three"]
    expected = texts(llm.generate(prompts, GREEDY))
    step = llm._engine._executor.backend.num_steps
    script.failures |= {step + 2}
    script.refusals |= {step + 9}
    assert texts(llm.generate(prompts, GREEDY)) == expected


def test_a_request_that_fails_again_ends_alone(llm: LLM, script: MockScript) -> None:
    prompts = ["one", "two", "three"]
    expected = texts(llm.generate(prompts, GREEDY))
    step = llm._engine._executor.backend.num_steps
    script.failures |= {step + 2, step + 3}  # all three together, then the first of them alone
    outputs = llm.generate(prompts, GREEDY)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length", "length"]
    assert isinstance(outputs[0].error, BackendError)
    assert texts(outputs)[1:] == expected[1:]


def test_nan_ends_its_requests_with_an_error(llm: LLM, script: MockScript) -> None:
    script.nans |= {2}
    (output,) = llm.generate("one", GREEDY)
    assert output.outputs[0].finish_reason == "error"
    assert "NaN" in str(output.error)
    assert len(output.outputs[0].token_ids) == 2
    assert llm.generate("one", GREEDY)[0].outputs[0].finish_reason == "length"


def test_leaving_a_stream_ends_its_request(llm: LLM) -> None:
    for piece in llm.stream("one", SamplingParams(max_tokens=200, ignore_eos=True)):
        assert piece.token_ids
        break
    assert_baseline(llm)


def test_many_threads(llm: LLM) -> None:
    prompts = [f"prompt of thread {i}" for i in range(8)]
    expected = texts(llm.generate(prompts, GREEDY))
    found: dict[int, str] = {}

    def work(i: int) -> None:
        found[i] = "".join(piece.text for piece in llm.stream(prompts[i], GREEDY))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [found[i] for i in range(8)] == expected


def test_a_dead_engine_fails_every_waiter(script: MockScript, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(backend="mock")
    monkeypatch.setattr(llm._scheduler, "commit", None)  # a bug in our own code
    (output,) = llm.generate("one", GREEDY)
    assert output.outputs[0].finish_reason == "error"
    with pytest.raises(BackendError, match="died"):
        llm.generate("two", GREEDY)
    llm.close()


def test_closed_and_closed_again() -> None:
    llm = LLM(backend="mock")
    llm.close()
    llm.close()
    with pytest.raises(BackendError, match="closed"):
        llm.generate("one")


def test_a_request_that_can_never_fit_is_refused() -> None:
    with (
        LLM(backend="mock", kv_cache_tokens=64) as llm,
        pytest.raises(InvalidRequestError, match="KV cache; it holds 64"),
    ):
        llm.generate("x" * 50, SamplingParams(max_tokens=20))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "cuda"}, "backend should be one of kylin, llama, mock"),
        ({"contextlength": 5}, "did you mean 'context_length'"),
        ({"context_length": 0}, "context_length should be a whole number from 1"),
        ({"context_length": True}, "found True"),
        ({"max_num_seqs": 2.0}, "found 2.0"),
        ({"kv_cache_dtype": "q8"}, "f16, f32"),
        ({"max_num_seqs": 32, "max_num_batched_tokens": 16}, "is below max_num_seqs"),
        ({"model": ""}, "path of a GGUF file"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**{"backend": "mock", **settings})


def test_thousands_of_prompts_are_under_way_a_few_at_a_time(
    script: MockScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Choices do not count as waiting requests, and what waits for its turn holds no more than its ids."""
    with LLM(backend="mock", max_num_seqs=4, max_queue=8, kv_cache_tokens=4096) as llm:
        made, ended, most = 0, 0, 0
        make, output = llm._requests.make, Request.output

        def counted(*args: Any, **kwargs: Any) -> Request:
            nonlocal made, most
            made += 1
            most = max(most, made - ended)
            return make(*args, **kwargs)

        def counted_output(request: Request) -> Any:
            nonlocal ended
            ended += 1
            return output(request)

        monkeypatch.setattr(llm._requests, "make", counted)
        monkeypatch.setattr(Request, "output", counted_output)
        params = SamplingParams(n=3, temperature=0, max_tokens=2, ignore_eos=True)
        outputs = llm.generate([f"prompt {i}" for i in range(2000)], params, use_tqdm=False)
        assert [output.prompt for output in outputs] == [f"prompt {i}" for i in range(2000)]
        assert all(len(output.outputs) == 3 for output in outputs)
        assert made == ended == 2000
        assert most <= 8


def test_warmup_compiles_sampling_and_counts_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    draw = sampler_kernels.kept_tokens
    monkeypatch.setattr(
        sampler_kernels, "kept_tokens", lambda *args, **more: drawn.append(args) or draw(*args, **more)
    )
    llm.warmup()
    assert len(drawn) == 1
    assert not sum(llm.metrics()["cllm:request_success_total"].values())
