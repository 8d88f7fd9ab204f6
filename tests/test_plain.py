"""The portable kernels against their NumPy twins, and law 1: an output depends on its row and token alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf_builder import F16_FIELDS, random_blocks

from cllm.errors import ModelFileError
from cllm.kylin.plain import PLAIN_TYPES, Activations, matmul_rows, quantize
from cllm.kylin.plain_blocks import f16_to_f32
from cllm.kylin.quants import (
    ACTIVATION_ROUNDING,
    DECODERS,
    ROUNDING_BLOCK,
    dequantize,
    quantize_activations,
    round_activations,
)

Q = GGMLQuantizationType
EVERY_TYPE = pytest.mark.parametrize("ggml_type", sorted(PLAIN_TYPES), ids=lambda t: t.name)
INT_TYPES = sorted(t for t in PLAIN_TYPES if ACTIVATION_ROUNDING[t] in ROUNDING_BLOCK)
MAX_ERROR = 1e-6  # float32 sums of up to 1,280 terms; an NMSE of at most 1e-12


def product(data: np.ndarray, ggml_type: Q, x: np.ndarray) -> np.ndarray:
    """All rows: float32[T, rows]."""
    out = np.full((len(x), len(data)), np.nan, np.float32)
    matmul_rows(data, ggml_type, quantize(x, ACTIVATION_ROUNDING[ggml_type]), out, 0, len(data))
    return out


def expected_product(data: np.ndarray, ggml_type: Q, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64 and its scale, the same sum over magnitudes; both [T, rows]."""
    rounded = round_activations(x, ACTIVATION_ROUNDING[ggml_type]).astype(np.float64)
    weights = dequantize(data, ggml_type).astype(np.float64)
    return rounded @ weights.T, np.abs(rounded) @ np.abs(weights).T


def assert_product_is_right(data: np.ndarray, ggml_type: Q, x: np.ndarray) -> None:
    """Each output by itself, so that one wrong row cannot hide among right ones."""
    expected, scale = expected_product(data, ggml_type, x)
    assert np.isfinite(expected).all()
    assert (np.abs(product(data, ggml_type, x) - expected) <= MAX_ERROR * scale).all()


