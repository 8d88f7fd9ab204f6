"""Vocabularies that are damaged or of an unsupported kind are refused with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tiny_vocab import CONTROL, vocab_metadata

from cllm.errors import ModelFileError
from cllm.tokenizer import load_tokenizer, make_tokenizer


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "llama"}, r"model is 'llama'; supported here: gpt2\. Try --backend llama"),
        ({"model": None}, r"model is None; supported here"),
        ({"model": np.array([1, 2])}, r"model is array"),
        ({"pre": "tekken"}, r"pre is 'tekken'; supported here: gpt-2, .*smollm\. Try --backend llama"),
        ({"pre": None}, r"pre is None"),
        ({"tokens": None}, r"array of strings as tokenizer.ggml.tokens, found nothing"),
        ({"tokens": np.arange(3)}, r"array of strings as tokenizer.ggml.tokens, found ndarray"),
        ({"tokens": ["a", 7]}, r"array of strings as tokenizer.ggml.tokens, found list"),
        ({"token_type": None}, r"expected 257 integers as .*token_type, one a token, found NoneType"),
        ({"token_type": np.ones(256, np.int32)}, r"expected 257 integers .* found 256 of int32"),
        ({"token_type": np.ones(257, np.float32)}, r"expected 257 integers .* found 257 of float32"),
        ({"token_type": np.full(257, 7)}, r"types 1\.\.6 .* found 7 for token 0"),
        ({"token_type": np.zeros(257, int)}, r"types 1\.\.6 .* found 0 for token 0"),
        ({"token_type": np.full(257, 257)}, r"types 1\.\.6 .* found 257 for token 0"),
        ({"merges": None}, r"array of strings as tokenizer.ggml.merges, found nothing"),
        ({"merges": ["a b", "ab"]}, r"merge 1, 'ab', is not two tokens"),
        ({"merges": ["a  b"]}, r"merge 0, 'a  b', is not two tokens"),
        ({"merges": [""]}, r"merge 0, '', is not two tokens"),
        ({"merges": ["a c"]}, r"merge 0, 'a c', is not two tokens"),
        ({"merges": ["a \u4f60"]}, r"is not two tokens"),
        ({"eos_token_id": 257}, r"token id in 0\.\.256 as tokenizer.ggml.eos_token_id, found 257"),
        ({"bos_token_id": -1}, r"token id in 0\.\.256 as tokenizer.ggml.bos_token_id, found -1"),
        ({"eot_token_id": "end"}, r"token id in 0\.\.256 as tokenizer.ggml.eot_token_id, found 'end'"),
        ({"add_bos_token": True}, r"bos_token_id is missing"),
    ],
)
def test_damage_is_named(changes: dict[str, Any], reason: str) -> None:
    metadata = vocab_metadata(merges=["a b"])
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    with pytest.raises(ModelFileError, match=reason):
        make_tokenizer({key: value for key, value in metadata.items() if value is not None})


def test_a_token_that_is_there_twice_is_refused() -> None:
    with pytest.raises(ModelFileError, match="'<x>' is there twice"):
        make_tokenizer(vocab_metadata(added=[("<x>", CONTROL), ("<x>", CONTROL)]))


def test_a_chat_template_must_be_text() -> None:
    with pytest.raises(ModelFileError, match=r"a string as tokenizer\.chat_template, found list"):
        make_tokenizer(vocab_metadata() | {"tokenizer.chat_template": ["a"]})


def write_vocabulary(path: Path, pre: str) -> None:
    metadata = vocab_metadata(merges=["a b"])
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"].tolist())
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_file_of_a_vocabulary_only_is_enough(tmp_path: Path) -> None:
    write_vocabulary(tmp_path / "vocab.gguf", "gpt-2")
    assert load_tokenizer(tmp_path / "vocab.gguf").encode("ab") == [256]


def test_the_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "vocab.gguf"
    write_vocabulary(path, "tekken")
    with pytest.raises(ModelFileError, match=r"vocab\.gguf: tokenizer\.ggml\.pre is 'tekken'") as caught:
        load_tokenizer(path)
    assert caught.value.path == str(path)
