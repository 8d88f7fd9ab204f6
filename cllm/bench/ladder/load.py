"""What every rung computes: the load, its prompts, the steps of full batches; and what a run of it brought.

It knows counts and ids, and neither backend nor engine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...errors import CLLMError
from ...tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Load:
    """`num_prompts` requests of `input_len` + `output_len` tokens, `concurrency` at a time."""

    num_prompts: int
    input_len: int
    output_len: int
    concurrency: int

    @property
    def num_output(self) -> int:
        """Tokens of all answers."""
        return self.num_prompts * self.output_len

    @property
    def waves(self) -> list[range]:
        """The requests that full batches answer together, by number."""
        size = self.concurrency
        return [range(at, min(at + size, self.num_prompts)) for at in range(0, self.num_prompts, size)]

    def __str__(self) -> str:
        at_once = "one at a time" if self.concurrency == 1 else f"{self.concurrency} at a time"
        return f"{self.num_prompts} requests of {self.input_len} + {self.output_len} tokens, {at_once}"


# The loads that the predecessor was measured with, by their concurrency.
PRESETS = {
    "8": Load(40, 32, 50, 8),
    "4": Load(20, 32, 30, 4),
    "5": Load(160, 32, 50, 5),
    "1": Load(10, 32, 50, 1),
}


class Prompt(NamedTuple):
    """A text and the ids that the model's tokenizer makes of it: rungs with and without text compute the same."""

    text: str
    token_ids: list[int]


def make_prompts(tokenizer: Tokenizer, load: Load, seed: int) -> list[Prompt]:
    """Random words, each prompt of exactly `input_len` tokens, the same for the same seed.

    Raises `CLLMError` where the tokenizer makes no such text.
    """
    draw = random.Random(seed)
    return [_make_prompt(tokenizer, load.input_len, draw) for _ in range(load.num_prompts)]


def _make_prompt(tokenizer: Tokenizer, length: int, draw: random.Random) -> Prompt:
    for _ in range(100):
        text = " ".join(draw.choice(_WORDS) for _ in range(length + 1))
        token_ids = tokenizer.encode(text)[:length]
        text = tokenizer.decode(token_ids, skip_special=True)
        # Cut in the middle of a word, the text may come back as other tokens: then another is tried.
        if len(token_ids) == length and tokenizer.encode(text) == token_ids:
            return Prompt(text, token_ids)
    raise CLLMError(
        f"no text of exactly {length} tokens was found for this tokenizer; try another --input-len"
    )


_TEXT = (
    "the a one day old young king queen girl boy dog cat bird fox tree house river sea moon sun star road hill wood "
    "door window fire water bread apple book song game story friend mother father brother sister went came saw said "
    "asked told found lost took gave made ran walked sat stood slept woke laughed cried sang played big small red "
    "blue green white black long short happy sad kind wise brave little great and but so then when because over under "
    "near far into out of with without again always never often soon"
)
_WORDS = _TEXT.split()


class Part(NamedTuple):
    """`num_tokens` tokens from `start` on of the wave's sequence `member`; whether its next token is sampled."""

    member: int
    start: int
    num_tokens: int
    is_sampled: bool


def full_steps(num_seqs: int, load: Load, budget: int) -> Iterator[list[Part]]:
    """The steps of one wave where all go together: prompts, `budget` tokens a step, then a token of each a step."""
    parts: list[Part] = []
    room = budget
    for index in range(num_seqs):
        start = 0
        while start < load.input_len:
            count = min(room, load.input_len - start)
            parts.append(Part(index, start, count, start + count == load.input_len))
            start, room = start + count, room - count
            if not room:
                yield parts
                parts, room = [], budget
    if parts:
        yield parts
    for position in range(load.input_len, load.input_len + load.output_len - 1):
        yield [Part(index, position, 1, True) for index in range(num_seqs)]


@dataclass(slots=True)
class Timing:
    """One request of a run. Times in seconds, from its arrival; `ttft` None where the client cannot see it.

    `is_same`: whether its answer is the one that the engine gave before the measurement; None where not compared.
    """

    latency: float
    ttft: float | None
    num_output: int
    error: str | None = None
    is_same: bool | None = None


@dataclass(slots=True)
class Outcome:
    """One run of a load on one rung, in seconds.

    `occupancy`: sequences that got a token in each step; where steps cannot be seen, requests under way over time.
    """

    seconds: float
    timings: list[Timing]
    occupancy: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second."""
        return sum(timing.num_output for timing in self.timings) / self.seconds

    def num_good(self, load: Load) -> int:
        """Requests answered whole."""
        return sum(t.error is None and t.num_output == load.output_len for t in self.timings)


def under_way(spans: Sequence[tuple[float, float]], points: int = 64) -> list[float]:
    """How many of the spans (start, end) cover each of `points` instants between the first start and the last end."""
    first, last = min(start for start, _ in spans), max(end for _, end in spans)
    instants = [first + (last - first) * (at + 0.5) / points for at in range(points)]
    return [float(sum(start <= instant <= end for start, end in spans)) for instant in instants]
