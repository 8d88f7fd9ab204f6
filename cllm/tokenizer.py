"""Text to token ids and back, from the vocabulary that a GGUF file carries.

This module keeps what a user types apart from the model's control tokens, and turns ids back into text, whole or
as a stream; plain text goes through the pipeline of `vocabulary.py`. It must not know models, requests or chat
templates; it only hands a template on.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidRequestError, ModelFileError
from .kylin.gguf import read_gguf
from .vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Vocabulary, read_vocabulary

# Controls that end a turn or a text, whatever the file names as its end of sequence.
_END_OF_GENERATION = frozenset({"<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"})

# The regex engine panics after 10 million steps within one match; a run of blanks takes one a character.
MAX_TEXT_CHARS = 8_000_000

# `encode` keeps every other Python thread waiting, for seconds at worst; from this many characters on the batch
# call, which does not, is worth its threads.
_LONG_TEXT = 10_000


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Reads the tokenizer of the GGUF file `path`, which may hold a vocabulary only.

    Raises `ModelFileError` if the file or its vocabulary is damaged or of an unsupported kind.
    """
    metadata = read_gguf(path).metadata
    try:
        return make_tokenizer(metadata)
    except ModelFileError as error:
        raise ModelFileError(str(error), path=os.fspath(path)) from None


