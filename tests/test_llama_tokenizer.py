"""llama.cpp's tokenizer: the oracle for ours where both know a vocabulary, and the stand-in where ours does not.

llama.cpp does not normalise, so texts are in NFC; and tables of Unicode differ in age, so they hold no code
point that is unassigned here. `CLLM_TEST_VOCABULARIES` may name a folder of `ggml-vocab-*.gguf` files (those
of llama.cpp's source, vendor/llama.cpp/models in the sdist of llama-cpp-python) to be compared as well.
"""

from __future__ import annotations

import functools
import os
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType
from gguf_builder import Typed, write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from qwen3_vocab import load_qwen3_vocab
from tiny_models import tiny_metadata
from tiny_vocab import qwen3_metadata

pytest.importorskip("llama_cpp")

from cllm.backends.llama_tokenizer import MAX_RUN_CHARS, LlamaTokenizer
from cllm.errors import InvalidRequestError, ModelFileError
from cllm.kylin.gguf import read_gguf
from cllm.tokenizer import StreamDecoder, Tokenizer, make_tokenizer
from cllm.vocabulary import is_supported

ODD_TEXTS = [
    "",
    " ",
    "   ",
    "\n",
    "\r\n\r\n \n\t x",
    "Hello, world!",
    "  two  blanks\t\ttabs \n\n\nlines\r\n ",
    "I'm SURE they'LL don't 'tis we'Ve you'd'VE",
    "3.14159 and 1234567 \xbd \u0663\u0664 \u216b x2y3",
    "na\xefve caf\xe9 \xc5 \xdf \u0130",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f \uc548\ub155",
    "\U0001f469\u200d\U0001f467\U0001f3f3\ufe0f\u200d\U0001f308 \U0001f9d1\U0001f3fd",
    "\x00\x01\x7f\ufffd\ufeff\u200b\u2028\x85\xa0\u3000",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u05e9\u05c1",
    "<|im_start|>user\nhi<|im_end|>\n<think>\n\n</think>",
    "<|endoftext|>a<|fim_prefix|> <|im_end|>",
    "<<|im_end|>|im_end|><|im_end",
    "def f(x):\n    return x**2  # \xb2\n\n\n\tif x != 0:\r\n",
    "!!!???--->>> ...\u2026 \u201cquoted\u201d \u2014 x_y_z",
    "A" * 300 + " " * 300 + "1" * 50 + "\n" * 70,
    "[PAD300] \u2581under \u0120lead <0x0A>",
]
SNIPPETS = [
    "\n",
    "\r\n",
    "\t",
    " ",
    "  ",
    "1",
    "\xbd",
    "a",
    "Z",
    "'s",
    "'LL",
    "\xe9",
    ".",
    "\u3000",
    "\u0301",
]
SNIPPETS += ["<|im_end|>", "<|im_start|>", "<think>", "<|", "|>", "im_end", "_", "\u4e16", "\U0001f469"]


def is_comparable(text: str) -> bool:
    return unicodedata.is_normalized("NFC", text) and "Cn" not in map(unicodedata.category, text)


TEXTS = (st.text(max_size=40) | st.lists(st.sampled_from(SNIPPETS), max_size=20).map("".join)).filter(
    is_comparable
)


class Pair:
    """Both tokenizers of one vocabulary."""

    def __init__(self, path: Path) -> None:
        metadata = read_gguf(path).metadata
        self.ours, self.oracle = make_tokenizer(metadata), LlamaTokenizer(path, metadata)

    def check(self, text: str) -> None:
        for parse_special in (False, True):
            ids = self.ours.encode(text, parse_special=parse_special)
            assert ids == self.oracle.encode(text, parse_special=parse_special)
            assert [self.ours.token_bytes(i) for i in ids] == [self.oracle.token_bytes(i) for i in ids]


def write_vocabulary(path: Path, **entries: Any) -> Path:
    """A GGUF file without tensors."""
    return write_gguf(path, tiny_metadata("llama") | entries)


@pytest.fixture(scope="module")
def vocabulary(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[str], Pair]:
    folder = tmp_path_factory.mktemp("vocabularies")

    @functools.cache
    def pair(name: str) -> Pair:
        if name == "smollm2":
            return Pair(request.getfixturevalue("smollm2_path"))
        entries = qwen3_metadata(load_qwen3_vocab()) if name == "qwen3" else {}
        return Pair(write_vocabulary(folder / f"{name}.gguf", **entries))

    return pair


names = pytest.mark.parametrize("name", ["bytes", "qwen3", pytest.param("smollm2", marks=pytest.mark.model)])


@names
@pytest.mark.parametrize("text", ODD_TEXTS)
def test_odd_texts_have_the_ids_of_llama(vocabulary: Callable[[str], Pair], name: str, text: str) -> None:
    assert is_comparable(text)
    vocabulary(name).check(text)


@names
@given(text=TEXTS)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_texts_have_the_ids_of_llama(vocabulary: Callable[[str], Pair], name: str, text: str) -> None:
    vocabulary(name).check(text)


@names
def test_facts_are_those_of_llama(vocabulary: Callable[[str], Pair], name: str) -> None:
    ours, oracle = vocabulary(name).ours, vocabulary(name).oracle
    for fact in ("vocab_size", "bos_id", "eos_id", "add_bos", "chat_template"):
        assert getattr(ours, fact) == getattr(oracle, fact), fact
    assert ours.eog_ids <= oracle.eog_ids
    assert ours.unused_ids.tolist() == oracle.unused_ids.tolist()


