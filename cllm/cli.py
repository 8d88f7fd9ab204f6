"""What the commands share: flags with their environment variables, and how a command ends.

It turns command lines into checked values and errors into one line on stderr. It must not know models or any
one command. Exit status: 0 done, 1 the work failed, 2 refused before loading (usage, configuration), 130
interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from .config import BACKENDS, KERNELS, KV_CACHE_DTYPES, EngineConfig, make_config
from .errors import CLLMError, ConfigError, InvalidRequestError
from .hub import is_hub_name
from .params import SamplingParams

logger = logging.getLogger(__name__)

# (field, flags, what argparse needs besides)
_Flags = list[tuple[str, tuple[str, ...], dict[str, Any]]]

_ENGINE_FLAGS: _Flags = [
    (
        "model",
        ("-m", "--model"),
        {
            "metavar": "MODEL",
            "help": "GGUF file, USER/REPO[:QUANT] on Hugging Face, or demo, the model in the package (default)",
        },
    ),
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
    (
        "num_threads",
        ("-t", "--threads"),
        {"type": int, "metavar": "N", "help": "default: all cores; 1 with all layers on a GPU"},
    ),
    (
        "num_gpu_layers",
        ("-ngl", "--n-gpu-layers"),
        {"type": int, "metavar": "N", "help": "layers on the GPU, -1 for all (llama)"},
    ),
    ("kv_cache_dtype", ("--kv-cache-dtype",), {"choices": KV_CACHE_DTYPES, "help": "default: f16"}),
    (
        "enable_prefix_caching",
        ("--no-prefix-caching",),
        {"action": "store_const", "const": False, "help": "keep nothing of finished requests"},
    ),
    ("kernels", ("--kernels",), {"choices": KERNELS, "help": "kylin's kernels (default: auto)"}),
    ("max_queue", ("--max-queue",), {"type": int, "metavar": "N", "help": "requests that may wait"}),
]


_SAMPLING_FLAGS: _Flags = [
    (
        "max_tokens",
        ("-n", "--max-tokens"),
        {"type": int, "default": 256, "metavar": "N", "help": "end the answer there at the latest (256)"},
    ),
    (
        "temperature",
        ("--temp",),
        {"type": float, "default": 0.0, "metavar": "T", "help": "0, the default, is greedy"},
    ),
    ("top_k", ("--top-k",), {"type": int, "metavar": "K", "help": "sample from the K likeliest tokens"}),
    ("top_p", ("--top-p",), {"type": float, "metavar": "P", "help": "from the likeliest that sum to P"}),
    (
        "min_p",
        ("--min-p",),
        {"type": float, "metavar": "P", "help": "from those above P times the likeliest"},
    ),
    (
        "repetition_penalty",
        ("--repeat-penalty",),
        {"type": float, "metavar": "X", "help": "1, the default: none"},
    ),
    ("seed", ("-s", "--seed"), {"type": int, "metavar": "N", "help": "of the random numbers"}),
    (
        "stop",
        ("--stop",),
        {"action": "append", "metavar": "TEXT", "help": "end before TEXT; may be repeated"},
    ),
]
_FLAGS = {field: "/".join(flags) for field, flags, _ in _ENGINE_FLAGS + _SAMPLING_FLAGS}


class CommandParser(argparse.ArgumentParser):
    """A parser that takes no abbreviations and raises `ConfigError` for a wrong command line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each field of `EngineConfig`. Each also reads `CLLM_<FIELD NAME>`; the flag wins."""
    group = parser.add_argument_group("engine", "each also reads an environment variable CLLM_<FIELD NAME>")
    model = group.add_mutually_exclusive_group()
    for field, flags, options in _ENGINE_FLAGS:
        (model if field == "model" else group).add_argument(*flags, dest=field, default=None, **options)
    model.add_argument(
        "-hf",
        dest="model",
        type=_hub_name,
        default=None,
        metavar="USER/REPO[:QUANT]",
        help="as -m, as llama.cpp has it",
    )


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `sampling_params` reads."""
    group = parser.add_argument_group("sampling")
    for field, flags, options in _SAMPLING_FLAGS:
        group.add_argument(*flags, dest=field, **options)


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `-q` and `-v`."""
    parser.add_argument("-q", "--quiet", action="store_true", help="no statistics")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what happens")


def engine_config(args: argparse.Namespace, **defaults: Any) -> EngineConfig:
    """The configuration of the flags given, else of the environment, else of `defaults`. Raises `ConfigError`."""
    settings = dict(defaults)
    for field, _, options in _ENGINE_FLAGS:
        value = getattr(args, field)
        if value is None:
            value = _from_environment(field, options.get("type", _truth if "action" in options else str))
        if value is not None:
            settings[field] = value
    return make_config(settings)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The sampling that the flags describe. Raises `ConfigError`, since it is refused before loading."""
    given = {field: getattr(args, field) for field, _, _ in _SAMPLING_FLAGS}
    for stop in args.stop or ():
        check_text("argument --stop", stop)
    try:
        return SamplingParams(**{field: value for field, value in given.items() if value is not None})
    except InvalidRequestError as error:
        raise ConfigError(str(error), field=error.field) from None


