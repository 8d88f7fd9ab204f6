"""`cllm bench ladder`: the same tokens through one layer more each time, from the bare backend to HTTP streaming.

So every loss has the name of the layer that takes it. What each rung is: docs/ladder.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ... import __version__
from ...cli import (
    CommandParser,
    add_engine_flags,
    add_output_flags,
    engine_config,
    naming_flags,
    say,
    start_logging,
)
from ...config import EngineConfig
from ...errors import ConfigError
from ...hub import model_path
from ...llm import LLM
from .llama_tools import Tools, tool_rungs
from .load import PRESETS, Load
from .measure import Climb, climb
from .report import format_table, load_plotting, plot, report
from .rig import Rig, Rung, make_rig, recorded_steps
from .rungs import engine_rungs
from .targets import Target, targets_for
from .web import HTTP_RUNGS, cllm_serve, web_rungs

ALL_RUNGS = range(10)
_LOAD_FLAGS = ("num_prompts", "input_len", "output_len", "concurrency")


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status: 1 where a request failed, or with `--check` a target is missed."""
    args = _parser().parse_args(argv)
    start_logging(verbose=args.verbose)
    with naming_flags(args):
        load = _load(args)
        at_once = load.concurrency
        config = engine_config(args, max_num_seqs=at_once, max_queue=max(at_once, EngineConfig().max_queue))
        config = ladder_config(config, load)
    tools = Tools(args.llama_bench, args.llama_batched_bench, args.llama_server)
    if config.backend == "mock" and tools != Tools():
        raise ConfigError("the mock has no model file that llama.cpp's programs could run")
    if args.plot:
        load_plotting()
    figures = measure(config, load, args, tools)
    print(json.dumps(figures) if args.json else format_table(figures))
    if args.plot:
        plot(figures, args.plot)
    has_failed = any(row["succeeded"] < row["requests"] for row in figures["rungs"])
    # A target that could not be measured, since its program was not given, is not missed.
    has_missed = any(target["is_met"] is False for target in figures["targets"])
    return 1 if has_failed or (args.check and has_missed) else 0


