"""The tokenizer on Qwen3's real vocabulary, beside an independent pipeline, and its rules on tiny ones."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from qwen3_vocab import Vocab, load_qwen3_vocab
from tiny_vocab import CONTROL, UNKNOWN, UNUSED, USER_DEFINED, qwen3_metadata, vocab_metadata

from cllm.errors import InvalidRequestError
from cllm.tokenizer import StreamDecoder, Tokenizer, make_tokenizer

# Ids from the tokenizer.json that Qwen publishes with Qwen3-0.6B, by tokenizers 0.23.3.
GOLDEN = [
    ("", []),
    ("Hello, world!", [9707, 11, 1879, 0]),
    (
        "  two  blanks\t\ttabs \n\n\nlines\r\n ",
        [220, 1378, 220, 78540, 197, 3244, 3435, 14731, 7969, 319, 220],
    ),
    (
        "I'm SURE they'LL don't 'tis we'Ve",
        [40, 2776, 328, 4521, 807, 6, 4086, 1513, 944, 364, 83, 285, 582, 6, 42612],
    ),
    (
        "3.14159 and 1234567 \xbd \u0663\u0664 \u216b",
        [
            *(18, 13, 16, 19, 16, 20, 24, 323, 220, 16, 17, 18, 19, 20, 21, 22),
            *(220, 26062, 220, 149, 96, 149, 97, 220, 70467, 104),
        ],
    ),
    (
        "na\xefve cafe\u0301 \u1e9b\u0323 \xc5",
        [3376, 37572, 586, 51950, 220, 149616, 136, 96, 79252],
    ),
    (
        "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f \uc548\ub155\ud558\uc138\uc694",
        [108386, 3837, 99489, 1773, 89015, 95170, 144370, 91145],
    ),
    (
        "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466\U0001f3f3\ufe0f\u200d\U0001f308 "
        "\U0001f9d1\U0001f3fd",
        [
            *(145233, 378, 235, 145233, 378, 235, 145665, 378, 235, 145988, 147233, 30543, 378, 235, 145354),
            *(11162, 100, 239, 145375),
        ],
    ),
    ("\x00\x01\x7f\ufffd\ufeff\u200b\u2028", [188, 189, 221, 5691, 3225, 15692, 378, 101]),
    (
        "\u0928\u092e\u0938\u094d\u0924\u0947 \u0936\u0941\u092d \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
        [
            60096,
            87244,
            78368,
            30484,
            97,
            34370,
            14925,
            114,
            72653,
            146101,
            129328,
            37213,
            23271,
            125136,
            28319,
        ],
    ),
    (
        "<|im_start|>user\nhi<|im_end|>\n<think>\n\n</think>",
        [151644, 872, 198, 6023, 151645, 198, 151667, 271, 151668],
    ),
    (
        "<|fim_prefix|>def f(x):\n    return x*2\n<|fim_suffix|>",
        [151659, 750, 282, 2075, 982, 262, 470, 856, 9, 17, 198, 151661],
    ),
    ("<<|im_end|>|im_end|><|im_end", [27, 151645, 91, 318, 6213, 91, 1784, 91, 318, 6213]),
    (
        "!!!???--->>>\xa0\u3000x\U00020000\U000e0001",
        [12069, 33015, 313, 405, 2452, 4102, 22441, 87, 172, 63219, 222, 175, 63219, 223],
    ),
]

# Text that is likely to meet the edges of words, of contractions, of controls and of normalisation.
SNIPPETS = [
    " ",
    "\n",
    "\r\n",
    "\t",
    "1",
    "\xbd",
    "a",
    "Z",
    "'s",
    "'LL",
    "\xe9",
    "e\u0301",
    "\u0301",
    ".",
    "\u3000",
]
SNIPPETS += ["<|im_end|>", "<|im_start|>", "<think>", "<|fim_prefix|>", "<|", "|>", "im_end", "[PAD151669]"]
TEXTS = st.text(max_size=50) | st.lists(st.sampled_from(SNIPPETS), max_size=20).map("".join)

VOCAB = load_qwen3_vocab()
QWEN3 = make_tokenizer(qwen3_metadata(VOCAB))


def published_pipeline(vocab: Vocab) -> tokenizers.Tokenizer:
    """The pipeline of Qwen3's tokenizer.json, spelled out here on its own."""
    num_pieces = vocab.tokens.index("<|endoftext|>")
    pieces = {text: token_id for token_id, text in enumerate(vocab.tokens[:num_pieces])}
    merges = [tuple(merge.split(" ")) for merge in vocab.merges]
    pipeline = tokenizers.Tokenizer(tokenizers.models.BPE(pieces, merges))
    pipeline.normalizer = tokenizers.normalizers.NFC()
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    to_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pipeline.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, to_bytes])
    added = vocab.tokens[num_pieces : num_pieces + 26]
    pipeline.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in added])
    return pipeline


