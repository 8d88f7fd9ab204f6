"""The fast matrix products: their integers exact, their bits the same on every instruction set and in every tile
size, and nothing read or written outside."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf_builder import random_blocks
from llvmlite import ir
from native_code import compile_here, guarded
from test_simd import RUNS_HERE

from cllm.kylin import matmul, rounding
from cllm.kylin.gguf import Tensor
from cllm.kylin.matmul import PackedMatrix, multiply, num_groups, pack, packed_bytes
from cllm.kylin.quants import (
    ACTIVATION_ROUNDING,
    ROUNDING_BLOCK,
    dequantize,
    quantize_activations,
    round_activations,
)
from cllm.kylin.tile_loops import TileSizes, emit_tiles, tile_sizes
from cllm.kylin.tile_types import TILE_TYPES
from cllm.kylin.tiles import BLOCK_TOKENS, RECORD_BYTES, WORD

Q = GGMLQuantizationType
EVERY_TYPE = pytest.mark.parametrize("ggml_type", sorted(TILE_TYPES), ids=lambda t: t.name)
MAX_TILE = max(tile_sizes(isa)[0] for isa in RUNS_HERE)  # tokens: a tile reads and writes all of its own
MAX_ERROR = 1e-6  # of float32 sums, over the sum of magnitudes


def packed(data: np.ndarray, ggml_type: Q, num_columns: int) -> PackedMatrix:
    tensor = Tensor("weight", (len(data), num_columns), ggml_type, data)
    groups = np.full((num_groups(tensor), packed_bytes(tensor) // num_groups(tensor)), 0xAA, np.uint8)
    for group in range(len(groups)):
        pack(tensor, groups[None, None], group, group + 1)
    return PackedMatrix(ggml_type, len(data), num_columns, groups[None, None])


def random_matrix(ggml_type: Q, rows: int, columns: int) -> tuple[np.ndarray, PackedMatrix]:
    data = random_blocks(np.random.default_rng([ggml_type, rows, columns]), ggml_type, (rows, columns))
    return data, packed(data, ggml_type, columns)


def product(matrix: PackedMatrix, x: np.ndarray) -> np.ndarray:
    acts = rounding.round_rows(x, matrix.rounding)
    out = np.full((len(x), matrix.padded_rows), np.nan, np.float32)
    multiply(matrix, acts, out, 0, matrix.num_groups)
    return out


def random_activations(num_tokens: int, columns: int) -> np.ndarray:
    return np.random.default_rng(columns).standard_normal((num_tokens, columns)).astype(np.float32)


@cache
def tile(isa: str, ggml_type: Q, num_tokens: int) -> Callable[..., None]:
    """The function of tiles of one size, by itself."""
    kind = TILE_TYPES[ggml_type]
    sizes = TileSizes(kind.words * WORD, RECORD_BYTES[ACTIVATION_ROUNDING[ggml_type]])

    def emit(module: ir.Module) -> Any:
        return emit_tiles(module, isa, "tile", kind.record, sizes, num_tokens)

    return compile_here(emit, 8)


def run_tile(
    isa: str,
    matrix: PackedMatrix,
    acts: np.ndarray,
    groups: np.ndarray,
    out: np.ndarray,
    num_tokens: int,
    *,
    bias: np.ndarray | None = None,
    adds: bool = False,
) -> None:
    """Every group and token by tiles of one size."""
    for token in range(0, len(out), num_tokens):
        tile(isa, matrix.type, num_tokens)(
            groups.ctypes.data,
            acts[token // BLOCK_TOKENS, 0, token % BLOCK_TOKENS].ctypes.data,
            out[token].ctypes.data,
            out.strides[0],
            matrix.num_records,
            len(groups),
            0 if bias is None else bias.ctypes.data,
            adds,
        )


@EVERY_TYPE
@pytest.mark.parametrize(("num_tokens", "rows", "columns"), [(1, 16, 256), (7, 37, 1280)])
def test_product_matches_numpy(ggml_type: Q, num_tokens: int, rows: int, columns: int) -> None:
    data, matrix = random_matrix(ggml_type, rows, columns)
    x = random_activations(num_tokens, columns)
    rounded = round_activations(x, matrix.rounding).astype(np.float64)
    weights = dequantize(data, ggml_type).astype(np.float64)
    scale = np.abs(rounded) @ np.abs(weights).T
    result = product(matrix, x)
    assert (np.abs(result[:, :rows] - rounded @ weights.T) <= MAX_ERROR * scale).all()
    assert (result[:, rows:] == 0).all()  # the rows that fill up the last group


@pytest.mark.parametrize(
    ("ggml_type", "columns"),
    [(t, n) for t in TILE_TYPES if GGML_QUANT_SIZES[t][0] == 32 for n in (32, 96)]
    + [(Q.F16, 66), (Q.F32, 1)],
)
def test_columns_that_fill_no_record(ggml_type: Q, columns: int) -> None:
    data, matrix = random_matrix(ggml_type, 16, columns)
    x = random_activations(2, columns)
    expected = round_activations(x, matrix.rounding) @ dequantize(data, ggml_type).T
    np.testing.assert_allclose(product(matrix, x), expected, rtol=1e-4, atol=1e-5)


@EVERY_TYPE
def test_each_byte_of_a_block_counts(ggml_type: Q) -> None:
    """One changed bit in any byte moves the product as it moves the decoded block."""
    block, num_bytes = GGML_QUANT_SIZES[ggml_type]
    rng = np.random.default_rng(12)
    clean = random_blocks(rng, ggml_type, (1, block))
    signs = np.where(dequantize(clean, ggml_type) < 0, -1, 1)
    x = (signs * rng.uniform(0.5, 1.5, (1, block))).astype(np.float32)
    changed = np.repeat(clean, num_bytes, axis=0)
    changed[np.diag_indices(num_bytes)] ^= 0x80 if block == 1 else 0x01
    rounded = round_activations(x, ACTIVATION_ROUNDING[ggml_type]).astype(np.float64)
    weights = dequantize(changed, ggml_type).astype(np.float64)
    scale = np.abs(rounded) @ np.abs(weights).T
    result = product(packed(changed, ggml_type, block), x)[:, :num_bytes]
    assert (np.abs(result - rounded @ weights.T) <= MAX_ERROR * scale).all()


@EVERY_TYPE
def test_same_bits_in_every_tile_on_every_instruction_set(ggml_type: Q) -> None:
    """Also in any batch and any split of the groups; weights and activations end where no byte may be read."""
    columns = 512
    _, matrix = random_matrix(ggml_type, 32, columns)
    x = random_activations(MAX_TILE, columns)
    whole = product(matrix, x)
    alone = np.concatenate([product(matrix, x[t : t + 1]) for t in range(MAX_TILE)])
    assert alone.tobytes() == whole.tobytes()
    with guarded(matrix.data[0, 0]) as groups, guarded(rounding.round_rows(x, matrix.rounding)) as acts:
        for isa in RUNS_HERE:
            for num_tokens in (tile_sizes(isa)[0], 1) if isa != "generic" else (1,):
                with guarded(np.zeros_like(whole)) as out:
                    run_tile(isa, matrix, acts, groups, out, num_tokens)
                    assert out.tobytes() == whole.tobytes(), (isa, num_tokens)


@pytest.mark.parametrize("ggml_type", [Q.Q4_K, Q.Q6_K, Q.Q5_K], ids=lambda t: t.name)
def test_sums_that_do_not_fit_16_bits(ggml_type: Q) -> None:
    """Largest weights times activations whose magnitudes add up to just below and above what fits, and to the most."""
    columns, num_groups = 512, 2
    data, _ = random_matrix(ggml_type, 16 * num_groups, columns)
    quants = {Q.Q4_K: slice(16, 144), Q.Q5_K: slice(16, 176), Q.Q6_K: slice(0, 192)}[ggml_type]
    blocks = data.reshape(len(data), 2, -1)
    blocks[:16, :, quants], blocks[16:, 1, quants] = 0xFF, 0
    matrix = packed(data, ggml_type, columns)
    x = np.zeros((MAX_TILE, columns), np.float32)
    for token, total in enumerate((1023, 1024, 2032, 1023, 300, 1023, 0, 1023)):
        whole, rest = divmod(total, 127)
        x[token].reshape(-1, 16)[:, :whole] = 127
        x[token].reshape(-1, 16)[:, whole:][:, :1] = rest
        x[token, 256 * (token % 2) :] *= -1
    x[3].reshape(-1, 32)[:, 16:] *= -1  # the two dot products of a pair with other signs
    acts = rounding.round_rows(x, matrix.rounding)
    is_wide = acts[0, :, :, 340:344].copy().view(np.int32)[..., 0].T
    np.testing.assert_array_equal(is_wide, np.isin(np.arange(MAX_TILE), (1, 2))[:, None] * [1, 1])
    exact = round_activations(x, matrix.rounding).astype(np.float64) @ dequantize(data, ggml_type).T.astype(
        float
    )
    results = []
    for tokens in (slice(0, 8), [3, 4, 5, 6, 7, 0, 3, 5]):  # with the wide ones and without
        some = rounding.round_rows(x[tokens], matrix.rounding)
        for isa in RUNS_HERE:
            for num_tokens in (tile_sizes(isa)[0], 1):
                out = np.zeros((8, 16 * num_groups), np.float32)
                run_tile(isa, matrix, some, matrix.data[0, 0], out, num_tokens)
                results.append(out[[3, 4, 5, 6, 7, 0]] if tokens == slice(0, 8) else out[:6])
                if tokens == slice(0, 8):
                    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-4 * np.abs(exact).max())
    assert len({result.tobytes() for result in results}) == 1


@pytest.mark.parametrize("isa", RUNS_HERE)
def test_bias_and_what_is_there_are_added_in_this_order(isa: str) -> None:
    _, matrix = random_matrix(Q.Q4_K, 32, 256)
    x = random_activations(3, 256)
    plain, acts = product(matrix, x), rounding.round_rows(x, matrix.rounding)
    rng = np.random.default_rng(2)
    bias, before = (rng.standard_normal(shape).astype(np.float32) for shape in (32, (3, 32)))
    for given, adds, expected in (
        (bias, False, plain + bias),
        (None, True, before + plain),
        (bias, True, before + (plain + bias)),
    ):
        out = before.copy()
        run_tile(isa, matrix, acts, matrix.data[0, 0], out, 1, bias=given, adds=adds)
        assert out.tobytes() == expected.tobytes()


@EVERY_TYPE
def test_groups_that_lie_apart(ggml_type: Q) -> None:
    """Two parts of three spans of two groups, between the groups of others."""
    rows, columns = 12 * 16 - 3, 256
    data, matrix = random_matrix(ggml_type, rows, columns)
    memory = np.full((2, 8, 4, matrix.data.shape[-1]), 0xAA, np.uint8)
    apart = PackedMatrix(ggml_type, rows, columns, memory[:, 1:7:2, 1:3])
    tensor = Tensor("weight", (rows, columns), ggml_type, data)
    for begin, end in ((0, 1), (1, 9), (9, 12)):
        pack(tensor, apart.data, begin, end)
    assert apart.data.tobytes() == matrix.data.tobytes()
    assert (memory == 0xAA).all(axis=3).sum() == 64 - 12  # nobody else's groups
    x = random_activations(3, columns)
    acts, out = rounding.round_rows(x, matrix.rounding), np.zeros((3, 12 * 16), np.float32)
    for begin, end in ((0, 3), (3, 4), (4, 11), (11, 12)):
        multiply(apart, acts, out, begin, end)
    assert out.tobytes() == product(matrix, x).tobytes()


@EVERY_TYPE
def test_writes_its_groups_only(ggml_type: Q) -> None:
    _, matrix = random_matrix(ggml_type, 64, 256)
    x = random_activations(3, 256)
    out = np.full((3, 64), 12345, np.float32)
    multiply(matrix, rounding.round_rows(x, matrix.rounding), out, 1, 3)
    np.testing.assert_array_equal(out[:, 16:48], product(matrix, x)[:, 16:48])
    out[:, 16:48] = 12345
    assert (out == 12345).all()


@pytest.mark.parametrize("kind", sorted(set(ACTIVATION_ROUNDING.values())))
def test_rounding_is_that_of_quants(kind: str) -> None:
    """Zeros, the smallest and largest scales, ties, halves that overflow, NaN and infinities; half a record at the end,
    where a row can end so."""
    rng = np.random.default_rng(1)
    width = 512 if kind == "q8_K" else 480
    x = rng.standard_normal((12, width)).astype(np.float32)
    x[1] = 0
    x[2, 256:] *= np.float32(1e-38)
    x[3] *= np.float32(1e30)
    x[4, 5], x[5, 300], x[6, 17] = np.nan, np.inf, -np.inf
    x[7] = np.round(x[7] * 4) / 2
    x[8] *= np.float32(30000)
    x[9, :2] = 7, -7
    x[10] *= np.float32(1e-7)
    blocks = rounding.round_rows(x, kind)
    assert not blocks[1, :, 4:].any()  # of no token
    parts = np.moveaxis(blocks, 1, 2).reshape(16, -1, RECORD_BYTES[kind])[:12]
    if kind not in ROUNDING_BLOCK:
        with np.errstate(all="ignore"):
            expected = np.pad(round_activations(x, kind), ((0, 0), (0, 512 - width)))
        np.testing.assert_array_equal(parts.view(np.float32).reshape(12, -1), expected)
        return
    quants, scales = quantize_activations(np.pad(x, ((0, 0), (0, 512 - width))), kind)
    if kind == "q8_K":
        values, found = parts[..., :256], parts[..., 336:340].copy().view(np.float32)
        sums = parts[..., 256:288].copy().view(np.int16)
        np.testing.assert_array_equal(sums.ravel(), quants.reshape(-1, 16).astype(int).sum(1))
        low, high = np.moveaxis(sums.astype(np.int64).reshape(-1, 2, 2), 1, 0)
        starts = parts[..., 288:320].copy().view(np.uint32)
        np.testing.assert_array_equal(starts.ravel(), ((2**15 - 32 * (low + 2**16 * high)) % 2**32).ravel())
        sums = parts[..., 320:336].copy().view(np.int16)
    else:
        values, found = parts[..., :64], parts[..., 64:72].copy().view(np.float32)
        sums = parts[..., 72:80].copy().view(np.int32)
    np.testing.assert_array_equal(values.reshape(12, -1).view(np.int8), quants)
    np.testing.assert_array_equal(found.reshape(scales.shape), scales)
    np.testing.assert_array_equal(sums.ravel(), quants.reshape(-1, 32).astype(int).sum(1))


@EVERY_TYPE
def test_not_finite_activations_stay_in_their_token(ggml_type: Q) -> None:
    _, matrix = random_matrix(ggml_type, 16, 256)
    x = random_activations(4, 256)
    clean = product(matrix, x)
    x[1, 3], x[2, 4] = np.nan, np.inf
    result = product(matrix, x)
    assert not np.isfinite(result[1:3]).any()
    assert result[[0, 3]].tobytes() == clean[[0, 3]].tobytes()


def test_wrong_shapes_are_refused() -> None:
    _, matrix = random_matrix(Q.Q8_0, 16, 64)
    acts = rounding.round_rows(random_activations(1, 64), matrix.rounding)
    with pytest.raises(ValueError, match="expected activations and output"):
        multiply(matrix, acts, np.empty((1, 15), np.float32), 0, 1)
    with pytest.raises(ValueError, match="do not lie within"):
        multiply(matrix, acts, np.empty((1, 16), np.float32), 0, 2)


def test_types_without_fast_kernels() -> None:
    assert matmul.is_fast(Q.Q4_K)
    assert not matmul.is_fast(Q.Q2_K)
