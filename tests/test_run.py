"""`cllm run`: what goes to stdout, interrupts and closed pipes that break nothing."""

from __future__ import annotations

import dataclasses
import gc
import io
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_helpers import (
    ENDLESS,
    SLOW_MOCK,
    Done,
    InterruptAt,
    clear_environment,
    ctrl_c_works,
    patch_mock,
    run,
    write_chat_vocabulary,
)

import cllm.run
from cllm import LLM, EngineConfig, RequestOutput, SamplingParams
from cllm.backends import mock
from cllm.backends.mock import MockScript


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_environment(monkeypatch)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> MockScript:
    """What the mock of the next `LLM` does."""
    return patch_mock(monkeypatch, MockScript(tokens=ENDLESS))


@pytest.fixture
def type_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """`type_in(data)`: what the command finds on stdin, which is no terminal."""
    return lambda data: monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.fixture
def mocked(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """`mocked(*argv)`: `cllm run --backend mock ARGV`."""
    return lambda *argv: run(capsys, "--backend", "mock", *argv)


@pytest.fixture
def chat_file(tmp_path: Path) -> str:
    return str(write_chat_vocabulary(tmp_path / "chat.gguf"))


def answer_of(prompt: str, **params: Any) -> str:
    with LLM(backend="mock", max_num_seqs=1) as llm:
        return llm.generate(prompt, SamplingParams(**params))[0].outputs[0].text


# --- Prompts in, answers out --------------------------------------------------------------------------------


@pytest.mark.usefixtures("script")
def test_the_answer_alone_goes_to_stdout_and_statistics_to_stderr(mocked: Callable[..., Done]) -> None:
    done = mocked("-n", "5", "ab")
    assert (done.status, done.out) == (0, "cdefg\n")
    assert done.err.startswith("prompt 2 tokens, ")
    assert "; decode 5 tokens, " in done.err
    assert done.err.endswith("; length | mock\n")
    assert mocked("-n", "5", "-q", "ab") == (0, "cdefg\n", "")


@pytest.mark.usefixtures("script")
def test_prompts_come_from_arguments_files_and_stdin(
    mocked: Callable[..., Done], type_in: Callable[[bytes], None], tmp_path: Path
) -> None:
    (tmp_path / "one").write_bytes("é\n\n".encode())
    (tmp_path / "two").write_bytes(b"\0")
    done = mocked(
        "-q", "-n1", "--json", "-f", str(tmp_path / "one"), "-p", "-", "first", "-f", str(tmp_path / "two")
    )
    prompts = [json.loads(line)["prompt"] for line in done.out.splitlines()]
    assert prompts == ["first", "é\n", "-", "\0"]
    type_in(b"from stdin\n")
    assert json.loads(mocked("-q", "-n1", "--json").out)["prompt"] == "from stdin"
    assert json.loads(mocked("-q", "-n1", "--json", "argument").out)["prompt"] == "argument"


@pytest.mark.usefixtures("script")
def test_several_prompts_are_one_batch_in_order(mocked: Callable[..., Done]) -> None:
    done = mocked("-n", "3", "-p", "ab", "-p", "c" * 30, "-p", "d")
    assert done.out == f"abcde\n\n{'c' * 30}efg\n\ndbcd\n\n"
    assert done.err.startswith("batch of 3 in ")
    assert "prompt 33 tokens" in done.err
    assert "decode 9 tokens" in done.err


@pytest.mark.usefixtures("script")
def test_json_has_the_fields_of_request_output(mocked: Callable[..., Done]) -> None:
    record = json.loads(mocked("--json", "-n", "2", "ab").out)
    assert list(record) == [field.name for field in dataclasses.fields(RequestOutput)]
    assert record["prompt_token_ids"] == [97, 98]
    assert record["outputs"][0]["token_ids"] == [99, 100]
    assert record["outputs"][0]["text"] == "cd"
    assert record["outputs"][0]["finish_reason"] == "length"
    assert record["error"] is None


def test_json_is_one_ascii_line_a_prompt_whatever_the_text(mocked: Callable[..., Done]) -> None:
    done = mocked(
        "--json", "-q", "--temp", "3", "-s", "1", "-p", "\u2028\r\n", "-p", "\x1b[31m", "-p", "日本"
    )
    assert done.out.isascii()
    assert [json.loads(line)["prompt"] for line in done.out.splitlines()] == [
        "\u2028\r\n",
        "\x1b[31m",
        "日本",
    ]


def test_flags_reach_the_sampling_params(
    monkeypatch: pytest.MonkeyPatch, mocked: Callable[..., Done]
) -> None:
    seen: list[SamplingParams] = []
    monkeypatch.setattr(cllm.run, "_answer_one", lambda llm, prompt, params, *rest: seen.append(params) or 0)
    mocked("x")
    mocked(
        *("-n", "7", "--temp", "0.5", "--top-k", "3", "--top-p", "0.9", "--min-p", "0.1"),
        *("--repeat-penalty", "1.1", "--seed", "5", "--stop", "a", "--stop", "\n", "x"),
    )
    assert seen[0] == SamplingParams(max_tokens=256, temperature=0)
    assert seen[1] == SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        seed=5,
        stop=("a", "\n"),
    )


