"""llama.cpp's tokenizer behind the interface of ours, for the kinds of vocabulary that ours lacks.

It owns a copy of the vocabulary, so it may outlive the backend. It knows no weights, requests or templates.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import BackendError, InvalidRequestError, ModelFileError
from ..tokenizer import Tokenizer
from .llama_library import LlamaModel, load_library

_NO_VOCABULARY, _BPE = 0, 2  # llama_vocab_type in llama.h
_UNKNOWN, _UNUSED, _CONTROL = 1, 2, 8  # bits of llama_token_attr in llama.h

# llama.cpp cuts words for BPE with std::regex, which recurses once a character of a match: 20,000 to 40,000
# overflow a stack of 8 MiB and end the process.
MAX_RUN_CHARS = 10_000


class LlamaTokenizer(Tokenizer):
    """`Tokenizer` on llama.cpp's vocabulary (SentencePiece and others).

    Differs from ours: text is not normalised beforehand; where the vocabulary puts a blank before a text,
    `decode` keeps it; the tokens that end a generation are those that llama.cpp knows; and with BPE `encode`
    refuses more than `MAX_RUN_CHARS` characters in a row without, or of nothing but, blanks.
    """

    def __init__(self, path: str | os.PathLike[str], metadata: Mapping[str, Any]) -> None:
        """`metadata` is that of the GGUF file `path`, which may hold a vocabulary only.

        Raises `ModelFileError` if llama.cpp cannot read the vocabulary either, `ConfigError` without llama.cpp.
        """
        library = load_library()
        _check_lengths(metadata, os.fspath(path))
        self._library, self._model = library, LlamaModel(path, vocab_only=True)
        self._vocab = vocab = self._model.vocab
        self._kind = library.llama_vocab_type(vocab)
        if self._kind == _NO_VOCABULARY:
            raise ModelFileError("the file holds no vocabulary", path=os.fspath(path))
        self.vocab_size = library.llama_vocab_n_tokens(vocab)
        self.bos_id = self._read_id("bos", library.llama_vocab_bos(vocab), metadata)
        self.eos_id = self._read_id("eos", library.llama_vocab_eos(vocab), metadata)
        self.add_bos = self.bos_id is not None and bool(library.llama_vocab_get_add_bos(vocab))
        template = metadata.get("tokenizer.chat_template")
        self.chat_template = template if isinstance(template, str) else None
        self.plain_texts = {}
        ids = range(self.vocab_size)
        attributes = np.fromiter((library.llama_vocab_get_attr(vocab, i) for i in ids), np.int32)
        self.control_ids = frozenset(np.flatnonzero(attributes & (_CONTROL | _UNKNOWN)).tolist())
        self.unused_ids = np.flatnonzero(attributes & _UNUSED)
        self.eog_ids = frozenset(i for i in ids if library.llama_vocab_is_eog(vocab, i))

    def _read_id(self, name: str, token_id: int, metadata: Mapping[str, Any]) -> int | None:
        """llama.cpp gives every BPE vocabulary the ids of Falcon where the file names none."""
        is_guess = self._kind == _BPE and f"tokenizer.ggml.{name}_token_id" not in metadata
        return None if is_guess or token_id < 0 else token_id

    def token_bytes(self, token_id: int) -> bytes:
        self.check_ids((token_id,))
        size = 64
        while True:
            piece = ctypes.create_string_buffer(size)
            count = self._library.llama_token_to_piece(self._vocab, token_id, piece, size, 0, True)
            if count >= 0:
                return piece.raw[:count]
            size = -count  # what it needs

    def _text_ids(self, text: str, *, parse_special: bool) -> list[int]:
        if self._kind == _BPE and any(len(run) > MAX_RUN_CHARS for run in re.findall(r"\s+|\S+", text)):
            raise InvalidRequestError(
                f"expected at most {MAX_RUN_CHARS} characters between blanks, found more: llama.cpp cannot cut "
                f"them into words",
                field="prompt",
            )
        data = text.encode()
        size = len(data) + 2  # enough for all but texts that grow when they are normalised
        for _ in range(2):
            ids = np.empty(size, np.int32)
            pointer = ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
            count = self._library.llama_tokenize(
                self._vocab, data, len(data), pointer, size, False, parse_special
            )
            if count >= 0:
                found: list[int] = ids[:count].tolist()
                return found
            size = -count
        raise BackendError(f"llama.cpp cannot tokenize a text of {len(data)} bytes")


def _check_lengths(metadata: Mapping[str, Any], path: str) -> None:
    """llama.cpp reads as many scores and types as there are tokens, whether they are there or not."""
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    for name in ("scores", "token_type"):
        found = metadata.get(f"tokenizer.ggml.{name}", tokens)
        if len(found) != len(tokens):
            raise ModelFileError(
                f"expected {len(tokens)} values as tokenizer.ggml.{name}, one a token, found {len(found)}",
                path=path,
            )