def ladder_config(config: EngineConfig, load: Load) -> EngineConfig:
    """The engine's settings for the load: room for its sequences, and no answer from a cache.

    Raises `ConfigError` where a setting contradicts the load.
    """
    need = load.input_len + load.output_len
    if config.context_length is not None and config.context_length < need:
        raise ConfigError(
            f"{config.context_length} tokens hold no request of {load.input_len} + {load.output_len}",
            field="context_length",
        )
    if config.max_num_seqs != load.concurrency:
        raise ConfigError(
            f"the load runs {load.concurrency} at a time; set --concurrency instead", field="max_num_seqs"
        )
    context = config.context_length or -(-(need + 1) // 64) * 64
    return replace(config, context_length=context, enable_prefix_caching=False)


def measure(config: EngineConfig, load: Load, args: argparse.Namespace, tools: Tools) -> dict[str, Any]:
    """Loads the model here and in a server, climbs, and returns the figures of `report`."""
    tell = (lambda text: None) if args.quiet else say
    with standing(config, load, args.seed, tools, args.rungs) as (rig, rungs, is_gpu):
        targets = targets_for(config.backend, load.concurrency, is_gpu=is_gpu)
        if args.check and not targets:
            raise ConfigError(f"argument --check: no target is set for {config.backend} and this load")
        found = climb(rungs, load, args.rounds, args.seed, warm_up=partial(warm_up, rig), tell=tell)
        return _report(found, rig, args, targets)


@contextlib.contextmanager
def standing(
    config: EngineConfig, load: Load, seed: int, tools: Tools, numbers: Collection[int] = ALL_RUNGS
) -> Iterator[tuple[Rig, list[Rung], bool]]:
    """The rungs `numbers`, ready to run, and whether the model is on a GPU; what they need is given back at the end.

    Raises `ConfigError` where a package is missing, `CLLMError` where a program does not start.
    """
    try:
        from ...server.service import Service
    except ImportError as error:
        raise ConfigError(f"the ladder needs the server: pip install 'cllm[server]' ({error})") from None
    with contextlib.ExitStack() as stack:
        llm = LLM(config)
        service = Service("ladder", max_queue=config.max_queue)
        service.attach(llm)
        stack.callback(service.close)
        rig = make_rig(llm, load, seed)
        is_gpu = llm.info.launches_early
        url = stack.enter_context(cllm_serve(config)) if HTTP_RUNGS & set(numbers) else ""
        rungs = [rung for rung in engine_rungs(rig) + web_rungs(rig, service, url) if rung.number in numbers]
        if tools != Tools():
            path = model_path(config.model)
            rungs += stack.enter_context(tool_rungs(tools, rig, path, is_gpu=is_gpu))
        yield rig, rungs, is_gpu


def warm_up(rig: Rig, rung: Rung) -> list[float]:
    """One run that is not measured; returns the sequences in each step, as the backend or else the client saw them."""
    with recorded_steps(rig.backend) as steps:
        outcome = rung.run()
    return steps or outcome.occupancy


def _report(found: Climb, rig: Rig, args: argparse.Namespace, targets: list[Target]) -> dict[str, Any]:
    config = rig.llm.config
    about = {
        "version": __version__,
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "backend": config.backend,
        "model": config.model,
        "description": rig.llm.info.description,
        "load_text": str(found.load),
        "rounds": args.rounds,
        "seed": args.seed,
    }
    return report(found, about, targets)


def _load(args: argparse.Namespace) -> Load:
    given = {name: getattr(args, name) for name in _LOAD_FLAGS if getattr(args, name) is not None}
    for name, value in [*given.items(), ("rounds", args.rounds)]:
        if value < 1:
            raise ConfigError(f"argument --{name.replace('_', '-')}: expected at least 1, found {value}")
    if given.get("output_len", 2) < 2:
        raise ConfigError("argument --output-len: expected at least 2, found 1")
    return replace(PRESETS[args.preset], **given)


def _rungs(text: str) -> list[int]:
    """Of `--rungs`: numbers with commas between, in ascending order. Rung 0 is what the others are measured against."""
    if not re.fullmatch(r"\d(,\d)*", text):
        raise argparse.ArgumentTypeError(f"expected numbers from 0 to 9 with commas between, found {text!r}")
    return sorted({0, *map(int, text.split(","))})


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="cllm bench ladder",
        description="Where the throughput goes: the same requests through one layer more each time, from the bare "
        "backend to HTTP streaming.",
    )
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    add = parser.add_argument
    loads = ", ".join(f"{name}: {load}" for name, load in PRESETS.items())
    add("--preset", choices=PRESETS, default="8", help=f"the load ({loads}); default 8")
    add("--num-prompts", **number, help="requests in all")
    add("--input-len", **number, help="tokens of a prompt")
    add("--output-len", **number, help="tokens of an answer")
    add("--concurrency", **number, help="requests at a time")
    add("--rounds", default=5, **number, help="runs of each rung (5), after one to warm up")
    add("--rungs", type=_rungs, default=ALL_RUNGS, metavar="N,N", help="only these, and always rung 0 (all)")
    add("--seed", type=int, default=0, metavar="N", help="of prompts and of the order of runs (0)")
    add("--json", action="store_true", help="one JSON object")
    add("--plot", metavar="FILE", help="draw speeds and batches (needs the extra plot)")
    add("--check", action="store_true", help="exit status 1 below a target")
    tool: dict[str, Any] = {"metavar": "PATH"}
    add("--llama-bench", **tool, help="llama.cpp's program, to measure beside the rungs")
    add("--llama-batched-bench", **tool, help="likewise, with and without -kvu")
    add("--llama-server", **tool, help="likewise, under the same load over HTTP")
    add_output_flags(parser)
    add_engine_flags(parser)
    return parser