@pytest.mark.usefixtures("script")
def test_a_chat_prints_its_content(mocked: Callable[..., Done], chat_file: str) -> None:
    with LLM(chat_file, backend="mock") as llm:
        params = SamplingParams(temperature=0, max_tokens=4)
        chats = [[{"role": "user", "content": text}] for text in ("one", "two")]
        thinking = llm.chat(chats, params)
        (at_once,) = llm.chat(chats[0], params, chat_template_kwargs={"enable_thinking": False})
    one, two = (output.outputs[0].content for output in thinking)
    common = ("-m", chat_file, "-q", "-n4", "-cnv")
    assert mocked(*common, "one").out == f"{one}\n"
    assert mocked(*common, "--no-think", "one").out == f"{at_once.outputs[0].content}\n" != f"{one}\n"
    assert mocked(*common, "-p", "one", "-p", "two").out == f"> one\n{one}\n\n> two\n{two}\n\n"
    assert json.loads(mocked(*common, "--json", "--no-think", "one").out)["prompt"] == at_once.prompt


def test_the_environment_sets_engine_fields_and_flags_win(
    monkeypatch: pytest.MonkeyPatch, mocked: Callable[..., Done]
) -> None:
    seen: list[EngineConfig] = []
    monkeypatch.setattr(cllm.run, "_answer_one", lambda llm, *rest: seen.append(llm.config) or 0)
    monkeypatch.setenv("CLLM_CONTEXT_LENGTH", "77")
    monkeypatch.setenv("CLLM_MAX_NUM_SEQS", "3")
    mocked("x")
    mocked("-c", "99", "x")
    assert [(config.context_length, config.max_num_seqs) for config in seen] == [(77, 3), (99, 3)]


@pytest.mark.parametrize(("num_prompts", "expected"), [(1, 1), (3, 3), (70, 64)])
def test_as_many_prompts_as_can_run_at_once(
    monkeypatch: pytest.MonkeyPatch, mocked: Callable[..., Done], num_prompts: int, expected: int
) -> None:
    seen: list[int] = []
    for name in ("_answer_one", "_answer_all"):
        monkeypatch.setattr(cllm.run, name, lambda llm, *rest: seen.append(llm.config.max_num_seqs) or 0)
    mocked(*["-p", "x"] * num_prompts)
    assert seen == [expected]


def test_the_cllm_script_names_its_commands() -> None:
    def call(*argv: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "cllm", *argv], capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stdout, done.stderr

    status, out, err = call("rnu", "prompt")
    assert (status, out) == (2, "")
    assert err.startswith("error: unknown command 'rnu'; expected one of run")
    assert call("--help")[0] == 0
    assert call("run", "--backend", "mock", "-q", "-n", "0", "prompt") == (0, "\n", "")


