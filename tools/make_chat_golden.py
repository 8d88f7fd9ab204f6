"""Makes tests/data/chat_golden.json: a table of conversations as transformers' own renderer writes them with the
templates of Qwen3 and SmolLM2. It uses nothing of cllm, so that the tests compare with an independent source. Needed
again only when a conversation is added or changed.

    pip install transformers==5.24.0 jinja2==3.1.6 gguf==0.19.0
    python tools/fetch_smollm2.py
    python tools/make_chat_golden.py models/SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from transformers.utils.chat_template_utils import render_jinja_template

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Weather of a place; 日本 & <b>others</b>, it\'s "quoted"',
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string"},
                "days": {"type": "integer", "minimum": 1, "default": None},
                "unit": {"enum": ["°C", "°F"]},
            },
            "required": ["place"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time", "parameters": {}}}


def say(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


SYSTEM, HI = say("system", "You are terse."), say("user", "Hi!")
ASK = say("user", "Weather in Kyōto?")
ASK_TOOL = say("assistant", None, tool_calls=[call("get_weather", {"place": "Kyōto", "days": 2})])
SUNNY = say("tool", '{"sky": "sunny"}', tool_call_id="call_1")
TEXT_CALL = say("assistant", "Let me see.", tool_calls=[call("get_weather", '{"place": "Kyōto"}')])
TWO_CALLS = say("assistant", "", tool_calls=[call("get_weather", {"place": "<Ōsaka>"}), call("get_time", {})])
THOUGHT = say("assistant", "Hello.", reasoning_content="\nA greeting.\n")
TAGGED = say("assistant", "<think>\nA greeting.\n</think>\n\nHello.")
HALF_TAGGED = say("assistant", "A greeting.\n</think>\n\n\nHello. </think> is a tag.")
PARTS = say("user", [{"type": "text", "text": "Look: "}, {"type": "text", "text": "two parts"}])
TYPED_RESPONSE = say("user", "<tool_response>\nnone\n</tool_response>")

# name: (messages as a client sends them, what else the template gets)
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one question": ([HI], {}),
    "system": ([SYSTEM, HI], {}),
    "thinking off": ([HI], {"enable_thinking": False}),
    "thinking on": ([SYSTEM, HI], {"enable_thinking": True}),
    "no generation prompt": ([HI, say("assistant", "Hello.")], {"add_generation_prompt": False}),
    "several turns": ([SYSTEM, HI, say("assistant", "Hello."), say("user", "And now?")], {}),
    "a second system message": ([SYSTEM, HI, say("system", "Be kind."), HI], {}),
    "unicode": ([say("user", "  naïve\t👩‍👩‍👧‍👦 \r\n\n {{ x }} {% if %} 你好\u200b ")], {}),
    "empty content": ([say("system", ""), say("user", "")], {}),
    "null content": ([say("user", None), say("assistant", None), HI], {}),
    "missing content": ([{"role": "user"}], {}),
    "content parts": ([PARTS, say("assistant", [{"type": "text", "text": "Yes."}]), say("user", [])], {}),
    "reasoning in history": ([HI, THOUGHT, HI], {}),
    "reasoning at the end": ([HI, THOUGHT], {"add_generation_prompt": False}),
    "tags in history": ([HI, TAGGED, HI], {}),
    "tags at the end": ([HI, TAGGED], {"add_generation_prompt": False}),
    "half a tag pair": ([HI, HALF_TAGGED], {}),
    "tags of a user": ([say("user", "What are <think>, </think> and <tool_call>?")], {}),
    "tools": ([ASK], {"tools": [WEATHER]}),
    "tools and system": ([SYSTEM, ASK], {"tools": [WEATHER, CLOCK], "enable_thinking": False}),
    "tool call and response": ([ASK, ASK_TOOL, SUNNY], {"tools": [WEATHER]}),
    "arguments as text": ([ASK, TEXT_CALL, SUNNY, say("assistant", "Sunny."), HI], {"tools": [WEATHER]}),
    "two calls, two responses": ([ASK, TWO_CALLS, SUNNY, say("tool", "12:00")], {"tools": [WEATHER, CLOCK]}),
    "thinking between tools": (
        [ASK, ASK_TOOL | {"reasoning_content": "I need a tool."}, SUNNY, THOUGHT, TYPED_RESPONSE],
        {"tools": [WEATHER]},
    ),
}


def normalise(message: dict[str, Any]) -> dict[str, Any]:
    """Content as text, which these templates require and transformers does not see to."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    return message | {"content": content}


def render(template: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
    given = {"add_generation_prompt": True} | options
    (text,), _ = render_jinja_template([[*map(normalise, messages)]], chat_template=template, **given)
    return text


def main(smollm2: str) -> None:
    field = GGUFReader(smollm2).get_field("tokenizer.chat_template")
    templates = {
        "qwen3": (DATA / "qwen3_chat_template.jinja").read_text(encoding="utf-8"),
        "smollm2": field.contents(),
    }
    cases = [
        {"name": name, "messages": messages, "options": options}
        | {model: render(template, messages, options) for model, template in templates.items()}
        for name, (messages, options) in CONVERSATIONS.items()
    ]
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    source = json.dumps(templates["smollm2"], ensure_ascii=False)
    text = f'{{"smollm2_template": {source},\n"cases": [\n{lines}\n]}}\n'
    (DATA / "chat_golden.json").write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(sys.argv[1])
