"""The radix tree against a simple model: what is found, what is counted, what is given up."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cllm.kv_tree import KVTree, Match


def fill(tree: KVTree, slot: int, token_ids: list[int], source: Match | None = None) -> None:
    """A new slot that computes `token_ids` behind what it shares."""
    tree.open(slot, source)
    rest = token_ids[0 if source is None else source.length :]
    tree.reserve(slot, len(rest))
    tree.commit(slot, rest)


def test_shared_blocks_are_counted_once() -> None:
    tree = KVTree(capacity=320, block=16)
    fill(tree, 0, list(range(40)))
    assert 20 - tree.num_free_blocks == 3
    tree.retire(0)
    match = tree.match([*range(36), 99, 98], 37)
    assert match == Match(slot=0, length=32, is_whole=False)
    fill(tree, 1, [*range(36), 99, 98], match)
    assert 20 - tree.num_free_blocks == 4  # two shared, one of each slot
    assert tree.num_idle_blocks == 1
    tree.check_integrity()
    tree.remove(1)
    assert 20 - tree.num_free_blocks == 3
    tree.check_integrity()


def test_a_sequence_that_extends_an_idle_slot_takes_it_over() -> None:
    tree = KVTree(capacity=320, block=16)
    fill(tree, 0, list(range(21)))
    assert tree.match(list(range(30)), 29) == Match(0, 16, False)  # busy: only whole blocks can be shared
    tree.retire(0)
    assert tree.match(list(range(30)), 29) == Match(0, 21, True)
    assert tree.match(list(range(21)), 20) == Match(0, 16, False)  # one token must be left to compute
    assert tree.match(list(range(16)), 15) is None
    tree.take_over(0)
    tree.reserve(0, 1)
    tree.commit(0, [21])
    assert tree.length(0) == 22
    tree.check_integrity()


def test_reserved_tokens_are_counted_but_not_shared_until_computed() -> None:
    tree = KVTree(capacity=64, block=16)
    tree.open(0)
    tree.reserve(0, 33)
    assert tree.num_free_blocks == 1
    assert tree.match(list(range(40)), 39) is None
    tree.commit(0, list(range(33)))
    assert tree.match(list(range(40)), 39) == Match(0, 32, False)


def test_the_longest_unused_slot_goes_first() -> None:
    tree = KVTree(capacity=160, block=16)
    for slot in range(3):
        fill(tree, slot, [slot] * 20)
        tree.retire(slot)
    tree.touch(0)
    assert tree.evict(keep=1) == 2
    assert tree.evict(keep=1) == 0
    assert tree.evict(keep=1) is None
    assert tree.evict() == 1
    assert tree.num_free_blocks == 10
    tree.check_integrity()


def test_equal_prompts_computed_apart_do_no_harm() -> None:
    tree = KVTree(capacity=160, block=16)
    fill(tree, 0, [5] * 20)
    fill(tree, 1, [5] * 40)
    match = tree.match([5] * 40, 39)
    assert match is not None
    assert match.length in (16, 32)
    tree.remove(0)
    tree.check_integrity()
    tree.remove(1)
    tree.check_integrity()
    assert tree.num_free_blocks == 10


@pytest.mark.parametrize("block", [1, 16])
def test_a_growing_conversation_stays_small(block: int) -> None:
    """Matching costs about one look-up a node, not one a token."""
    tree = KVTree(capacity=100_000, block=block)
    history: list[int] = []
    for turn in range(50):
        longer = history + [turn * 7 % 11] * 100
        match = tree.match(longer, len(longer) - 1)
        if match is None:
            fill(tree, 0, longer)
        else:
            assert match.is_whole
            tree.take_over(0)
            tree.reserve(0, len(longer) - match.length)
            tree.commit(0, longer[match.length :])
        tree.retire(0)
        history = longer
    tree.check_integrity()
    assert tree.length(0) == 5000


class TreeMachine(RuleBasedStateMachine):
    """Slots come and go in any order; a dict of lists says what each one holds."""

    @initialize(block=st.sampled_from([1, 2, 4]))
    def start(self, block: int) -> None:
        self.block = block
        self.tree = KVTree(capacity=4000, block=block)
        self.held: dict[int, list[int]] = {}
        self.idle: list[int] = []
        self.next_slot = 0

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=2, max_size=14))
    def arrive(self, token_ids: list[int]) -> None:
        match = self.tree.match(token_ids, len(token_ids) - 1)
        longest = max((self.common(token_ids, held) for held in self.held.values()), default=0)
        found = 0 if match is None else match.length
        assert found <= longest
        if match is not None:
            assert self.held[match.slot][:found] == token_ids[:found]
            assert found % self.block == 0 or match.is_whole
        if match is not None and match.is_whole:
            slot = match.slot
            assert slot in self.idle
            assert len(self.held[slot]) == found
            self.tree.take_over(slot)
            self.idle.remove(slot)
        else:
            slot, self.next_slot = self.next_slot, self.next_slot + 1
            self.tree.open(slot, match)
            self.held[slot] = token_ids[:found]
        self.grow(slot, token_ids[found:])

    def grow(self, slot: int, token_ids: list[int]) -> None:
        self.tree.reserve(slot, len(token_ids))
        self.tree.commit(slot, token_ids)
        self.held[slot] = self.held[slot] + token_ids

    def common(self, token_ids: list[int], held: list[int]) -> int:
        equal = 0
        while equal < min(len(held), len(token_ids) - 1) and held[equal] == token_ids[equal]:
            equal += 1
        return equal

    def busy(self) -> list[int]:
        return [slot for slot in self.held if slot not in self.idle]

    @precondition(lambda self: self.busy())
    @rule(data=st.data(), token_ids=st.lists(st.integers(0, 1), max_size=3))
    def step(self, data: st.DataObject, token_ids: list[int]) -> None:
        self.grow(data.draw(st.sampled_from(self.busy())), token_ids)

    @precondition(lambda self: self.busy())
    @rule(data=st.data(), reserved=st.integers(0, 5))
    def retire(self, data: st.DataObject, reserved: int) -> None:
        slot = data.draw(st.sampled_from(self.busy()))
        self.tree.reserve(slot, reserved)  # a step that never came
        self.tree.retire(slot)
        self.idle.append(slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(list(self.held)))
        self.tree.remove(slot)
        del self.held[slot]
        if slot in self.idle:
            self.idle.remove(slot)

    @rule()
    def evict(self) -> None:
        slot = self.tree.evict()
        assert slot == (self.idle.pop(0) if self.idle else None)
        if slot is not None:
            del self.held[slot]

    @invariant()
    def counts_follow_from_the_tree(self) -> None:
        if not hasattr(self, "tree"):
            return
        self.tree.check_integrity()
        assert {slot: self.tree.length(slot) for slot in self.tree.slots} == {
            slot: len(held) for slot, held in self.held.items()
        }
        if not self.held:
            assert self.tree.num_free_blocks == 4000 // self.block
        used = 4000 // self.block - self.tree.num_free_blocks
        assert used <= sum(-(-len(held) // self.block) for held in self.held.values())


TestTreeMachine = TreeMachine.TestCase
TestTreeMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
