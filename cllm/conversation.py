"""Answers on a terminal: one as it is made, or a conversation of many.

`Conversation` keeps the messages and prints nothing; `converse` reads lines, obeys `/commands` and prints. It
must not know flags.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterable, Iterator
from dataclasses import replace
from typing import Any, TextIO

from .chat import ChatPrompt
from .cli import say, say_error
from .errors import ContextLengthError, InvalidRequestError
from .llm import LLM
from .outputs import StreamPiece
from .params import SamplingParams

Pieces = Generator[StreamPiece, None, None]

_HELP = """\
/clear  forget the conversation
/regen  answer the last message anew
/show   the prompt of the last answer as the model saw it, and the answer
/help   these lines
Ctrl-C stops an answer, Ctrl-D leaves. A message that begins with "/" needs a blank before it."""


class Conversation:
    """Messages so far, and the answers to them.

    `messages`: in OpenAI's form, user and assistant by turns. An answer that was interrupted stays as far as it
    came; a message that was refused or failed leaves no trace. `transcript`: the prompt of the last answer as
    the model saw it, and its raw text.
    """

    def __init__(
        self, llm: LLM, params: SamplingParams, chat_template_kwargs: dict[str, Any] | None = None
    ) -> None:
        self._llm = llm
        self._params = params
        self._template_kwargs = chat_template_kwargs
        self._num_regenerated = 0
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self.messages: list[dict[str, str]] = []
        self.transcript = ""
        self.num_prompt_tokens = 0

    def ask(self, text: str) -> Pieces:
        """The answer to one more message, piece by piece. Raises `InvalidRequestError`, at the call."""
        return self._answer([*self.messages, {"role": "user", "content": text}], self._params)

    def regenerate(self) -> Pieces:
        """Another answer to the last message; a given seed counts up.

        Raises `InvalidRequestError` where nothing was asked yet.
        """
        if not self.messages:
            raise InvalidRequestError("there is no message yet to answer anew", field="messages")
        self._num_regenerated += 1
        seed = self._params.seed
        seed = seed if seed is None else (seed + self._num_regenerated) % 2**64
        return self._answer(self.messages[:-1], replace(self._params, seed=seed))

    def _answer(self, messages: list[dict[str, str]], params: SamplingParams) -> Pieces:
        prompt = self._llm.render(messages, chat_template_kwargs=self._template_kwargs)
        return self._keep(messages, prompt, self._llm.stream(prompt, params))

    def _keep(
        self, messages: list[dict[str, str]], prompt: ChatPrompt, stream: Iterator[StreamPiece]
    ) -> Pieces:
        """Passes the pieces on and takes what came of the answer into the conversation, however it ends."""
        pieces: list[StreamPiece] = []
        try:
            for piece in stream:
                pieces.append(piece)
                yield piece
        finally:
            if not any(piece.error for piece in pieces):
                answer = {"role": "assistant", "content": "".join(piece.content or "" for piece in pieces)}
                if reasoning := "".join(piece.reasoning or "" for piece in pieces):
                    answer["reasoning"] = reasoning
                self.messages = [*messages, answer]
                self.transcript = prompt.text + "".join(piece.text for piece in pieces)
                self.num_prompt_tokens = len(prompt.token_ids)


def converse(conversation: Conversation, description: str, *, quiet: bool) -> None:
    """Holds a conversation on the terminal until Ctrl-D; Ctrl-C stops an answer only.

    Answers go to stdout and everything else to stderr. Raises `BackendError` where the engine died.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  input() then lets lines be edited and recalled
    if not quiet:
        say("Ctrl-C stops an answer, Ctrl-D leaves, /help tells more")
    while True:
        try:
            line = _read_line()
        except EOFError:
            say("")
            return
        except KeyboardInterrupt:
            say("\nCtrl-D leaves")
            continue
        except UnicodeDecodeError:
            say_error("the line is not valid UTF-8")
            continue
        if line.strip():
            with contextlib.suppress(KeyboardInterrupt):
                _take_turn(conversation, line, description, quiet)


def print_answer(pieces: Iterable[StreamPiece]) -> tuple[int, StreamPiece]:
    """Writes an answer to stdout as it is made; returns the number of its tokens and its last piece.

    A terminal shows the raw text, a model's reasoning included; a file or pipe gets the answer alone.
    """
    raw = is_terminal(sys.stdout)
    num_tokens, begun = 0, False
    try:
        for piece in pieces:
            num_tokens += len(piece.token_ids)
            text = piece.text if raw or piece.content is None else piece.content
            if piece.content is not None and not begun:
                text = text.lstrip("\n")  # models leave blank lines after their reasoning
            begun = begun or bool(text)
            print(text, end="", flush=True)
    finally:
        print(flush=True)
    return num_tokens, piece


def describe_answer(num_prompt: int, num_tokens: int, last: StreamPiece, description: str) -> str:
    """The line of statistics: tokens, tokens/s for prompt and decode, why it ended, what computed it."""
    prompt, decode = f"prompt {num_prompt} tokens", f"decode {num_tokens} tokens"
    metrics = last.metrics
    if metrics is not None and metrics.time_to_first_token_s:
        seconds = metrics.time_to_first_token_s - (metrics.queue_s or 0.0)
        prompt += f", {num_prompt / seconds:.1f} tokens/s"
        prompt += f" (first token after {metrics.time_to_first_token_s:.2f} s)"
    if metrics is not None and metrics.decode_tokens_per_s:
        decode += f", {metrics.decode_tokens_per_s:.1f} tokens/s"
    return f"{prompt}; {decode}; {last.finish_reason} | {description}"


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person is at the other end; a standard stream that was closed is None."""
    return stream is not None and stream.isatty()


def _read_line() -> str:
    if is_terminal(sys.stdout):
        return input("> ")
    print("> ", end="", file=sys.stderr, flush=True)  # stdout, which goes elsewhere, is for answers
    return input()


def _take_turn(conversation: Conversation, line: str, description: str, quiet: bool) -> None:
    try:
        if not line.startswith("/"):
            pieces = conversation.ask(line)
        elif line.strip() == "/regen":
            pieces = conversation.regenerate()
        else:
            _obey(conversation, line.strip())
            return
        with contextlib.closing(pieces):
            num_tokens, last = print_answer(pieces)
    except InvalidRequestError as error:
        full = isinstance(error, ContextLengthError) or error.field == "max_tokens"
        say_error(f"{error}; /clear forgets the conversation" if full else error)
        return
    if last.error is not None:
        say_error(last.error)
    elif not quiet:
        say(describe_answer(conversation.num_prompt_tokens, num_tokens, last, description))


def _obey(conversation: Conversation, command: str) -> None:
    if command == "/clear":
        conversation.clear()
    elif command == "/show":
        say(conversation.transcript or "nothing was said yet")
    elif command == "/help":
        say(_HELP)
    else:
        say_error(f"unknown command {command!r}; /help lists the commands")
