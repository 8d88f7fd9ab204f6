"""Text to token ids and back, from the vocabulary that a GGUF file carries.

This module owns byte-level BPE ("gpt2" vocabularies): it checks the vocabulary, builds a `tokenizers`
pipeline from it, keeps what a user types apart from the model's control tokens, and turns ids back into text,
whole or as a stream. It must not know models, requests or chat templates; it only hands a template on.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Pipeline
from tokenizers.models import BPE

from .errors import InvalidRequestError, ModelFileError
from .kylin.gguf import read_gguf

# Values of `tokenizer.ggml.token_type` (llama.cpp's `llama_token_type`).
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

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
    return Tokenizer(_read_vocabulary(metadata))


def is_supported(metadata: Mapping[str, Any]) -> bool:
    """Whether `make_tokenizer` knows this kind of vocabulary; it may still be damaged."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    return kind == "gpt2" and isinstance(pre, str) and pre in _PRE_TOKENIZATIONS


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

    def __init__(self, vocabulary: _Vocabulary) -> None:
        self._tokens, self._types = vocabulary.tokens, vocabulary.types
        self._pipeline = vocabulary.pipeline
        self._bytes_of: dict[int, bytes] = {}  # of the tokens met so far: streams ask again and again
        self.plain_texts = {}
        self.vocab_size = len(self._tokens)
        self.bos_id, self.eos_id = vocabulary.bos_id, vocabulary.eos_id
        self.add_bos = vocabulary.add_bos
        self.chat_template = vocabulary.chat_template
        self.control_ids = frozenset(vocabulary.ids_of_type(_CONTROL, _UNKNOWN))
        self.unused_ids = np.array(vocabulary.ids_of_type(_UNUSED), np.int64)
        named = (i for i in self.control_ids if self._tokens[i] in _END_OF_GENERATION)
        self.eog_ids = frozenset([*vocabulary.end_ids, *named])
        user_defined = vocabulary.ids_of_type(_USER_DEFINED)
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
        if self._types[token_id] in (_NORMAL, _BYTE):
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


# --- From metadata to a checked vocabulary ------------------------------------------------------------------


@dataclass(frozen=True)
class _Vocabulary:
    """A checked vocabulary: every id is in range, every text unique, every merge known."""

    tokens: list[str]
    types: bytes  # one a token; user-defined tokens that look like controls are controls here
    pipeline: Pipeline
    bos_id: int | None
    eos_id: int | None
    end_ids: list[int]
    add_bos: bool
    chat_template: str | None

    def ids_of_type(self, *types: int) -> list[int]:
        found: list[int] = np.flatnonzero(np.isin(np.frombuffer(self.types, np.uint8), types)).tolist()
        return found


def _read_vocabulary(metadata: Mapping[str, Any]) -> _Vocabulary:
    rule = _read_pre_tokenization(metadata)
    tokens = _read_strings(metadata, "tokenizer.ggml.tokens")
    types = _read_types(metadata, tokens)
    merges = _read_strings(metadata, "tokenizer.ggml.merges")
    ids = {name: _read_id(metadata, name, len(tokens)) for name in ("bos", "eos", "eot", "eom")}
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", rule.add_bos and ids["bos"] is not None))
    if add_bos and ids["bos"] is None:
        raise ModelFileError(
            "tokenizer.ggml.add_bos_token is true, but tokenizer.ggml.bos_token_id is missing"
        )
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise ModelFileError(f"expected a string as tokenizer.chat_template, found {type(template).__name__}")
    return _Vocabulary(
        tokens=tokens,
        types=types,
        pipeline=_build_pipeline(rule, tokens, types, merges),
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        end_ids=[i for name, i in ids.items() if name != "bos" and i is not None],
        add_bos=add_bos,
        chat_template=template,
    )


def _read_strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not set(map(type, value)) <= {str}:
        found = "nothing" if value is None else type(value).__name__
        raise ModelFileError(f"expected an array of strings as {key}, found {found}: damaged vocabulary")
    return value


