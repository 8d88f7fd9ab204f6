"""What a request may ask for, through the whole circle on the mock: stops, choices, log-probabilities, chat."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_builder import write_gguf
from qwen3_vocab import load_qwen3_vocab
from tiny_vocab import qwen3_metadata

from cllm import LLM, InvalidRequestError, SamplingParams
from cllm.backends.mock import MockScript

GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture
def llm(script: MockScript) -> Iterator[LLM]:
    with LLM(backend="mock", context_length=512, max_num_seqs=4, max_num_batched_tokens=64) as llm:
        yield llm


def say(script: MockScript, prompt: str, answer: str | bytes) -> None:
    """Makes the model answer `prompt` so."""
    data = answer.encode() if isinstance(answer, str) else answer
    script.tokens = {len(prompt) + at: byte for at, byte in enumerate(data)}


def ask(llm: LLM, prompt: str, **params: Any) -> Any:
    """The answer, after checking that its stream says the same."""
    asked = SamplingParams(**{**GREEDY, **params})
    (output,) = llm.generate(prompt, asked)
    pieces = list(llm.stream(prompt, asked))
    answer = output.outputs[0]
    assert "".join(piece.text for piece in pieces) == answer.text
    assert pieces[-1].finish_reason == answer.finish_reason
    assert pieces[-1].stop_reason == answer.stop_reason
    return answer


@pytest.mark.parametrize(
    ("params", "text", "finish_reason", "stop_reason", "num_tokens"),
    [
        ({}, "Hello World", "length", None, 11),
        ({"stop": "o W"}, "Hell", "stop", "o W", 7),
        ({"stop": "o W", "include_stop_str_in_output": True}, "Hello W", "stop", "o W", 7),
        ({"stop": ["xyz", "lo"]}, "Hel", "stop", "lo", 5),
        ({"stop": ["World!"]}, "Hello World", "length", None, 11),  # held back, then released
        ({"stop_token_ids": [ord("W")]}, "Hello ", "stop", ord("W"), 7),
        ({"stop_token_ids": [ord("W")], "include_stop_str_in_output": True}, "Hello W", "stop", ord("W"), 7),
        ({"max_tokens": 3}, "Hel", "length", None, 3),
        ({"stop": "l", "min_tokens": 5}, "Hello Wor", "stop", "l", 10),
    ],
)
def test_how_an_answer_ends(
    llm: LLM,
    script: MockScript,
    params: dict[str, Any],
    text: str,
    finish_reason: str,
    stop_reason: Any,
    num_tokens: int,
) -> None:
    say(script, "Say:", "Hello World")
    answer = ask(llm, "Say:", **{"max_tokens": 11, **params})
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (text, finish_reason, stop_reason)
    assert len(answer.token_ids) == num_tokens


def test_end_of_generation_and_ignoring_it(llm: LLM, script: MockScript) -> None:
    script.tokens = {4: ord("A"), 5: 258, 6: ord("B")}
    answer = ask(llm, "Say:", ignore_eos=False)
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("A", "stop", None)
    assert ask(llm, "Say:", max_tokens=3).text == "AB"
    assert ask(llm, "Say:", max_tokens=3, skip_special_tokens=False).text == "A<|im_end|>B"


def test_characters_split_over_tokens(llm: LLM, script: MockScript) -> None:
    say(script, "Say:", "é漢🦜")
    answer = ask(llm, "Say:", max_tokens=9)
    assert answer.text == "é漢🦜"
    assert ask(llm, "Say:", max_tokens=8).text == "é漢\ufffd"


def test_choices_differ_and_repeat(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=2.0, seed=5, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate("prompt", params)
    answers = [answer.token_ids for answer in output.outputs]
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert len({tuple(answer) for answer in answers}) == 3
    assert [a.token_ids for a in llm.generate("prompt", params)[0].outputs] == answers
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for piece in llm.stream("prompt", params):
        streamed[piece.index] += piece.token_ids
    assert list(streamed.values()) == answers


def log_softmax(row: np.ndarray) -> np.ndarray:
    row = row.astype(np.float64)
    return row - (row.max() + math.log(np.exp(row - row.max()).sum()))


@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 130, 200])
def test_log_probabilities_of_prompt_and_answer(llm: LLM, length: int) -> None:
    """Entry i comes from position i - 1, the first is None; chunks and the limit of rows do not show."""
    prompt = "".join(chr(97 + i * 7 % 26) for i in range(length))
    params = SamplingParams(**GREEDY, max_tokens=4, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate(prompt, params)
    history = llm.encode(prompt) + output.outputs[0].token_ids
    backend = llm._engine._executor.backend
    positions = list(range(len(history)))
    rows = [log_softmax(row) for row in backend.history_logits([history] * len(positions), positions)]
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == length
    entries = output.prompt_logprobs[1:] + output.outputs[0].logprobs
    for position, entry in enumerate(entries, start=1):
        token_id = history[position]
        assert entry[token_id].logprob == pytest.approx(rows[position - 1][token_id], abs=1e-5)
        assert entry[token_id].decoded_token == llm.decode([token_id])
        best = int(rows[position - 1].argmax())
        assert entry[best].rank == 1
        assert next(iter(entry)) == best
    answer = output.outputs[0]
    total = sum(entry[id].logprob for entry, id in zip(answer.logprobs, answer.token_ids, strict=True))
    assert answer.cumulative_logprob == pytest.approx(total)
    (plain,) = llm.generate(prompt, SamplingParams(**GREEDY, max_tokens=4))
    assert plain.outputs[0].token_ids == answer.token_ids
    assert plain.outputs[0].logprobs is None
    assert plain.prompt_logprobs is None


def test_scoring_without_an_answer(llm: LLM) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    outputs = llm.generate(["score this", "x", "and this one" * 20], params)
    for output in outputs:
        assert output.outputs[0].token_ids == []
        assert output.outputs[0].finish_reason == "length"
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    scored = llm.generate("score this", SamplingParams(**GREEDY, max_tokens=3, prompt_logprobs=0))
    assert scored[0].prompt_logprobs == outputs[0].prompt_logprobs


def test_scoring_survives_a_failed_step(llm: LLM, script: MockScript) -> None:
    prompt = "a long prompt that takes several steps " * 5
    params = SamplingParams(**GREEDY, max_tokens=2, prompt_logprobs=0)
    expected = llm.generate(prompt, params)[0].prompt_logprobs
    step = llm._engine._executor.backend.num_steps
    script.failures |= {step + 2}
    assert llm.generate(prompt, params)[0].prompt_logprobs == expected


def test_a_list_of_params_and_the_index_of_a_wrong_prompt(llm: LLM) -> None:
    each = [SamplingParams(**GREEDY, max_tokens=n) for n in (1, 2, 3)]
    assert [len(o.outputs[0].token_ids) for o in llm.generate(["a", "b", "c"], each)] == [1, 2, 3]
    with pytest.raises(InvalidRequestError, match="3 prompts, but 2"):
        llm.generate(["a", "b", "c"], each[:2])
    for wrong, message in (("", "empty"), ([5, -7], "-7"), (3.5, "float"), ("\ud800", "surrogate")):
        with pytest.raises(InvalidRequestError, match=f"prompt 1: .*{message}"):
            llm.generate(["fine", wrong, "fine"], each)


def test_ids_outside_the_vocabulary_are_refused(llm: LLM) -> None:
    for params in ({"logit_bias": {259: 1.0}}, {"stop_token_ids": [500]}, {"allowed_token_ids": [259]}):
        with pytest.raises(InvalidRequestError, match=next(iter(params))):
            llm.generate("x", SamplingParams(**params))
    assert len(llm.generate("x", SamplingParams(**GREEDY, top_k=10**9))[0].outputs[0].token_ids) == 16


def test_masks_reach_the_answer(llm: LLM) -> None:
    allowed = SamplingParams(temperature=1.0, seed=1, max_tokens=20, allowed_token_ids=[65, 66])
    assert set(llm.generate("x", allowed)[0].outputs[0].token_ids) <= {65, 66}
    biased = SamplingParams(temperature=1.0, seed=1, max_tokens=5, logit_bias={70: 100})
    assert llm.generate("x", biased)[0].outputs[0].token_ids == [70] * 5


def test_deadlines_end_requests_in_queue_and_running(llm: LLM, script: MockScript) -> None:
    script.delay = 0.02
    params = [
        SamplingParams(**GREEDY, max_tokens=100, deadline_s=deadline)
        for deadline in (0.2, None, None, None, 0.1)
    ]
    outputs = llm.generate(list("abcde"), params)  # the fifth waits for a slot all its life
    answers = [output.outputs[0] for output in outputs]
    assert [(a.finish_reason, a.stop_reason) for a in answers] == [
        ("abort", "deadline"),
        ("length", None),
        ("length", None),
        ("length", None),
        ("abort", "deadline"),
    ]
    assert 0 < len(answers[0].token_ids) < 30
    assert answers[4].token_ids == []
    assert outputs[4].metrics.queue_s is None
    assert outputs[0].metrics.queue_s is not None


def test_lower_priority_numbers_go_first(script: MockScript) -> None:
    script.delay = 0.005
    with LLM(backend="mock", max_num_seqs=1) as llm:
        params = [SamplingParams(**GREEDY, max_tokens=4, priority=p) for p in (5, 5, 0, -1)]
        outputs = llm.generate(list("abcd"), params)
    order = sorted(range(1, 4), key=lambda i: outputs[i].metrics.queue_s)
    assert order == [3, 2, 1]


@pytest.fixture(scope="module")
def qwen3_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("vocab") / "qwen3.gguf", qwen3_metadata(load_qwen3_vocab()), {})


def test_chat_and_reasoning(script: MockScript, qwen3_file: Path) -> None:
    with LLM(str(qwen3_file), backend="mock") as llm:
        messages = [{"role": "user", "content": "Hi <|im_end|> there"}]
        prompt = llm.render(messages)
        assert prompt.text == "<|im_start|>user\nHi <|im_end|> there<|im_end|>\n<|im_start|>assistant\n"
        assert prompt.token_ids.count(llm.encode("<|im_end|>", parse_special=True)[0]) == 1
        answer = llm.encode("<think>hm, well</think>Hello!<|im_end|>", parse_special=True)
        script.tokens = {len(prompt.token_ids) + at: token_id for at, token_id in enumerate(answer)}
        params = SamplingParams(temperature=0, max_tokens=50)
        (output,) = llm.chat(messages, params)
        (choice,) = output.outputs
        assert (choice.reasoning, choice.content) == ("hm, well", "Hello!")
        assert choice.text == "<think>hm, well</think>Hello!"
        assert output.prompt == prompt.text
        pieces = list(llm.stream(prompt, params))
        assert "".join(piece.reasoning or "" for piece in pieces) == "hm, well"
        assert "".join(piece.content or "" for piece in pieces) == "Hello!"
        assert "".join(piece.text for piece in pieces) == choice.text
        off = llm.render(messages, chat_template_kwargs={"enable_thinking": False})
        assert off.text.endswith("<think>\n\n</think>\n\n")
        two = llm.chat([messages, messages], params)
        assert [o.outputs[0].content for o in two] == ["Hello!", "Hello!"]


def test_chat_without_a_template(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="no chat template"):
        llm.chat([{"role": "user", "content": "hi"}])
    assert llm.generate("still completes text")


@pytest.mark.model
def test_smollm2_answers(smollm2_path: Path) -> None:
    with LLM(str(smollm2_path)) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=24)
        question = [{"role": "user", "content": "What is the capital of Japan?"}]
        assert llm.chat(question, greedy)[0].outputs[0].content == "The capital of Japan is Tokyo."
        assert llm.generate("The capital of France is", greedy)[0].outputs[0].text.startswith(" Paris")
