"""Attention with vector instructions against its plain twin, in the same bits however queries share their loads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from llvmlite import ir
from native_code import compile_here
from test_simd import RUNS_HERE

from cllm.kylin import attention, attention_simd
from cllm.kylin.kv_cache import CHUNK, KVCache, to_stored

MAX_NMSE = 1e-12
SHAPES = [(4, 2, 128), (9, 3, 64), (7, 1, 80)]  # H, K, C
LAYER = 1  # of three, of which the others stay empty


class Filled:
    """Two slots of random keys and values, 70 and 20 tokens long."""

    LENGTHS = (70, 20)

    def __init__(self, heads: int, kv_heads: int, width: int, dtype: str) -> None:
        rng = np.random.default_rng([heads, width])
        self.kv_heads = kv_heads
        self.cache = KVCache(
            num_layers=LAYER + 2,
            num_kv_heads=kv_heads,
            head_width=width,
            num_blocks=9,
            num_slots=2,
            slot_tokens=96,
            dtype=dtype,
        )
        self.keys, self.values = self.cache.keys, self.cache.values
        self.cache.extend(dict(enumerate(self.LENGTHS)))
        self.slots = np.repeat(np.arange(2, dtype=np.int32), self.LENGTHS)
        self.positions = np.concatenate([np.arange(n, dtype=np.int32) for n in self.LENGTHS])
        shape = (len(self.slots), kv_heads, width)
        self.k, self.v = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
        self.q = rng.standard_normal((len(self.slots), heads, width)).astype(np.float32)
        self.store(self.k, self.v, 0, len(self.slots))

    def store(self, k: np.ndarray, v: np.ndarray, begin: int, end: int) -> None:
        cache = (self.keys, self.values, LAYER, self.cache.tables)
        for head in range(self.kv_heads):
            attention_simd.store_head(k, v, *cache, self.slots, self.positions, head, begin, end)

    def attend(self, tokens: Any) -> np.ndarray:
        """z of the tokens at these indices, as one batch."""
        q, slots, positions = self.q[tokens], self.slots[tokens], self.positions[tokens]
        tiles, z = np.empty((len(q), 2), np.int32), np.empty_like(q)
        num_tiles = attention_simd.find_tiles(slots, positions, len(q), tiles)
        rows, scores = attention_simd.make_scratch(q.shape[1] // self.kv_heads, q.shape[2], 96)
        for begin, end in tiles[:num_tiles]:
            for head in range(self.kv_heads):
                cache = (self.keys, self.values, LAYER, self.cache.tables, slots, positions)
                attention_simd.take_queries(q, begin, end, head, rows)
                attention_simd.attend_tile(*cache, begin, end, head, rows, scores)
                attention_simd.put_results(rows, begin, end, head, z)
        return z


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_plain(shape: tuple[int, int, int], dtype: str) -> None:
    filled = Filled(*shape, dtype)
    expected = np.empty_like(filled.q)
    attention.attend(
        filled.q,
        filled.keys,
        filled.values,
        LAYER,
        filled.cache.tables,
        filled.slots,
        filled.positions,
        expected,
        0,
        len(filled.q) * shape[1],
    )
    z = filled.attend(np.arange(90))
    assert np.square(z - expected).sum() <= MAX_NMSE * np.square(expected).sum()
    for cache in (filled.keys, filled.values):
        assert [bool(cache[:, layer].any()) for layer in range(3)] == [False, True, False]


@pytest.mark.parametrize("shape", SHAPES)
def test_same_bits_in_any_batch(shape: tuple[int, int, int]) -> None:
    filled = Filled(*shape, "f16")
    whole = filled.attend(np.arange(90))
    for name, batch in {"alone": 1, "in threes": 3, "in sevens": 7}.items():
        parts = [filled.attend(np.arange(start, min(start + batch, 90))) for start in range(0, 90, batch)]
        assert np.concatenate(parts).tobytes() == whole.tobytes(), name
    mixed = np.random.default_rng(0).permutation(90)
    assert filled.attend(mixed).tobytes() == whole[mixed].tobytes()


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_stored_as_numpy_rounds(dtype: str) -> None:
    """Also what f16 cannot hold, subnormal values and infinities."""
    filled = Filled(4, 2, 128, dtype)
    x = np.concatenate([filled.k, filled.k * np.float32(1e-6), filled.k * np.float32(40000)], axis=0)
    x[0, 0, :3] = np.inf, -np.inf, 65520
    x[1, 0, :4] = 2**-25, 1.5 * 2**-25, -0.0, 2.0**-14
    for start in range(0, len(x), 90):
        part = np.ascontiguousarray(x[start : start + 90])
        filled.store(part, part, 0, 37)
        filled.store(part, part, 37, 90)
        keys, values = filled.keys.copy(), filled.values.copy()
        stored = to_stored(part, filled.keys)
        attention.store(
            stored,
            stored,
            filled.keys,
            filled.values,
            LAYER,
            filled.cache.tables,
            filled.slots,
            filled.positions,
        )
        assert keys.tobytes() == filled.keys.tobytes()
        assert values.tobytes() == filled.values.tobytes()


def test_what_later_positions_hold_does_not_count() -> None:
    """NaN in positions that a query does not see: those of later tokens, and those never written."""
    filled = Filled(4, 2, 128, "f16")
    whole = filled.attend(np.arange(90))
    nan = np.uint16(0x7E00)
    for block, places in (
        (filled.cache.tables[0, 60 // 16], 60 % 16),
        (filled.cache.tables[1, 1], slice(4, None)),
    ):
        chunk, number = divmod(int(block), CHUNK)
        filled.keys[chunk, :, :, number, :, places] = nan
        filled.values[chunk, :, :, number, places] = nan
    z = filled.attend(np.arange(90))
    assert z[:60].tobytes() == whole[:60].tobytes()
    assert np.isnan(z[60:70]).all()
    assert z[70:].tobytes() == whole[70:].tobytes()


@pytest.mark.parametrize("num_rows", [1, 2, 4, 8])
def test_inner_loops_are_the_same_bits_on_every_instruction_set(num_rows: int) -> None:
    width, rng = 80, np.random.default_rng(0)
    block = rng.standard_normal((width, 16)).astype(np.float16)
    weights = rng.random((num_rows, 16)).astype(np.float32)
    results = []
    for isa in RUNS_HERE:
        out = np.ones((num_rows, width), np.float32)

        def emit(module: ir.Module, isa: str = isa) -> Any:
            return attention_simd.emit_weigh(module, isa, num_rows, half=True)

        call = compile_here(emit, 8)
        call(weights.ctypes.data, 64, block.ctypes.data, width, 1, 14, out.ctypes.data, 4 * width)
        results.append(out)
        values = block.reshape(16, width).astype(np.float32)[1:14]
        np.testing.assert_allclose(out, 1 + weights[:, 1:14] @ values, rtol=1e-5, atol=1e-5)
    assert len({result.tobytes() for result in results}) == 1


@pytest.mark.parametrize("num_rows", [1, 2, 4, 8])
def test_scores_are_the_same_bits_on_every_instruction_set(num_rows: int) -> None:
    width, rng = 80, np.random.default_rng(1)
    keys = rng.standard_normal((width, 16)).astype(np.float16)
    queries = rng.standard_normal((num_rows, width)).astype(np.float32)
    results = []
    for isa in RUNS_HERE:
        out = np.zeros((num_rows, 16), np.float32)

        def emit(module: ir.Module, isa: str = isa) -> Any:
            return attention_simd.emit_scores(module, isa, num_rows, half=True)

        call = compile_here(emit, 7, float_argument=4)
        call(queries.ctypes.data, 4 * width, keys.ctypes.data, width, 0.25, out.ctypes.data, out.strides[0])
        results.append(out)
        np.testing.assert_allclose(out, 0.25 * queries @ keys.astype(np.float32), rtol=1e-4, atol=1e-5)
    assert len({result.tobytes() for result in results}) == 1
