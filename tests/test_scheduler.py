"""The scheduler alone: who runs, who waits, who gives way, and that the books balance."""

from __future__ import annotations

import pytest

from cllm.params import SamplingParams
from cllm.plan import Plan, SlotOperation
from cllm.sampler import Sampled
from cllm.scheduler import Scheduler
from cllm.sequence import Request, Sequence


class NoText:
    """Text is not the scheduler's business."""

    stop = None

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        return ""

    def flush(self) -> str:
        return ""

    def split(self, text: str, start: int) -> tuple[None, str]:
        return None, text

    def token_text(self, token_id: int) -> str:
        return ""


_arrivals = iter(range(10**9))


def make_sequence(prompt: int | list[int], max_tokens: int, priority: int = 0, n: int = 1) -> Sequence:
    """A prompt of so many tokens that is like no other, or of these tokens; never ends by itself."""
    number = next(_arrivals)
    token_ids = [number + 1000] * prompt if isinstance(prompt, int) else prompt
    params = SamplingParams(max_tokens=max_tokens, priority=priority, n=n)
    request = Request(str(number), None, token_ids, params, deliver=print, arrived=float(number))
    sequences = [
        Sequence(request, i, sampler=None, text=NoText(), eog_ids=frozenset({0}), max_tokens=max_tokens)
        for i in range(n)
    ]
    return sequences[0]


def make_scheduler(**changes: int | None) -> Scheduler:
    settings = {
        "max_num_seqs": 4,
        "num_slots": 16,
        "max_num_batched_tokens": 16,
        "max_logit_rows": 64,
        "kv_capacity": 1024,
        "kv_block": 1,
        **changes,
    }
    return Scheduler(**settings)  # type: ignore[arg-type]


def commit(scheduler: Scheduler, plan: Plan, token_id: int = 7) -> None:
    scheduler.commit(plan, [Sampled(token_id)] * len(plan.sampled), now=0.0)
    scheduler.check_integrity()


def run(scheduler: Scheduler, limit: int = 10_000) -> list[Plan]:
    """Steps until nothing is left."""
    plans = []
    while scheduler.has_work:
        plans.append(scheduler.schedule())
        assert plans[-1].chunks, "a step without work"
        assert sum(chunk.num_tokens for chunk in plans[-1].chunks) <= scheduler._max_num_batched_tokens
        commit(scheduler, plans[-1])
        assert len(plans) < limit
    return plans


def test_prompts_are_cut_into_chunks_of_the_budget() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(40, 2))
    sizes = [[(chunk.num_tokens, chunk.num_rows) for chunk in plan.chunks] for plan in run(scheduler)]
    assert sizes == [[(16, 0)], [(16, 0)], [(8, 1)], [(1, 1)]]


def test_a_short_prompt_passes_a_long_one_and_streams_never_wait() -> None:
    """The first token of 5 comes within two steps of its arrival in a prefill of 4,000."""
    scheduler = make_scheduler(max_num_batched_tokens=512, kv_capacity=8192)
    stream, long = make_sequence(1, 1000), make_sequence(4000, 1)
    scheduler.add(stream)
    commit(scheduler, scheduler.schedule())
    scheduler.add(long)
    commit(scheduler, scheduler.schedule())
    short = make_sequence(5, 2)
    scheduler.add(short)
    steps = 0
    while short.num_output == 0:
        plan = scheduler.schedule()
        assert plan.chunks[0].sequence is stream
        commit(scheduler, plan)
        steps += 1
    assert steps <= 2
    assert long.num_output == 0
    while long.finish_reason is None:
        plan = scheduler.schedule()
        assert plan.chunks[0] == (stream, 1, 1)
        commit(scheduler, plan)


def test_twenty_long_prompts_starve_nobody() -> None:
    """Short prompts keep arriving; every long one ends, and no short one waits for more than a few steps."""
    scheduler = make_scheduler(max_num_seqs=32, num_slots=64, max_num_batched_tokens=512, kv_capacity=200_000)
    longs = [make_sequence(4000, 1) for _ in range(20)]
    for sequence in longs:
        scheduler.add(sequence)
    shorts: list[tuple[int, Sequence]] = []
    for step in range(400):
        if step % 2 == 0:
            shorts.append((step, make_sequence(200, 1)))
            scheduler.add(shorts[-1][1])
        plan = scheduler.schedule()
        commit(scheduler, plan)
        for arrived, sequence in list(shorts):
            if sequence.finish_reason:
                shorts.remove((arrived, sequence))
                assert step - arrived <= 4
    assert all(sequence.finish_reason for sequence in longs)


