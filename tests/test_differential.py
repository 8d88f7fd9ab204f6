"""The same prompts on both backends, alone and together.

On kylin an answer never depends on its neighbours, by a bit. llama.cpp's arithmetic depends on the size of the
batch, so there an answer may change, but only where two candidates lie close together: at a near-tie.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cllm import LLM, SamplingParams
from cllm.plan import Plan

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "To make a good cup of tea, you",
    "def fibonacci(n):",
    "The three most important things in life are",
    "Dear Sir or Madam,",
    "Water boils at",
    "In 1969,",
]
NEAR_TIE = 0.5  # the two best logits lie closer than this
GREEDY = SamplingParams(temperature=0, max_tokens=32, logprobs=2)


@pytest.fixture(params=["kylin", "llama"], scope="module")
def llm(request: pytest.FixtureRequest, smollm2_path: Path) -> Iterator[LLM]:
    if request.param == "llama":
        pytest.importorskip("llama_cpp")
    with LLM(str(smollm2_path), backend=request.param, context_length=512, num_threads=2) as llm:
        yield llm


def first_difference(one: Any, other: Any) -> tuple[int, float] | None:
    """(position, the gap between the two best candidates there) of the first token that differs, or None."""
    for at, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=False)):
        if a != b:
            best, second = sorted((entry.logprob for entry in one.logprobs[at].values()), reverse=True)[:2]
            return at, best - second
    return None


@pytest.mark.model
def test_batched_equals_solo_up_to_the_first_near_tie(llm: LLM) -> None:
    solo = [llm.generate(prompt, GREEDY)[0].outputs[0] for prompt in PROMPTS]
    batched = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY)]
    for prompt, one, other in zip(PROMPTS, solo, batched, strict=True):
        parted = first_difference(one, other)
        if llm.config.backend == "kylin":
            assert one.token_ids == other.token_ids
            assert one.logprobs == other.logprobs
        elif parted is not None:
            print(f"{prompt!r}: parts at token {parted[0]}, gap {parted[1]:.3f}")
            assert parted[1] < NEAR_TIE


@pytest.mark.model
def test_both_backends_agree_up_to_the_first_near_tie(smollm2_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    answers = {}
    for backend in ("kylin", "llama"):
        with LLM(str(smollm2_path), backend=backend, context_length=512, num_threads=2) as llm:
            answers[backend] = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY)]
    for prompt, one, other in zip(PROMPTS, answers["kylin"], answers["llama"], strict=True):
        parted = first_difference(one, other)
        if parted is not None:
            print(f"{prompt!r}: parts at token {parted[0]}, gap {parted[1]:.3f}")
            assert parted[1] < NEAR_TIE


@pytest.mark.parametrize("backend", ["kylin", "llama"])
def test_places_are_refilled_at_once(
    backend: str, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 requests of 10 to 200 tokens, 8 at a time: at least 98 % of the places are taken until the queue is empty."""
    if backend == "llama":
        pytest.importorskip("llama_cpp")
    with LLM(
        str(tiny_model("qwen3", "q4_k_m")), backend=backend, context_length=256, max_num_seqs=8, num_threads=2
    ) as llm:
        scheduler, taken = llm._scheduler, list[int]()
        schedule = scheduler.schedule

        def counted() -> Plan:
            plan = schedule()
            if scheduler.waiting:
                taken.append(len(plan.sampled))
            return plan

        monkeypatch.setattr(scheduler, "schedule", counted)
        prompts = [[(7 * i + place) % 256 for place in range(32)] for i in range(64)]
        params = [
            SamplingParams(temperature=0, max_tokens=10 + i * 67 % 191, ignore_eos=True) for i in range(64)
        ]
        outputs = llm.generate(prompts, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [p.max_tokens for p in params]
    assert sum(taken) / (8 * len(taken)) >= 0.98


def test_a_storm_on_llama(tiny_model: Callable[..., Path]) -> None:
    """Requests from 16 threads with random cancels: no text ever belongs to another request, nothing leaks."""
    pytest.importorskip("llama_cpp")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    rng = random.Random(3)
    prompts = [[rng.randrange(256) for _ in range(rng.randrange(2, 40))] for _ in range(12)]
    wrong: list[Any] = []
    with LLM(
        str(tiny_model("qwen3", "f32")), backend="llama", context_length=256, max_num_seqs=4, num_threads=2
    ) as llm:
        expected = [llm.generate(prompt, params)[0].outputs[0] for prompt in prompts]

        def work(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(13):
                at = rng.randrange(len(prompts))
                stop_after = rng.choice([None, None, 3])
                token_ids: list[int] = []
                for piece in llm.stream(prompts[at], params):
                    token_ids += piece.token_ids
                    if stop_after is not None and len(token_ids) >= stop_after:
                        break
                for position, token_id in enumerate(token_ids):
                    if token_id != expected[at].token_ids[position]:
                        near = sorted(
                            (e.logprob for e in expected[at].logprobs[position].values()), reverse=True
                        )
                        if near[0] - near[1] >= NEAR_TIE:
                            wrong.append((at, position))
                        break

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert not wrong
        assert llm.drain(timeout=60)
        llm._scheduler.check_integrity()
        llm._scheduler.clear_cache()
        assert llm._scheduler.tree.num_free_blocks == llm.info.kv_capacity // llm.info.kv_block
