"""What a step consists of, and how its budget of tokens is shared among prompts. It decides on no memory.

Prompts are cut into chunks, so that no stream waits for a prompt and no short prompt for a long one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .sequence import Sequence


class Chunk(NamedTuple):
    """The next `num_tokens` tokens of a sequence. The logits of its last `num_rows` tokens are wanted."""

    sequence: Sequence
    num_tokens: int
    num_rows: int


class SlotOperation(NamedTuple):
    """What a backend is to do with a slot: drop all but its first `length` tokens, or, with a `source`, begin it as the
    first `length` tokens of that one."""

    slot: int
    source: int | None = None
    length: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: its chunks. The sequences whose last token is computed are `sampled`, in this order; the others
    are not. `scores`: whether rows of a prompt are among those wanted (`prompt_logprobs`).
    """

    chunks: list[Chunk]
    sampled: list[Sequence]
    unsampled: list[Sequence]
    scores: bool


def make_plan(chunks: list[Chunk], *, has_prompts: bool) -> Plan:
    """The plan of these chunks, by ascending slot: only such neighbours llama.cpp computes together where each sequence
    has a cache of its own. Without prompts each chunk is a running stream."""
    chunks.sort(key=_slot)
    if not has_prompts:
        return Plan(chunks, [chunk.sequence for chunk in chunks], [], False)
    sampled: list[Sequence] = []
    unsampled: list[Sequence] = []
    for sequence, num_tokens, _ in chunks:
        is_sampled = num_tokens == sequence.num_pending and sequence.max_tokens > 0
        (sampled if is_sampled else unsampled).append(sequence)
    return Plan(chunks, sampled, unsampled, any(chunk.sequence.wants_prompt_logprobs for chunk in chunks))


def plan_after(plan: Plan) -> Plan | None:
    """One token more for each sequence of `plan`, which has not been computed yet.

    None where one of them ends in it, as far as is known, or is still a prompt afterwards.
    """
    if plan.unsampled or plan.scores or any(s.num_output + 1 >= s.max_tokens for s in plan.sampled):
        return None
    return Plan([Chunk(sequence, 1, 1) for sequence in plan.sampled], plan.sampled, [], False)


def prompt_chunks(prompts: list[Sequence], tokens: int, rows: int) -> Iterator[Chunk]:
    """Shares `tokens`, and `rows` of logits, among prompts, given by age: the one with the fewest tokens left
    first, the oldest second, so that neither a short nor a long one starves, then the others by length.

    While others wait, one takes at most half of what is left.
    """
    ordered = sorted(prompts, key=lambda sequence: sequence.num_pending)
    if ordered and ordered[0] is not prompts[0]:
        ordered.remove(prompts[0])
        ordered.insert(1, prompts[0])
    for num_others, sequence in zip(range(len(ordered) - 1, -1, -1), ordered, strict=True):
        chunk = _chunk(sequence, (tokens + 1) // 2 if num_others else tokens, rows)
        if chunk.num_tokens > 0:
            tokens -= chunk.num_tokens
            rows -= chunk.num_rows
            yield chunk


def _chunk(sequence: Sequence, tokens: int, rows: int) -> Chunk:
    """As much of the sequence as there are `tokens` and `rows` left for."""
    start, end = sequence.num_computed, len(sequence.token_ids)
    if sequence.wants_prompt_logprobs:
        # The row of position p scores token p + 1; after a failed step some tokens are scored already.
        first_row = sequence.request.num_scored - 1
    else:
        first_row = end - 1 if sequence.max_tokens else end
    num_tokens = min(end - start, tokens, first_row + rows - start)
    return Chunk(sequence, num_tokens, max(start + num_tokens - first_row, 0))


def _slot(chunk: Chunk) -> int:
    assert chunk.sequence.slot is not None  # it is planned
    return chunk.sequence.slot