def test_slots_are_refilled_in_the_next_step() -> None:
    """64 requests of 10 to 200 tokens, 8 at a time: at least 98 % of the places are taken until the queue is empty."""
    scheduler = make_scheduler(
        max_num_seqs=8, max_num_batched_tokens=512, kv_capacity=100_000, max_idle_tokens=0
    )
    for i in range(64):
        scheduler.add(make_sequence(32, 10 + i * 67 % 191))
    taken = places = 0
    while scheduler.waiting:
        plan = scheduler.schedule()
        taken, places = taken + len(plan.chunks), places + 8
        commit(scheduler, plan)
    assert taken / places >= 0.98
    run(scheduler)


def test_admission_by_priority_then_age() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    sequences = [make_sequence(2, 1, priority) for priority in (5, 5, 0, -1)]
    for sequence in sequences:
        scheduler.add(sequence)
    order = [plan.chunks[0].sequence for plan in run(scheduler)]
    assert order == [sequences[i] for i in (3, 2, 0, 1)]


def test_the_newest_of_the_least_urgent_gives_way_and_resumes() -> None:
    scheduler = make_scheduler(kv_capacity=64, max_idle_tokens=0)
    urgent, old, new = make_sequence(10, 30, -1), make_sequence(10, 30), make_sequence(10, 30)
    for sequence in (urgent, old, new):
        scheduler.add(sequence)
    preempted: list[Sequence] = []
    while scheduler.has_work:
        commit(scheduler, scheduler.schedule())
        preempted += [s for s in scheduler.waiting if s not in preempted]
    assert preempted[0] is new
    assert urgent not in preempted
    assert [s.num_output for s in (urgent, old, new)] == [30, 30, 30]
    assert scheduler.counts.num_preemptions <= 3  # it is let in again only when it fits: no to and fro


def test_eight_requests_in_a_cache_for_one_and_a_half() -> None:
    scheduler = make_scheduler(max_num_seqs=8, max_num_batched_tokens=64, kv_capacity=512, kv_block=16)
    sequences = [make_sequence(100, 200) for _ in range(8)]
    for sequence in sequences:
        scheduler.add(sequence)
    run(scheduler)
    assert [sequence.num_output for sequence in sequences] == [200] * 8
    assert scheduler.counts.num_preemptions > 0


def test_a_common_prefix_is_computed_once_and_waited_for() -> None:
    scheduler = make_scheduler(
        max_num_seqs=16, num_slots=64, max_num_batched_tokens=64, kv_capacity=10 * 120, kv_block=16
    )
    prefix = list(range(5000, 5100))
    sequences = [make_sequence([*prefix, 9000 + i], 15) for i in range(64)]
    for sequence in sequences:
        scheduler.add(sequence)
    plans = run(scheduler)
    computed = sum(chunk.num_tokens for plan in plans for chunk in plan.chunks)
    assert computed < 101 + 63 * 5 + 64 * 16  # the prefix once, then the rest of its last block
    assert all(sequence.num_output == 15 for sequence in sequences)
    assert [sequence.request.num_cached_tokens for sequence in sequences] == [0] + [96] * 63


def test_choices_share_their_prompt() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64, kv_block=16)
    first = make_sequence(50, 3, n=4)
    for sequence in first.request.sequences:
        scheduler.add(sequence)
    plans = run(scheduler)
    assert sum(chunk.num_tokens for plan in plans for chunk in plan.chunks) == 50 + 3 * 2 + 4 * 2


def test_the_same_prompt_twice_still_computes_one_token() -> None:
    scheduler = make_scheduler(kv_block=16)
    prompt = list(range(100, 133))
    for expected in (0, 32, 32):
        sequence = make_sequence(prompt, 1)
        scheduler.add(sequence)
        run(scheduler)
        assert sequence.request.num_cached_tokens == expected


