"""The vocabulary of a GGUF file, checked, and the `tokenizers` pipeline that turns plain text into its ids.

It knows byte-level BPE ("gpt2" vocabularies) and how each kind of model cuts text into words; not how text and control
tokens are told apart, nor how ids become text again.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Pipeline
from tokenizers.models import BPE

from .errors import ModelFileError

# Values of `tokenizer.ggml.token_type` (llama.cpp's `llama_token_type`).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def is_supported(metadata: Mapping[str, Any]) -> bool:
    """Whether `read_vocabulary` knows this kind of vocabulary; it may still be damaged."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    return kind == "gpt2" and isinstance(pre, str) and pre in _PRE_TOKENIZATIONS


@dataclass(frozen=True)
class Vocabulary:
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


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary that a GGUF file's `metadata` holds under `tokenizer.*`.

    Raises `ModelFileError` if it is damaged or of an unsupported kind.
    """
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
    return Vocabulary(
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
    wrong = np.flatnonzero((found < NORMAL) | (found > BYTE))
    if wrong.size:
        raise ModelFileError(f"expected types 1..6 in {key}, found {found[wrong[0]]} for token {wrong[0]}")
    types = found.astype(np.uint8)
    for token_id in map(int, np.flatnonzero(types == USER_DEFINED)):
        if re.fullmatch(r"<\|.*\|>", tokens[token_id], re.DOTALL):
            types[token_id] = CONTROL  # some converters write <|fim_prefix|> and its like as user-defined
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
    plain = {text: i for text, i in id_of.items() if types[i] in (NORMAL, USER_DEFINED, BYTE)}
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
