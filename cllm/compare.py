"""`cllm compare`: two engines read the same texts, token by token, and how far their answers lie apart.

It owns the reading, the texts that are read by default, and the command. It must not know how a backend
computes: it launches batches and reads logits, so whatever differs lies below the contract.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from .backends import load_backend
from .backends.base import Floats
from .batch import Batch
from .cli import (
    CommandParser,
    add_engine_flags,
    check_text,
    engine_config,
    naming_flags,
    run_command,
    say,
    start_logging,
)
from .comparison import (
    Comparison,
    GreedyDifference,
    Limits,
    Position,
    Side,
    compare_rows,
    describe_difference,
    format_table,
    summarise,
)
from .config import EngineConfig
from .errors import BackendError, ConfigError, InvalidRequestError
from .request_maker import Prompt

_CONTEXT_CHARS = 40  # of the text shown before a token that differs


def compare(
    first: EngineConfig,
    second: EngineConfig,
    prompts: Sequence[Prompt] | None = None,
    *,
    greedy_tokens: int = 32,
) -> Comparison:
    """Loads both engines, has them read `prompts` and go on greedily, and says how far they lie apart.

    `prompts`: texts, or lists of token ids, of at least two tokens each; None for `PROMPTS`. One that is longer
    than the smaller context is cut into parts, each read from its own beginning. Both engines run one sequence
    at a time, so `max_num_seqs=1` saves memory. Raises `ConfigError` where the two cannot be compared,
    `InvalidRequestError` for a prompt, `BackendError` where a side fails or its logits are not finite.
    """
    prompts = PROMPTS if prompts is None else prompts
    if isinstance(prompts, str) or not prompts:
        raise ConfigError(f"expected a list of at least one prompt; found {prompts!r}")
    if greedy_tokens < 0:
        raise ConfigError(f"greedy_tokens should be 0 or more; found {greedy_tokens}")
    positions: list[Position] = []
    differences: list[GreedyDifference] = []
    with ExitStack() as stack:
        pair = _Pair(first, second, stack)
        encoded = [pair.encode(index, prompt) for index, prompt in enumerate(prompts)]
        pair.progress.total = sum(map(len, encoded)) + greedy_tokens * len(encoded)
        for index, token_ids in enumerate(encoded):
            for start in range(0, len(token_ids), pair.room):
                part = token_ids[start : start + pair.room]
                last_rows = _read_part(pair, part, positions)
            difference = _go_on_greedily(pair, index, part, last_rows, greedy_tokens)
            differences += [difference] if difference else []
    return Comparison(
        first=pair.sides[0],
        second=pair.sides[1],
        num_prompts=len(encoded),
        num_greedy_tokens=greedy_tokens,
        greedy_differences=tuple(differences),
        **summarise(positions),
    )


# --- Both engines, reading ----------------------------------------------------------------------------------


class _Pair:
    """Both sides, loaded, reading the same tokens in slot 0. `stack` closes them."""

    def __init__(self, first: EngineConfig, second: EngineConfig, stack: ExitStack) -> None:
        loaded = []
        for config in (first, second):
            backend, tokenizer = load_backend(config)
            stack.callback(backend.close)
            backend.warm_up()
            loaded.append((backend, tokenizer))
        self.backends, self.tokenizers = zip(*loaded, strict=True)
        infos = [backend.info for backend in self.backends]
        self.sides = (Side(first, infos[0].description), Side(second, infos[1].description))
        if infos[0].vocab_size != infos[1].vocab_size:
            raise ConfigError(
                f"both sides need the same vocabulary; {first.model} has {infos[0].vocab_size} tokens and "
                f"{second.model} has {infos[1].vocab_size}"
            )
        self.room = min(min(info.context_length, info.kv_capacity) for info in infos)
        self.step_tokens = min(min(info.max_num_batched_tokens, info.max_logit_rows) for info in infos)
        self.progress = stack.enter_context(
            tqdm(desc="comparing", delay=3, leave=False, unit="tok", disable=None)  # None: only on a terminal
        )
        self._position = 0

    def encode(self, index: int, prompt: Prompt) -> list[int]:
        """Token ids of prompt `index`, the same on both sides."""
        if isinstance(prompt, str):
            token_ids: list[int] = self.tokenizers[0].encode(prompt)
            if token_ids != self.tokenizers[1].encode(prompt):
                raise ConfigError(f"prompt {index}: the two files split it into different tokens")
        else:
            self.tokenizers[0].check_ids(prompt)
            token_ids = [int(token_id) for token_id in prompt]
        if len(token_ids) < 2:
            raise InvalidRequestError(
                f"prompt {index}: expected at least two tokens, found {len(token_ids)}", field="prompt"
            )
        return token_ids

    def start(self) -> None:
        """Begins an empty sequence."""
        for backend in self.backends:
            backend.free(0)
        self._position = 0

    def read(self, token_ids: list[int]) -> tuple[Floats, Floats]:
        """The logits [T, V] of both sides after each of at most `step_tokens` tokens, valid until the next call."""
        count = len(token_ids)
        entries = np.arange(count, dtype=np.int32)
        batch = Batch(
            token_ids=np.array(token_ids, np.int32),
            positions=entries + np.int32(self._position),
            slots=np.zeros(count, np.int32),
            logit_rows=entries,
        )
        self._position += count
        steps = [backend.launch(batch) for backend in self.backends]  # on GPUs both compute at once
        first, second = (step.logits() for step in steps)
        for logits, side in zip((first, second), self.sides, strict=True):
            if not np.isfinite(logits).all():
                raise BackendError(
                    f"logits are not finite within {count} tokens up to position {self._position - 1}: "
                    f"{side.description}"
                )
        self.progress.update(count)
        return first, second


def _read_part(pair: _Pair, token_ids: list[int], positions: list[Position]) -> tuple[Floats, Floats]:
    """Reads one text from its beginning, adds its positions, and returns both rows of logits after its end."""
    pair.start()
    next_ids = [*token_ids[1:], None]
    for start in range(0, len(token_ids), pair.step_tokens):
        chunk = slice(start, start + pair.step_tokens)
        first, second = pair.read(token_ids[chunk])
        positions += map(compare_rows, first, second, next_ids[chunk])
    return first[-1], second[-1]


def _go_on_greedily(
    pair: _Pair, prompt: int, token_ids: list[int], rows: tuple[Floats, Floats], num_tokens: int
) -> GreedyDifference | None:
    """Both sides go on from `rows`, which follow `token_ids`, to the first token that differs or the end."""
    tokenizer = pair.tokenizers[0]
    answer: list[int] = []
    # The last token of an answer need not be read, so the answer may end one past the room.
    for position in range(min(num_tokens, pair.room - len(token_ids) + 1)):
        if position:
            first, second = pair.read(answer[-1:])
            rows = first[0], second[0]
        first_row, second_row = (_without(row, tokenizer.unused_ids) for row in rows)
        first_id, second_id = int(first_row.argmax()), int(second_row.argmax())
        if first_id != second_id:
            before = tokenizer.decode(token_ids + answer)[-_CONTEXT_CHARS:]
            tokens = tokenizer.decode([first_id]), tokenizer.decode([second_id])
            return describe_difference(prompt, position, before, tokens, first_row, second_row)
        if first_id in tokenizer.eog_ids:
            break
        answer.append(first_id)
    return None


def _without(row: Floats, unused_ids: NDArray[np.int64]) -> Floats:
    """A copy of logits [V] in which tokens that no text means are never the likeliest, as in sampling."""
    row = row.copy()
    row[unused_ids] = -np.inf
    return row


# --- The command --------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """The command; returns 1 where a limit is exceeded. Raises `CLLMError` for what goes wrong."""
    args = _parser().parse_args(argv)
    start_logging(verbose=args.verbose)
    with naming_flags(args):
        limits = Limits(max_kld=args.max_kld, max_kld_99=args.max_kld_99, min_top1=args.min_top1)
        first, second = _side_configs(args)
        prompts = [_read_prompt(source) for source in args.prompts] or None
        comparison = compare(first, second, prompts, greedy_tokens=args.greedy_tokens)
    exceeded = limits.exceeded(comparison)
    if args.json:
        report = comparison.to_dict() | {"limits": asdict(limits), "exceeded": exceeded}
        print(json.dumps(report, allow_nan=False))
    else:
        print(format_table(comparison))
    if exceeded:
        say(f"limits exceeded: {'; '.join(exceeded)}")
    return 1 if exceeded else 0


def _side_configs(args: argparse.Namespace) -> list[EngineConfig]:
    """The two configurations of the flags: what names two values differs, the rest is shared."""
    pairs = _pairs(args)
    backends = pairs.get("backend", [])
    configs = []
    for side in (0, 1):
        own = vars(args).copy()
        for backend, field in (("kylin", "kernels"), ("llama", "num_gpu_layers")):
            if backend in backends and backends[side] != backend:
                own[field] = None  # meant for the other side
        own |= {field: values[side] for field, values in pairs.items()}
        configs.append(engine_config(argparse.Namespace(**own), max_num_seqs=1))
    return configs


def _pairs(args: argparse.Namespace) -> dict[str, list[str]]:
    """{field of `EngineConfig`: its values for both sides}. Raises `ConfigError` where nothing differs."""
    pairs = {}
    for field, flag in (("model", "models"), ("backend", "backends"), ("kernels", "kernels")):
        text = getattr(args, flag)
        if text is None or (field == flag and "," not in text):
            continue
        values = text.split(",")
        if len(values) != 2:
            raise ConfigError(f"argument --{flag}: expected two values, as A,B; found {text!r}")
        if field != flag and getattr(args, field) is not None:
            raise ConfigError(f"argument --{flag}: it takes the place of --{field}; give one of them")
        pairs[field] = values
    if not pairs:
        raise ConfigError(
            "nothing to compare: name two sides with --backends kylin,llama, --models A,B or --kernels plain,numpy"
        )
    return pairs


def _read_prompt(source: str | Path) -> str:
    """A prompt given as such, or a file's text without its last line end. Raises `ConfigError`."""
    if isinstance(source, str):
        check_text("the prompt", source)
        return source
    try:
        return source.read_bytes().decode().removesuffix("\n")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"argument -f/--file: {source}: {reason}") from None


