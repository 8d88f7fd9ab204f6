"""Hostile flags, files, streams and fields: one clear line each, the right exit status, and an engine that goes on."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_helpers import ENDLESS, Done, clear_environment, patch_mock, run, write_chat_vocabulary
from test_params import REFUSED

import cllm.run
from cllm import LLM, EngineConfig, InvalidRequestError, SamplingParams
from cllm.backends.mock import MockScript


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_environment(monkeypatch)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> MockScript:
    return patch_mock(monkeypatch, MockScript(tokens=ENDLESS))


@pytest.fixture
def mocked(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """`mocked(*argv)`: `cllm run --backend mock ARGV`."""
    return lambda *argv: run(capsys, "--backend", "mock", *argv)


@pytest.fixture
def type_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """`type_in(data)`: what the command finds on stdin, which is no terminal."""
    return lambda data: monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


HOSTILE = [  # (flags, what the line names)
    (["-n", "-1"], "argument -n/--max-tokens: max_tokens must be an integer of at least 0"),
    (["-n", "x"], "argument -n/--max-tokens: invalid int value: 'x'"),
    (["-n", "1.5"], "argument -n/--max-tokens"),
    (["-n", "9" * 5000], "argument -n/--max-tokens"),
    (["-n"], "argument -n/--max-tokens: expected one argument"),
    (["--temp", "-0.1"], "argument --temp: temperature must be"),
    (["--temp", "nan"], "argument --temp"),
    (["--temp", "1e999"], "argument --temp"),
    (["--temp", "hot"], "argument --temp"),
    (["--top-k", "-2"], "argument --top-k"),
    (["--top-k", "1.0"], "argument --top-k"),
    (["--top-p", "0"], "argument --top-p"),
    (["--top-p", "1.1"], "argument --top-p"),
    (["--min-p", "-1"], "argument --min-p"),
    (["--min-p", "nan"], "argument --min-p"),
    (["--repeat-penalty", "0"], "argument --repeat-penalty: repetition_penalty must be"),
    (["-s", "-1"], "argument -s/--seed"),
    (["-s", str(2**64)], "argument -s/--seed"),
    (["--stop", ""], "argument --stop"),
    (["--stop", "\udcff"], "argument --stop: expected UTF-8"),
    (["-p", "\udcff"], "the prompt: expected UTF-8, found another byte at character 0"),
    (["-p"], "argument -p/--prompt: expected one argument"),
    (["-f", "/nowhere"], "argument -f/--file: /nowhere: No such file"),
    (["-f", "/"], "argument -f/--file: /: Is a directory"),
    (["-f", "a\0b"], "argument -f/--file: a\\x00b: embedded null byte"),
    (["-f", "/dev/zero"], "a prompt has at most 1000 bytes; this is longer"),
    (["--no-think"], "argument --no-think: it sets a variable of the chat template, so it needs -cnv"),
    (["--backend", "cuda"], "argument --backend: invalid choice: 'cuda'"),
    (["-m", ""], "argument -m/--model: model should be the path of a GGUF file"),
    (["-c", "0"], "argument -c/--ctx-size: context_length should be a whole number from 1"),
    (["-c", "-5"], "argument -c/--ctx-size"),
    (["-c", str(2**80)], "argument -c/--ctx-size"),
    (["-np", "0"], "argument -np/--parallel"),
    (["-np", "many"], "argument -np/--parallel"),
    (["-b", "0"], "argument -b/--batch-size"),
    (
        ["-b", "1", "-np", "2"],
        "argument -b/--batch-size: max_num_batched_tokens (1) is below max_num_seqs (2)",
    ),
    (["--kv-cache-tokens", "0"], "argument --kv-cache-tokens"),
    (["-t", "0"], "argument -t/--threads"),
    (["-ngl", "-2"], "argument -ngl/--n-gpu-layers"),
    (["-ngl", "1"], "argument -ngl/--n-gpu-layers: num_gpu_layers belongs to the llama backend"),
    (["--kv-cache-dtype", "q9"], "argument --kv-cache-dtype: invalid choice"),
    (["--kv-cache-dtype", "q8_0"], "argument --kv-cache-dtype: kv_cache_dtype should be one of"),
    (["--kernels", "fast"], "argument --kernels: invalid choice"),
    (["--max-queue", "0"], "argument --max-queue"),
    (["-hf", "model.gguf"], "argument -hf: expected USER/REPO or USER/REPO:QUANT, found 'model.gguf'"),
    (["-hf", "user/repo", "-m", "demo"], "argument -m/--model: not allowed with argument -hf"),
    (["--tempe", "1"], "unrecognized arguments: --tempe"),
    (["--nonsense\x1b[31m\n"], "unrecognized arguments: --nonsense\\x1b[31m\\n"),
    (["a second prompt"], "unrecognized arguments: a second prompt"),
]


@pytest.mark.parametrize(("flags", "named"), HOSTILE, ids=[repr(flags)[:40] for flags, _ in HOSTILE])
def test_hostile_flags_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, mocked: Callable[..., Done], flags: list[str], named: str
) -> None:
    monkeypatch.setattr(cllm.run, "_MAX_PROMPT_BYTES", 1000)
    monkeypatch.setattr(cllm.run, "LLM", None)  # nothing may be loaded
    done = mocked("prompt", *flags)
    assert (done.status, done.out) == (2, "")
    assert named in done.error
    assert len(done.error) < 1100


def test_every_flag_that_takes_a_value_has_a_hostile_one() -> None:
    hostile = {flag for flags, _ in HOSTILE for flag in flags}
    for action in cllm.run._parser()._actions:
        if action.option_strings and action.nargs is None:
            assert hostile.intersection(action.option_strings), action.option_strings


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("CLLM_CONTEXT_LENGTH", "long", "CLLM_CONTEXT_LENGTH: expected a whole number, found 'long'"),
        ("CLLM_CONTEXT_LENGTH", "", "CLLM_CONTEXT_LENGTH: expected a whole number, found ''"),
        ("CLLM_MAX_QUEUE", "0", "CLLM_MAX_QUEUE: max_queue should be a whole number from 1"),
        ("CLLM_KERNELS", "fast", "CLLM_KERNELS: kernels should be one of"),
        ("CLLM_MODEL", "", "CLLM_MODEL: model should be the path of a GGUF file"),
    ],
)
def test_a_hostile_environment_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, mocked: Callable[..., Done], variable: str, value: str, named: str
) -> None:
    monkeypatch.setenv(variable, value)
    done = mocked("prompt")
    assert (done.status, done.out) == (2, "")
    assert named in done.error


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "stdin is empty"),
        (b"\n", "stdin is empty"),
        (b"ab\xff", "stdin: expected UTF-8, found another byte at offset 2"),
    ],
)
def test_hostile_stdin(
    mocked: Callable[..., Done], type_in: Callable[[bytes], None], data: bytes, message: str
) -> None:
    type_in(data)
    done = mocked()
    assert done.status == 2
    assert message in done.error


def test_a_file_that_is_not_text(mocked: Callable[..., Done], tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"\x89PNG")
    done = mocked("-f", str(tmp_path / "image"))
    assert done.status == 2
    assert "image: expected UTF-8, found another byte at offset 0" in done.error


def test_no_stdin_at_all(monkeypatch: pytest.MonkeyPatch, mocked: Callable[..., Done]) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert "no prompt; give one" in mocked().error


@pytest.mark.parametrize(
    ("model", "status", "named"),
    [
        ("qwen3", 1, "qwen3: no such file; a model is demo, the path of a .gguf file or USER/REPO[:QUANT]"),
        ("nowhere.gguf", 1, "nowhere.gguf: no such file"),
        ("a\0b", 1, "a\\x00b"),
        ("line\nbreak.gguf", 1, "line\\nbreak.gguf"),
        ("/", 1, "directory"),
        ("/dev/null", 1, "regular file"),
        (__file__, 1, "not GGUF"),
    ],
)
def test_hostile_models(capsys: pytest.CaptureFixture[str], model: str, status: int, named: str) -> None:
    done = run(capsys, "-m", model, "prompt")
    assert (done.status, done.out) == (status, "")
    assert named in done.error


def test_damaged_model_files(
    capsys: pytest.CaptureFixture[str], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    whole = tiny_model().read_bytes()
    path = tmp_path / "damaged.gguf"
    for size in (4, 23, 24, 1000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        done = run(capsys, "-m", str(path), "prompt")
        assert done.status == 1
        assert "damaged.gguf" in done.error


def test_a_vocabulary_alone_cannot_answer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    done = run(capsys, "-m", str(write_chat_vocabulary(tmp_path / "chat.gguf")), "prompt")
    assert done.status == 1
    assert done.error


def test_a_context_beyond_the_model_names_the_flag(
    capsys: pytest.CaptureFixture[str], tiny_model: Callable[..., Path]
) -> None:
    done = run(capsys, "-m", str(tiny_model()), "-c", "513", "prompt")
    assert done.status == 2
    assert "argument -c/--ctx-size: context_length 513 is beyond the 512 tokens" in done.error


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["-c", "8", "too long a prompt"], "the prompt has 17 tokens; the context holds 8"),
        (["-c", "8", "-p", "short", "-p", "too long a prompt"], "prompt 1: the prompt has 17 tokens"),
        ([""], "the prompt is empty"),
        (["--kv-cache-tokens", "9", "-n", "15", "prompt"], "argument -n/--max-tokens: prompt (6 tokens)"),
        (["-cnv", "prompt"], "no chat template"),
    ],
)
def test_what_only_the_model_can_refuse_fails_in_one_line(
    mocked: Callable[..., Done], argv: list[str], named: str
) -> None:
    done = mocked(*argv)
    assert (done.status, done.out) == (1, "")
    assert named in done.error


def test_a_failing_step_keeps_the_answer_so_far(mocked: Callable[..., Done], script: MockScript) -> None:
    script.failures |= {3, 4}
    done = mocked("-n", "9", "ab")
    assert (done.status, done.out) == (1, "cde\n")
    assert done.error == "error: scripted failure of step 4\n"


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_one_prompt_of_a_batch_fails(
    mocked: Callable[..., Done], script: MockScript, flags: list[str]
) -> None:
    script.failures |= {3, 4}
    done = mocked("-n", "5", "-p", "ab", "-p", "c", *flags)
    assert done.status == 1
    assert done.error == "error: 1 of 2 prompts failed, first prompt 0: scripted failure of step 4\n"
    if flags:
        first, second = map(json.loads, done.out.splitlines())
        assert first["error"] == "scripted failure of step 4"
        assert second["outputs"][0]["text"] == "bcdef"


def test_a_bug_of_ours_is_one_line_too(monkeypatch: pytest.MonkeyPatch, mocked: Callable[..., Done]) -> None:
    monkeypatch.setattr(cllm.run, "_answer_one", lambda *args: [][0])
    done = mocked("prompt")
    assert done.status == 1
    assert done.error == "error: IndexError: list index out of range (-v tells where)\n"


# Engine fields that a model or a machine cannot serve, beside those of HOSTILE; all fields in SamplingParams.
BAD_SETTINGS: dict[str, Any] = {
    "model": 5,
    "backend": None,
    "context_length": 1.5,
    "max_num_seqs": None,
    "max_num_batched_tokens": "512",
    "kv_cache_tokens": -1,
    "num_threads": 10**9,
    "num_gpu_layers": 1,
    "kv_cache_dtype": ["f16"],
    "kernels": b"auto",
    "enable_prefix_caching": "yes",
    "max_queue": float("nan"),
}


def test_every_field_refuses_in_one_line_and_the_engine_answers_on() -> None:
    assert set(BAD_SETTINGS) == {field.name for field in dataclasses.fields(EngineConfig)}
    assert set(REFUSED) == {field.name for field in dataclasses.fields(SamplingParams)}
    with LLM(backend="mock", max_num_seqs=2) as llm:
        params = SamplingParams(temperature=0, max_tokens=9)
        expected = llm.generate("prompt", params)[0].outputs[0]
        for field, value in BAD_SETTINGS.items():
            with pytest.raises(cllm.ConfigError) as refused:
                LLM(**{"backend": "mock", field: value})
            assert field in str(refused.value)
            assert "\n" not in str(refused.value)
        for field, values in REFUSED.items():
            for value in values:
                with pytest.raises(InvalidRequestError) as invalid:
                    llm.generate("prompt", SamplingParams(**{field: value}))
                assert invalid.value.field == field
                assert "\n" not in str(invalid.value)
            assert llm.generate("prompt", params)[0].outputs[0] == expected
