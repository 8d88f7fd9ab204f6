"""`cllm bench http`: load on any server with OpenAI's API, and the result block of `vllm bench serve`.

Closed loop: so many requests under way at any time. Open loop: so many a second, whatever the answers do. Prompts are
random token ids, so that their lengths are exact.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import time
from collections.abc import Mapping
from typing import Any

from ..cli import CommandParser, printable
from ..errors import CLLMError, ConfigError
from .answers import read_answer, result_block, summarize
from .load import Client, ask, closed_loop, open_client, open_loop

# Every vocabulary has the ids below this one; prompts of these differ enough that no prefix cache helps.
NUM_IDS = 256
DEFAULT_CONCURRENCY = 8
_COUNTS = ("num_prompts", "input_len", "output_len", "concurrency")


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status: 1 where a request failed."""
    args = _parser().parse_args(argv)
    _check(args)
    figures = asyncio.run(_run(args))
    print(json.dumps(figures) if args.json else printable_lines(result_block(figures)))
    return 1 if figures["failed"] else 0


def printable_lines(text: str) -> str:
    """`text` without control characters other than line ends: parts of it came from a server."""
    return "\n".join(map(printable, text.split("\n")))


async def _run(args: argparse.Namespace) -> dict[str, Any]:
    is_stream = not args.no_stream
    with open_client(args.base_url, args.api_key) as client:
        model = args.model or await _first_model(client)
        bodies = make_bodies(
            model,
            random_prompts(args.num_prompts, args.input_len, args.seed),
            args.output_len,
            is_chat=args.endpoint.endswith("/chat/completions"),
            is_stream=is_stream,
            ignore_eos=args.ignore_eos,
        )
        messages = [client.message("POST", args.endpoint, body) for body in bodies]
        started = time.perf_counter()
        if args.request_rate is None:
            exchanges = await closed_loop(client, messages, args.concurrency)
        else:
            exchanges = await open_loop(client, messages, args.request_rate, args.seed, args.concurrency)
        duration = time.perf_counter() - started
    answers = [read_answer(exchange, args.input_len, is_stream=is_stream) for exchange in exchanges]
    about = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "model_id": model,
        "num_prompts": args.num_prompts,
        "request_rate": args.request_rate,
        "max_concurrency": args.concurrency,
    }
    return about | summarize(answers, duration, is_stream=is_stream)


async def _first_model(client: Client) -> str:
    """The first of `GET /v1/models`. Raises `CLLMError`."""
    listed = await ask(client, "GET", "/v1/models")
    try:
        return str(json.loads(listed)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise CLLMError("GET /v1/models names no model; give one with --model") from None


def random_prompts(num_prompts: int, input_len: int, seed: int) -> list[list[int]]:
    """`num_prompts` prompts of `input_len` token ids, the same for the same seed."""
    draw = random.Random(seed)
    return [[draw.randrange(NUM_IDS) for _ in range(input_len)] for _ in range(num_prompts)]


def make_bodies(
    model: str,
    prompts: list[Any],
    output_len: int,
    *,
    is_chat: bool = False,
    is_stream: bool = True,
    ignore_eos: bool = True,
    extra: Mapping[str, Any] | None = None,
) -> list[bytes]:
    """The body of a greedy request for each prompt, a text or token ids; a chat's are written as words of digits.

    `extra`: fields that every body has besides.
    """
    common: dict[str, Any] = {**(extra or {})} | {
        "model": model,
        "max_tokens": output_len,
        "temperature": 0.0,
        "stream": is_stream,
    }
    if ignore_eos:
        common["ignore_eos"] = True
    if is_stream:
        common["stream_options"] = {"include_usage": True}
    bodies = []
    for prompt in prompts:
        if is_chat:
            text = prompt if isinstance(prompt, str) else " ".join(map(str, prompt))
            asked = {"messages": [{"role": "user", "content": text}]}
        else:
            asked = {"prompt": prompt}
        bodies.append(json.dumps(common | asked).encode())
    return bodies


def _check(args: argparse.Namespace) -> None:
    """Raises `ConfigError`; the concurrency's default is set here, where it is known which loop runs."""
    if args.concurrency is None and args.request_rate is None:
        args.concurrency = DEFAULT_CONCURRENCY
    for name in _COUNTS:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"argument --{name.replace('_', '-')}: expected at least 1, found {value}")
    if args.request_rate is not None and not (0 < args.request_rate < math.inf):
        raise ConfigError(f"argument --request-rate: expected requests a second, found {args.request_rate}")
    if not args.endpoint.startswith("/"):
        raise ConfigError(
            f"argument --endpoint: expected a path such as /v1/completions, found {args.endpoint!r}"
        )
    if args.api_key is not None and not (args.api_key.isascii() and args.api_key.isprintable()):
        raise ConfigError("argument --api-key: expected printable ASCII characters")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="cllm bench http",
        description="Load on a server with OpenAI's API; the result is that of vllm bench serve.",
    )
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    key = os.environ.get("CLLM_API_KEY") or os.environ.get("OPENAI_API_KEY")
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="default: http://127.0.0.1:8000")
    add("--endpoint", default="/v1/completions", metavar="PATH", help="or /v1/chat/completions")
    add("--model", metavar="NAME", help="default: the first that the server lists")
    add("--api-key", default=key, metavar="KEY", help="default: CLLM_API_KEY, else OPENAI_API_KEY")
    add(
        "--concurrency",
        **number,
        help=f"requests at once (closed loop, {DEFAULT_CONCURRENCY}); with a rate, at most",
    )
    add("--request-rate", type=float, metavar="X", help="requests a second, Poisson (open loop)")
    add("--num-prompts", default=40, **number, help="requests in all (40)")
    add("--input-len", default=32, **number, help="tokens of a prompt (32); in a chat, words")
    add("--output-len", default=50, **number, help="tokens of an answer, at most (50)")
    add("--ignore-eos", action="store_true", help="answers of exactly that length")
    add("--no-stream", action="store_true", help="whole replies instead of streams")
    add("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals (0)")
    add("--json", action="store_true", help="one JSON object, with the keys of vllm bench serve")
    return parser
