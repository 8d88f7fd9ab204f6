"""How llama.cpp's KV cache is shared out among the slots: one for all (unified), or an equal part of its own for each.

In a unified cache llama.cpp's attention on a CPU looks at the mask of every cell for every sequence, and what one
sequence has lies among the others': 8 sequences of 900 tokens took 452 ms a step there, and 237 in caches of their own
(0.6B shape, 2 cores). In those, llama.cpp computes a batch in parts, of slots that are neighbours and have equally many
tokens, which costs a CPU little and a GPU most of its speed; and a beginning is not shared but copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ..config import EngineConfig

CELLS = 256  # n_ctx, and each sequence's part of it, are multiples of it
# llama.cpp's attention on a CPU scans the mask of all cells up to the highest used one: so many idle tokens cost
# about 3 % of a step's time (measured with 8 sequences of the 0.6B shape: 1,000 cost 3.5 %).
IDLE_TOKENS = 850
# A copy is of a whole part, 4,096 cells in the time of 12 tokens of a prompt (0.6B shape): less is computed again.
SHORTEST_COPY = 16


class Cells(NamedTuple):
    """What a cache consists of: `capacity` cells, a token each; `own` of them for each slot, or None (unified)."""

    capacity: int
    num_slots: int
    own: int | None

    @property
    def block(self) -> int:
        """Tokens that may be shared or copied: a multiple of it. It divides `CELLS`, or `own`."""
        return 1 if self.own is None else max(SHORTEST_COPY, self.own // CELLS)

    def max_idle_tokens(self, context: int) -> int | None:
        """What idle slots may hold before they slow the others; no limit where nobody looks at them."""
        return max(context, IDLE_TOKENS) if self.own is None else None

    def __str__(self) -> str:
        if self.own is None:
            return f"unified KV cache of {self.capacity} tokens"
        return f"KV cache of {self.num_slots} x {self.own} tokens"


def share_out(config: EngineConfig, *, context: int, affordable: int, may_split: bool) -> Cells:
    """The cells for sequences of `context` tokens: those that `config` names, or else at most `affordable`.

    Where all sequences find room for their context, and `may_split`, each has cells of its own.
    """
    own = _whole(context)
    capacity = config.kv_cache_tokens
    if capacity is None:
        capacity = min(own * config.max_num_seqs, max(CELLS, affordable))
    capacity = _whole(capacity)
    if not may_split or config.max_num_seqs == 1 or capacity < own * config.max_num_seqs:
        return Cells(capacity, config.num_slots(), None)
    num_slots = min(config.num_slots(), capacity // own)
    return Cells(own * num_slots, num_slots, own)


def _whole(count: int) -> int:
    return -(-count // CELLS) * CELLS


def bytes_a_cell(metadata: Mapping[str, Any], dtype: str) -> int:
    """Bytes of KV cache a token over all layers, at least 1. llama.cpp has checked these values."""
    architecture = metadata.get("general.architecture")

    def values(key: str, default: Any) -> np.ndarray[Any, Any]:
        return np.atleast_1d(metadata.get(f"{architecture}.{key}", default)).astype(np.int64)

    num_heads = values("attention.head_count", 1)
    head_width = int(values("embedding_length", 0)[0]) // max(1, int(num_heads.max()))
    widths = values("attention.key_length", head_width)[0] + values("attention.value_length", head_width)[0]
    num_layers = values("block_count", 0)[0]
    heads = np.broadcast_to(values("attention.head_count_kv", num_heads), num_layers).sum()
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[dtype.upper()]]
    return max(1, int(heads * widths) * size // block)
