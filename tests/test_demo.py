"""The model in the package: that it reads well, and that both backends read it alike on text that it never saw."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from test_model import Runner
from test_real_text import kl_divergence

from cllm import LLM, EngineConfig, SamplingParams
from cllm.compare import compare
from cllm.hub import DEMO, model_path
from cllm.kylin import reference
from cllm.kylin.gguf import read_gguf
from cllm.kylin.weights import load_weights
from cllm.tokenizer import load_tokenizer

TEXT = (Path(__file__).parent / "data" / "heldout.txt").read_text(encoding="utf-8")
NUM_TOKENS, WINDOW = 5000, 1000
PROMPTS = [
    *(
        "Once upon a time",
        "One day,",
        "The fox looked at the moon",
        "There was a king who",
        "In a small village",
    ),
    *("Max was a dog.", "The old house", "Lily loved to read", "It was raining and", "The teacher asked"),
    *("A little bird", "Mother said that", "The sea was", "Tom found a key.", "Every morning the baker"),
    *(
        "The mouse was not afraid",
        "On the hill stood",
        "She opened the door and",
        "His friend laughed",
        "At night",
    ),
]


@pytest.fixture(scope="module")
def windows() -> list[list[int]]:
    """5,000 held-out tokens, in windows that the context holds."""
    token_ids = load_tokenizer(model_path(DEMO)).encode(TEXT)[:NUM_TOKENS]
    assert len(token_ids) == NUM_TOKENS
    return [token_ids[at : at + WINDOW] for at in range(0, NUM_TOKENS, WINDOW)]


def test_kylin_stays_near_float32(windows: list[list[int]]) -> None:
    weights = load_weights(read_gguf(model_path(DEMO)))
    changed, divergences = 0, []
    for token_ids in windows:
        exact = reference.forward(weights, token_ids)
        runner = Runner(weights, num_threads=2, num_tokens=WINDOW)
        logits = np.concatenate([runner.step((0, token_ids[at : at + 250])) for at in range(0, WINDOW, 250)])
        runner.team.close()
        changed += int((logits.argmax(axis=-1) != exact.argmax(axis=-1)).sum())
        divergences.append(kl_divergence(exact, logits))
    kld = np.concatenate(divergences)
    print(f"top-1 differs at {changed / NUM_TOKENS:.2%}, KL divergence mean {kld.mean():.5f}")
    assert changed / NUM_TOKENS <= 0.0645
    assert kld.mean() <= 0.01


def test_both_backends_read_alike(windows: list[list[int]]) -> None:
    pytest.importorskip("llama_cpp")
    found = compare(
        EngineConfig(max_num_seqs=1, num_threads=2),
        EngineConfig(max_num_seqs=1, num_threads=2, backend="llama"),
        windows,
        greedy_tokens=0,
    )
    print(found)
    assert found.num_tokens >= NUM_TOKENS - len(windows)
    assert found.mean_kld <= 0.01
    assert found.same_top1 >= 1 - 0.0645
    assert found.num_clear_changes == 0
    assert abs(found.second_perplexity / found.first_perplexity - 1) <= 0.005


def test_both_backends_go_on_alike_up_to_a_near_tie() -> None:
    pytest.importorskip("llama_cpp")
    found = compare(
        EngineConfig(max_num_seqs=1, num_threads=2),
        EngineConfig(max_num_seqs=1, num_threads=2, backend="llama"),
        PROMPTS,
        greedy_tokens=32,
    )
    for difference in found.greedy_differences:
        print(difference)
    assert all(difference.is_near_tie for difference in found.greedy_differences)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_threads=2) as llm:
        yield llm


def test_it_tells_stories(llm: LLM) -> None:
    """The README's settings: whole sentences of words that the held-out stories use, and no loop."""
    params = SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=200)
    (output,) = llm.generate("Once upon a time", params)
    words = output.outputs[0].text.lower().replace(",", " ").replace(".", " ").split()
    known = set(TEXT.lower().replace(",", " ").replace(".", " ").split())
    assert len(words) > 60
    assert output.outputs[0].text.count(".") >= 4
    assert sum(word in known for word in words) / len(words) > 0.8
    assert len(set(zip(words, words[1:], words[2:], strict=False))) > 0.8 * (len(words) - 2)


def test_it_answers_a_chat(llm: LLM) -> None:
    question = [{"role": "user", "content": "Tell me a story about a dragon and a key."}]
    params = SamplingParams(temperature=0, max_tokens=300)
    (output,) = llm.chat(question, params, chat_template_kwargs={"enable_thinking": False})
    answer = output.outputs[0]
    assert answer.finish_reason == "stop"
    assert "dragon" in answer.text.lower()


def test_the_context_is_a_hard_limit(llm: LLM) -> None:
    assert llm.info.context_length == 1024
    (output,) = llm.generate([300] * 1020, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 4