PUBLISHED = published_pipeline(VOCAB)


# --- Text to ids --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "ids"), GOLDEN)
def test_ids_are_those_of_the_published_tokenizer(text: str, ids: list[int]) -> None:
    assert QWEN3.encode(text, parse_special=True) == ids


@settings(deadline=None)
@given(TEXTS)
def test_encode_matches_an_independent_pipeline(text: str) -> None:
    assert QWEN3.encode(text, parse_special=True) == PUBLISHED.encode(text).ids


@settings(deadline=None)
@given(TEXTS)
@example("<|im_end|>")
@example("<|fim_prefix|>")
def test_typed_text_never_becomes_a_control_or_unused_token(text: str) -> None:
    ids = QWEN3.encode(text)
    assert QWEN3.control_ids.isdisjoint(ids)
    assert not np.isin(ids, QWEN3.unused_ids).any()
    assert QWEN3.decode(ids) == unicodedata.normalize("NFC", text)


def test_user_defined_tokens_are_always_parsed() -> None:
    assert QWEN3.encode("<think>") == [151667]


def test_one_long_word_is_encoded_in_full() -> None:
    assert QWEN3.encode("a" * 80_000) == QWEN3.encode("a" * 8) * 10_000
    assert QWEN3.encode(" " * 128_000) == QWEN3.encode(" " * 128) * 1_000


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["12345", "'", "T"]),
        ("llama-bpe", ["123", "4", "5", "'T"]),
        ("llama3", ["123", "4", "5", "'T"]),
        ("llama-v3", ["123", "4", "5", "'T"]),
        ("qwen2", ["1", "2", "3", "4", "5", "'T"]),
        ("smollm", ["1", "2", "3", "4", "5", "'", "T"]),
    ],
)
def test_each_pre_tokenizer_cuts_its_own_words(pre: str, pieces: list[str]) -> None:
    merges = ["1 2", "12 3", "123 4", "1234 5", "' T"]
    tokenizer = make_tokenizer(vocab_metadata(pre, merges))
    assert [tokenizer.decode([i]) for i in tokenizer.encode("12345'T")] == pieces


@pytest.mark.parametrize(("pre", "is_nfc"), [("qwen2", True), ("smollm", False), ("llama-bpe", False)])
def test_only_qwen2_normalises(pre: str, is_nfc: bool) -> None:
    tokenizer = make_tokenizer(vocab_metadata(pre))
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == ("\xe9" if is_nfc else "e\u0301")


def test_llama3_takes_a_word_that_is_a_token_without_merges() -> None:
    added = [("xyz", 1), ("stop", CONTROL)]
    assert make_tokenizer(vocab_metadata("llama-bpe", added=added)).encode("xyz") == [256]
    assert len(make_tokenizer(vocab_metadata("gpt-2", added=added)).encode("xyz")) == 3
    assert len(make_tokenizer(vocab_metadata("llama-bpe", added=added)).encode("stop")) == 4


def test_merges_that_would_make_a_control_are_left_out() -> None:
    metadata = vocab_metadata(merges=["a b"], added=[("abc", CONTROL)])
    metadata["tokenizer.ggml.merges"].append("ab c")
    tokenizer = make_tokenizer(metadata)
    assert tokenizer.encode("abc") == [256, *tokenizer.encode("c")]
    assert tokenizer.encode("abc", parse_special=True) == [257]


def test_the_longest_special_token_wins() -> None:
    tokenizer = make_tokenizer(vocab_metadata(added=[("<a>", USER_DEFINED), ("<a><b>", USER_DEFINED)]))
    assert tokenizer.encode("<a><b><a>") == [257, 256]


