"""`cllm bench speed`: prefill and decode of the bare backends, alternating in one run, beside the machine's ceilings.

A test runs on every backend in turn, round after round, a short one more often; medians and ratios are over rounds, so
that a machine whose speed drifts is fair to both. The tests take turns as well: what others do to the machine for a
minute decides none of them. Token ids are random: what they are changes no time.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..backends import load_backend
from ..backends.base import Backend
from ..backends.kylin import KylinBackend
from ..batch import Batch
from ..cli import CommandParser, add_engine_flags, engine_config, naming_flags
from ..config import EngineConfig
from ..errors import ConfigError
from ..hub import model_path
from ..kylin.gguf import read_gguf
from ..kylin.kv_cache import BLOCK, block_bytes
from ..kylin.layout import PHASE_NAMES
from ..kylin.weights import load_weights
from ..machine import available_cores
from .ceilings import Ceiling, Ceilings

DECODE_STEPS = 64
TEST_S, NUM_TURNS = 30, 3  # seconds of rounds of a test, at least, and in how many turns
BATCHES = (1, 2, 4, 8, 16)
DEPTHS = (0, 512, 4096)
# What kylin is to reach, as a multiple of llama.cpp in the same run (Qwen3-0.6B shape, q4_k_m, 2 threads).
TARGETS = {"pp128": 2.5, "pp512": 2.5, "tg64": 1.25, "tg64 x8": 3.3, "tg64 x16": 2.4, "tg64 @ d4096": 2.8}
SHARES = {"tg64": 0.85}  # of the ceiling, likewise


@dataclass(frozen=True, slots=True)
class Test:
    """`num_tokens` of prompt, or that many decode steps of `batch` sequences, behind `depth` tokens each."""

    name: str
    num_tokens: int
    is_decode: bool
    batch: int = 1
    depth: int = 0


@dataclass(slots=True)
class Result:
    """Tokens a second of one test on one backend, a value a round."""

    test: Test
    samples: dict[str, list[float]] = field(default_factory=dict)
    ceilings: list[Ceiling] = field(default_factory=list)  # of the same rounds
    phase_cycles: Counter[str] = field(default_factory=Counter)  # of kylin

    def median(self, backend: str) -> float:
        return statistics.median(self.samples[backend])

    def ratio(self, first: str, second: str) -> float:
        """The median over rounds of first / second."""
        pairs = zip(self.samples[first], self.samples[second], strict=True)
        return statistics.median(a / b for a, b in pairs)

    def share(self, backend: str, bytes_a_token: float, operations_a_token: float) -> tuple[str, float]:
        """The ceiling that bounds the test, and the median over rounds of the share of it that was reached."""
        rounds = list(zip(self.samples[backend], self.ceilings, strict=True))
        by_memory = statistics.median(speed * bytes_a_token / 1e9 / now.read_gb_s for speed, now in rounds)
        by_dots = statistics.median(speed * operations_a_token / 1e9 / now.dot_gops for speed, now in rounds)
        return ("read", by_memory) if by_memory > by_dots else ("dot", by_dots)


def make_tests(context: int) -> list[Test]:
    """The tests that a context of so many tokens has room for."""
    prefill = [Test(f"pp{n}", n, False) for n in (128, 512)]
    batches = [Test("tg64" if n == 1 else f"tg64 x{n}", DECODE_STEPS, True, batch=n) for n in BATCHES]
    deep = [Test(f"tg64 @ d{depth}", DECODE_STEPS, True, depth=depth) for depth in DEPTHS if depth]
    return [test for test in prefill + batches + deep if test.depth + test.num_tokens <= context]


class Runner:
    """Drives one backend through the tests. What lies before the measured tokens is kept between rounds."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._random = np.random.default_rng(0)
        self._lengths = [0] * backend.info.num_slots

    def run(self, test: Test) -> float:
        """Tokens a second. What lies before the measured tokens is computed outside the measured time."""
        slots = list(range(test.batch))
        for slot in slots:
            if self._lengths[slot] > test.depth:
                self.backend.truncate(slot, test.depth)
                self._lengths[slot] = test.depth
            self.fill(slot, test.depth - self._lengths[slot])
        if test.is_decode:
            batches = [self._next_batch(slots, [1] * len(slots)) for _ in range(test.num_tokens)]
        else:
            batches = self._prompt(0, test.num_tokens)
        started = time.perf_counter()  # batches are no part of a backend's work
        self._compute(batches)
        return test.num_tokens * test.batch / (time.perf_counter() - started)

    def phase_cycles(self) -> Counter[str]:
        """Cycles by phase of a step since the model was loaded; empty where it counts none."""
        return Counter(self.backend.phase_cycles() if isinstance(self.backend, KylinBackend) else {})

    def clear(self) -> None:
        """Empties all slots: idle tokens would slow llama.cpp's other tests."""
        for slot, length in enumerate(self._lengths):
            if length:
                self.backend.free(slot)
                self._lengths[slot] = 0

    def fill(self, slot: int, num_tokens: int) -> None:
        """`num_tokens` more tokens in a slot."""
        self._compute(self._prompt(slot, num_tokens))

    def _compute(self, batches: list[Batch]) -> None:
        for batch in batches:
            self.backend.launch(batch).logits()

    def _prompt(self, slot: int, num_tokens: int) -> list[Batch]:
        """`num_tokens` more tokens in a slot, in steps as large as may be."""
        largest = self.backend.info.max_num_batched_tokens
        counts = [min(largest, num_tokens - at) for at in range(0, num_tokens, largest)]
        return [self._next_batch([slot], [count]) for count in counts]

    def _next_batch(self, slots: list[int], counts: list[int]) -> Batch:
        """`counts[i]` tokens more in `slots[i]`, with the logits of the last one of each."""
        positions: list[int] = []
        for slot, count in zip(slots, counts, strict=True):
            positions += range(self._lengths[slot], self._lengths[slot] + count)
            self._lengths[slot] += count
        num_ids = min(1000, self.backend.info.vocab_size)
        return Batch(
            token_ids=self._random.integers(0, num_ids, sum(counts), np.int32),
            positions=np.array(positions, np.int32),
            slots=np.repeat(np.array(slots, np.int32), counts),
            logit_rows=(np.cumsum(counts) - 1).astype(np.int32),
        )


