"""`cllm bench`: measurements that anyone can repeat. Each kind is one file here."""

from __future__ import annotations

import importlib
import sys

from ..errors import ConfigError

KINDS = {
    "speed": "tokens a second of the backends alone, beside the machine's ceilings",
    "http": "load on any server with OpenAI's API",
    "ladder": "where the throughput goes between the bare backend and HTTP streaming",
}


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    kind, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if kind in ("-h", "--help"):
        listing = "\n".join(f"  {name:10}{job}" for name, job in KINDS.items())
        print(f"usage: cllm bench KIND ...\n\n{listing}\n\ncllm bench KIND --help tells more")
        return 0
    if kind not in KINDS:
        found = f"unknown benchmark {kind!r}" if kind else "no benchmark"
        raise ConfigError(f"{found}; expected one of {', '.join(KINDS)}")
    status: int = importlib.import_module(f"cllm.bench.{kind}").main(rest)
    return status