def check_text(source: str, text: str) -> None:
    """Raises `ConfigError` for text that came from bytes which are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{source}: expected UTF-8, found another byte at character {error.start}"
        ) from None


@contextlib.contextmanager
def naming_flags(args: argparse.Namespace) -> Iterator[None]:
    """Errors raised inside that are about a field name the flag or the environment variable that set it."""
    try:
        yield
    except (ConfigError, InvalidRequestError) as error:
        if error.field in _FLAGS:
            variable = _variable(error.field)
            from_environment = getattr(args, error.field, None) is None and variable in os.environ
            source = variable if from_environment else f"argument {_FLAGS[error.field]}"
            error.args = (f"{source}: {error}",)
        raise


def start_logging(*, verbose: bool) -> None:
    """Sends the log to stderr with `verbose`; otherwise nothing, since a failure ends in a line of its own."""
    level = logging.INFO if verbose else logging.CRITICAL
    logging.basicConfig(level=level, stream=sys.stderr, format="%(relativeCreated)d ms %(name)s: %(message)s")


def say(text: str) -> None:
    """Writes a line to stderr, if anybody listens there."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def say_error(error: BaseException | str) -> None:
    """Writes an error as one line."""
    known = isinstance(error, str | CLLMError | OSError)
    text = str(error) if known else f"{type(error).__name__}: {error} (-v tells where)"
    if len(text) > _LONGEST_LINE:
        text = f"{text[: _LONGEST_LINE // 2]} ... {text[-_LONGEST_LINE // 2 :]}"
    say("error: " + printable(text))


def printable(text: str) -> str:
    """`text` on one line, with line ends and control characters as escapes: it may come from a stranger's file."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def run_command(main: Callable[[list[str] | None], int], argv: list[str] | None = None) -> NoReturn:
    """Runs a command and exits with its status; whatever goes wrong becomes one line on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer may hold what the terminal's encoding lacks
    try:
        status = main(argv)
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would break into the exit
        status = 130
    except BrokenPipeError:  # the reader of our output went away, as `head` does: nothing is left to say
        status = 1
    except Exception as error:
        logger.info("this ended the command", exc_info=error)
        say_error(error)
        status = 2 if isinstance(error, ConfigError) else 1
    _drop_unwritten_output()
    sys.exit(status)


_LONGEST_LINE = 1000  # characters


def _variable(field: str) -> str:
    return f"CLLM_{field.upper()}"


def _from_environment(field: str, convert: Callable[[str], Any]) -> Any:
    text = os.environ.get(_variable(field))
    try:
        return text if text is None else convert(text)
    except ValueError:
        expected = "1 or 0" if convert is _truth else "a whole number"
        raise ConfigError(f"expected {expected}, found {text!r}", field=field) from None


def _truth(text: str) -> bool:
    if text.lower() not in ("1", "true", "0", "false"):
        raise ValueError
    return text.lower() in ("1", "true")


def _hub_name(text: str) -> str:
    if not is_hub_name(text):
        raise argparse.ArgumentTypeError(f"expected USER/REPO or USER/REPO:QUANT, found {text!r}")
    return text


def _drop_unwritten_output() -> None:
    """Where stdout is broken, Python's own flush at exit would fail again, loudly."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
