"""What the commands share: the engine's flags, their environment variables, and how errors end a command.

Exit status: 0 done, 1 the work failed, 2 refused before loading, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from .config import BACKENDS, KERNELS, KV_CACHE_DTYPES, EngineConfig, make_config
from .errors import CLLMError, ConfigError, InvalidRequestError

# (field of EngineConfig, flags, what argparse needs besides)
_ENGINE_FLAGS: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("model", ("-m", "--model"), {"metavar": "FILE", "help": "path of a GGUF file"}),
    ("backend", ("--backend",), {"choices": BACKENDS, "help": "what computes (default: kylin)"}),
    ("context_length", ("-c", "--ctx-size"), {"type": int, "metavar": "N", "help": "tokens of one sequence"}),
    ("max_num_seqs", ("-np", "--parallel"), {"type": int, "metavar": "N", "help": "sequences at once"}),
    (
        "max_num_batched_tokens",
        ("-b", "--batch-size"),
        {"type": int, "metavar": "N", "help": "tokens of a step"},
    ),
    (
        "kv_cache_tokens",
        ("--kv-cache-tokens",),
        {"type": int, "metavar": "N", "help": "tokens of the KV cache"},
    ),
    ("num_threads", ("-t", "--threads"), {"type": int, "metavar": "N", "help": "default: all cores"}),
    (
        "num_gpu_layers",
        ("-ngl", "--n-gpu-layers"),
        {"type": int, "metavar": "N", "help": "layers on the GPU, -1 for all (llama)"},
    ),
    ("kv_cache_dtype", ("--kv-cache-dtype",), {"choices": KV_CACHE_DTYPES, "help": "default: f16"}),
    ("kernels", ("--kernels",), {"choices": KERNELS, "help": "kylin's kernels (default: auto)"}),
    ("max_queue", ("--max-queue",), {"type": int, "metavar": "N", "help": "requests that may wait"}),
]


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each field of `EngineConfig`. Each also reads `CLLM_<FIELD NAME>`; the flag wins."""
    group = parser.add_argument_group("engine", "each also reads an environment variable CLLM_<FIELD NAME>")
    for field, flags, options in _ENGINE_FLAGS:
        group.add_argument(*flags, dest=field, default=None, **options)


def engine_config(args: argparse.Namespace, **defaults: Any) -> EngineConfig:
    """The configuration of the flags given, else of the environment, else of `defaults`."""
    settings = dict(defaults)
    for field, _, options in _ENGINE_FLAGS:
        value, variable = getattr(args, field), f"CLLM_{field.upper()}"
        if value is None and variable in os.environ:
            value = os.environ[variable]
            if options.get("type") is int:
                try:
                    value = int(value)
                except ValueError:
                    raise ConfigError(f"{variable} should be a whole number; found {value!r}") from None
        if value is not None:
            settings[field] = value
    return make_config(settings)


def run_command(main: Callable[[list[str] | None], int], argv: list[str] | None = None) -> NoReturn:
    """Runs a command and exits with its status; a `CLLMError` becomes one line on stderr."""
    try:
        status = main(argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # the reader of our output went away, as `head` does: nothing is left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except CLLMError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 2 if isinstance(error, ConfigError | InvalidRequestError) else 1
    sys.exit(status)
