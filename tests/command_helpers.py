"""What the tests of commands share: running one in this process, a model file that the mock can chat with, Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from gguf import GGUFValueType
from gguf_builder import Typed, write_gguf

from cllm.backends import mock
from cllm.backends.mock import MockScript, byte_vocabulary
from cllm.cli import run_command
from cllm.run import main

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is false %}at once: {% endif %}"
)

ENDLESS = {n: 97 + n % 26 for n in range(5000)}  # a mock's tokens: letters, and no end of the text among them

# A program that runs `cllm run` on a mock which needs 10 ms a token and never ends.
SLOW_MOCK = """
import sys
from cllm.backends import mock
from cllm.backends.mock import MockScript
from cllm.cli import run_command
from cllm.run import main
load, script = mock.load_mock, MockScript(delay=0.01, tokens={n: 97 for n in range(5000)})
mock.load_mock = lambda config: load(config, script)
run_command(main, sys.argv[1:])
"""


class Done(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The only line on stderr, which must be an error."""
        assert self.err.startswith("error: "), self.err
        assert self.err.count("\n") == 1, self.err
        return self.err


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> Done:
    """`cllm run ARGV` in this process."""
    return run_main(capsys, main, *argv)


def run_main(
    capsys: pytest.CaptureFixture[str], command: Callable[[list[str] | None], int], *argv: str
) -> Done:
    """A command's `main` with ARGV in this process."""
    with pytest.raises(SystemExit) as exit:
        run_command(command, list(argv))
    captured = capsys.readouterr()
    assert isinstance(exit.value.code, int)
    return Done(exit.value.code, captured.out, captured.err)


def patch_mock(monkeypatch: pytest.MonkeyPatch, script: MockScript) -> MockScript:
    """The mock of the next `LLM` does as `script` says; returns it."""
    load = mock.load_mock
    monkeypatch.setattr(mock, "load_mock", lambda config: load(config, script))
    return script


def clear_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No `CLLM_*` variable of the person who runs the tests is seen."""
    for name in os.environ:
        if name.startswith("CLLM_"):
            monkeypatch.delenv(name)


def write_chat_vocabulary(path: Path) -> Path:
    """A file without weights: bytes, the three control tokens and a chat template."""
    merges = Typed(GGUFValueType.STRING, [])  # an empty list would be one of integers
    template = {"tokenizer.ggml.merges": merges, "tokenizer.chat_template": TEMPLATE}
    return write_gguf(path, byte_vocabulary() | template)


class InterruptAt(dict[int, float]):
    """Delays of a mock's script; in one step, Ctrl-C is pressed."""

    def __init__(self, step: int) -> None:
        self.step = step

    def get(self, step: int, default: Any = None) -> Any:
        if step == self.step:
            ident = threading.main_thread().ident
            assert ident is not None
            signal.pthread_kill(ident, signal.SIGINT)
        return default


@contextlib.contextmanager
def ctrl_c_works() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt here, which a test runner may have switched off."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def resident_bytes() -> int:
    """Memory of this process that is in use, 0 where the system does not tell."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0