def test_a_byte_without_a_token_is_dropped() -> None:
    metadata = vocab_metadata()
    metadata["tokenizer.ggml.tokens"][0] = "unreachable"  # it was "!"
    tokenizer = make_tokenizer(metadata)
    assert tokenizer.decode(tokenizer.encode("a !b")) == "a b"


# --- BOS ----------------------------------------------------------------------------------------------------

BOS = [("<|bos|>", CONTROL)]


@pytest.mark.parametrize(
    ("pre", "file_rule", "begins"),
    [
        ("gpt-2", None, False),
        ("llama-bpe", None, True),
        ("gpt-2", True, True),
        ("llama-bpe", False, False),
    ],
)
def test_bos_follows_the_file(pre: str, file_rule: bool | None, begins: bool) -> None:
    tokenizer = make_tokenizer(vocab_metadata(pre, added=BOS, bos_token_id=256, add_bos_token=file_rule))
    plain = tokenizer.encode("hi", add_bos=False)
    assert tokenizer.add_bos is begins
    assert tokenizer.encode("hi") == [256] * begins + plain
    assert tokenizer.encode("hi", add_bos=True) == [256, *plain]
    assert tokenizer.encode("", add_bos=True) == [256]
    assert tokenizer.encode("<|bos|>hi", parse_special=True, add_bos=True) == [256, *plain]


def test_bos_without_a_token_is_refused() -> None:
    tokenizer = make_tokenizer(vocab_metadata("llama-bpe"))
    assert tokenizer.bos_id is None
    assert len(tokenizer.encode("hi")) == 2
    with pytest.raises(InvalidRequestError, match="no BOS token") as caught:
        tokenizer.encode("hi", add_bos=True)
    assert caught.value.field == "add_bos"


# --- Ids to text --------------------------------------------------------------------------------------------

EMOJI = QWEN3.encode("\U0001f9d1\U0001f3fd")


def stream(tokenizer: Tokenizer, ids: list[int], *, skip_special: bool = False) -> list[str]:
    decoder = StreamDecoder(tokenizer, skip_special=skip_special)
    return [*map(decoder.push, ids), decoder.flush()]


@settings(deadline=None)
@given(st.lists(st.integers(0, 255) | st.integers(0, QWEN3.vocab_size - 1), max_size=30))
@example([*EMOJI[:2], 151645, *EMOJI[2:]])
@example([188, 151667, 172, 175, 151645, 172])
def test_the_stream_is_the_text(ids: list[int]) -> None:
    pieces = b"".join(map(QWEN3.token_bytes, ids))
    assert "".join(stream(QWEN3, ids)) == QWEN3.decode(ids) == pieces.decode("utf-8", "replace")
    kept = [token_id for token_id in ids if token_id not in QWEN3.control_ids]
    assert "".join(stream(QWEN3, ids, skip_special=True)) == QWEN3.decode(kept)
    assert QWEN3.decode(ids, skip_special=True) == QWEN3.decode(kept)


def test_a_character_in_parts_is_held_back() -> None:
    ids = [byte_id for byte in "\U0001f9d1".encode() for byte_id in byte_ids(byte)]
    assert stream(QWEN3, [*ids, *ids[:2]]) == ["", "", "", "\U0001f9d1", "", "", "\ufffd"]
    assert stream(QWEN3, [ids[0], 9707]) == ["", "\ufffdHello", ""]


def byte_ids(byte: int) -> list[int]:
    return [token_id for token_id in range(256) if QWEN3.token_bytes(token_id) == bytes([byte])]


def test_the_bytes_are_the_first_256_tokens() -> None:
    assert sorted(map(QWEN3.token_bytes, range(256))) == [bytes([byte]) for byte in range(256)]


def test_flush_begins_a_new_text() -> None:
    decoder = StreamDecoder(QWEN3)
    assert decoder.push(byte_ids(0xF0)[0]) + decoder.flush() == "\ufffd"
    assert decoder.push(9707) + decoder.flush() == "Hello"


