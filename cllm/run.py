"""`cllm run`: prompts in, answers out, as they are made."""

from __future__ import annotations

import argparse
import logging
import sys
import time

from .cli import add_engine_flags, engine_config, run_command
from .errors import ConfigError
from .llm import LLM
from .outputs import StreamPiece
from .params import SamplingParams


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.ERROR, stream=sys.stderr)
    prompts = ([args.prompt] if args.prompt is not None else []) + args.prompts
    if not prompts:
        raise ConfigError('no prompt: give one, as in cllm run "Once upon a time"')
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    config = engine_config(args, max_num_seqs=min(len(prompts), 64))
    with LLM(config) as llm:
        started = time.perf_counter()
        if len(prompts) == 1:
            return _stream(llm, prompts[0], params, args.quiet)
        outputs = llm.generate(prompts, params)
        for prompt, output in zip(prompts, outputs, strict=True):
            print(f"{prompt}{output.outputs[0].text}\n")
        if not args.quiet:
            tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            seconds = time.perf_counter() - started
            print(
                f"{len(prompts)} prompts, {tokens} tokens, {tokens / seconds:.1f} tokens/s", file=sys.stderr
            )
        return 1 if any(output.error for output in outputs) else 0


def _stream(llm: LLM, prompt: str, params: SamplingParams, quiet: bool) -> int:
    """Prints the prompt and the answer as it is made."""
    print(prompt, end="", flush=True)
    num_tokens, piece = 0, None
    for piece in llm.stream(prompt, params):
        num_tokens += len(piece.token_ids)
        print(piece.text, end="", flush=True)
    print()
    if piece is None or piece.error is not None:
        raise piece.error if piece and piece.error else RuntimeError("no answer")
    if not quiet:
        print(_statistics(llm, len(llm.encode(prompt)), num_tokens, piece), file=sys.stderr)
    return 0


def _statistics(llm: LLM, num_prompt: int, num_tokens: int, last: StreamPiece) -> str:
    metrics = last.metrics
    parts = []
    if metrics and metrics.time_to_first_token_s:
        parts.append(
            f"prompt {num_prompt} tokens, {num_prompt / metrics.time_to_first_token_s:.1f} tokens/s "
            f"(first token after {metrics.time_to_first_token_s:.2f} s)"
        )
    rate = metrics.decode_tokens_per_s if metrics else None
    parts.append(f"decode {num_tokens} tokens" + (f", {rate:.1f} tokens/s" if rate else ""))
    return "; ".join([*parts, f"{last.finish_reason} | {llm.info.description}"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cllm run", description=__doc__.split(":", 1)[1].strip().capitalize()
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue")
    parser.add_argument(
        "-p", dest="prompts", action="append", default=[], metavar="PROMPT", help="another prompt"
    )
    parser.add_argument(
        "-n", "--max-tokens", type=int, default=256, metavar="N", help="at most (default: 256)"
    )
    parser.add_argument("--temp", dest="temperature", type=float, default=0.0, metavar="T", help="0: greedy")
    parser.add_argument("-s", "--seed", type=int, default=None, metavar="N", help="of the random stream")
    parser.add_argument("-q", "--quiet", action="store_true", help="no line of statistics")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what happens")
    add_engine_flags(parser)
    return parser


if __name__ == "__main__":
    run_command(main)
