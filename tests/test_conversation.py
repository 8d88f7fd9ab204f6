"""Conversations: what stays in the history, what the commands do, and a real terminal with Ctrl-C and Ctrl-D."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_helpers import (
    ENDLESS,
    SLOW_MOCK,
    Done,
    InterruptAt,
    ctrl_c_works,
    patch_mock,
    run,
    write_chat_vocabulary,
)

from cllm import LLM, ContextLengthError, InvalidRequestError, SamplingParams
from cllm.backends.mock import MockScript
from cllm.conversation import Conversation, converse
from cllm.outputs import StreamPiece

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
AT_TEMPERATURE = SamplingParams(temperature=2, seed=2**64 - 1, max_tokens=8, ignore_eos=True)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> MockScript:
    """What the mock of the next `LLM` does."""
    return patch_mock(monkeypatch, MockScript(tokens=ENDLESS))


@pytest.fixture
def llm(script: MockScript, tmp_path: Path) -> Iterator[LLM]:
    path = write_chat_vocabulary(tmp_path / "chat.gguf")
    with LLM(str(path), backend="mock", context_length=256, max_num_seqs=2) as llm:
        yield llm


def joined(pieces: Iterator[StreamPiece]) -> str:
    return "".join(piece.text for piece in pieces)


# --- Conversation -------------------------------------------------------------------------------------------


def test_history_is_what_llm_chat_would_get(llm: LLM) -> None:
    conversation = Conversation(llm, GREEDY)
    first = joined(conversation.ask("one"))
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "two"},
    ]
    (output,) = llm.chat(messages, GREEDY)
    assert joined(conversation.ask("two")) == output.outputs[0].text
    assert conversation.messages == [*messages, {"role": "assistant", "content": output.outputs[0].text}]
    assert conversation.transcript == str(output.prompt) + output.outputs[0].text
    assert conversation.num_prompt_tokens == len(output.prompt_token_ids)


def test_template_variables_reach_the_template(llm: LLM) -> None:
    conversation = Conversation(llm, GREEDY, {"enable_thinking": False})
    answer = joined(conversation.ask("one"))
    assert conversation.transcript.endswith(f"<|im_start|>assistant\nat once: {answer}")


def test_reasoning_is_kept_apart_from_content(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(prompt: Any, params: SamplingParams) -> Iterator[StreamPiece]:
        yield StreamPiece("0", 0, "<think>hm</think>", [1], reasoning="hm", content="")
        yield StreamPiece("0", 0, "yes", [2], content="yes", finish_reason="stop")

    monkeypatch.setattr(llm, "stream", stream)
    conversation = Conversation(llm, GREEDY)
    list(conversation.ask("one"))
    assert conversation.messages[1] == {"role": "assistant", "content": "yes", "reasoning": "hm"}


def test_regenerate_replaces_the_answer_with_another_seed(llm: LLM, script: MockScript) -> None:
    script.tokens = {}
    conversation = Conversation(llm, AT_TEMPERATURE)
    with pytest.raises(InvalidRequestError, match="no message yet"):
        conversation.regenerate()
    answers = [
        joined(conversation.ask("one")),
        joined(conversation.regenerate()),
        joined(conversation.regenerate()),
    ]
    assert len(set(answers)) == 3
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]
    assert conversation.transcript.endswith(answers[-1])
    conversation.clear()
    assert (conversation.messages, conversation.transcript) == ([], "")


def test_regenerate_gives_the_same_where_greedy(llm: LLM) -> None:
    conversation = Conversation(llm, GREEDY)
    assert joined(conversation.ask("one")) == joined(conversation.regenerate())


def test_an_answer_that_was_left_stays_as_far_as_it_came(llm: LLM) -> None:
    conversation = Conversation(llm, GREEDY)
    pieces = conversation.ask("one")
    begun = next(pieces).text + next(pieces).text
    pieces.close()
    assert conversation.messages[1] == {"role": "assistant", "content": begun}


def test_a_refused_message_leaves_no_trace(llm: LLM) -> None:
    conversation = Conversation(llm, GREEDY)
    joined(conversation.ask("one"))
    before = list(conversation.messages)
    with pytest.raises(ContextLengthError):
        conversation.ask("x" * 250)
    with pytest.raises(InvalidRequestError, match="surrogate"):
        conversation.ask("\udcff")
    assert conversation.messages == before


def test_a_failed_answer_leaves_no_trace(llm: LLM, script: MockScript) -> None:
    conversation = Conversation(llm, GREEDY)
    script.failures |= {1, 2}
    *_, last = conversation.ask("one")
    assert last.finish_reason == "error"
    assert conversation.messages == []
    assert len(joined(conversation.ask("one"))) == 8


# --- converse, with lines instead of a terminal -------------------------------------------------------------

Typed = Callable[..., Done]


@pytest.fixture
def typed(llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    """`typed(*lines)`: holds a conversation of these lines; an exception among them is raised instead."""

    def hold(*lines: str | type[BaseException], params: SamplingParams = GREEDY, quiet: bool = True) -> Done:
        waiting = iter([*lines, EOFError])

        def read(prompt: str = "") -> str:
            line = next(waiting)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", read)
        converse(Conversation(llm, params), "the mock", quiet=quiet)
        return Done(0, *capsys.readouterr())

    return hold


def test_answers_alone_go_to_stdout(llm: LLM, typed: Typed) -> None:
    first, second = typed("one", "  ", "/clear", "one").out.splitlines()
    assert first == second == llm.chat([{"role": "user", "content": "one"}], GREEDY)[0].outputs[0].text


def test_statistics_follow_each_answer(typed: Typed) -> None:
    hint, line, *_ = typed("one", quiet=False).err.splitlines()
    assert "/help" in hint
    assert "decode 8 tokens" in line
    assert line.endswith("length | the mock")


def test_show_help_and_unknown_commands(typed: Typed) -> None:
    done = typed("/show", "one", "/show", "/help", "/nonsense", "/clear now")
    assert "nothing was said yet" in done.err
    assert f"<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n{done.out}" in done.err
    assert "/regen  answer" in done.err
    assert "error: unknown command '/nonsense'; /help lists the commands\n" in done.err
    assert "unknown command '/clear now'" in done.err


def test_a_blank_before_it_makes_a_message_of_a_command(typed: Typed) -> None:
    assert "<|im_start|>user\n /clear<|im_end|>" in typed(" /clear", "/show").err


def test_regen_answers_anew(typed: Typed, script: MockScript) -> None:
    assert "no message yet" in typed("/regen").err
    script.tokens = {}
    assert (
        len(set(typed("one", "/regen", params=AT_TEMPERATURE).out.split("\n"))) == 3
    )  # two answers, and the end


def test_a_full_context_suggests_clear_and_the_conversation_goes_on(typed: Typed) -> None:
    done = typed("x" * 250, "one")
    assert "the context holds 256" in done.err
    assert "; /clear forgets the conversation\n" in done.err
    assert len(done.out) == 9


def test_the_conversation_outlives_a_failed_step(typed: Typed, script: MockScript) -> None:
    script.failures |= {2, 3}
    done = typed("one", "one")
    assert "error: scripted failure of step 3\n" in done.err
    assert [len(line) for line in done.out.splitlines()] == [2, 8]


def test_bad_bytes_and_ctrl_c_at_the_prompt(typed: Typed) -> None:
    def undecodable() -> UnicodeDecodeError:
        return UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    done = typed(undecodable(), "\udcff", KeyboardInterrupt, "one")
    assert "error: the line is not valid UTF-8\n" in done.err
    assert "lone surrogate" in done.err
    assert "Ctrl-D leaves" in done.err
    assert len(done.out) == 9


def test_ctrl_c_stops_the_answer_only(typed: Typed, script: MockScript) -> None:
    script.delay, script.delays = 0.01, InterruptAt(3)
    with ctrl_c_works():
        done = typed("one", "/show", "two")
    first, second = done.out.splitlines()
    assert len(first) < len(second) == 8
    assert f"<|im_start|>assistant\n{first}" in done.err


# --- The command ---------------------------------------------------------------------------------------------

# A session leader's first terminal controls it, so that Ctrl-C reaches the program.
ON_A_TERMINAL = "import os, sys\nos.open(sys.argv.pop(1), os.O_RDWR)" + SLOW_MOCK


class Terminal:
    """A process on a terminal of its own, and the person before it."""

    def __init__(self, *argv: str) -> None:
        self._master, slave = pty.openpty()
        command = [sys.executable, "-c", ON_A_TERMINAL, os.ttyname(slave), *argv]
        self._process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env={**os.environ, "TERM": "dumb"},
        )
        os.close(slave)
        self._unread = ""

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def expect(self, text: str) -> None:
        """Reads up to `text`."""
        assert self._find(text, 30), f"expected {text!r}, found {self._unread!r}"

    def type_until(self, keys: str, text: str) -> None:
        """Types `keys` again and again: readline overlooks a signal that comes just before it begins to wait."""
        for _ in range(60):
            self.type(keys)
            if self._find(text, 0.5):
                return
        raise AssertionError(f"expected {text!r}, found {self._unread!r}")

    def _find(self, text: str, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while text not in self._unread:
            ready, _, _ = select.select([self._master], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return False
            self._unread += os.read(self._master, 4096).decode(errors="replace")
        self._unread = self._unread.split(text, 1)[1]
        return True

    def status(self) -> int:
        """Waits for the end; returns the exit status."""
        return self._process.wait(30)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)


def test_a_terminal_with_ctrl_c_and_ctrl_d(tmp_path: Path) -> None:
    path = write_chat_vocabulary(tmp_path / "chat.gguf")
    with Terminal("--backend", "mock", "-m", str(path), "-cnv", "-n", "4000") as terminal:
        terminal.expect("> ")
        terminal.type("hello\n")
        terminal.expect("aaa")
        terminal.type("\x03")
        terminal.expect("> ")
        terminal.type_until("\x03", "Ctrl-D leaves")
        terminal.expect("> ")
        terminal.type("/show\n")
        terminal.expect("<|im_start|>user\r\nhello<|im_end|>\r\n<|im_start|>assistant\r\naaa")
        terminal.expect("> ")
        terminal.type("\x04")
        assert terminal.status() == 0


def test_a_terminal_shows_the_prompt_before_its_continuation() -> None:
    with Terminal("--backend", "mock", "-n", "3", "once upon") as terminal:
        terminal.expect("once uponaaa\r\nprompt 9 tokens")
        assert terminal.status() == 0


def test_without_a_prompt_a_terminal_gets_one_line() -> None:
    with Terminal("--backend", "mock") as terminal:
        terminal.expect("error: no prompt; give one")
        assert terminal.status() == 2


def test_json_needs_a_prompt() -> None:
    with Terminal("--backend", "mock", "-cnv", "--json") as terminal:
        terminal.expect("error: argument --json: it needs a prompt")
        assert terminal.status() == 2


def test_a_file_without_a_template_is_told_at_once() -> None:
    with Terminal("--backend", "mock", "-cnv") as terminal:
        terminal.expect("error: this model file has no chat template")
        assert terminal.status() == 1


@pytest.mark.model
def test_smollm2_knows_the_capital_of_japan(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    question, answer = "What is the capital of Japan?", "The capital of Japan is Tokyo."
    done = run(capsys, "-m", str(smollm2_path), "-cnv", question)
    assert (done.status, done.out) == (0, f"{answer}\n")
    with LLM(str(smollm2_path), max_num_seqs=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=32)
        (output,) = llm.chat([{"role": "user", "content": question}], params)
        assert output.outputs[0].content == answer
        conversation = Conversation(llm, params)
        assert joined(conversation.ask(question)) == answer
        assert "Tokyo" in joined(conversation.ask("Repeat the name of that city."))
