"""From messages to a prompt.

This module owns the chat template of a model file: it checks messages and renders them in a sandbox, so that
nothing a user writes becomes a control token. It must not know models, requests or HTTP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from cllm.errors import InvalidRequestError
from cllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    import jinja2

# OpenAI's roles. A template may write a control token around one of these, as Phi-4-mini's "<|" + role + "|>".
_ROLES = frozenset({"system", "user", "assistant", "tool", "function"})
_OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})
_PRIVATE_USE = range(0xE000, 0xF900)  # Unicode's private-use characters of the basic plane


class ChatPrompt(NamedTuple):
    """A rendered conversation."""

    text: str
    """What the template wrote, with the users' strings as they came."""
    token_ids: list[int]
    """Its tokens; a control token stands only where the template itself wrote one."""


class ChatTemplate:
    """The chat template of a tokenizer's file; see `render`.

    It is compiled at the first `render`, so that a file without a template, or with a broken one, still completes
    plain text. May be used from several threads at once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        texts = {tokenizer.token_bytes(token_id).decode(): token_id for token_id in tokenizer.control_ids}
        # A text of one character cannot be broken, so even a template's own is not parsed.
        self._id_of_control = {text: token_id for text, token_id in texts.items() if len(text) > 1}
        self._control_pattern = re.compile(f"({_match_any(self._id_of_control)})")
        self._ends = {
            name: tokenizer.token_bytes(token_id).decode(errors="replace")
            for name, token_id in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id))
            if token_id is not None
        }

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """Renders `messages` and `tools`, in OpenAI's form, and encodes the result.

        `template_kwargs` are further variables of the template, such as Qwen3's `enable_thinking`. A BOS token comes
        first if the file asks for one, never twice. Missing or null content is "", text parts are concatenated, other
        null fields are left out, the role "developer" is "system", "reasoning" is "reasoning_content".
        Raises `InvalidRequestError` for a file without a template or with a broken one, for malformed messages, and
        with the template's own words for what it refuses.
        """
        template = self._template
        try:
            variables = _read_variables(template_kwargs or {})
            variables |= {"messages": _read_messages(messages), "tools": _read_tools(tools)}
            mark = _choose_mark([self._source, *self._id_of_control, *_strings(variables)])
            variables = self._guard.break_variables(variables, mark)
        except RecursionError:
            raise InvalidRequestError(
                "the messages or tools are nested too deeply", field="messages"
            ) from None
        try:
            broken = template.render(variables, add_generation_prompt=add_generation_prompt, **self._ends)
        except Exception as error:  # a template is a program of others: it may fail in any way
            reason = str(error).replace(mark, "") or type(error).__name__
            message = f"the model's chat template refused the messages: {reason}"
            raise InvalidRequestError(message, field="messages") from None
        return ChatPrompt(broken.replace(mark, ""), self._encode(broken, mark))

    @cached_property
    def _source(self) -> str:
        if self._tokenizer.chat_template is None:
            raise InvalidRequestError(
                "this model file has no chat template; complete plain text instead", field="messages"
            )
        return self._tokenizer.chat_template

    @cached_property
    def _template(self) -> jinja2.Template:
        source = self._source
        try:
            return _make_environment().from_string(source)
        except Exception as error:  # a syntax error mostly, but the parser has limits of its own
            line = f" (line {error.lineno})" if hasattr(error, "lineno") else ""
            raise InvalidRequestError(
                f"the chat template of this model file is broken{line}: {error}; complete plain text instead",
                field="messages",
            ) from None

    @cached_property
    def _guard(self) -> _Guard:
        return _Guard(self._source, self._id_of_control, self._ends.values())

    def _encode(self, broken: str, mark: str) -> list[int]:
        ids: list[int] = []
        for index, part in enumerate(self._control_pattern.split(broken)):
            if index % 2:  # a pattern of one group splits into text, match, text, ...
                ids.append(self._id_of_control[part])
            else:
                ids += self._tokenizer.encode(part.replace(mark, ""), add_bos=False)
        bos_id = self._tokenizer.bos_id
        if self._tokenizer.add_bos and bos_id is not None and ids[:1] != [bos_id]:
            ids.insert(0, bos_id)
        return ids


# --- What a user writes stays text --------------------------------------------------------------------------


class _Guard:
    """Breaks users' strings so that no control text can arise from them, alone or joined with others.

    A mark follows every character that can begin a control text. What a template cuts off, and what it joins, then
    never holds the beginning of one. Only the tags that the template's source mentions, such as "</think>", stay
    whole, because it may look for them; none of them begins a control text. There remain the templates that write
    the beginning themselves, such as "<|" + role: there a string that would continue it gets a mark in front.
    Of a control text that begins with a letter, a digit or a blank only whole occurrences are broken.
    """

    def __init__(self, source: str, controls: Iterable[str], ends: Iterable[str]) -> None:
        controls = list(controls)
        worded = [text for text in controls if text[0].isalnum() or text[0].isspace()]
        firsts = {text[0] for text in controls} - {text[0] for text in worded}
        first = _match_any(firsts)
        tags = set(re.findall(rf"{first}/?[\w:.=-]+", source))
        whole = [tag for tag in tags if not any(_one_begins_other(tag, text) for text in controls)]
        self._opening = re.compile(
            rf"(?={first})(?!{_match_any(whole)}).|(?={_match_any(worded)}).", re.DOTALL
        )
        splits = [(text[:length], text[length:]) for text in controls for length in range(1, len(text))]
        begun = {start for start, _ in splits if any(start + after in source for after in "'\"{%")}
        begun.update(ends)  # a template gets these texts as variables
        self._continuations = {rest.lower() for start, rest in splits if start in begun}
        self._longest = max(map(len, self._continuations), default=0)

    def break_variables(self, variables: dict[str, Any], mark: str) -> dict[str, Any]:
        """Returns `variables` with every string and key in them broken by `mark`, except the usual roles."""
        broken: dict[str, Any] = self._break(variables, mark)
        for message, original in zip(broken["messages"], variables["messages"], strict=True):
            if original["role"] in _ROLES:
                message["role"] = original["role"]
        return broken

    def _break(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self._break_text(value, mark)
        if isinstance(value, list):
            return [self._break(item, mark) for item in value]
        if isinstance(value, dict):
            return {self._break_text(key, mark): self._break(item, mark) for key, item in value.items()}
        return value

    def _break_text(self, text: str, mark: str) -> str:
        broken = self._opening.sub(rf"\g<0>{mark}", text)
        start = len(text) - len(text.lstrip())  # a template may strip blanks
        head = text[start : start + self._longest].lower()
        if head and any(_one_begins_other(head, rest) for rest in self._continuations):
            broken = broken[:start] + mark + broken[start:]
        return broken


def _one_begins_other(left: str, right: str) -> bool:
    return left.startswith(right) or right.startswith(left)


def _match_any(texts: Iterable[str]) -> str:
    """The source of a pattern that matches any of `texts`, the longest first; of none, nothing."""
    longest_first = sorted(texts, key=len, reverse=True)
    return f"(?:{'|'.join(map(re.escape, longest_first))})" if longest_first else "(?!)"


def _choose_mark(strings: Iterable[str]) -> str:
    """A private-use character that is in none of `strings`."""
    used: set[str] = set()
    for text in strings:
        used.update(re.findall(f"[{chr(_PRIVATE_USE[0])}-{chr(_PRIVATE_USE[-1])}]", text))
    mark = next((chr(code) for code in _PRIVATE_USE if chr(code) not in used), None)
    if mark is None:
        raise InvalidRequestError(
            f"the messages hold all {len(_PRIVATE_USE)} private-use characters of Unicode; leave one out",
            field="messages",
        )
    return mark


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)


# --- From a request to a template's variables ---------------------------------------------------------------


def _read_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list | tuple) or not messages:
        raise _refusal("messages", "a list of at least one message", messages)
    return [_read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _read_message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _refusal(path, "an object with a role and content", message)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _refusal(f"{path}.role", "a role such as user", role)
    fields = {key: value for key, value in message.items() if value is not None and key != "content"}
    read: dict[str, Any] = _read_json(fields, path)
    read["role"] = "system" if role == "developer" else role
    read["content"] = _read_content(message.get("content"), f"{path}.content")
    if "reasoning" in read:
        read.setdefault("reasoning_content", read["reasoning"])
    return read


def _read_content(content: Any, path: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise _refusal(path, "a string or a list of text parts", content)
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping):
            raise _refusal(f"{path}[{index}]", 'a part such as {"type": "text", "text": "..."}', part)
        if part.get("type") != "text":
            raise _refusal(
                f"{path}[{index}].type", "'text', the only kind this model reads", part.get("type")
            )
        if not isinstance(part.get("text"), str):
            raise _refusal(f"{path}[{index}].text", "a string", part.get("text"))
        texts.append(part["text"])
    return "".join(texts)


def _read_tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list | tuple):
        raise _refusal("tools", "a list of tools", tools)
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise _refusal(f"tools[{index}]", "an object that describes a function", tool)
    return _read_json(tools, "tools") or None


def _read_variables(template_kwargs: Any) -> dict[str, Any]:
    name = "chat_template_kwargs"
    if not isinstance(template_kwargs, Mapping):
        raise _refusal(name, "an object", template_kwargs)
    own = sorted(_OWN_VARIABLES.intersection(template_kwargs))
    if own:
        raise InvalidRequestError(f"{name} may not set {', '.join(own)}", field=name)
    read: dict[str, Any] = _read_json(template_kwargs, name)
    return {"documents": None} | read


def _read_json(value: Any, path: str) -> Any:
    """A copy of `value` in plain dicts and lists, so that a template sees no foreign object and no caller's own."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_read_json(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if not isinstance(value, Mapping):
        raise _refusal(path, "what JSON can hold", value)
    for key in value:
        if not isinstance(key, str):
            raise _refusal(path, "an object whose keys are strings", value)
    return {key: _read_json(item, f"{path}.{key}") for key, item in value.items()}


def _refusal(path: str, expected: str, value: object) -> InvalidRequestError:
    shown = f"{value[:40]!r}" if isinstance(value, str) else type(value).__name__
    found = {"NoneType": "nothing", "list": "a list", "dict": "an object"}.get(shown, shown)
    if isinstance(value, list | tuple) and not value:
        found = "an empty list"
    return InvalidRequestError(f"{path} must be {expected}; found {found}", field=path)


# --- The sandbox --------------------------------------------------------------------------------------------


def _make_environment() -> jinja2.Environment:
    """What transformers 5.24 gives a chat template (`utils/chat_template_utils.py`), so that it renders alike."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` ... `{% endgeneration %}` marks an answer for training; here its body is rendered."""

        tags = {"generation"}  # noqa: RUF012, jinja2's own declaration

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    strftime_now: Callable[[str], str] = lambda pattern: datetime.now().strftime(pattern)  # noqa: E731
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter. A private-use character, perhaps the mark, stays."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:
        text = re.sub("[^\x00-\x7f\ue000-\uf8ff]", lambda match: json.dumps(match[0])[1:-1], text)
    return text
