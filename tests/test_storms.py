"""Storms: any order of submissions, steps, cancellations and failures, on a cache that is too small for them.

Every finished answer must be the one that its prompt gets alone, and everything must be given back.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from string import ascii_letters
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cllm import LLM, SamplingParams
from cllm.answer_text import AnswerText
from cllm.backends.mock import MockScript, load_mock
from cllm.batch import BatchManager
from cllm.config import EngineConfig
from cllm.executor import Executor
from cllm.sampler import TokenSampler
from cllm.scheduler import Scheduler
from cllm.sequence import Request, Sequence

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


class ExecutorMachine(RuleBasedStateMachine):
    """One executor on the mock, step by step; the mock itself says what each answer must be."""

    @initialize(
        budget=st.integers(8, 40),
        capacity=st.sampled_from([96, 160, 400]),
        idle=st.sampled_from([None, 0, 64]),
        num_slots=st.sampled_from([4, 16]),
        launches_early=st.booleans(),
        awaited=st.randoms(use_true_random=False),
    )
    def start(
        self,
        budget: int,
        capacity: int,
        idle: int | None,
        num_slots: int,
        launches_early: bool,
        awaited: random.Random,
    ) -> None:
        config = EngineConfig(backend="mock", max_num_seqs=4, kv_cache_tokens=capacity, context_length=96)
        self.script = MockScript(launches_early=launches_early)
        self.backend, self.tokenizer = load_mock(config, self.script)
        info = self.backend.info
        self.scheduler = Scheduler(
            max_num_seqs=4,
            num_slots=num_slots,
            max_num_batched_tokens=budget,
            max_logit_rows=info.max_logit_rows,
            kv_capacity=info.kv_capacity,
            kv_block=info.kv_block,
            max_idle_tokens=idle,
        )
        self.executor = Executor(self.backend, self.scheduler, BatchManager(budget))
        self.executor.deliver = self.hear
        self.executor.must_pause = lambda: awaited.random() < 0.2
        self.open: list[Sequence] = []
        self.number = 0

    @rule(
        start=st.sampled_from([b"", b"the same long beginning of a prompt, ", b"another beginning "]),
        end=st.binary(min_size=1, max_size=30),
        max_tokens=st.integers(0, 25),
        priority=st.sampled_from([0, 0, 0, -1, 5]),
        n=st.sampled_from([1, 1, 2]),
        scored=st.booleans(),
        stop=st.sampled_from([None, list(ascii_letters)]),  # about every fifth token
    )
    def submit(
        self,
        start: bytes,
        end: bytes,
        max_tokens: int,
        priority: int,
        n: int,
        scored: bool,
        stop: list[str] | None,
    ) -> None:
        self.number += 1
        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            priority=priority,
            n=n,
            ignore_eos=True,
            prompt_logprobs=0 if scored else None,
            stop=stop,
        )
        prompt = list(start + end)
        request = Request(str(self.number), None, prompt, params, print, arrived=float(self.number))
        for index in range(n):
            sampler = TokenSampler(
                params, prompt_token_ids=prompt, vocab_size=259, unused_ids=[], eog_ids=[], index=index
            )
            sequence = Sequence(
                request,
                index,
                sampler=sampler,
                text=AnswerText(self.tokenizer, stop=stop or ()),
                eog_ids=frozenset(),
                max_tokens=max_tokens,
            )
            self.scheduler.add(sequence)
            self.open.append(sequence)

    @rule(failing=st.sampled_from([None, None, None, None, "failures", "refusals", "nans"]))
    def step(self, failing: str | None) -> None:
        if failing is not None:
            getattr(self.script, failing).add(self.backend.num_steps)
        before = {id(sequence): sequence.num_output for sequence in self.open}
        self.executor.step()
        assert all(sequence.num_output - before[id(sequence)] <= 1 for sequence in self.open)

    def hear(self, sequences: list[Sequence]) -> None:
        """The executor delivers; an answer that has ended must come once, and never again."""
        for sequence in sequences:
            assert sequence in self.open
            if sequence.finish_reason:
                self.check_answer(sequence)
                self.open.remove(sequence)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.open))
        self.executor.settle()
        if sequence.finish_reason:
            return  # it ended just before
        sequence.finish("abort")
        self.scheduler.retire(sequence)
        self.executor.apply_operations()
        self.check_answer(sequence)
        self.open.remove(sequence)

    def check_answer(self, sequence: Sequence) -> None:
        """The mock's answer is a function of the history alone: whatever happened, each token must follow from it."""
        history = sequence.token_ids[: sequence.num_prompt]
        for token_id in sequence.token_ids[sequence.num_prompt :]:
            assert token_id == self.backend.next_token(history)
            history = [*history, token_id]
        if sequence.finish_reason == "length":
            assert sequence.num_output == sequence.max_tokens
            scores = sequence.request.prompt_logprobs
            if sequence.request.params.prompt_logprobs is not None and sequence.index == 0:
                assert len(scores) == sequence.num_prompt
        elif sequence.finish_reason == "stop":
            assert sequence.stop_reason == chr(sequence.token_ids[-1])
            assert not set(sequence.text) & set(ascii_letters)
        else:
            assert sequence.finish_reason in ("abort", "error")

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        plan = self.executor._under_way and self.executor._under_way.plan
        coming = {} if plan is None else {chunk.sequence: chunk.num_tokens for chunk in plan.chunks}
        self.scheduler.check_integrity(plan)
        assert self.scheduler.has_work == any(not sequence.finish_reason for sequence in self.open)
        if self.scheduler._operations or (plan and self.backend.num_steps - 1 in self.script.refusals):
            return  # decided, and carried out before the next step; or launched ahead, but refused
        for sequence in self.open:
            if sequence.slot is not None:
                num_seen = sequence.num_computed + coming.get(sequence, 0)
                assert self.backend.histories[sequence.slot] == sequence.token_ids[:num_seen]
        for slot, history in enumerate(self.backend.histories):
            held = self.scheduler.tree.length(slot) if slot in self.scheduler.tree.slots else 0
            assert len(history) == held
        free = self.backend._blocks.num_free_blocks
        assert free == self.scheduler.tree.num_free_blocks  # every block counted once, on both sides

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(5000):
            if not self.scheduler.has_work:
                break
            self.executor.step()
        self.executor.settle()
        assert not self.open
        self.scheduler.clear_cache()
        self.executor.apply_operations()
        assert not any(self.backend.histories)
        self.scheduler.check_integrity()