def random_operands(ggml_type: Q, num_tokens: int, rows: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([ggml_type, num_tokens, rows, n])
    return random_blocks(rng, ggml_type, (rows, n)), rng.standard_normal((num_tokens, n)).astype(np.float32)


@EVERY_TYPE
@pytest.mark.parametrize(("num_tokens", "rows", "n"), [(1, 1, 256), (7, 13, 1280)])
def test_matmul_rows_matches_numpy(ggml_type: Q, num_tokens: int, rows: int, n: int) -> None:
    data, x = random_operands(ggml_type, num_tokens, rows, n)
    assert_product_is_right(data, ggml_type, x)


@pytest.mark.parametrize(
    ("ggml_type", "n"),
    [(t, 32) for t in PLAIN_TYPES if GGML_QUANT_SIZES[t][0] == 32]
    + [(t, n) for t in (Q.F32, Q.F16, Q.BF16) for n in (1, 15, 64, 67, 129)],
)
def test_sizes_that_fill_no_vector(ggml_type: Q, n: int) -> None:
    data, x = random_operands(ggml_type, 3, 2, n)
    assert_product_is_right(data, ggml_type, x)


@EVERY_TYPE
def test_each_byte_of_a_block_counts(ggml_type: Q) -> None:
    """One changed bit in any byte, scales included, moves the product as it moves the decoded block.

    It moves by so much that the limit notices a kernel that misses one scale, sum or quant."""
    block, num_bytes = GGML_QUANT_SIZES[ggml_type]
    rng = np.random.default_rng(12)  # no integer scale is 0 with this seed
    clean = random_blocks(rng, ggml_type, (1, block))
    signs = np.where(dequantize(clean, ggml_type) < 0, -1, 1)  # so that large sums do not cancel
    x = (signs * rng.uniform(0.5, 1.5, (1, block))).astype(np.float32)
    changed = np.repeat(clean, num_bytes, axis=0)
    changed[np.diag_indices(num_bytes)] ^= 0x80 if block == 1 else 0x01
    assert_product_is_right(changed, ggml_type, x)
    (before, _), (after, scale) = (expected_product(d, ggml_type, x) for d in (clean, changed))
    assert (np.abs(after - before) > 10 * MAX_ERROR * scale).all()


@EVERY_TYPE
def test_same_bits_for_any_batch_and_split(ggml_type: Q) -> None:
    data, x = random_operands(ggml_type, 7, 11, 768)
    whole = product(data, ggml_type, x)
    alone = np.concatenate([product(data, ggml_type, x[t : t + 1]) for t in range(7)])
    np.testing.assert_array_equal(alone.view(np.uint32), whole.view(np.uint32))
    acts = quantize(x, ACTIVATION_ROUNDING[ggml_type])
    parts = np.empty_like(whole)
    for begin, end in [(4, 5), (0, 4), (5, 5), (5, 11)]:
        matmul_rows(data, ggml_type, acts, parts, begin, end)
    np.testing.assert_array_equal(parts.view(np.uint32), whole.view(np.uint32))


@EVERY_TYPE
def test_writes_its_rows_only_and_reads_any_address(ggml_type: Q) -> None:
    data, x = random_operands(ggml_type, 3, 6, 256)
    whole = product(data, ggml_type, x)
    arena = np.full(3 * 6 + 64, 12345, np.float32)
    out = arena[32:-32].reshape(3, 6)
    shifted = np.concatenate([np.zeros(1, np.uint8), data.ravel()])[1:].reshape(data.shape)
    shifted.flags.writeable = False
    matmul_rows(shifted, ggml_type, quantize(x, ACTIVATION_ROUNDING[ggml_type]), out, 2, 5)
    np.testing.assert_array_equal(out[:, 2:5], whole[:, 2:5])
    out[:, 2:5] = 12345
    assert (arena == 12345).all()


@EVERY_TYPE
def test_zeros_give_zeros(ggml_type: Q) -> None:
    data, x = random_operands(ggml_type, 2, 3, 256)
    assert not product(data, ggml_type, np.zeros_like(x)).any()
    data[1] = 0
    assert not product(data, ggml_type, x)[:, 1].any()


@EVERY_TYPE
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite_activations_spoil_their_token_alone(ggml_type: Q, bad: float) -> None:
    data, x = random_operands(ggml_type, 3, 5, 512)
    clean = product(data, ggml_type, x)
    x[1, 300] = bad
    found = product(data, ggml_type, x)
    assert not np.isfinite(found[1]).any()
    np.testing.assert_array_equal(found[[0, 2]], clean[[0, 2]])
    if ggml_type in INT_TYPES:
        assert np.isnan(found[1]).all()


@pytest.mark.parametrize("ggml_type", F16_FIELDS, ids=lambda t: t.name)
@pytest.mark.parametrize("scale", [65504.0, -65504.0, 6e-8])
def test_extreme_scales(ggml_type: Q, scale: float) -> None:
    data, x = random_operands(ggml_type, 2, 3, 256)
    blocks = data.reshape(-1, GGML_QUANT_SIZES[ggml_type][1])
    for at, _ in F16_FIELDS[ggml_type]:
        blocks[:, at : at + 2] = np.array([scale], "<f2").view(np.uint8)
    assert_product_is_right(data, ggml_type, x)


@pytest.mark.parametrize("ggml_type", INT_TYPES, ids=lambda t: t.name)
def test_largest_sums_fit_int32(ggml_type: Q) -> None:
    _, block_bytes = GGML_QUANT_SIZES[ggml_type]
    block = np.full((2, block_bytes), 0xFF, np.uint8)  # all quants, scales and minimums at their largest
    block[1] = 0x80 if ggml_type == Q.Q6_K else 0x00  # Q6_K: scale -128; others: the most negative quants
    if ggml_type == Q.Q6_K:
        block[1, :192] = 0  # quant -32
    for at, _ in F16_FIELDS[ggml_type]:
        block[:, at : at + 2] = np.array([1.0], "<f2").view(np.uint8)
    data = np.tile(block, 256 // GGML_QUANT_SIZES[ggml_type][0])
    x = np.ones((2, 256), np.float32)
    x[1] = -1
    assert_product_is_right(data, ggml_type, x)


@pytest.mark.parametrize("rounding", sorted(ROUNDING_BLOCK))
def test_quantize_matches_numpy(rounding: str) -> None:
    rng = np.random.default_rng(8)
    x = (rng.standard_normal((60, 1024)) * 10.0 ** rng.integers(-44, 38, (60, 1))).astype(np.float32)
    x[0], x[1, ::3], x[2, 40], x[3, 700], x[4, 300] = 0, 0, np.nan, np.inf, -np.inf
    x[5, 5], x[6, :2], x[7] = 127 * 65519.9, [-3, 3], np.finfo(np.float32).max
    x[8:20] = rng.integers(-254, 255, (12, 1024)) / np.float32(2)  # many ties
    x[8:20, ::32] = 127
    quants, scales = quantize_activations(x, rounding)
    acts = quantize(x, rounding)
    np.testing.assert_array_equal(acts.values, quants)
    np.testing.assert_array_equal(acts.scales, scales)
    np.testing.assert_array_equal(acts.sums, quants.reshape(60, -1, 32).sum(axis=-1, dtype=np.int32))
    assert (acts.values.dtype, acts.scales.dtype, acts.sums.dtype) == (np.int8, np.float32, np.int32)


def test_scales_round_to_f16_as_numpy_does() -> None:
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = (halves[:-1] + halves[1:]) / 2  # ties, and their neighbours on both sides
    scales = np.concatenate(
        [halves, between, np.nextafter(between, 0), np.nextafter(between, np.float32(1e9))]
    )
    x = np.zeros((len(scales), 32), np.float32)
    x[:, 0] = scales * np.float32(127)
    np.testing.assert_array_equal(quantize(x, "q8_0").scales, quantize_activations(x, "q8_0")[1])


@pytest.mark.parametrize("rounding", ["f16", "bf16", "none"])
def test_float_roundings_carry_values_only(rounding: str) -> None:
    x = np.random.default_rng(9).standard_normal((3, 40)).astype(np.float32)
    acts = quantize(x, rounding)
    np.testing.assert_array_equal(acts.values, round_activations(x, rounding))
    assert acts.scales.shape == acts.sums.shape == (3, 0)


def test_f16_conversion_is_exact_for_every_pattern() -> None:
    @numba.njit
    def convert(codes, values):
        for i in range(len(codes)):
            values[i] = f16_to_f32(np.uint32(codes[i]))

    codes = np.arange(65536, dtype=np.uint16)
    values = np.empty(65536, np.float32)
    convert(codes, values)
    expected = codes.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(np.signbit(values), np.signbit(expected))


def test_every_decodable_type_has_a_kernel() -> None:
    assert set(DECODERS) == PLAIN_TYPES


def test_unsupported_type_is_named() -> None:
    acts = quantize(np.ones((1, 256), np.float32), "none")
    with pytest.raises(ModelFileError, match="no kernel for weights of type IQ2_XXS: use one of Q4_K"):
        matmul_rows(np.zeros((1, 66), np.uint8), Q.IQ2_XXS, acts, np.zeros((1, 1), np.float32), 0, 1)


def broken_operands() -> list:
    """Each breaks one thing in the operands of a Q8_0 product with T = 2, rows = 3, n = 64."""

    def case(message: str, **change: object):
        return pytest.param(change, message, id=message)

    return [
        case(r"^data .* uint8\[3, 68\], found uint8\[3, 34\]", data=np.zeros((3, 34), np.uint8)),
        case(r"^data .* found int8", data=np.zeros((3, 68), np.int8)),
        case(r"^data .* C-ordered", data=np.zeros((68, 3), np.uint8).T),
        case(r"^out .* float32\[2, 3\], found float32\[2, 4\]", out=np.zeros((2, 4), np.float32)),
        case(r"^out .* found float64", out=np.zeros((2, 3))),
        case(r"^acts.values .* int8\[2, 64\], found float32", values=np.zeros((2, 64), np.float32)),
        case(
            r"^acts.values .* int8\[2, 32\], found int8\[2, 33\]",
            values=np.zeros((2, 33), np.int8),
            data=np.zeros((3, 34), np.uint8),
        ),
        case(r"^acts.scales .* float32\[2, 2\], found float32\[2, 0\]", scales=np.zeros((2, 0), np.float32)),
        case(r"^acts.sums .* int32\[2, 2\], found int32\[2, 1\]", sums=np.zeros((2, 1), np.int32)),
        case("rows 2 to 4 do not lie within the 3 rows", end=4),
        case("rows 2 to 1 do not lie", end=1),
        case("rows -1 to 3 do not lie", begin=-1),
    ]


@pytest.mark.parametrize(("change", "message"), broken_operands())
def test_operands_are_checked_before_any_work(change: dict, message: str) -> None:
    good = {
        "data": np.zeros((3, 68), np.uint8),
        "values": np.zeros((2, 64), np.int8),
        "scales": np.zeros((2, 2), np.float32),
        "sums": np.zeros((2, 2), np.int32),
        "out": np.zeros((2, 3), np.float32),
        "begin": 2,
        "end": 3,
    }
    a = good | change
    acts = Activations(a["values"], a["scales"], a["sums"])
    with pytest.raises(ValueError, match=message):
        matmul_rows(a["data"], Q.Q8_0, acts, a["out"], a["begin"], a["end"])


def test_activations_are_checked() -> None:
    with pytest.raises(ValueError, match=r"expected float32\[T, n\], found float64\[1, 32\]"):
        quantize(np.ones((1, 32)), "q8_0")
    with pytest.raises(ValueError, match=r"blocks of 256.*\(1, 32\)"):
        quantize(np.ones((1, 32), np.float32), "q8_K")


CACHE_PROBE = """
import numpy as np
from gguf import GGMLQuantizationType
from cllm.kylin import plain, plain_kernels
for writeable in (True, False):
    data = np.zeros((2, 34), np.uint8)
    data.flags.writeable = writeable
    acts = plain.quantize(np.ones((1, 32), np.float32), "q8_0")
    plain.matmul_rows(data, GGMLQuantizationType.Q8_0, acts, np.zeros((1, 2), np.float32), 0, 2)
for function in (plain._quantize_q8_0, plain_kernels.KERNELS[GGMLQuantizationType.Q8_0]):
    print(len(function.signatures), sum(function.stats.cache_hits.values()))
"""


def test_second_process_compiles_nothing(tmp_path: Path) -> None:
    root = str(Path(__file__).parent.parent)
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": root}
    runs = [
        subprocess.run(
            [sys.executable, "-c", CACHE_PROBE], env=env, capture_output=True, text=True, check=True
        )
        for _ in range(2)
    ]
    assert [run.stdout.split() for run in runs] == [["1", "0"] * 2, ["1", "1"] * 2]
