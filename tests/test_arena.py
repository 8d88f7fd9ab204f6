"""Where repacked weights lie: every byte once, a thread's part of a layer in the order in which it is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cllm.kylin.arena import make_arena, places_of
from cllm.kylin.gguf import read_gguf
from cllm.kylin.memory import LINE_BYTES, zeros
from cllm.kylin.weights import Weights, load_weights


def numbered(weights: Weights, num_threads: int) -> dict[str, np.ndarray]:
    """For each matrix the place of the first byte of each group, int64[parts, spans, groups]."""
    arena = make_arena(weights)
    base = arena.ctypes.data
    found = {}
    for tensor, data in places_of(weights, arena, num_threads).items():
        part, span, group = (
            np.arange(n) * stride for n, stride in zip(data.shape, data.strides[:3], strict=False)
        )
        found[tensor.name] = data.ctypes.data - base + part[:, None, None] + span[:, None] + group
        data += 1
    assert (arena == 1).all()
    return found


@pytest.mark.parametrize("types", ["q4_k_m", "q5_0_q8_0", "f16_bf16"])
@pytest.mark.parametrize("num_threads", [1, 2, 3, 16])
def test_every_byte_belongs_to_one_group(tiny_model: Any, types: str, num_threads: int) -> None:
    numbered(load_weights(read_gguf(tiny_model("llama", types))), num_threads)


def test_a_part_lies_in_the_order_in_which_it_is_read(tiny_model: Any) -> None:
    """Groups of 4 records take turns by 16; three threads cannot share 64 of them."""
    weights = load_weights(read_gguf(tiny_model("llama", "q5_0_q8_0")))
    names = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    for num_threads, num_parts in ((2, 2), (3, 1)):
        places = numbered(weights, num_threads)
        for layer in range(2):
            matrices = [places[f"blk.{layer}.{name}.weight"] for name in names]
            assert {len(matrix) for matrix in matrices} == {num_parts}
            gate, up = matrices[4:6]
            assert gate.shape == up.shape == (num_parts, 4 // num_parts, 16)
            for part in range(num_parts):
                woven = np.stack([gate[part], up[part]], axis=1)
                order = [matrix[part].ravel() for matrix in (*matrices[:4], woven, matrices[6])]
                assert (np.diff(np.concatenate(order)) > 0).all()
                if part:
                    assert order[0][0] > matrices[6][part - 1].max()
    assert places[
        "token_embd.weight" if weights.output.weight is weights.token_embd else "output.weight"
    ].min() > (places["blk.1.ffn_down.weight"].max())


@pytest.mark.parametrize(("shape", "dtype"), [((3, 5), np.float32), ((4, 2), np.int64), ((7,), np.uint8)])
def test_arrays_begin_a_cache_line(shape: tuple[int, ...], dtype: Any) -> None:
    arrays = [zeros(shape, dtype) for _ in range(8)]
    for array in arrays:
        assert (array.shape, array.dtype) == (shape, dtype)
        assert array.ctypes.data % LINE_BYTES == 0
        assert not array.any()
        array[...] = 1