TestExecutorMachine = ExecutorMachine.TestCase
TestExecutorMachine.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)


def solo_answers(llm: LLM, prompts: list[Any], params: SamplingParams) -> list[list[int]]:
    return [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts]


@pytest.fixture(params=["mock", "kylin"])
def make_llm(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> Iterator[Callable[..., LLM]]:
    llms: list[LLM] = []

    def make(**settings: Any) -> LLM:
        model = {"model": str(tiny_model())} if request.param == "kylin" else {}
        llms.append(LLM(**{"backend": request.param, "num_threads": 2, **model, **settings}))
        return llms[-1]

    yield make
    for llm in llms:
        llm.close()


def test_a_cache_too_small_for_all_changes_no_answer(make_llm: Callable[..., LLM]) -> None:
    """8 requests of 100 + 200 tokens in a cache of 512: all finish, each equal to its solo run."""
    prompts = [[(i * 31 + j * 7) % 256 for j in range(100)] for i in range(8)]
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    expected = solo_answers(make_llm(max_num_seqs=1, context_length=512), prompts, params)
    llm = make_llm(kv_cache_tokens=512, context_length=512, max_num_seqs=8)
    assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected
    assert llm._scheduler.counts.num_preemptions > 0


def test_a_common_prefix_in_a_small_cache(make_llm: Callable[..., LLM]) -> None:
    """64 requests with a prefix of 100 tokens in a cache that holds 10 of them at once."""
    prompts = [[*range(100), 200 + i % 50, i] for i in range(64)]
    expected = solo_answers(make_llm(max_num_seqs=1, context_length=256), prompts, GREEDY)
    llm = make_llm(kv_cache_tokens=10 * 128, max_num_seqs=16, context_length=256)
    outputs = llm.generate(prompts, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert sum(output.num_cached_tokens for output in outputs) >= 63 * 96


def test_prefix_cache_hits_change_no_answer(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(context_length=512)
    prompt = list(range(50, 150))
    plain = make_llm(context_length=512, enable_prefix_caching=False)
    (first,), (again,), (without,) = (one.generate(prompt, GREEDY) for one in (llm, llm, plain))
    assert (first.num_cached_tokens, again.num_cached_tokens, without.num_cached_tokens) == (0, 96, 0)
    assert first.outputs[0].token_ids == again.outputs[0].token_ids == without.outputs[0].token_ids
    longer = prompt + first.outputs[0].token_ids + [1, 2, 3]
    (continued,) = llm.generate(longer, GREEDY)
    assert continued.num_cached_tokens == 119
    assert continued.outputs[0].token_ids == plain.generate(longer, GREEDY)[0].outputs[0].token_ids


def test_two_hundred_requests_from_sixteen_threads(make_llm: Callable[..., LLM]) -> None:
    """With random cancels: every answer is the solo answer or the beginning of it, and the cache ends empty."""
    rng = random.Random(1)
    prompts = [[rng.randrange(256) for _ in range(rng.randrange(1, 60))] for _ in range(40)]
    llm = make_llm(max_num_seqs=6, kv_cache_tokens=640, context_length=256, max_num_batched_tokens=64)
    expected = solo_answers(llm, prompts, GREEDY)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(13):
            at = rng.randrange(len(prompts))
            stop_after = rng.choice([None, None, 1, 5])
            token_ids: list[int] = []
            for piece in llm.stream(prompts[at], GREEDY):
                token_ids += piece.token_ids
                if stop_after is not None and len(token_ids) >= stop_after:
                    break
            if token_ids != expected[at][: len(token_ids)] or (stop_after is None and len(token_ids) != 20):
                wrong.append((at, token_ids))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong
    assert all(not thread.is_alive() for thread in threads)
    assert llm._engine.drain(timeout=10)
    llm._scheduler.check_integrity()
    llm._scheduler.clear_cache()
    assert llm._scheduler.tree.num_free_blocks == llm.info.kv_capacity // llm.info.kv_block
