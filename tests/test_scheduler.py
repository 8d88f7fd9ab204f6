"""The scheduler alone: counts, order and slots, under any order of arrivals, steps and retirements."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cllm.params import SamplingParams
from cllm.sampler import Sampled
from cllm.scheduler import Plan, Scheduler
from cllm.sequence import Request, Sequence


class NoText:
    """Text is not the scheduler's business."""

    stop = None

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        return ""

    def split(self, text: str, start: int) -> tuple[None, str]:
        return None, text

    def token_text(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def make_sequence(num_prompt: int, max_tokens: int) -> Sequence:
    request = Request("r", None, [7] * num_prompt, SamplingParams(max_tokens=max_tokens), deliver=print)
    return Sequence(request, 0, sampler=None, text=NoText(), eog_ids=frozenset({0}), max_tokens=max_tokens)


def make_scheduler(num_slots: int = 4, budget: int = 16, capacity: int = 1000, block: int = 1) -> Scheduler:
    return Scheduler(
        num_slots=num_slots,
        max_num_batched_tokens=budget,
        max_logit_rows=64,
        kv_capacity=capacity,
        kv_block=block,
    )


def commit(scheduler: Scheduler, plan: Plan, token_id: int = 7) -> None:
    scheduler.commit(plan, [Sampled(token_id)] * len(plan.sampled), now=0.0)


def test_prompts_are_cut_into_chunks_of_the_budget() -> None:
    scheduler = make_scheduler(budget=16)
    long = make_sequence(40, 2)
    scheduler.add(long)
    sizes = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        sizes.append([(chunk.num_tokens, bool(plan.sampled)) for chunk in plan.chunks])
        commit(scheduler, plan)
        scheduler.check_integrity()
    assert sizes == [[(16, False)], [(16, False)], [(8, True)], [(1, True)]]
    assert long.finish_reason == "length"


def test_running_streams_come_before_prompts() -> None:
    scheduler = make_scheduler(budget=16)
    stream, prompt = make_sequence(1, 50), make_sequence(100, 1)
    scheduler.add(stream)
    commit(scheduler, scheduler.schedule())
    scheduler.add(prompt)
    while prompt.finish_reason is None:
        plan = scheduler.schedule()
        assert plan.chunks[0] == (stream, 1, 1)
        assert sum(chunk.num_tokens for chunk in plan.chunks) <= 16
        commit(scheduler, plan)


def test_first_in_first_out_and_refilled_in_the_next_step() -> None:
    scheduler = make_scheduler(num_slots=2)
    first, second, third = make_sequence(2, 1), make_sequence(2, 5), make_sequence(2, 5)
    for sequence in (first, second, third):
        scheduler.add(sequence)
    plan = scheduler.schedule()
    assert [chunk.sequence for chunk in plan.chunks] == [first, second]
    commit(scheduler, plan)
    plan = scheduler.schedule()
    assert {chunk.sequence for chunk in plan.chunks} == {second, third}


def test_admission_waits_for_room_in_whole_blocks() -> None:
    scheduler = make_scheduler(capacity=64, block=16)
    first, second = make_sequence(10, 23), make_sequence(1, 16)  # 33 -> 48 tokens, 17 -> 32 tokens
    scheduler.add(first)
    scheduler.add(second)
    assert [chunk.sequence for chunk in scheduler.schedule().chunks] == [first]
    scheduler.retire(first)
    assert [chunk.sequence for chunk in scheduler.schedule().chunks] == [second]


def test_a_failed_step_is_repeated_one_by_one() -> None:
    scheduler = make_scheduler()
    sequences = [make_sequence(3, 5) for _ in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    plan = scheduler.schedule()
    commit(scheduler, plan)
    plan = scheduler.schedule()
    assert scheduler.suspect(plan, nothing_changed=False) == []
    assert sorted(scheduler.take_released()) == [0, 1, 2]
    for sequence in sequences[:2]:
        plan = scheduler.schedule()
        assert plan.chunks == [(sequence, 4, 1)]  # prompt and first token again
        commit(scheduler, plan)
    plan = scheduler.schedule()
    assert scheduler.suspect(plan, nothing_changed=False) == [sequences[2]]  # failed alone
    scheduler.retire(sequences[2])
    assert len(scheduler.schedule().chunks) == 2
    scheduler.check_integrity()


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of events keeps the books balanced and serves everybody."""

    @initialize(slots=st.integers(1, 4), budget=st.integers(4, 20), block=st.sampled_from([1, 16]))
    def start(self, slots: int, budget: int, block: int) -> None:
        self.scheduler = make_scheduler(slots, budget, capacity=128, block=block)
        self.open: list[Sequence] = []
        self.budget = budget

    @rule(num_prompt=st.integers(1, 60), max_tokens=st.integers(1, 30))
    def arrive(self, num_prompt: int, max_tokens: int) -> None:
        self.open.append(make_sequence(num_prompt, max_tokens))
        self.scheduler.add(self.open[-1])

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def retire_any(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.open))
        sequence.finish("abort")
        self.scheduler.retire(sequence)
        self.open.remove(sequence)

    @rule(ends=st.booleans())
    def step(self, ends: bool) -> None:
        plan = self.scheduler.schedule()
        assert bool(plan.chunks) == bool(self.open)  # whenever there is work, a step does some
        assert sum(chunk.num_tokens for chunk in plan.chunks) <= self.budget
        for sequence, num_tokens, _ in plan.chunks:
            assert 1 <= num_tokens <= sequence.num_pending
        commit(self.scheduler, plan, token_id=0 if ends else 7)
        self.open = [sequence for sequence in self.open if sequence.finish_reason is None]

    @rule(nothing_changed=st.booleans())
    def fail(self, nothing_changed: bool) -> None:
        plan = self.scheduler.schedule()
        if plan.chunks:
            for sequence in self.scheduler.suspect(plan, nothing_changed=nothing_changed):
                self.scheduler.retire(sequence)
                self.open.remove(sequence)

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            for _ in range(10_000):
                if not self.scheduler.has_work:
                    break
                commit(self.scheduler, self.scheduler.schedule())
            assert not self.scheduler.has_work
            self.scheduler.check_integrity()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