def measure(configs: dict[str, EngineConfig], rounds: int, ceilings: Ceilings) -> list[Result]:
    """Every test on every backend, `rounds` times or more after a round that is not counted."""
    runners = {name: Runner(load_backend(config)[0]) for name, config in configs.items()}
    for runner in runners.values():
        runner.backend.warm_up()
    context = min(runner.backend.info.context_length for runner in runners.values())
    results = [Result(test, {name: [] for name in runners}) for test in make_tests(context)]
    _take_turns(results, runners, rounds, ceilings)
    for runner in runners.values():
        runner.backend.close()
    return results


def _take_turns(results: list[Result], runners: dict[str, Runner], rounds: int, ceilings: Ceilings) -> None:
    """`rounds` of each test and for `TEST_S`, in turns."""
    for turn in range(NUM_TURNS):
        for result in results:
            # What lies before a deep test's tokens takes too long to compute again.
            num_turns = 1 if result.test.depth else NUM_TURNS
            if turn < num_turns:
                _alternate(result, runners, -(-rounds // num_turns), TEST_S / num_turns, ceilings)
                for runner in runners.values():
                    runner.clear()


def _alternate(
    result: Result, runners: dict[str, Runner], rounds: int, seconds: float, ceilings: Ceilings
) -> None:
    """Rounds of one test, with the ceilings in each: so many and for so long, after one not counted."""
    for runner in runners.values():
        runner.run(result.test)
    started, before_these = time.perf_counter(), len(result.ceilings)
    while len(result.ceilings) < before_these + rounds or time.perf_counter() < started + seconds:
        order = list(runners)[:: 1 if len(result.ceilings) % 2 else -1]
        for place, name in enumerate(order):
            if place == len(order) // 2:  # next to every backend: the memory's speed changes within seconds
                result.ceilings.append(ceilings.measure())
            before = runners[name].phase_cycles()
            result.samples[name].append(runners[name].run(result.test))
            result.phase_cycles += runners[name].phase_cycles() - before


def report(results: list[Result], path: str, num_threads: int) -> dict[str, Any]:
    """The figures with llama-bench's column names, and the share of the ceiling that bounds each test."""
    work = _Work(path)
    ceilings = [ceiling for result in results for ceiling in result.ceilings]
    rows = []
    for result in results:
        for name in result.samples:
            ceiling, share = result.share(name, *work.of_token(result.test))
            rows.append(
                {
                    "model": work.name,
                    "size": work.num_bytes,
                    "params": work.num_weights + work.output_weights,
                    "backend": name,
                    "threads": num_threads,
                    "test": result.test.name,
                    "t/s": result.median(name),
                    "samples_ts": result.samples[name],
                    "ceiling": ceiling,
                    "share": share,
                    "ratio": result.ratio("kylin", "llama") if "llama" in result.samples else None,
                    "target": TARGETS.get(result.test.name),
                }
            )
    phases = {
        result.test.name: {
            name: result.phase_cycles[name] / result.phase_cycles.total() for name in PHASE_NAMES
        }
        for result in results
        if result.phase_cycles
    }
    read, dots = (statistics.median(values) for values in zip(*ceilings, strict=True))
    return {"read_gb_s": read, "dot_gops": dots, "rows": rows, "phases": phases}


class _Work:
    """What a model's file makes a token cost."""

    def __init__(self, path: str) -> None:
        file = read_gguf(path)
        self.name = str(file.metadata.get("general.name", path))
        matrices = {name: tensor for name, tensor in file.tensors.items() if len(tensor.shape) == 2}
        output = matrices.pop("token_embd.weight")  # of embeddings a step reads a few rows; as the output all
        output = matrices.pop("output.weight", output)
        self.num_weights = sum(math.prod(tensor.shape) for tensor in matrices.values())
        self.output_weights = math.prod(output.shape)
        self.num_bytes = sum(tensor.nbytes for tensor in matrices.values()) + output.nbytes
        shape = load_weights(file).shape
        self._kv_bytes = block_bytes(shape.num_layers, shape.num_kv_heads, shape.head_width, "f16") // BLOCK

    def of_token(self, test: Test) -> tuple[float, float]:
        """Bytes read from memory and operations for one token of a test.

        A decode step reads every weight once, and the keys and values of all positions before its own. A prompt reads
        them too seldom for memory to matter, and computes logits for one of its rows.
        """
        if not test.is_decode:
            return 0.0, 2.0 * self.num_weights
        num_read = self.num_bytes / test.batch + self._kv_bytes * (test.depth + (test.num_tokens - 1) / 2)
        return num_read, 2.0 * (self.num_weights + self.output_weights)


def format_table(figures: dict[str, Any]) -> str:
    """A line a test: each backend's tokens a second and share of its ceiling, and the ratio; then kylin's phases."""
    lines = [f"streaming read {figures['read_gb_s']:.1f} GB/s, int8 dot {figures['dot_gops']:.0f} GOPS"]
    lines.append(f"{'test':14}{'backend':8}{'t/s':>9}{'of ceiling':>14}{'kylin/llama':>13}{'target':>8}")
    for row in figures["rows"]:
        tail = ""
        if row["backend"] == "kylin" and row["ratio"] is not None:
            target = f"{row['target']:8.2f}" if row["target"] else ""
            tail = f"{row['ratio']:13.2f}{target}"
        share = f"{row['share']:.0%} {row['ceiling']}"
        lines.append(f"{row['test']:14}{row['backend']:8}{row['t/s']:9.1f}{share:>14}{tail}")
    for number, (test, shares) in enumerate(figures["phases"].items()):
        if number == 0:
            lines += ["", f"{'time of kylin in':16}" + "".join(f"{name:>13}" for name in shares)]
        lines.append(f"{test:16}" + "".join(f"{share:13.0%}" for share in shares.values()))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    args = _parser().parse_args(argv)
    with naming_flags(args):
        names = args.backends.split(",")
        if "kylin" not in names or not set(names) <= {"kylin", "llama"}:
            raise ConfigError("argument --backends: expected kylin or kylin,llama")
        base = engine_config(args, max_num_seqs=max(BATCHES))
        context = min(_trained_context(base), max(DEPTHS) + 2 * DECODE_STEPS)
        base = replace(
            base,
            num_threads=base.num_threads or available_cores(),
            context_length=base.context_length or context,
            kv_cache_tokens=base.kv_cache_tokens or context + 2 * DECODE_STEPS * max(BATCHES),
        )
        num_threads = base.num_threads or 1
        configs = {name: replace(base, backend=name) for name in names}
        results = measure(configs, args.rounds, Ceilings(num_threads))
    figures = report(results, model_path(base.model), num_threads)
    print(json.dumps(figures) if args.json else format_table(figures))
    return 1 if args.check and any(map(_is_missed, figures["rows"])) else 0


def _is_missed(row: dict[str, Any]) -> bool:
    """Whether a row is kylin's and below what kylin is to reach."""
    if row["backend"] != "kylin":
        return False
    below = row["ratio"] is not None and row["target"] is not None and row["ratio"] < row["target"]
    return bool(below or row["share"] < SHARES.get(row["test"], 0))


def _trained_context(config: EngineConfig) -> int:
    metadata = read_gguf(model_path(config.model)).metadata
    return int(metadata.get(f"{metadata.get('general.architecture')}.context_length", 4096))


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="cllm bench speed", description="Prefill and decode of the bare backends.")
    parser.add_argument("--backends", default="kylin,llama", help="default: kylin,llama")
    help_ = f"of each test at least, which go on for {TEST_S} s; default: 3"
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help=help_)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--check", action="store_true", help="exit status 1 below a target")
    add_engine_flags(parser)
    return parser