def test_a_conversation_goes_on_in_its_slot() -> None:
    scheduler = make_scheduler(kv_block=16)
    first = make_sequence(list(range(100, 121)), 5)
    scheduler.add(first)
    run(scheduler)
    second = make_sequence([*first.token_ids, 500, 501], 2)
    scheduler.add(second)
    plan = scheduler.schedule()
    assert plan.chunks == [(second, 3, 1)]  # the last answer's last token was never computed
    assert scheduler.take_operations() == []


def test_a_cancelled_prefill_is_not_lost() -> None:
    scheduler = make_scheduler(kv_block=16)
    prompt = list(range(200, 260))
    first = make_sequence(prompt, 1)
    scheduler.add(first)
    commit(scheduler, scheduler.schedule())
    commit(scheduler, scheduler.schedule())
    first.finish("abort")
    scheduler.retire(first)
    again = make_sequence(prompt, 1)
    scheduler.add(again)
    assert scheduler.schedule().chunks == [(again, 16, 0)]
    assert again.request.num_cached_tokens == 32


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    scheduler = make_scheduler(max_idle_tokens=0)
    for _ in range(2):
        sequence = make_sequence(list(range(50)), 1)
        scheduler.add(sequence)
        run(scheduler)
        assert sequence.request.num_cached_tokens == 0
        assert scheduler.take_operations() == [SlotOperation(0)]


def test_idle_tokens_have_a_limit() -> None:
    scheduler = make_scheduler(max_idle_tokens=100)
    for _ in range(10):
        scheduler.add(make_sequence(40, 1))
        run(scheduler)
        assert scheduler.tree.num_idle_blocks <= 100
    assert scheduler.counts.num_evictions == 8


def test_slots_of_idle_prefixes_are_taken_when_there_are_no_others() -> None:
    scheduler = make_scheduler(max_num_seqs=2, num_slots=2)
    for _ in range(5):
        scheduler.add(make_sequence(3, 2))
    run(scheduler)
    assert scheduler.counts.num_evictions == 3


def test_batches_go_by_slot_and_the_lowest_free_one_is_taken() -> None:
    scheduler = make_scheduler(max_num_seqs=3, num_slots=8, max_idle_tokens=0)
    for max_tokens in (2, 9, 3, 9, 9):
        scheduler.add(make_sequence(3, max_tokens))
    seen = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        seen.append([chunk.sequence.slot for chunk in plan.chunks])
        commit(scheduler, plan)
    assert seen[:4] == [[0, 1, 2]] * 4
    assert all(slots == sorted(slots) for slots in seen)


def test_the_only_idle_slot_is_cut_to_the_beginning_it_shares() -> None:
    scheduler = make_scheduler(max_num_seqs=2, num_slots=2, kv_block=16)
    beginning = list(range(100, 132))
    first = make_sequence([*beginning, *range(200, 210)], 5)
    scheduler.add(first)
    run(scheduler)
    scheduler.add(make_sequence(3, 9))
    scheduler.add(second := make_sequence([*beginning, 300], 2))
    plan = scheduler.schedule()
    assert (second, 1, 1) in plan.chunks
    assert second.request.num_cached_tokens == 32
    assert SlotOperation(0, None, 32) in scheduler.take_operations()
    scheduler.check_integrity(plan)
    commit(scheduler, plan)
    run(scheduler)
    assert scheduler.counts.num_evictions == 0


@pytest.mark.parametrize("nothing_changed", [True, False])
def test_a_failed_step_is_repeated_one_by_one(nothing_changed: bool) -> None:
    scheduler = make_scheduler()
    sequences = [make_sequence(3, 5) for _ in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    commit(scheduler, scheduler.schedule())
    scheduler.take_operations()
    plan = scheduler.schedule()
    assert scheduler.suspect(plan, nothing_changed=nothing_changed) == []
    freed = [operation.slot for operation in scheduler.take_operations()]
    assert sorted(freed) == ([] if nothing_changed else [0, 1, 2])
    scheduler.check_integrity()
    for sequence in sequences[:2]:
        plan = scheduler.schedule()
        assert plan.chunks == [
            (sequence, 1 if nothing_changed else 4, 1)
        ]  # else prompt and first token again
        commit(scheduler, plan)
    plan = scheduler.schedule()
    assert scheduler.suspect(plan, nothing_changed=nothing_changed) == [sequences[2]]  # failed alone
    sequences[2].finish("error")
    scheduler.retire(sequences[2])
    scheduler.check_integrity()
    assert len(scheduler.schedule().chunks) == 2
