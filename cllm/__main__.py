"""`cllm <command>`: hands over to the module of that name. It knows the commands' names and nothing else of them."""

from __future__ import annotations

import importlib
import sys

from .cli import run_command
from .errors import ConfigError

COMMANDS = {
    "run": "generate text",
    "compare": "tell how far two engines lie apart",
    "bench": "measure speed",
    "serve": "serve a model over HTTP",
    "models": "find, fetch and describe model files",
}


def main() -> None:
    """The `cllm` script."""
    run_command(_dispatch, sys.argv[1:])


def _dispatch(argv: list[str] | None) -> int:
    name, *rest = argv or [""]
    if name in ("-h", "--help"):
        listing = "\n".join(f"  {command:10}{job}" for command, job in COMMANDS.items())
        print(f"usage: cllm COMMAND ...\n\n{listing}\n\ncllm COMMAND --help tells more")
        return 0
    if name not in COMMANDS:
        found = f"unknown command {name!r}" if name else "no command"
        raise ConfigError(f"{found}; expected one of {', '.join(COMMANDS)}; see cllm --help")
    # Imported here, where an interrupt is caught.
    status: int = importlib.import_module(f"cllm.{name}").main(rest)
    return status


if __name__ == "__main__":
    main()
