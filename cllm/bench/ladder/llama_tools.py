"""llama.cpp's own programs beside the rungs: llama-bench, llama-batched-bench and llama-server, on the same load.

It knows their command lines and what they print. Only what their documentation names is used.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config import EngineConfig
from ...errors import CLLMError
from .load import Load, Outcome, Timing
from .rig import Rig, Rung
from .targets import BATCHED_BENCH, LLAMA_BENCH, LLAMA_SERVER
from .web import over_http, server_process


@dataclass(frozen=True, slots=True)
class Tools:
    """Paths of the programs, None for those that are not to run."""

    llama_bench: str | None = None
    llama_batched_bench: str | None = None
    llama_server: str | None = None


@contextlib.contextmanager
def tool_rungs(tools: Tools, rig: Rig, model: str, *, is_gpu: bool) -> Iterator[list[Rung]]:
    """A rung for each way of running each program; `model` is the path of the file. The server runs until the end."""
    load, config, rungs = rig.load, rig.llm.config, list[Rung]()
    with contextlib.ExitStack() as stack:
        common = _common(config, model, is_gpu=is_gpu)
        if tools.llama_bench:
            command = [tools.llama_bench, *common, *_sizes(load, "-p", "-n"), "-r", "1", "-o", "json"]
            rungs.append(Rung(None, LLAMA_BENCH, _runner(command, lambda out: read_llama_bench(out, load))))
        if tools.llama_batched_bench:
            cells = _cells(load)
            command = [tools.llama_batched_bench, *common, *_sizes(load, "-npp", "-ntg")]
            command += ["-npl", str(load.concurrency), "-c", str(cells), "--output-format", "jsonl"]
            for name, extra in ((BATCHED_BENCH, []), (f"{BATCHED_BENCH} -kvu", ["-kvu"])):
                runner = _runner([*command, *extra], lambda out: read_batched_bench(out, load))
                rungs.append(Rung(None, name, runner))
        if tools.llama_server:
            command = [tools.llama_server, *common, "-c", str(_cells(load)), "-np", str(load.concurrency)]
            url = stack.enter_context(server_process(command))
            for name, is_stream in ((LLAMA_SERVER, False), (f"{LLAMA_SERVER}, streaming", True)):
                rungs.append(Rung(None, name, _server_runner(rig, url, is_stream=is_stream)))
        yield rungs


def _server_runner(rig: Rig, url: str, *, is_stream: bool) -> Callable[[], Outcome]:
    return lambda: over_http(rig, url, is_stream=is_stream, cache_prompt=False)


def _common(config: EngineConfig, model: str, *, is_gpu: bool) -> list[str]:
    """The model, and the engine's settings where they are set."""
    num_layers = config.num_gpu_layers
    if num_layers is None or num_layers < 0:
        num_layers = 99 if is_gpu else 0
    flags = ["-m", model, "-ngl", str(num_layers)]
    if config.num_threads:
        flags += ["-t", str(config.num_threads)]
    if config.kv_cache_dtype != "f16":
        flags += ["-ctk", config.kv_cache_dtype, "-ctv", config.kv_cache_dtype]
    return flags


def _sizes(load: Load, prompt: str, answer: str) -> list[str]:
    return [prompt, str(load.input_len), answer, str(load.output_len)]


def _cells(load: Load) -> int:
    """KV cells; without -kvu each sequence gets an even share, rounded up to 256 by llama.cpp."""
    return -(-(load.input_len + load.output_len) // 256) * 256 * load.concurrency


def _runner(command: list[str], read: Callable[[str], Outcome]) -> Callable[[], Outcome]:
    name = Path(command[0]).name

    def run() -> Outcome:
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        except OSError as error:
            raise CLLMError(f"cannot start {command[0]}: {error.strerror or error}") from None
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
            raise CLLMError(f"{name} failed (status {done.returncode}): {said[-1]}")
        try:
            return read(done.stdout)
        except (ValueError, LookupError, TypeError, StopIteration) as error:
            raise CLLMError(f"{name} printed what was not expected: {error!r:.200}") from None

    return run


def read_llama_bench(output: str, load: Load) -> Outcome:
    """Its decode test, one sequence: the "tg" row of `-o json`."""
    row: dict[str, Any] = next(row for row in json.loads(output) if row["n_gen"] and not row["n_prompt"])
    seconds = load.output_len / float(row["avg_ts"])
    return Outcome(seconds, [Timing(seconds, None, load.output_len)])


def read_batched_bench(output: str, load: Load) -> Outcome:
    """Its one row, prompts and answers together, as our rungs count: tokens of answers over the whole time."""
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    row = next(row for row in rows if row["pl"] == load.concurrency)
    seconds, first = float(row["t"]), float(row["t_pp"])
    return Outcome(seconds, [Timing(seconds, first, int(row["tg"])) for _ in range(load.concurrency)])