def test_special_tokens_decode_to_their_own_text() -> None:
    assert QWEN3.decode([151644, 872, 151667, 151645]) == "<|im_start|>user<think><|im_end|>"
    assert QWEN3.decode([151644, 872, 151667, 151645], skip_special=True) == "user<think>"
    assert QWEN3.token_bytes(151645) == b"<|im_end|>"
    written_plainly = make_tokenizer(
        vocab_metadata(added=[("na\xefve \u4f60", 1), ("<\u0120>", USER_DEFINED)])
    )
    assert written_plainly.decode([256]) == "na\xefve \u4f60"
    assert written_plainly.decode([257]) == "<\u0120>"


@pytest.mark.parametrize("token_id", [-1, 151_936, 1 << 70, 1.0, "5", None, True])
def test_ids_outside_the_vocabulary_are_refused(token_id: int) -> None:
    decoder = StreamDecoder(QWEN3)
    for refuse in (QWEN3.check_ids, QWEN3.decode, lambda ids: decoder.push(ids[1])):
        with pytest.raises(InvalidRequestError, match=r"0\.\.151935, found") as caught:
            refuse([0, token_id])
        assert caught.value.field == "prompt_token_ids"


def test_numpy_ids_are_ids() -> None:
    assert QWEN3.decode(np.array([9707, 11], np.int32)) == "Hello,"


# --- What a request may not hold ----------------------------------------------------------------------------


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"U\+D83D, at character 3") as caught:
        QWEN3.encode("abc\ud83d")
    assert caught.value.field == "prompt"


def test_texts_past_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cllm.tokenizer.MAX_TEXT_CHARS", 10)
    assert QWEN3.encode("a" * 10)
    with pytest.raises(InvalidRequestError, match="at most 10 characters, found 11"):
        QWEN3.encode("a" * 11)


# --- What the vocabulary says of itself ---------------------------------------------------------------------


def test_qwen3_facts() -> None:
    assert QWEN3.vocab_size == 151_936
    assert (QWEN3.bos_id, QWEN3.eos_id, QWEN3.add_bos) == (151643, 151645, False)
    assert QWEN3.eog_ids == {151643, 151645}
    assert QWEN3.unused_ids.tolist() == list(range(151669, 151936))
    assert QWEN3.control_ids == {*range(151643, 151657), *range(151659, 151665)}
    assert QWEN3.chat_template is not None
    assert "<|im_start|>assistant" in QWEN3.chat_template


def test_every_end_of_generation_is_found() -> None:
    ends = ["<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"]
    added = [*((text, CONTROL) for text in ends), ("</s>", CONTROL), ("<end>", CONTROL), ("<eot>", CONTROL)]
    tokenizer = make_tokenizer(vocab_metadata(added=added, eos_token_id=261, eot_token_id=263))
    assert tokenizer.eog_ids == {256, 257, 258, 259, 260, 261, 263}
    assert (tokenizer.bos_id, tokenizer.chat_template) == (None, None)


def test_kinds_of_tokens() -> None:
    added = [("<unk>", UNKNOWN), ("<|x|>", USER_DEFINED), ("<x>", USER_DEFINED), ("gap", UNUSED)]
    tokenizer = make_tokenizer(vocab_metadata(added=added))
    assert tokenizer.control_ids == {256, 257}
    assert tokenizer.unused_ids.tolist() == [259]
    assert tokenizer.encode("<unk><|x|><x>", parse_special=True) == [256, 257, 258]


QWEN3_1000 = make_tokenizer(qwen3_metadata(load_qwen3_vocab(1000)))


@given(text=st.text(max_size=200))
@settings(max_examples=100, deadline=None)
def test_the_call_for_long_texts_matches_the_other(text: str) -> None:
    """A long text goes through the library's batch call; its ids are those of the plain one."""
    tokenizer = QWEN3_1000
    plain = tokenizer._pipeline.encode(text, add_special_tokens=False).ids
    assert tokenizer._pipeline.encode_batch_fast([text], add_special_tokens=False)[0].ids == plain
    long = "the cat, 世界 " * 1000 + text
    with pytest.MonkeyPatch.context() as patch:
        found = tokenizer.encode(long)
        patch.setattr("cllm.tokenizer._LONG_TEXT", len(long))
        assert tokenizer.encode(long) == found
