"""`cllm <command>`: hands over to the module of that name."""

from __future__ import annotations

import importlib
import sys

from .cli import run_command

COMMANDS = {"run": "generate text"}


def main() -> None:
    """The `cllm` script."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in COMMANDS:
        listing = "\n".join(f"  {command:10}{job}" for command, job in COMMANDS.items())
        wanted_help = name in ("-h", "--help")
        print(f"usage: cllm <command> ...\n\n{listing}", file=sys.stdout if wanted_help else sys.stderr)
        sys.exit(0 if wanted_help else 2)
    run_command(importlib.import_module(f"cllm.{name}").main, sys.argv[2:])


if __name__ == "__main__":
    main()