def _read_types(metadata: Mapping[str, Any], tokens: Sequence[str]) -> bytes:
    key = "tokenizer.ggml.token_type"
    found = metadata.get(key)
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu" or len(found) != len(tokens):
        shown = f"{len(found)} of {found.dtype}" if isinstance(found, np.ndarray) else type(found).__name__
        raise ModelFileError(f"expected {len(tokens)} integers as {key}, one a token, found {shown}")
    wrong = np.flatnonzero((found < _NORMAL) | (found > _BYTE))
    if wrong.size:
        raise ModelFileError(f"expected types 1..6 in {key}, found {found[wrong[0]]} for token {wrong[0]}")
    types = found.astype(np.uint8)
    for token_id in map(int, np.flatnonzero(types == _USER_DEFINED)):
        if re.fullmatch(r"<\|.*\|>", tokens[token_id], re.DOTALL):
            types[token_id] = _CONTROL  # some converters write <|fim_prefix|> and its like as user-defined
    return types.tobytes()


def _read_id(metadata: Mapping[str, Any], name: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int | np.integer) or not 0 <= value < count:
        raise ModelFileError(f"expected a token id in 0..{count - 1} as {key}, found {value!r}")
    return int(value)


# --- From a vocabulary to a pipeline ------------------------------------------------------------------------


@dataclass(frozen=True)
class _PreTokenization:
    """How text is cut into words before BPE, and what else goes with a value of `tokenizer.ggml.pre`."""

    make: Callable[[], pre_tokenizers.PreTokenizer]
    nfc: bool = False  # normalise to NFC first
    ignore_merges: bool = False  # a word that is itself a token needs no merges
    add_bos: bool = False  # unless the file says otherwise


def _split_then_bytes(max_digits: int) -> pre_tokenizers.PreTokenizer:
    """The pattern that the tokenizer.json of Llama 3 (up to 3 digits a word) and of Qwen2 (1) publish."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        rf"{{1,{max_digits}}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, to_bytes])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_LLAMA3 = _PreTokenization(lambda: _split_then_bytes(3), ignore_merges=True, add_bos=True)
_PRE_TOKENIZATIONS = {
    "gpt-2": _PreTokenization(_gpt2),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _PreTokenization(lambda: _split_then_bytes(1), nfc=True),
    "smollm": _PreTokenization(_smollm),
}


def _read_pre_tokenization(metadata: Mapping[str, Any]) -> _PreTokenization:
    for key, supported in (
        ("tokenizer.ggml.model", ["gpt2"]),
        ("tokenizer.ggml.pre", list(_PRE_TOKENIZATIONS)),
    ):
        found = metadata.get(key)
        if not isinstance(found, str) or found not in supported:
            raise ModelFileError(
                f"{key} is {found!r}; supported here: {', '.join(supported)}. Try --backend llama"
            )
    return _PRE_TOKENIZATIONS[metadata["tokenizer.ggml.pre"]]


def _build_pipeline(
    rule: _PreTokenization, tokens: Sequence[str], types: bytes, merges: Sequence[str]
) -> Pipeline:
    """The pipeline knows only what plain text may become: no control, unknown or unused token."""
    id_of = {text: token_id for token_id, text in enumerate(tokens)}
    if len(id_of) < len(tokens):
        twice = next(text for token_id, text in enumerate(tokens) if id_of[text] != token_id)
        raise ModelFileError(f"the token {twice!r} is there twice: damaged vocabulary")
    plain = {text: i for text, i in id_of.items() if types[i] in (_NORMAL, _USER_DEFINED, _BYTE)}
    pipeline = Pipeline(_make_bpe(plain, id_of, merges, rule.ignore_merges))
    if rule.nfc:
        pipeline.normalizer = normalizers.NFC()
    pipeline.pre_tokenizer = rule.make()
    return pipeline


def _make_bpe(
    plain: dict[str, int], known: Mapping[str, int], merges: Sequence[str], ignore_merges: bool
) -> BPE:
    """The library checks the pieces of a merge faster than Python can; over some unions it panics."""
    pairs = [_split_merge(merge) for merge in merges]
    if all(left + right in plain for left, right in pairs):
        with contextlib.suppress(Exception):  # it says less than the check below
            return BPE(plain, pairs, ignore_merges=ignore_merges)
    return BPE(plain, _check_merges(merges, plain, known), ignore_merges=ignore_merges)


def _split_merge(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _check_merges(
    merges: Sequence[str], plain: Mapping[str, int], known: Mapping[str, int]
) -> list[tuple[str, str]]:
    """The merges of `plain` tokens; those that would make or use another one are left out."""
    pairs = []
    for index, (left, right) in enumerate(map(_split_merge, merges)):
        if left in plain and right in plain and left + right in plain:
            pairs.append((left, right))
        elif not (left in known and right in known and left + right in known):
            raise ModelFileError(
                f"merge {index}, {merges[index]!r}, is not two tokens, a blank between, that make a third"
            )
    return pairs


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
