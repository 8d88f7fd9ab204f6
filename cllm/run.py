"""`cllm run`: prompts in, answers out, as they are made.

It reads prompts from flags, files or stdin, and prints answers as text or JSON. It must not know backends.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from .cli import (
    CommandParser,
    add_engine_flags,
    add_output_flags,
    add_sampling_flags,
    check_text,
    engine_config,
    naming_flags,
    run_command,
    sampling_params,
    say,
    say_error,
    start_logging,
)
from .config import EngineConfig
from .conversation import Conversation, converse, describe_answer, is_terminal, print_answer
from .errors import ConfigError
from .llm import LLM
from .outputs import RequestOutput
from .params import SamplingParams
from .tokenizer import MAX_TEXT_CHARS

logger = logging.getLogger(__name__)

MAX_PROMPTS_AT_ONCE = 64
_MAX_PROMPT_BYTES = 4 * MAX_TEXT_CHARS  # UTF-8 has at most four bytes a character


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status. Raises `CLLMError` for what goes wrong."""
    args = _parser().parse_args(argv)
    start_logging(verbose=args.verbose)
    with naming_flags(args):
        given = ([] if args.prompt is None else [args.prompt]) + args.prompts
        is_conversation = args.chat and not given and is_terminal(sys.stdin)
        _check_usage(args, is_conversation)
        params = sampling_params(args)
        config = engine_config(args, max_num_seqs=min(max(len(given), 1), MAX_PROMPTS_AT_ONCE))
        prompts = [] if is_conversation else _read_prompts(given)
        logger.info("loading %s", config)
        with _load(config) as llm:
            logger.info("loaded: %s", llm.info)
            template_kwargs = {"enable_thinking": False} if args.no_think else None
            if is_conversation:
                llm.render([{"role": "user", "content": "?"}])  # a file without a template is told at once
                conversation = Conversation(llm, params, template_kwargs)
                converse(conversation, llm.info.description, quiet=args.quiet)
                return 0
            if len(prompts) == 1 and not args.json:
                return _answer_one(llm, prompts[0], params, template_kwargs, args)
            return _answer_all(llm, prompts, params, template_kwargs, args)


def _load(config: EngineConfig) -> LLM:
    """The model, without a look for garbage among the half million objects that loading makes: a tenth of a start."""
    gc.disable()
    try:
        return LLM(config)
    finally:
        gc.freeze()  # nor later
        gc.enable()


def _answer_one(
    llm: LLM,
    prompt: str,
    params: SamplingParams,
    template_kwargs: dict[str, Any] | None,
    args: argparse.Namespace,
) -> int:
    """Prints the answer as it is made; a terminal shows the text that it continues before it."""
    if args.chat:
        rendered = llm.render([{"role": "user", "content": prompt}], chat_template_kwargs=template_kwargs)
        num_prompt, pieces = len(rendered.token_ids), llm.stream(rendered, params)
    else:
        token_ids = llm.encode(prompt)
        num_prompt, pieces = len(token_ids), llm.stream(token_ids, params)
        if is_terminal(sys.stdout):
            print(prompt, end="", flush=True)
    num_tokens, last = print_answer(pieces)
    if last.error is not None:
        raise last.error
    if not args.quiet:
        say(describe_answer(num_prompt, num_tokens, last, llm.info.description))
    return 0


def _answer_all(
    llm: LLM,
    prompts: list[str],
    params: SamplingParams,
    template_kwargs: dict[str, Any] | None,
    args: argparse.Namespace,
) -> int:
    """Answers all prompts in one batch, then prints them in order."""
    started = time.perf_counter()
    if args.chat:
        conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs = llm.chat(conversations, params, chat_template_kwargs=template_kwargs)
    else:
        outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - started
    for prompt, output in zip(prompts, outputs, strict=True):
        print(_as_json(output) if args.json else _as_text(prompt, output))
    failed = [(index, output.error) for index, output in enumerate(outputs) if output.error is not None]
    if failed:
        index, error = failed[0]
        say_error(f"{len(failed)} of {len(outputs)} prompts failed, first prompt {index}: {error}")
        return 1
    if not args.quiet:
        say(_describe_all(outputs, seconds, llm.info.description))
    return 0


def _as_json(output: RequestOutput) -> str:
    """The fields of `RequestOutput` on one line, in ASCII; `error` becomes its message."""
    error = None if output.error is None else str(output.error)
    return json.dumps(asdict(replace(output, error=None)) | {"error": error})


def _as_text(prompt: str, output: RequestOutput) -> str:
    answer = output.outputs[0]
    if answer.content is None:
        return f"{prompt}{answer.text}\n"
    return f"> {prompt}\n{answer.content.strip()}\n"


def _describe_all(outputs: Sequence[RequestOutput], seconds: float, description: str) -> str:
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_decoded = sum(len(output.outputs[0].token_ids) for output in outputs)
    return (
        f"batch of {len(outputs)} in {seconds:.2f} s: prompt {num_prompt} tokens, "
        f"{num_prompt / seconds:.1f} tokens/s; decode {num_decoded} tokens, {num_decoded / seconds:.1f} tokens/s "
        f"| {description}"
    )


def _check_usage(args: argparse.Namespace, is_conversation: bool) -> None:
    if args.no_think and not args.chat:
        raise ConfigError("argument --no-think: it sets a variable of the chat template, so it needs -cnv")
    if args.json and is_conversation:
        raise ConfigError("argument --json: it needs a prompt; a conversation is for people")


def _read_prompts(given: list[str | Path]) -> list[str]:
    """The texts of prompts and files, or of stdin where there are none. Raises `ConfigError`."""
    for source in given:
        if isinstance(source, str):
            check_text("the prompt", source)
    if given:
        return [source if isinstance(source, str) else _read_file(source) for source in given]
    if sys.stdin is None or is_terminal(sys.stdin):
        raise ConfigError(
            'no prompt; give one, as in cllm run "Once upon a time", or -cnv for a conversation'
        )
    text = _decode("stdin", sys.stdin.buffer.read(_MAX_PROMPT_BYTES + 1))
    if not text:
        raise ConfigError('no prompt, and stdin is empty; give one, as in cllm run "Once upon a time"')
    return [text]


def _read_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return _decode(f"argument -f/--file: {path}", file.read(_MAX_PROMPT_BYTES + 1))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"argument -f/--file: {path}: {reason}") from None


def _decode(source: str, data: bytes) -> str:
    """The text without its last line end, which editors and `echo` add."""
    if len(data) > _MAX_PROMPT_BYTES:
        raise ConfigError(f"{source}: a prompt has at most {_MAX_PROMPT_BYTES} bytes; this is longer")
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: expected UTF-8, found another byte at offset {error.start}") from None


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="cllm run",
        description="Continues prompts, or answers them with -cnv. Without a prompt, reads one from stdin, or holds "
        "a conversation with -cnv on a terminal. Answers go to stdout, statistics to stderr.",
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue")
    parser.add_argument(
        "-p", "--prompt", dest="prompts", action="append", default=[], metavar="PROMPT", help="another prompt"
    )
    parser.add_argument(
        "-f", "--file", dest="prompts", action="append", type=Path, metavar="FILE", help="a prompt in a file"
    )
    parser.add_argument(
        "-cnv", "--conversation", dest="chat", action="store_true", help="apply the model's chat template"
    )
    parser.add_argument("--no-think", action="store_true", help="with -cnv: answer without reasoning first")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, with token ids")
    add_output_flags(parser)
    add_sampling_flags(parser)
    add_engine_flags(parser)
    return parser


if __name__ == "__main__":
    run_command(main)
