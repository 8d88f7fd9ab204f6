"""What a streamed token costs in Python: CPU of a server on the mock while a client in another process reads streams.

    python tools/bench_stream.py [--requests 40] [--concurrency 8] [--tokens 50 450] [--delay-ms 0] [--rounds 15]

Prints, for answers of each length, the median and the least of all rounds in microseconds of CPU a token: engine,
hand-over, HTTP and the requests themselves; and from two lengths, what a token costs and what a request does. With
`--delay-ms` a step takes as long as one of a model does, so that each token is written alone; without it several
steps share an event. Also the time between a client's events.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
_PROMPT = "Once upon a time there was a hen"  # 32 bytes are 32 tokens of the mock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[50, 450])
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--backend", default="mock", help="mock, or kylin or llama on the demo model")
    parser.add_argument(
        "--switch-ms", type=float, help="the interpreter's switch interval (that of cllm serve)"
    )
    parser.add_argument("--client-of", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client_of:
        asyncio.run(_client(args))
    else:
        _measure(args)


def _measure(args: argparse.Namespace) -> None:
    from cllm import LLM
    from cllm.backends.mock import MockBackend, MockScript
    from cllm.serve import SWITCH_INTERVAL_S, _listen, spare_collections
    from cllm.server.app import make_app
    from cllm.server.draining import DrainingServer
    from cllm.server.service import Service

    sys.setswitchinterval(SWITCH_INTERVAL_S if args.switch_ms is None else args.switch_ms / 1000)
    service = Service("mock")
    with LLM("demo", backend=args.backend, max_num_seqs=args.concurrency) as llm:
        backend = llm._engine._executor.backend
        if isinstance(backend, MockBackend):
            letters = {length: ord("a") + length % 26 for length in range(4096)}  # no character in pieces
            backend.script = MockScript(delay=args.delay_ms / 1000, tokens=letters)
        service.attach(llm)
        spare_collections()
        listener = _listen("127.0.0.1", 0)
        server = DrainingServer(make_app(service), service, drain_seconds=1)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        port = str(listener.getsockname()[1])
        command = [sys.executable, "tools/bench_stream.py", *sys.argv[1:], "--client-of", port]
        try:
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as client:
                rounds = [
                    [_round(client, args, num_tokens) for num_tokens in args.tokens]
                    for _ in range(args.rounds + 1)
                ][1:]  # the first one warms up
                client.stdin.close()
        finally:
            server.should_exit = True
            thread.join()
    print(
        f"{args.backend}, {args.requests} requests, {args.concurrency} at a time, steps of {args.delay_ms:g} ms"
    )
    costs = []
    for num_tokens, of_length in zip(args.tokens, zip(*rounds, strict=True), strict=True):
        cpu, seconds, gaps = zip(*of_length, strict=True)
        costs.append(statistics.median(cpu))
        print(
            f"{num_tokens} tokens: median {costs[-1]:.1f}, least {min(cpu):.1f} microseconds of CPU a token; "
            f"{args.requests * num_tokens / statistics.median(seconds):.0f} tokens/s; "
            f"between events median {statistics.median(g[0] for g in gaps):.2f} ms, "
            f"99 % {statistics.median(g[1] for g in gaps):.2f} ms"
        )
    if len(costs) == 2:
        (short, long), (few, many) = costs, args.tokens
        token = (long * many - short * few) / (many - few)
        print(f"a token {token:.1f}, a request {few * (short - token):.0f} microseconds of CPU")


def _round(
    client: subprocess.Popen[str], args: argparse.Namespace, num_tokens: int
) -> tuple[float, float, tuple[float, float]]:
    """CPU of this process in microseconds a token, seconds, (median, 99 %) of the gaps between events in ms."""
    cpu, started = time.process_time(), time.perf_counter()
    client.stdin.write(f"{num_tokens}\n")
    client.stdin.flush()
    found = json.loads(client.stdout.readline())
    cpu, seconds = time.process_time() - cpu, time.perf_counter() - started
    assert found["tokens"] == args.requests * num_tokens, found
    return 1e6 * cpu / found["tokens"], seconds, (found["gap"], found["gap99"])


async def _client(args: argparse.Namespace) -> None:
    """A round for each line on stdin, which is the answers' length; a line of JSON after each."""
    loop = asyncio.get_running_loop()
    streams = [await asyncio.open_connection("127.0.0.1", args.client_of) for _ in range(args.concurrency)]
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        todo, gaps, counts = list(range(args.requests)), [], []
        await asyncio.gather(*(_ask(*stream, int(line), todo, gaps, counts) for stream in streams))
        gaps.sort()
        gaps = gaps or [0.0]
        found = {"tokens": sum(counts), "gap": gaps[len(gaps) // 2], "gap99": gaps[len(gaps) * 99 // 100]}
        print(json.dumps(found), flush=True)


async def _ask(reader, writer, num_tokens, todo, gaps, counts) -> None:
    """Sends requests over one connection until none is left to do."""
    body = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    while todo:
        prompt = f"{todo.pop():04d}" + _PROMPT[4:]
        data = json.dumps(body | {"prompt": prompt}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        await reader.readuntil(b"\r\n\r\n")
        reply, last = b"", None
        while not reply.endswith(b"0\r\n\r\n"):
            chunk = await reader.read(65536)
            if not chunk:
                raise SystemExit("the server closed the connection")
            now = time.perf_counter()
            if last is not None:
                gaps.append(1000 * (now - last))
            last = now
            reply += chunk
        counts.append(int(re.search(rb'"completion_tokens":(\d+)', reply)[1]))


if __name__ == "__main__":
    main()