# --- Interrupts and closed pipes ----------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["generate", "stream"])
def test_an_interrupt_ends_the_request_and_the_engine_answers_on(script: MockScript, call: str) -> None:
    long = SamplingParams(temperature=0, max_tokens=1000)
    short = SamplingParams(temperature=0, max_tokens=5)
    with LLM(backend="mock", max_num_seqs=2) as llm:
        expected = llm.generate("prompt", short)[0].outputs[0].text
        backend = llm._engine._executor.backend
        script.delay, script.delays = 0.01, InterruptAt(backend.num_steps + 4)
        with ctrl_c_works(), pytest.raises(KeyboardInterrupt):
            list(llm.stream("prompt", long)) if call == "stream" else llm.generate(["prompt", "other"], long)
        num_steps = backend.num_steps
        assert llm.generate("prompt", short)[0].outputs[0].text == expected
        assert (
            backend.num_steps - num_steps < 10
        )  # nothing else ran on: a request that did would go for 1,000
        llm.close()
        llm._scheduler.check_integrity()
        assert not llm._scheduler.running


def test_ctrl_c_keeps_the_answer_so_far(mocked: Callable[..., Done], script: MockScript) -> None:
    script.delay, script.delays = 0.01, InterruptAt(3)
    with ctrl_c_works():
        done = mocked("-n", "20", "ab")
    assert (done.status, done.err) == (130, "")
    assert done.out[-1] == "\n"
    assert "cdefghijklmnopqrstu".startswith(done.out[:-1])


def test_ctrl_c_during_the_load(monkeypatch: pytest.MonkeyPatch, mocked: Callable[..., Done]) -> None:
    monkeypatch.setattr(mock, "load_mock", lambda config: signal.raise_signal(signal.SIGINT))
    with ctrl_c_works():
        assert mocked("prompt") == (130, "", "")


@pytest.mark.parametrize("kernels", ["numpy", "plain"])
def test_close_gives_the_memory_back(tiny_model: Callable[..., Path], kernels: str) -> None:
    llm = LLM(str(tiny_model()), kernels=kernels, max_num_seqs=1)
    backend = llm._engine._executor.backend
    weights = backend._weights if kernels == "numpy" else backend._model.weights
    array = weakref.ref(weights.token_embd.data)
    del weights
    llm.close()
    gc.collect()
    assert array() is None


def start_slowly(*argv: str, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", SLOW_MOCK, "--backend", "mock", *argv]
    return subprocess.Popen(command, stderr=subprocess.PIPE, **options)


def test_a_closed_pipe_ends_quietly() -> None:
    with start_slowly("-n", "3000", "prompt", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1) == b"a"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "wb") as full, start_slowly("-n", "3", "prompt", stdout=full) as process:
        assert process.stderr is not None
        assert process.stderr.read() == b"error: [Errno 28] No space left on device\n"
        assert process.wait(30) == 1


def test_closed_streams_and_a_narrow_encoding() -> None:
    def shell(redirection: str) -> tuple[int, bytes]:
        command = f"{sys.executable} -m cllm.run --backend mock --temp 2 -s 3 -n 50 prompt {redirection}"
        environment = {
            **os.environ,
            "PYTHONIOENCODING": "ascii",
            "PYTHONPATH": str(Path(cllm.__file__).parent.parent),
        }
        done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, env=environment, timeout=60)
        return done.returncode, done.stdout

    assert shell(">&-") == (0, b"")
    status, out = shell("2>&-")
    assert status == 0
    assert out.isascii()
    assert b"tokens/s" not in out


def test_verbose_logs_and_tells_where() -> None:
    with start_slowly("-n", "2", "-v", "prompt", stdout=subprocess.DEVNULL) as process:
        assert process.stderr is not None
        log = process.stderr.read().decode()
    assert "loading EngineConfig(" in log
    assert log.splitlines()[-1].startswith("prompt 6 tokens")
