"""Qwen3's own vocabulary and chat template, rebuilt from the compact form in tests/data.

It owns that form and the added tokens. It must not know cLLM, whose tokenizer is tested against it.
"""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import NamedTuple

import numpy as np

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
PADDED_SIZE = 151_936  # rows of the embedding in every Qwen3 up to 8B

# Added tokens in order of id (151643 and up in the full vocabulary), as tokenizer.json lists them.
ADDED_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>"),
    *("<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
)
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # llama.cpp's token types


class Vocab(NamedTuple):
    """What a GGUF file holds of a tokenizer; `merges` are "left right"."""

    tokens: list[str]
    token_types: list[int]
    merges: list[str]
    chat_template: str


def load_qwen3_vocab(size: int = PADDED_SIZE) -> Vocab:
    """Returns Qwen3's vocabulary in `size` tokens, as llama.cpp's converter writes it.

    A smaller `size` keeps the bytes, the first merges and all added tokens; what is left over is padding.
    Raises `ValueError` if `size` has no room for the bytes and the added tokens.
    """
    tokens = _byte_characters()
    room = size - len(tokens) - len(ADDED_TOKENS)
    if room < 0:
        raise ValueError(f"expected a size of at least {size - room}, found {size}")
    packed = lzma.decompress((DATA / "qwen3_merges.u32.xz").read_bytes())
    merges = []
    for left, right in np.frombuffer(packed, "<u4").reshape(-1, 2)[:room].tolist():
        merges.append(f"{tokens[left]} {tokens[right]}")
        tokens.append(tokens[left] + tokens[right])
    types = [NORMAL] * len(tokens)
    types += [CONTROL if text.startswith("<|") else USER_DEFINED for text in ADDED_TOKENS]
    tokens += ADDED_TOKENS
    types += [UNUSED] * (size - len(tokens))
    tokens += [f"[PAD{token_id}]" for token_id in range(len(tokens), size)]
    return Vocab(tokens, types, merges, (DATA / "qwen3_chat_template.jinja").read_text(encoding="utf-8"))


def _byte_characters() -> list[str]:
    """GPT-2's 256 byte characters in code point order: printable Latin-1, then U+0100 and up for the rest."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(code) for code in (*printable, *range(0x100, 0x100 + 256 - len(printable)))]