@pytest.mark.skipif("CLLM_TEST_VOCABULARIES" not in os.environ, reason="names a folder of ggml-vocab-*.gguf")
def test_every_supported_vocabulary_has_the_ids_of_llama() -> None:
    compared = []
    for path in sorted(Path(os.environ["CLLM_TEST_VOCABULARIES"]).glob("ggml-vocab-*.gguf")):
        if is_supported(read_gguf(path).metadata):
            pair = Pair(path)
            for text in ODD_TEXTS:
                pair.check(text)
            compared.append(path.name)
    assert len(compared) >= 3, compared


# --- As the stand-in -------------------------------------------------------------------------------------------

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
WORDS = [
    "\u2581",
    "H",
    "e",
    "l",
    "o",
    "\u2581H",
    "\u2581He",
    "ll",
    "\u2581Hello",
    "<|user|>",
    "\u4e16",
    "[unused]",
]
KINDS = [2, 3, 3, *[6] * 256, *[1] * 9, 4, 1, 5]


def sentencepiece(**changes: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary as a converted Llama 2 has it."""
    tokens = PIECES + WORDS
    entries = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "scores": np.array([0.0] * 259 + [-float(i) for i in range(len(WORDS))], np.float32),
        "token_type": np.array(KINDS, np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": True,
        "merges": Typed(GGUFValueType.STRING, []),
    } | changes
    return {f"tokenizer.ggml.{name}": value for name, value in entries.items()}


def load(path: Path, **entries: Any) -> LlamaTokenizer:
    write_vocabulary(path, **entries)
    return LlamaTokenizer(path, read_gguf(path).metadata)


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> LlamaTokenizer:
    return load(tmp_path_factory.mktemp("spm") / "spm.gguf", **sentencepiece())


def test_ours_does_not_know_sentencepiece(stand_in: LlamaTokenizer) -> None:
    assert not is_supported(sentencepiece())
    assert isinstance(stand_in, Tokenizer)


def test_facts_of_sentencepiece(stand_in: LlamaTokenizer) -> None:
    assert (stand_in.vocab_size, stand_in.bos_id, stand_in.eos_id) == (271, 1, 2)
    assert stand_in.add_bos
    assert stand_in.eog_ids == {2}
    assert stand_in.control_ids == {0, 1, 2}
    assert stand_in.unused_ids.tolist() == [270]
    assert stand_in.chat_template is None


def test_text_goes_there_and_back(stand_in: LlamaTokenizer) -> None:
    ids = stand_in.encode("Hello \u4e16\u754c\n")
    assert ids == [1, 265, 266, 263, 259, 269, *(3 + byte for byte in "\u754c\n".encode())]
    assert stand_in.decode(ids) == "<s> Hello \u4e16\u754c\n"
    assert stand_in.decode(ids, skip_special=True) == " Hello \u4e16\u754c\n"


def test_a_stream_of_it_is_the_text(stand_in: LlamaTokenizer) -> None:
    decoder = StreamDecoder(stand_in)
    pieces = [decoder.push(token_id) for token_id in stand_in.encode("He \u754c", add_bos=False)]
    assert pieces == [" He", " ", "", "", "\u754c"]


def test_controls_are_typed_only_on_request(stand_in: LlamaTokenizer) -> None:
    assert 2 not in stand_in.encode("</s>")
    assert stand_in.encode("</s>", parse_special=True, add_bos=False) == [2]
    assert 268 in stand_in.encode("<|user|>")


def test_long_pieces_and_wrong_ids(stand_in: LlamaTokenizer, tmp_path: Path) -> None:
    long = [*PIECES, *WORDS[:-1], "x" * 500]
    tokenizer = load(
        tmp_path / "long.gguf", **sentencepiece(tokens=long, token_type=np.array([*KINDS[:-1], 1], np.int32))
    )
    assert tokenizer.token_bytes(270) == b"x" * 500
    with pytest.raises(InvalidRequestError, match=r"in 0\.\.270"):
        stand_in.token_bytes(271)
    with pytest.raises(InvalidRequestError, match="surrogate"):
        stand_in.encode("\ud800")


@pytest.mark.parametrize("name", ["scores", "token_type"])
def test_arrays_of_wrong_length_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelFileError, match=f"expected 271 values as tokenizer.ggml.{name}.*found 7"):
        load(
            tmp_path / "short.gguf",
            **sentencepiece(**{name: np.ones(7, np.float32 if name == "scores" else np.int32)}),
        )


def test_a_file_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "none.gguf", {**tiny_metadata("llama"), "tokenizer.ggml.model": "no_vocab"})
    with pytest.raises(ModelFileError, match="holds no vocabulary"):
        LlamaTokenizer(path, read_gguf(path).metadata)


def test_runs_that_would_end_the_process_are_refused(tmp_path: Path) -> None:
    tokenizer = load(tmp_path / "bpe.gguf", **{"tokenizer.ggml.pre": "deepseek-llm"})
    run = "a" * MAX_RUN_CHARS
    assert len(tokenizer.encode(f"{run} {run}")) == 2 * MAX_RUN_CHARS + 1
    for text in (run + "a", " " * MAX_RUN_CHARS + "\n"):
        with pytest.raises(InvalidRequestError, match="between blanks"):
            tokenizer.encode(text)
