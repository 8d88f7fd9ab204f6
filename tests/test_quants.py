"""The decoders against gguf-py, bit for bit; the rounding of activations against ggml's rules."""

from __future__ import annotations

import gguf.quants
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf_builder import random_blocks

from cllm.errors import ModelFileError
from cllm.kylin.quants import (
    ACTIVATION_ROUNDING,
    DECODERS,
    ROUNDING_BLOCK,
    dequantize,
    quantize_activations,
    round_activations,
)

Q = GGMLQuantizationType
INT_ROUNDINGS = sorted(ROUNDING_BLOCK)


@pytest.mark.parametrize("ggml_type", DECODERS, ids=lambda t: t.name)
def test_decoder_matches_gguf_py(ggml_type: Q) -> None:
    raw = random_blocks(np.random.default_rng(ggml_type), ggml_type, (5, 3, 512))
    ours, theirs = dequantize(raw, ggml_type), gguf.quants.dequantize(raw, ggml_type)
    assert ours.dtype == np.float32
    assert ours.shape == (5, 3, 512)
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("ggml_type", DECODERS, ids=lambda t: t.name)
def test_decoder_reads_any_address_and_one_row(ggml_type: Q) -> None:
    raw = random_blocks(np.random.default_rng(1), ggml_type, (256,))
    shifted = np.concatenate([np.zeros(1, np.uint8), raw])[1:]
    shifted.flags.writeable = False
    np.testing.assert_array_equal(dequantize(shifted, ggml_type), dequantize(raw, ggml_type))


@pytest.mark.parametrize("ggml_type", DECODERS, ids=lambda t: t.name)
def test_decoder_is_silent_on_any_bits(ggml_type: Q) -> None:
    block_size, block_bytes = GGML_QUANT_SIZES[ggml_type]
    raw = np.random.default_rng(2).integers(0, 256, (400, block_bytes), dtype=np.uint8)
    raw[0] = 0xFF  # every float field is a NaN
    values = dequantize(raw, ggml_type)
    assert values.shape == (400, block_size)
    assert np.isnan(values[0]).all()


def test_unsupported_type_is_named() -> None:
    with pytest.raises(ModelFileError, match=r"IQ2_XXS are not supported.*Q4_K"):
        dequantize(np.zeros(66, np.uint8), Q.IQ2_XXS)


def test_partial_block_is_refused() -> None:
    with pytest.raises(ModelFileError, match="blocks of 18 bytes, found 19"):
        dequantize(np.zeros((2, 19), np.uint8), Q.Q4_0)


def test_every_decodable_type_has_a_rounding() -> None:
    assert set(ACTIVATION_ROUNDING) == set(DECODERS)
    for rounding in set(ACTIVATION_ROUNDING.values()):
        assert round_activations(np.ones((1, 256), np.float32), rounding).shape == (1, 256)


