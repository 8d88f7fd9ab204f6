"""Vocabularies as GGUF metadata for tests of the tokenizer: bytes, a few merges and a few added tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from qwen3_vocab import Vocab, load_qwen3_vocab

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5


def vocab_metadata(
    pre: str = "gpt-2",
    merges: Sequence[str] = (),
    added: Sequence[tuple[str, int]] = (),
    **changes: Any,
) -> dict[str, Any]:
    """The 256 bytes, then the tokens that `merges` make, then `added` (text, type).

    `changes` replaces entries of `tokenizer.ggml.*` by their last name; None removes one.
    """
    tokens = load_qwen3_vocab(300).tokens[:256]
    tokens += [merge.replace(" ", "") for merge in merges]
    types = [NORMAL] * len(tokens) + [kind for _, kind in added]
    tokens += [text for text, _ in added]
    entries = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": np.array(types, np.int32),
        "merges": list(merges),
    } | changes
    return {f"tokenizer.ggml.{name}": value for name, value in entries.items() if value is not None}


def qwen3_metadata(vocab: Vocab) -> dict[str, Any]:
    """What a converted Qwen3 holds of its tokenizer, for a vocabulary of any size."""
    end_of_text = vocab.tokens.index("<|endoftext|>")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": vocab.tokens,
        "tokenizer.ggml.token_type": np.array(vocab.token_types, np.int32),
        "tokenizer.ggml.merges": vocab.merges,
        "tokenizer.ggml.bos_token_id": end_of_text,
        "tokenizer.ggml.eos_token_id": vocab.tokens.index("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": end_of_text,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": vocab.chat_template,
    }
