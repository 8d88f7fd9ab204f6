"""Trains the demo model's tokenizer and turns the stories into token ids.

    python tools/demo_model/tokens.py stories.txt simple_stories.txt OUT_FOLDER

writes tokenizer.json and data.npz. It owns the vocabulary (byte-level BPE under Qwen2's pre-tokenizer, Qwen3's
special tokens last) and the streams of tokens. It must not know the model.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from conversations import make_conversations
from corpus import END_OF_TEXT, is_held_out, is_tidy, read_stories
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCAB_SIZE = 4096
# In Qwen3's order; those that begin with "<|" are control tokens, the others user-defined.
SPECIAL_TOKENS = (
    *(END_OF_TEXT, "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
)
# The pre-tokenizer that GGUF files name "qwen2".
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of `VOCAB_SIZE` ids: 256 bytes, the merges, then `SPECIAL_TOKENS`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def encode_all(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """All texts in one row, each ended by `<|endoftext|>`: ids uint16[n], and starts int32[len(texts) + 1]."""
    end = [tokenizer.token_to_id(END_OF_TEXT)]
    rows = [encoding.ids + end for encoding in tokenizer.encode_batch(list(texts))]
    starts = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    return np.concatenate([np.array(row, np.uint16) for row in rows]), starts


def main() -> None:
    """Reads the command line and writes the two files."""
    parser = argparse.ArgumentParser(description="Train the tokenizer and tokenise the corpus.")
    parser.add_argument("stories", type=Path)
    parser.add_argument("simple_stories", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    streams: dict[str, list[str]] = {}
    for name, path in (("stories", args.stories), ("simple", args.simple_stories)):
        stories = read_stories(path)
        streams[f"heldout_{name}"] = [story for story in stories if is_held_out(story)]
        streams[name] = [story for story in stories if not is_held_out(story)]
    streams["tidy"] = [story for story in streams["simple"] if is_tidy(story)]
    streams["simple"] = [story for story in streams["simple"] if not is_tidy(story)]
    streams["chat"] = make_conversations(streams["tidy"])

    tokenizer = train_tokenizer(streams["stories"] + streams["simple"] + streams["tidy"])
    tokenizer.save(str(args.out / "tokenizer.json"))
    arrays: dict[str, Any] = {}
    for name, texts in streams.items():
        ids, starts = encode_all(tokenizer, texts)
        num_bytes = sum(len(text.encode()) for text in texts)
        arrays |= {name: ids, f"{name}_starts": starts, f"{name}_bytes": np.int64(num_bytes)}
        print(f"{name}: {len(texts)} texts, {num_bytes} bytes, {len(ids)} tokens")
    np.savez_compressed(args.out / "data.npz", **arrays)


if __name__ == "__main__":
    main()