def _parser() -> argparse.ArgumentParser:
    # "resolve": --kernels takes the place of the engine's flag of that name.
    parser = CommandParser(
        prog="cllm compare",
        conflict_handler="resolve",
        description="Has two engines read the same texts and tells how far their predictions lie apart. "
        "Exit status 1 where a limit is exceeded.",
    )
    add_engine_flags(parser)
    sides = parser.add_argument_group("sides", "at least one of these names two")
    sides.add_argument("--backends", metavar="A,B", help="as kylin,llama")
    sides.add_argument("--models", metavar="A,B", help="two GGUF files with the same vocabulary")
    sides.add_argument("--kernels", metavar="A[,B]", help="kylin's kernels: auto, plain or numpy")
    parser.add_argument(
        "-p", "--prompt", dest="prompts", action="append", default=[], metavar="TEXT", help="may be repeated"
    )
    parser.add_argument(
        "-f", "--file", dest="prompts", action="append", type=Path, metavar="FILE", help="a text in a file"
    )
    parser.add_argument(
        "--greedy-tokens",
        type=int,
        default=32,
        metavar="N",
        help="compare greedy answers of N tokens after each text (default: 32)",
    )
    limits = Limits()
    for flag, default, job in (
        ("--max-kld", limits.max_kld, "limit of the mean KL divergence, in nats"),
        ("--max-kld-99", limits.max_kld_99, "limit of its 99th percentile"),
        ("--min-top1", limits.min_top1, "least share of positions with the same likeliest token"),
    ):
        parser.add_argument(
            flag, type=float, default=default, metavar="X", help=f"{job} (default: {default})"
        )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what happens")
    return parser


PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "Water boils at a temperature of",
    "To make a simple tomato soup, first",
    "The three primary colours are red,",
    "In 1969, for the first time, a human being",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Question: If a train travels 60 miles in an hour, how far does it travel in three hours?\nAnswer:",
    "The opposite of hot is",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 2, 4, 8, 16, 32,",
    '{"name": "Ada", "born": 1815, "profession":',
    # Lewis Carroll, Alice's Adventures in Wonderland (1865), chapter I; public domain.
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once "
    "or twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it, "
    '"and what is the use of a book," thought Alice "without pictures or conversations?" So she was considering in '
    "her own mind (as well as she could, for the hot day made her feel very sleepy and stupid), whether the pleasure "
    "of making a daisy-chain would be worth the trouble of getting up and picking the daisies, when suddenly a White "
    "Rabbit with pink eyes ran close by her.",
    # Charles Darwin, On the Origin of Species (1859), chapter XIV; public domain.
    "It is interesting to contemplate an entangled bank, clothed with many plants of many kinds, with birds singing "
    "on the bushes, with various insects flitting about, and with worms crawling through the damp earth, and to "
    "reflect that these elaborately constructed forms, so different from each other, and dependent on each other in "
    "so complex a manner, have all been produced by laws acting around us.",
)

if __name__ == "__main__":
    run_command(main)
