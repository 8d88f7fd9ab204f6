"""Which tokens lie in which slot of the KV cache, and how many blocks that takes: a radix tree over token ids.

An inner node is a run of whole blocks that several slots share; each slot ends in a leaf of its own, which grows
while its sequence runs. So every block is counted once. A slot is *busy* while a sequence runs in it, and *idle*
afterwards: it stays, as a prefix for others, until its memory is needed. Ids and counts, never data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

Key = tuple[int, ...]
_NEW = -1  # stands for a slot until that is free


class Match(NamedTuple):
    """The longest cached beginning of a sequence: its first `length` tokens lie in `slot`.

    `is_whole`: they are all that an idle slot holds, so that the sequence can go on in that slot itself.
    """

    slot: int
    length: int
    is_whole: bool


class _Node:
    __slots__ = ("children", "loose", "num_busy", "num_held", "parent", "slot", "start", "tokens")

    def __init__(self, parent: _Node | None, start: int, tokens: list[int], slot: int | None) -> None:
        self.parent = parent
        self.start = start  # position of its first token
        self.tokens = tokens  # tokens that the backend has computed
        self.slot = slot  # of a leaf
        self.num_held = len(
            tokens
        )  # tokens counted in blocks: the computed ones and those of the step under way
        self.num_busy = 0  # busy slots at or below it
        self.children: dict[Key, _Node] = {}  # by their first block
        self.loose: set[_Node] = (
            set()
        )  # children without a whole block, or with one that stands in `children`

    def below(self) -> Iterator[_Node]:
        yield from self.children.values()
        yield from self.loose


class KVTree:
    """`capacity` and all lengths in tokens; memory is counted in blocks of `block` tokens."""

    def __init__(self, *, capacity: int, block: int) -> None:
        self.block = block
        self.num_total_blocks = capacity // block
        self._root = _Node(None, 0, [], None)
        self._leaves: dict[int, _Node] = {}
        self._idle: dict[int, None] = {}  # in order of last use, the longest unused first
        self._num_used = 0
        self._num_idle = 0  # of the used blocks, those that only idle slots hold

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nothing holds."""
        return self.num_total_blocks - self._num_used

    @property
    def num_available_blocks(self) -> int:
        """Blocks that nothing holds, or only idle slots."""
        return self.num_total_blocks - self._num_used + self._num_idle

    @property
    def num_idle_blocks(self) -> int:
        """Blocks that only idle slots hold."""
        return self._num_idle

    @property
    def slots(self) -> set[int]:
        """The slots that hold, or may come to hold, something."""
        return set(self._leaves)

    @property
    def idle_slots(self) -> set[int]:
        return set(self._idle)

    @property
    def usage(self) -> float:
        """Share of the cache that busy slots hold."""
        return (self._num_used - self._num_idle) / self.num_total_blocks

    def blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block)

    def length(self, slot: int) -> int:
        """Tokens that the slot holds."""
        leaf = self._leaves[slot]
        return leaf.start + leaf.num_held

    def num_missing_blocks(self, slot: int, num_tokens: int) -> int:
        """Further blocks that `slot` needs for `num_tokens` more tokens."""
        leaf = self._leaves[slot]
        return self.blocks(leaf.num_held + num_tokens) - self.blocks(leaf.num_held)

    def match(self, token_ids: list[int], limit: int) -> Match | None:
        """The longest beginning of `token_ids[:limit]` that some slot holds, in whole blocks unless it is whole."""
        node, at, block = self._root, 0, self.block
        while at + block <= limit:
            child = node.children.get(tuple(token_ids[at : at + block]))
            if child is None:
                break
            node = child
            length = self._common(child.tokens, token_ids, at, limit)
            at += length
            if length < len(child.tokens) // block * block:
                break
        if node is self._root:
            return None
        end = node.start + len(node.tokens)
        is_idle = node.slot in self._idle and node.num_held == len(node.tokens)
        if is_idle and end <= limit and node.tokens[at - node.start :] == token_ids[at:end]:
            return Match(node.slot, end, True)  # type: ignore[arg-type]  # an idle node is a leaf
        return Match(self._any_leaf(node), at, False)

    def num_idle_blocks_of(self, match: Match) -> int:
        """Blocks of the match that only idle slots hold."""
        idle, node = 0, self._leaves[match.slot]
        while node.parent is not None:
            if node.num_busy == 0 and node.start < match.length:
                idle += self.blocks(min(node.start + node.num_held, match.length) - node.start)
            node = node.parent
        return idle

    def open(self, slot: int, source: Match | None = None) -> None:
        """`slot`, which is new, becomes busy, empty or with the shared beginning that `source` names."""
        parent = self._root if source is None else self._node_ending_at(source)
        leaf = _Node(parent, 0 if source is None else source.length, [], slot)
        parent.loose.add(leaf)
        self._leaves[slot] = leaf
        self._add_busy(leaf, 1)

    def take_over(self, slot: int) -> None:
        """An idle slot becomes busy again, with all that it holds."""
        del self._idle[slot]
        self._add_busy(self._leaves[slot], 1)

    def cut(self, match: Match) -> None:
        """The idle slot of `match` becomes busy with the matched beginning alone."""
        slot = match.slot
        self.open(_NEW, match)
        self.remove(slot)
        leaf = self._leaves[slot] = self._leaves.pop(_NEW)
        leaf.slot = slot

    def touch(self, slot: int) -> None:
        """Counts an idle slot as just used."""
        if slot in self._idle:
            del self._idle[slot]
            self._idle[slot] = None

    def reserve(self, slot: int, num_tokens: int) -> bool:
        """Counts `num_tokens` more tokens as held by a busy slot; False, with nothing changed, where none are free."""
        leaf, block = self._leaves[slot], self.block
        before, after = leaf.num_held, leaf.num_held + num_tokens
        missing = -(-after // block) - -(-before // block)
        if missing > self.num_total_blocks - self._num_used:
            return False
        leaf.num_held = after
        self._num_used += missing
        return True

    def commit(self, slot: int, token_ids: list[int]) -> None:
        """The reserved tokens have been computed; from now on others may share them."""
        leaf = self._leaves[slot]
        num_before = len(leaf.tokens)
        leaf.tokens += token_ids
        if num_before < self.block <= len(leaf.tokens):
            self._attach(leaf)

    def retire(self, slot: int) -> None:
        """A busy slot becomes idle and keeps what has been computed."""
        leaf = self._leaves[slot]
        self.reserve(slot, len(leaf.tokens) - leaf.num_held)  # a step that never came is counted no more
        self._idle[slot] = None
        self._add_busy(leaf, -1)

    def remove(self, slot: int) -> None:
        """Forgets a slot, busy or idle, and every block that only it held."""
        leaf = self._leaves.pop(slot)
        if slot in self._idle:
            del self._idle[slot]
        else:
            self._add_busy(leaf, -1)
        node: _Node | None = leaf
        while node is not None and node.parent is not None and not any(True for _ in node.below()):
            blocks = self.blocks(node.num_held)
            self._num_used -= blocks
            self._num_idle -= blocks  # nobody busy is left here
            self._detach(node)
            node = node.parent

    def evict(self, keep: int | None = None) -> int | None:
        """Removes the idle slot that was not used for longest, other than `keep`; returns it, or None."""
        for slot in self._idle:
            if slot != keep:
                self.remove(slot)
                return slot
        return None

    def check_integrity(self) -> None:
        """Raises AssertionError unless all counts follow from the tree."""
        used = idle = 0
        stack = list(self._root.below())
        seen: set[int] = set()
        while stack:
            node = stack.pop()
            children = list(node.below())
            stack += children
            used += self.blocks(node.num_held)
            idle += 0 if node.num_busy else self.blocks(node.num_held)
            assert node.parent is not None
            assert node.start == node.parent.start + len(node.parent.tokens), "a gap between nodes"
            if node.slot is None:
                assert children, "an inner node without slots"
                assert node.num_held == len(node.tokens)
                assert node.num_held % self.block == 0, "shared tokens that are no whole blocks"
                assert node.num_busy == sum(child.num_busy for child in children)
            else:
                assert not children, "a leaf with children"
                assert node.num_busy == (node.slot not in self._idle)
                assert self._leaves[node.slot] is node
                seen.add(node.slot)
        assert seen == set(self._leaves), "slots lost"
        assert set(self._idle) <= seen
        assert (used, idle) == (self._num_used, self._num_idle), "blocks miscounted"
        assert used <= self.num_total_blocks, "more blocks used than there are"

    def _common(self, run: list[int], token_ids: list[int], at: int, limit: int) -> int:
        """Tokens, in whole blocks, in which `run` equals `token_ids[at:limit]`; the first block is known to."""
        block = self.block
        longest = min(len(run), limit - at) // block * block
        if run[:longest] == token_ids[at : at + longest]:
            return longest
        equal, differ = block, longest
        while differ - equal > block:
            middle = (equal + differ) // 2 // block * block
            if run[equal:middle] == token_ids[at + equal : at + middle]:
                equal = middle
            else:
                differ = middle
        return equal

    def _any_leaf(self, node: _Node) -> int:
        while node.slot is None:
            node = next(node.below())
        return node.slot

    def _node_ending_at(self, source: Match) -> _Node:
        """The inner node on the way to `source.slot` that ends at `source.length`, split off if need be."""
        node = self._leaves[source.slot]
        while node.parent is not None and node.start >= source.length:
            node = node.parent
        return self._split(node, source.length - node.start)

    def _split(self, node: _Node, length: int) -> _Node:
        """An inner node with the first `length` tokens of `node`, which becomes its child with the rest."""
        if node.slot is None and length == len(node.tokens):
            return node
        assert node.parent is not None
        upper = _Node(node.parent, node.start, node.tokens[:length], None)
        upper.num_busy = node.num_busy
        self._detach(node)
        node.parent.children[self._key(upper)] = upper
        node.parent, node.start = upper, node.start + length
        node.tokens = node.tokens[length:]
        node.num_held -= length
        self._attach(node)
        return upper

    def _key(self, node: _Node) -> Key:
        return tuple(node.tokens[: self.block])

    def _attach(self, node: _Node) -> None:
        """Puts a node where its parent finds it by its first block, if it has one that is not there yet."""
        assert node.parent is not None
        node.parent.loose.discard(node)
        if len(node.tokens) < self.block or self._key(node) in node.parent.children:
            node.parent.loose.add(node)
        else:
            node.parent.children[self._key(node)] = node

    def _detach(self, node: _Node) -> None:
        assert node.parent is not None
        if node in node.parent.loose:
            node.parent.loose.remove(node)
        else:
            del node.parent.children[self._key(node)]

    def _add_busy(self, node: _Node, change: int) -> None:
        """A slot at or below `node` became busy (+1) or idle (-1)."""
        above: _Node | None = node
        while above is not None:
            was_idle = above.num_busy == 0
            above.num_busy += change
            if was_idle != (above.num_busy == 0):
                self._num_idle += -self.blocks(above.num_held) if was_idle else self.blocks(above.num_held)
            above = above.parent