def q8_k_block(x: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """ggml's quantize_row_q8_K_ref on one block, value by value."""
    largest = np.float32(0)
    for value in x:
        if abs(value) > abs(largest):
            largest = value
    inverse = np.float32(-127) / largest
    return np.array([min(127, int(np.rint(inverse * v))) for v in x]), np.float32(1) / inverse


def q8_0_block(x: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """ggml's quantize_row_q8_0 for x86 on one block, value by value."""
    amax = max(abs(x))
    inverse = np.float32(127) / amax
    return np.array([int(np.rint(v * inverse)) for v in x]), np.float32(np.float16(amax / np.float32(127)))


@pytest.mark.parametrize(
    ("rounding", "one_block"), [("q8_K", q8_k_block), ("q8_0", q8_0_block), ("q8_1", q8_0_block)]
)
def test_quants_and_scales_follow_ggml(rounding: str, one_block) -> None:
    block = ROUNDING_BLOCK[rounding]
    x = np.random.default_rng(3).standard_normal((3, 2 * block)).astype(np.float32)
    x[0, :4] = [-5, 5, -5, 2.5]  # equal magnitudes: the first one counts
    x[1, 5] = 2.0**20
    quants, scales = quantize_activations(x, rounding)
    for t, b in np.ndindex(3, 2):
        part = slice(block * b, block * (b + 1))
        expected_quants, expected_scale = one_block(x[t, part])
        np.testing.assert_array_equal(quants[t, part], expected_quants)
        assert scales[t, b] == expected_scale


def test_q8_k_keeps_the_sign_of_the_first_extreme() -> None:
    x = np.zeros((1, 256), np.float32)
    x[0, :3] = [4, -4, 2]
    quants, scales = quantize_activations(x, "q8_K")
    assert quants[0, :4].tolist() == [-127, 127, -64, 0]  # -63.5 goes to the even neighbour
    assert scales[0, 0] < 0


@pytest.mark.parametrize("rounding", INT_ROUNDINGS)
def test_rounding_error_is_half_a_step(rounding: str) -> None:
    x = np.random.default_rng(4).standard_normal((4, 512)).astype(np.float32)
    blocks = x.reshape(4, -1, ROUNDING_BLOCK[rounding])
    error = np.abs(round_activations(x, rounding).reshape(blocks.shape) - blocks)
    step = np.abs(blocks).max(axis=-1, keepdims=True) / 127
    assert (error <= 0.57 * step).all()  # half a step, and 127 times the rounding of the f16 scale
    assert error.max() > 0


@pytest.mark.parametrize("rounding", INT_ROUNDINGS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite_spoils_its_block_alone(rounding: str, bad: float) -> None:
    block = ROUNDING_BLOCK[rounding]
    x = np.random.default_rng(5).standard_normal((2, 3 * block)).astype(np.float32)
    clean = round_activations(x, rounding)
    x[1, block + 7] = bad
    rounded = round_activations(x, rounding)
    spoiled = np.zeros(x.shape, bool)
    spoiled[1, block : 2 * block] = True
    assert np.isnan(rounded[spoiled]).all()
    np.testing.assert_array_equal(rounded[~spoiled], clean[~spoiled])


@pytest.mark.parametrize("rounding", INT_ROUNDINGS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -1e-40, 3e-37])
def test_nothing_or_next_to_nothing_is_zero(rounding: str, value: float) -> None:
    x = np.full((1, 256), value, np.float32)
    quants, scales = quantize_activations(x, rounding)
    assert not quants.any()
    assert (scales == 0).all()


@pytest.mark.parametrize("rounding", ["q8_0", "q8_1"])
def test_scale_beyond_f16_is_nan(rounding: str) -> None:
    x = np.full((1, 64), 1.0, np.float32)
    x[0, 3] = 127 * 65536
    rounded = round_activations(x, rounding)
    assert np.isnan(rounded[0, :32]).all()
    assert (rounded[0, 32:] == np.float32(np.float16(1 / 127)) * 127).all()


def test_f16_rounds_to_nearest_even() -> None:
    x = np.array([[1 + 2**-11, 1 + 3 * 2**-11, 1e6, -np.inf, np.nan, 2.0**-25]], np.float32)
    expected = [[1, 1 + 2**-9, np.inf, -np.inf, np.nan, 0]]
    np.testing.assert_array_equal(round_activations(x, "f16"), expected)


def test_bf16_rounds_to_nearest_even() -> None:
    x = np.array([[1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, -np.inf, -3.5]], np.float32)
    np.testing.assert_array_equal(round_activations(x, "bf16"), [[1, 1 + 2**-6, np.inf, -np.inf, -3.5]])
    nans = np.array([[0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001]], np.uint32).view(np.float32)
    assert np.isnan(round_activations(nans, "bf16")).all()


def test_none_changes_nothing() -> None:
    x = np.random.default_rng(6).standard_normal((2, 5)).astype(np.float32)
    np.testing.assert_array_equal(round_activations(x, "none"), x)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"unknown activation rounding 'q9'.*q8_K"):
        round_activations(np.ones((1, 32), np.float32), "q9")
    with pytest.raises(ValueError, match=r"blocks of 256.*\(1, 32\)"):
        round_activations(np.ones((1, 32), np.float32), "q8_K")
