"""The operations of the reference and the rope tables, one by one, against their formulas in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from cllm.kylin.gguf import Tensor
from cllm.kylin.reference import (
    attention_pattern,
    attention_values,
    linear,
    rms_norm,
    rope,
    silu,
    softmax,
    stored,
)
from cllm.kylin.rope import RopeScaling, rope_table
from cllm.kylin.weights import Linear


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def close(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("size", [1e-3, 1, 1e3])
def test_rms_norm_matches_formula(size):
    x, weight = np.float32(size) * normal(5, 48), normal(48)
    x64 = x.astype(np.float64)
    expected = x64 / np.sqrt((x64**2).mean(axis=-1, keepdims=True) + 1e-5) * weight
    close(rms_norm(x, weight, 1e-5), expected)


def test_rms_norm_is_taken_over_each_head():
    q, weight = normal(3, 4, 8), normal(8)
    close(rms_norm(q, weight, 1e-5)[2, 3], rms_norm(q[2, 3], weight, 1e-5))


def test_softmax_matches_formula_without_overflow():
    scores = 30 * normal(4, 9)
    scores[1, 3:] = -np.inf
    exponentials = np.exp(scores.astype(np.float64))
    close(softmax(scores), exponentials / exponentials.sum(axis=-1, keepdims=True))
    np.testing.assert_array_equal(softmax(np.array([[1e4, 1e4, -1e4]], np.float32)), [[0.5, 0.5, 0]])


def test_silu_matches_formula_without_overflow():
    x = np.linspace(-80, 80, 1001, dtype=np.float32)
    close(silu(x), x / (1 + np.exp(-x.astype(np.float64))))
    np.testing.assert_array_equal(silu(np.array([-1e30, 0, 1e30], np.float32)), np.float32([0, 0, 1e30]))


@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
def test_rope_multiplies_pairs_as_complex_numbers(pairs):
    x, angles = normal(5, 3, 12), normal(5, 6)
    turned = rope(x, np.cos(angles), np.sin(angles), pairs)

    def as_complex(x: np.ndarray) -> np.ndarray:
        return x[..., :6] + 1j * x[..., 6:] if pairs == "halves" else x[..., 0::2] + 1j * x[..., 1::2]

    assert turned.dtype == np.float32
    np.testing.assert_allclose(
        as_complex(turned), as_complex(x) * np.exp(1j * angles[:, None]), rtol=1e-5, atol=1e-6
    )


def test_attention_matches_loops():
    q, k, v = normal(7, 6, 8), normal(7, 2, 8), normal(7, 2, 8)
    expected, expected_z = np.zeros((6, 7, 7)), np.zeros((7, 6, 8))
    for head in range(6):
        kv_head = head // 3  # heads 0, 1, 2 share kv-head 0
        for at in range(7):
            scores = np.exp(k[: at + 1, kv_head].astype(np.float64) @ q[at, head] / np.sqrt(8))
            expected[head, at, : at + 1] = scores / scores.sum()
            expected_z[at, head] = expected[head, at] @ v[:, kv_head]
    pattern = attention_pattern(q, k)
    close(pattern, expected)
    assert not np.triu(pattern, 1).any()
    close(attention_values(pattern, v), expected_z)


def test_linear_adds_bias_and_rounds_activations_only_when_asked():
    weight = normal(4, 64)
    layer = Linear(
        Tensor("w", (4, 64), Q.BF16, (weight.view("<u4") >> 16).astype("<u2").view(np.uint8)), normal(4)
    )
    decoded = (weight.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    x = normal(3, 64)
    close(linear(x, layer, rounded=False), x @ decoded.T + layer.bias)
    fine = x * 0 + np.float32(1 + 2**-12)  # between two BF16 values, nearer to 1
    close(linear(fine, layer, rounded=True), np.ones((3, 64)) @ decoded.T + layer.bias)


def test_stored_rounds_to_the_type_of_the_cache():
    x = np.array([1 + 2**-12, 70000, -70000, np.nan], np.float32)
    np.testing.assert_array_equal(stored(x, np.float16), np.float32([1, np.inf, -np.inf, np.nan]))
    np.testing.assert_array_equal(stored(x, np.float32), x)


# --- rope tables


def test_plain_rope_table_matches_formula():
    cos, sin = rope_table(50, 12, 700.0, RopeScaling())
    angles = np.outer(np.arange(50), 700.0 ** (-np.arange(6) / 6))
    close(cos, np.cos(angles))
    close(sin, np.sin(angles))


def test_linear_scaling_stretches_positions():
    stretched = rope_table(40, 12, 700.0, RopeScaling("linear", 2.0, 20))
    plain = rope_table(20, 12, 700.0, RopeScaling())
    for table, expected in zip(stretched, plain, strict=True):
        np.testing.assert_array_equal(table[::2], expected)


def test_factors_divide_frequencies():
    factors = np.array([1, 2, 4, 8, 8, 8], np.float32)
    cos, _ = rope_table(33, 12, 700.0, RopeScaling(), factors)
    plain, _ = rope_table(33, 12, 700.0, RopeScaling())
    np.testing.assert_array_equal(cos[:, 0], plain[:, 0])
    np.testing.assert_array_equal(cos[::8, 3], plain[:5, 3])


def test_yarn_table_matches_transformers():
    """Heads of 128, base 1e6, four times 32768 tokens: pairs below, between and above both bounds."""
    with np.load(Path(__file__).parent / "data" / "golden_yarn_table.npz") as golden:
        cos, sin = rope_table(8, 128, 1e6, RopeScaling("yarn", 4.0, 32768))
        np.testing.assert_allclose(cos, golden["cos"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(sin, golden["sin"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(sin[1], golden["sin"][1], rtol=1e-5)  # the smallest angles too


def test_yarn_by_a_factor_of_one_changes_nothing():
    for yarn, plain in zip(
        rope_table(9, 12, 700.0, RopeScaling("yarn", 1.0, 64)),
        rope_table(9, 12, 700.0, RopeScaling()),
        strict=True,
    ):
        close(yarn, plain)


@pytest.mark.parametrize("kind", RopeScaling.KINDS)
def test_attn_factor_multiplies_every_table(kind):
    plain = rope_table(9, 12, 700.0, RopeScaling(kind, 2.0, 64))
    larger = rope_table(9, 12, 700.0, RopeScaling(kind, 2.0, 64, attn_factor=1.5))
    for table, expected in zip(larger, plain, strict=True):
        close(table, 1.5 * expected)
