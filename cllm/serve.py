"""`cllm serve`: the HTTP server as a process: its address, its model, its signals.

It must not know routes or shapes of replies.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from .cli import (
    CommandParser,
    add_engine_flags,
    add_output_flags,
    engine_config,
    naming_flags,
    run_command,
    say,
    start_logging,
)
from .config import EngineConfig
from .errors import ConfigError
from .llm import LLM

if TYPE_CHECKING:
    from uvicorn import Server

    from .server.service import Service

logger = logging.getLogger(__name__)

# Engine and event loop take turns in Python. Whoever waits for the other's turn to end waits this long, in seconds,
# while the other computes in Python. Measured with tools/bench_stream.py on two busy cores, 8 streams, medians of five
# runs in shuffled order, for 5, 1, 0.5 and 0.1 ms: 99 % of the gaps between tokens were below 6.4, 6.2, 4.6 and 6.0 ms
# on a mock with steps of 2 ms (3,024, 3,061, 3,118 and 2,981 tokens/s), and below 7.4, 8.6, 7.3 and 8.4 ms on the demo
# model (1,567, 1,559, 1,607 and 1,487 tokens/s). Shorter turns cost more than they save.
SWITCH_INTERVAL_S = 0.0005


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status. Raises `CLLMError` for what goes wrong."""
    args = _parser().parse_args(argv)
    start_logging(verbose=args.verbose)
    if not args.verbose and not args.quiet:
        logging.getLogger().setLevel(logging.WARNING)  # a server has no other way to tell what went wrong
    with naming_flags(args):
        _check_usage(args)
        config = engine_config(args)
    try:
        from .server.app import make_app
        from .server.draining import DrainingServer
        from .server.service import Service
    except ImportError as error:
        raise ConfigError(
            f"the server needs further packages: pip install 'cllm[server]' ({error})"
        ) from None
    service = Service(_model_id(config), max_queue=config.max_queue)
    app = make_app(
        service,
        api_key=args.api_key,
        cors_origins=args.cors_origins or (),
        max_body=args.max_body,
        has_benchmark=args.enable_benchmark,
    )
    with _listen(args.host, args.port) as listener:
        server = DrainingServer(app, service, args.drain_seconds, access_log=args.verbose)
        return _serve(server, service, config, listener, quiet=args.quiet)


def _serve(
    server: Server, service: Service, config: EngineConfig, listener: socket.socket, *, quiet: bool
) -> int:
    """Answers until a signal comes. The model loads meanwhile, so that `/health` can tell."""
    failures: list[BaseException] = []
    host, port = listener.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def load() -> None:
        try:
            llm = LLM(config)
            llm.warmup()
            spare_collections()
        except BaseException as error:
            failures.append(error)
            server.should_exit = True
            return
        service.attach(llm)
        if not quiet:
            say(f"serving {service.model_id} ({llm.info.description}) at {address}")

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # uvicorn raises the signal again when it is done: SIGTERM is a clean end here.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    threading.Thread(target=load, name="cllm-load", daemon=True).start()
    try:
        server.run(sockets=[listener])
    finally:
        service.close()
    if failures:
        raise failures[0]
    return 0


def spare_collections() -> None:
    """Of the garbage that lies in circles. What is loaded stays: looking through it would hold all streams up for 70 ms
    now and then. The young are looked through every 20,000 objects instead of 700: 3 to 10 % of a mock's step."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
        # Accepted connections inherit it. asyncio sets it itself only where a socket names its protocol, which this
        # one does not; without it the second write of a reply waits up to 40 ms for the client's acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {host}, port {port}: {error}; choose another --host or --port"
        ) from None


def _model_id(config: EngineConfig) -> str:
    """The name under which clients ask for the model: that of its file without the ending."""
    return Path(config.model).name.removesuffix(".gguf")


def _check_usage(args: argparse.Namespace) -> None:
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"argument --port: expected a number from 0 to 65535, found {args.port}")
    if args.max_body < 1:
        raise ConfigError(f"argument --max-body: expected a number of bytes, found {args.max_body}")
    if args.drain_seconds < 0:
        raise ConfigError(f"argument --drain-seconds: expected at least 0, found {args.drain_seconds}")
    if args.api_key is not None and not (
        args.api_key.isascii() and args.api_key.isprintable() and args.api_key
    ):
        raise ConfigError("argument --api-key: expected printable ASCII characters, at least one")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="cllm serve",
        description="Serves a model over HTTP with OpenAI's API and its own; GET / lists the routes.",
    )
    get = os.environ.get  # argparse converts a default that is a text as it does a flag
    parser.add_argument(
        "--host",
        default=get("CLLM_HOST", "127.0.0.1"),
        help="address to listen at (127.0.0.1: this machine only)",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=get("CLLM_PORT", "8000"),
        metavar="N",
        help="port (8000); 0 takes a free one",
    )
    parser.add_argument(
        "--api-key",
        default=get("CLLM_API_KEY"),
        metavar="KEY",
        help="what clients must send as a bearer token",
    )
    parser.add_argument(
        "--max-body",
        type=int,
        default=get("CLLM_MAX_BODY", str(16 * 2**20)),
        metavar="BYTES",
        help="longest request (16 MiB)",
    )
    parser.add_argument(
        "--drain-seconds",
        type=int,
        default=get("CLLM_DRAIN_SECONDS", "30"),
        metavar="S",
        help="at SIGTERM, let answers go on for so long (30)",
    )
    parser.add_argument(
        "--cors-origin",
        dest="cors_origins",
        action="append",
        default=(get("CLLM_CORS_ORIGIN") or "").split() or None,
        metavar="ORIGIN",
        help="let pages of this origin use the server, * for all; may be repeated",
    )
    parser.add_argument("--enable-benchmark", action="store_true", help="offer POST /benchmark")
    add_output_flags(parser)
    add_engine_flags(parser)
    return parser


if __name__ == "__main__":
    run_command(main)
