"""Reasoning and content of an output: exact slices of its raw text, whole and as a stream."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from qwen3_vocab import load_qwen3_vocab
from tiny_vocab import CONTROL, qwen3_metadata, vocab_metadata

from cllm.chat import ChatTemplate
from cllm.reasoning import Answer, ReasoningSplitter, split_reasoning
from cllm.tokenizer import StreamDecoder, make_tokenizer

TOKENIZER = make_tokenizer(qwen3_metadata(load_qwen3_vocab(1000)))
OPEN, CLOSE = (TOKENIZER.encode(tag)[0] for tag in ("<think>", "</think>"))
IN_THOUGHT = [OPEN]  # a prompt that leaves the tag open


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("", False, Answer(None, "")),
        ("", True, Answer("", "")),
        ("plain", False, Answer(None, "plain")),
        ("<think>\nhm\n</think>\n\nyes", False, Answer("\nhm\n", "\n\nyes")),
        ("<think></think>", False, Answer("", "")),
        ("<think>cut sho", False, Answer("cut sho", "")),
        ("hm</think>yes", True, Answer("hm", "yes")),
        ("hm", True, Answer("hm", "")),
        ("<think>hm</think>yes", True, Answer("<think>hm", "yes")),
        ("<think>a<think>b</think>c</think>d<think>", False, Answer("a<think>b", "c</think>d<think>")),
        ("x <think>hm</think>", False, Answer(None, "x <think>hm</think>")),
        ("a</think>b", False, Answer(None, "a</think>b")),
    ],
)
def test_answers(text: str, is_open: bool, expected: Answer) -> None:
    prompt = IN_THOUGHT if is_open else []
    assert split_reasoning(TOKENIZER, TOKENIZER.encode(text), prompt_ids=prompt) == expected


def test_a_tag_written_in_plain_tokens_is_text() -> None:
    ids = [OPEN, *(TOKENIZER.encode(part)[0] for part in "</"), *TOKENIZER.encode("think>"), CLOSE]
    assert split_reasoning(TOKENIZER, ids) == Answer("</think>", "")


def test_a_character_that_a_tag_cuts_belongs_to_the_field_before_it() -> None:
    first, *rest = TOKENIZER.encode("\U0001f308")
    assert split_reasoning(TOKENIZER, [OPEN, first, CLOSE, *rest]).reasoning == "\ufffd"


@pytest.mark.parametrize(
    ("options", "is_open"), [({}, False), ({"enable_thinking": False}, False), ({"begin": True}, True)]
)
def test_the_prompt_tells_whether_reasoning_is_open(options: dict[str, bool], is_open: bool) -> None:
    source = load_qwen3_vocab(300).chat_template + "{% if begin %}<think>\n{% endif %}"
    metadata = qwen3_metadata(load_qwen3_vocab(1000)) | {"tokenizer.chat_template": source}
    messages = [{"role": "user", "content": "a tag of the user: <think>"}]
    prompt = ChatTemplate(make_tokenizer(metadata)).render(messages, template_kwargs=options)
    answer = split_reasoning(TOKENIZER, TOKENIZER.encode("x"), prompt_ids=prompt.token_ids)
    assert answer == (Answer("x", "") if is_open else Answer(None, "x"))


def test_a_vocabulary_without_tags_has_content_only() -> None:
    tokenizer = make_tokenizer(vocab_metadata())
    ids = tokenizer.encode("<think>a</think>b")
    assert split_reasoning(tokenizer, ids) == Answer(None, "<think>a</think>b")


@pytest.mark.parametrize("skip_special", [True, False])
def test_tags_may_be_control_tokens(skip_special: bool) -> None:
    tokenizer = make_tokenizer(vocab_metadata(added=[("<think>", CONTROL), ("</think>", CONTROL)]))
    ids = tokenizer.encode("<think>a</think>b", parse_special=True)
    assert split_reasoning(tokenizer, ids, skip_special=skip_special) == Answer("a", "b")


RAINBOW = TOKENIZER.encode("\U0001f308")  # more tokens than one, none a whole character
TOKENS = st.lists(
    st.sampled_from([OPEN, CLOSE, *RAINBOW, *TOKENIZER.encode("a\n <"), *TOKENIZER.control_ids])
)


@given(ids=TOKENS, is_open=st.booleans(), skip_special=st.booleans())
def test_tags_and_fields_make_the_raw_text(ids: list[int], is_open: bool, skip_special: bool) -> None:
    raw = TOKENIZER.decode(ids, skip_special=skip_special)
    prompt = IN_THOUGHT if is_open else []
    reasoning, content = split_reasoning(TOKENIZER, ids, prompt_ids=prompt, skip_special=skip_special)
    if reasoning is None:
        assert (content, is_open or ids[:1] == [OPEN]) == (raw, False)
        return
    opening = "" if is_open else "<think>"
    closing = "</think>" if CLOSE in ids else ""
    assert raw == opening + reasoning + closing + content
    assert "</think>" not in reasoning


@given(ids=TOKENS, is_open=st.booleans(), lag=st.integers(0, 12), kept=st.integers(0, 40))
def test_a_stream_that_lags_or_ends_early_matches_the_whole(
    ids: list[int], is_open: bool, lag: int, kept: int
) -> None:
    prompt = IN_THOUGHT if is_open else []
    decoder, splitter = StreamDecoder(TOKENIZER), ReasoningSplitter(TOKENIZER, prompt)
    raw, sent, answers = "", 0, []
    for token_id in [*ids, None]:
        piece = decoder.flush() if token_id is None else decoder.push(token_id)
        raw += piece
        if token_id is not None:
            splitter.push(token_id, piece)
        end = max(sent, min(kept, len(raw) - (lag if token_id is not None else 0)))
        answers.append(splitter.split(raw[sent:end], sent))
        sent = end
    whole = splitter.split(raw[:kept])
    assert "".join(answer.reasoning or "" for answer in answers) == (whole.reasoning or "")
    assert "".join(answer.content for answer in answers) == whole.content
    assert splitter.split(raw) == split_reasoning(TOKENIZER, ids, prompt_ids=prompt, skip_special=False)