def make_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds the tokenizer that a GGUF file's `metadata` describes under `tokenizer.*`.

    Raises `ModelFileError` if that vocabulary is damaged or of an unsupported kind.
    """
    return Tokenizer(read_vocabulary(metadata))


class Tokenizer:
    """Byte-level BPE over the vocabulary of a model file; see `make_tokenizer`.

    A byte for which the vocabulary has no token is dropped, as llama.cpp does (SmolLM2 lacks a few ASCII
    controls). All methods may be called from several threads at once.
    """

    vocab_size: int
    """Number of ids; they are 0 .. vocab_size - 1."""
    bos_id: int | None
    eos_id: int | None
    add_bos: bool
    """The file's own rule: whether a prompt begins with `bos_id`."""
    eog_ids: frozenset[int]
    """The tokens that end a generation."""
    control_ids: frozenset[int]
    """The tokens that text makes only with `parse_special`, and that `skip_special` leaves out."""
    unused_ids: NDArray[np.int64]
    """The ids that no text means (padding of the embedding), ascending: never to be sampled."""
    plain_texts: dict[int, str]
    """Of the tokens that streams have met, those that are whole ASCII texts and no controls."""
    chat_template: str | None
    """The source of the file's Jinja template."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens, self._types = vocabulary.tokens, vocabulary.types
        self._pipeline = vocabulary.pipeline
        self._bytes_of: dict[int, bytes] = {}  # of the tokens met so far: streams ask again and again
        self.plain_texts = {}
        self.vocab_size = len(self._tokens)
        self.bos_id, self.eos_id = vocabulary.bos_id, vocabulary.eos_id
        self.add_bos = vocabulary.add_bos
        self.chat_template = vocabulary.chat_template
        self.control_ids = frozenset(vocabulary.ids_of_type(CONTROL, UNKNOWN))
        self.unused_ids = np.array(vocabulary.ids_of_type(UNUSED), np.int64)
        named = (i for i in self.control_ids if self._tokens[i] in _END_OF_GENERATION)
        self.eog_ids = frozenset([*vocabulary.end_ids, *named])
        user_defined = vocabulary.ids_of_type(USER_DEFINED)
        self._id_of_special = {self._tokens[i]: i for i in [*user_defined, *self.control_ids]}
        self._user_pattern = _match_any(self._tokens[i] for i in user_defined)
        self._special_pattern = _match_any(self._id_of_special)

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool | None = None) -> list[int]:
        """Returns the token ids of `text`.

        `parse_special` lets the text of a control token stand for that token; otherwise it is plain text.
        `add_bos` None means the file's own rule; a text that begins with a BOS token gets no second one.
        Raises `InvalidRequestError` for lone surrogates, for more than `MAX_TEXT_CHARS` characters, and for
        `add_bos` where the vocabulary has no BOS token.
        """
        _check_text(text)
        ids = self._text_ids(text, parse_special=parse_special)
        if self.add_bos if add_bos is None else add_bos:
            if self.bos_id is None:
                raise InvalidRequestError("this model has no BOS token; leave add_bos out", field="add_bos")
            if ids[:1] != [self.bos_id]:
                ids.insert(0, self.bos_id)
        return ids

    def _text_ids(self, text: str, *, parse_special: bool) -> list[int]:
        pattern = self._special_pattern if parse_special else self._user_pattern
        ids: list[int] = []
        for index, part in enumerate(pattern.split(text)):
            if index % 2:  # a pattern of one group splits into text, match, text, ...
                ids.append(self._id_of_special[part])
            elif len(part) > _LONG_TEXT:
                ids += self._pipeline.encode_batch_fast([part], add_special_tokens=False)[0].ids
            elif part:
                ids += self._pipeline.encode(part, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Returns the text of `ids`; bytes that are not UTF-8 become U+FFFD, as `bytes.decode` has it.

        `skip_special` leaves the control tokens out; otherwise their own text stands for them.
        Raises `InvalidRequestError` for an id outside the vocabulary.
        """
        decoder = StreamDecoder(self, skip_special=skip_special)
        return "".join([*map(decoder.push, ids), decoder.flush()])

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that `token_id` stands for: perhaps a part of a character only.

        Raises `InvalidRequestError` for an id outside the vocabulary.
        """
        known = self._bytes_of.get(token_id) if type(token_id) is int else None
        if known is None:
            self.check_ids((token_id,))
            known = self._bytes_of[int(token_id)] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        text = self._tokens[token_id]
        if self._types[token_id] in (NORMAL, BYTE):
            try:
                return bytes(map(BYTE_OF_CHAR.__getitem__, text))
            except KeyError:
                pass  # some files hold an added token, written plainly, under the normal type
        return text.encode()

    def check_ids(self, ids: Iterable[int]) -> None:
        """Raises `InvalidRequestError` unless every one of `ids` is an integer in 0 .. vocab_size - 1."""
        for token_id in ids:
            if type(token_id) is int and 0 <= token_id < self.vocab_size:
                continue
            is_integer = isinstance(token_id, int | np.integer) and not isinstance(token_id, bool)
            if not is_integer or not 0 <= token_id < self.vocab_size:
                raise InvalidRequestError(
                    f"expected token ids in 0..{self.vocab_size - 1}, found {token_id!r}",
                    field="prompt_token_ids",
                )


class StreamDecoder:
    """Text of one token after another; the pieces joined are what `Tokenizer.decode` returns for all of them.

    Bytes that begin a character are held back until it is whole or broken.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.control_ids if skip_special else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._plain_texts = tokenizer.plain_texts
        self._is_inside = False  # whether bytes of an unfinished character are held back

    def push(self, token_id: int) -> str:
        """Returns the text that is settled by `token_id`, often "" inside a character.

        Raises `InvalidRequestError` for an id outside the vocabulary; the stream is then as before.
        """
        plain = self._plain_texts.get(token_id) if type(token_id) is int else None  # True == 1, too
        if plain is not None and not self._is_inside:
            return plain
        data = self._tokenizer.token_bytes(token_id)
        if token_id in self._skipped:
            return ""
        if token_id not in self._tokenizer.control_ids and data.isascii():
            self._plain_texts[token_id] = data.decode("ascii")
        text = self._utf8.decode(data)
        self._is_inside = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        """Ends the text: returns what is held back, as U+FFFD. The next `push` begins a new text."""
        self._is_inside = False
        return self._utf8.decode(b"", final=True)


def _match_any(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern of one group that matches any of `texts`, the longest first; of none, nothing."""
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("(" + ("|".join(map(re.escape, longest_first)) or "(?!)") + ")")


def _check_text(text: str) -> None:
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidRequestError(
            f"expected a text of at most {MAX_TEXT_CHARS} characters, found {len(text)}", field="prompt"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text holds a lone surrogate, U+{ord(text[error.start]):04X}, at character {error.start}; "
            "send valid Unicode",
            field="prompt",
        ) from None


def _make_byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes in order for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(moved)}


BYTE_OF_CHAR = _make_byte_of_char()
