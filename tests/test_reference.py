"""The reference against transformers (golden values, tools/make_golden.py), the proof that this comparison
notices small mistakes, and what else `forward` promises. Single operations are in test_reference_ops.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_models import MODELS, NUM_LAYERS, gguf_metadata, gguf_tensors, token_ids, weights, write_model

from cllm.hooks import hook_names
from cllm.kylin import weights as weights_module
from cllm.kylin.gguf import read_gguf
from cllm.kylin.reference import forward
from cllm.kylin.weights import Weights, load_weights

DATA = Path(__file__).parent / "data"

# Two float32 programs that sum in different orders: measured 1e-12 or less.
SAME = 1e-10
# A wrong program, however small its mistake, is further off than this.
DIFFERENT = 1e-6

Metadata = dict[str, Any]
Tensors = dict[str, np.ndarray]


def nmse(found: np.ndarray, expected: np.ndarray) -> float:
    expected = np.asarray(expected, np.float64)
    return float(np.square(found - expected).sum() / np.square(expected).sum())


def load_golden(name: str) -> dict[str, np.ndarray]:
    with np.load(DATA / f"golden_{name}.npz") as arrays:
        return dict(arrays)


def run(model: Weights, ids: list[int], **options: Any) -> dict[str, np.ndarray]:
    """Every activation by its hook name."""
    seen: dict[str, np.ndarray] = {}
    forward(model, ids, tap=seen.__setitem__, **options)
    return seen


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Weights]:
    """build(name, mutate): a model of golden_models, through a GGUF file, after mutate(metadata, tensors)."""

    def build(name: str, mutate: Callable[[Metadata, Tensors], object] | None = None) -> Weights:
        metadata, tensors = gguf_metadata(MODELS[name]), gguf_tensors(MODELS[name])
        if mutate is not None:
            mutate(metadata, tensors)
        write_model(tmp_path / "model.gguf", metadata, tensors)
        return load_weights(read_gguf(tmp_path / "model.gguf"))

    return build


# --- the same as transformers


@pytest.mark.parametrize("name", MODELS)
def test_random_models_match_transformers(build, name):
    golden = load_golden(name)
    seen = run(build(name), token_ids(MODELS[name]))
    for layer, resid_post in enumerate(golden["resid_post"]):
        assert nmse(seen[f"blocks.{layer}.hook_resid_post"], resid_post) < SAME
    assert nmse(seen["logits"], golden["logits"]) < SAME


@pytest.mark.model
def test_smollm2_matches_transformers(smollm2_path):
    golden = load_golden("smollm2")
    seen = run(load_weights(read_gguf(smollm2_path)), golden["token_ids"].tolist())
    for layer, resid_post in enumerate(golden["resid_post"]):
        assert nmse(seen[f"blocks.{layer}.hook_resid_post"][:, golden["columns"]], resid_post) < SAME
    logits = seen["logits"].astype(np.float64)
    assert nmse(logits[:, golden["logit_ids"]], golden["logits"]) < SAME
    # The columns that were not kept take part in these two.
    np.testing.assert_allclose(np.logaddexp.reduce(logits, axis=-1), golden["logsumexp"], atol=1e-3)
    np.testing.assert_array_equal(logits.argmax(axis=-1), golden["argmax"])


# --- and that comparison notices mistakes


def _set(key: str, value: Any) -> Callable[[Metadata, Tensors], object]:
    """Metadata `<architecture>.<key>`."""
    return lambda metadata, tensors: metadata.update({f"{metadata['general.architecture']}.{key}": value})


def _fill(name: str, value: float) -> Callable[[Metadata, Tensors], object]:
    return lambda metadata, tensors: tensors[name].fill(value)


def _drop(name: str) -> Callable[[Metadata, Tensors], object]:
    return lambda metadata, tensors: tensors.pop(name)


def _swap(one: str, other: str) -> Callable[[Metadata, Tensors], object]:
    return lambda metadata, tensors: tensors.update({one: tensors[other], other: tensors[one]})


def _roll(name: str, rows: int) -> Callable[[Metadata, Tensors], object]:
    return lambda metadata, tensors: tensors.update({name: np.roll(tensors[name], rows, axis=0)})


def _unpermuted(name: str) -> Callable[[Metadata, Tensors], object]:
    return lambda metadata, tensors: tensors.update({name: weights(MODELS["llama"])[name]})


MUTANTS = {
    "epsilon": ("llama", _set("attention.layer_norm_rms_epsilon", 2e-5)),
    "rope base": ("qwen2", _set("rope.freq_base", 710.0)),
    "rows of q in transformers' order": ("llama", _unpermuted("blk.1.attn_q.weight")),
    "rows of k in transformers' order": ("llama", _unpermuted("blk.1.attn_k.weight")),
    "attention norm left out": ("qwen2", _fill("blk.1.attn_norm.weight", 1)),
    "ffn norm left out": ("llama", _fill("blk.1.ffn_norm.weight", 1)),
    "output norm left out": ("qwen3", _fill("output_norm.weight", 1)),
    "query norm left out": ("qwen3", _fill("blk.1.attn_q_norm.weight", 1)),
    "key norm left out": ("qwen3", _fill("blk.1.attn_k_norm.weight", 1)),
    "query and key norms swapped": ("qwen3", _swap("blk.0.attn_q_norm.weight", "blk.0.attn_k_norm.weight")),
    "bias of q left out": ("qwen2", _fill("blk.1.attn_q.bias", 0)),
    "bias of k left out": ("qwen2", _fill("blk.1.attn_k.bias", 0)),
    "bias of v left out": ("qwen2", _fill("blk.1.attn_v.bias", 0)),
    "query heads on the wrong kv-head": ("llama", _roll("blk.1.attn_q.weight", 12)),
    "gate and up swapped": ("llama", _swap("blk.1.ffn_gate.weight", "blk.1.ffn_up.weight")),
    "linear scaling left out": ("llama_linear", _set("rope.scaling.type", "none")),
    "linear scaling by another factor": ("llama_linear", _set("rope.scaling.factor", 2.4)),
    "yarn as linear": ("qwen3_yarn", _set("rope.scaling.type", "linear")),
    "yarn from another context": ("qwen3_yarn", _set("rope.scaling.original_context_length", 16)),
    "yarn's magnitude": ("qwen3_yarn", _set("rope.scaling.attn_factor", 1.01)),
    "rope divisors left out": ("llama_llama3", _drop("rope_freqs.weight")),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_golden_values_reject_mutant(build, mutant):
    name, mutate = MUTANTS[mutant]
    logits = forward(build(name, mutate), token_ids(MODELS[name]))
    assert nmse(logits, load_golden(name)["logits"]) > DIFFERENT


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama"])
def test_golden_values_reject_other_rope_pairs(build, monkeypatch, name):
    model = build(name)
    other = {"halves": "neighbours", "neighbours": "halves"}[model.shape.table.rope_pairs]
    mutated = replace(model.shape.table, rope_pairs=other)
    monkeypatch.setitem(weights_module.ARCHITECTURES, model.shape.architecture, mutated)
    assert nmse(forward(model, token_ids(MODELS[name])), load_golden(name)["logits"]) > DIFFERENT


# --- what else forward promises


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama"])
def test_hooks_come_by_name_in_order(build, name):
    seen = run(build(name), token_ids(MODELS[name]))
    assert list(seen) == hook_names(NUM_LAYERS, qk_norm=name == "qwen3")
    assert {activation.dtype for activation in seen.values()} == {np.dtype(np.float32)}


def test_hooks_have_documented_shapes(build):
    model = MODELS["qwen3"]
    tokens, heads, kv_heads, head_width = 7, model.num_heads, model.num_kv_heads, model.head_width
    seen = run(build("qwen3"), token_ids(model)[:tokens])
    for name in ("hook_q", "hook_q_normed", "hook_rot_q", "hook_z"):
        assert seen[f"blocks.1.attn.{name}"].shape == (tokens, heads, head_width)
    for name in ("hook_k", "hook_k_normed", "hook_rot_k", "hook_v"):
        assert seen[f"blocks.1.attn.{name}"].shape == (tokens, kv_heads, head_width)
    assert seen["blocks.1.attn.hook_pattern"].shape == (heads, tokens, tokens)
    assert seen["blocks.1.mlp.hook_post"].shape == (tokens, model.ffn_width)
    assert seen["blocks.1.hook_attn_out"].shape == (tokens, model.width)


def test_what_a_tap_returns_takes_the_place_of_the_activation(build):
    model, ids = build("llama"), token_ids(MODELS["llama"])
    for name in hook_names(NUM_LAYERS, qk_norm=False):
        edited = forward(model, ids, tap=lambda at, x, name=name: 0 * x + 1 if at == name else None)
        assert nmse(edited, load_golden("llama")["logits"]) > DIFFERENT, name


def test_later_tokens_do_not_change_earlier_logits(build):
    model, ids = build("qwen3"), token_ids(MODELS["qwen3"])
    assert nmse(forward(model, ids[:20]), forward(model, ids)[:20]) < SAME


def test_activation_rounding_moves_logits_a_little(build):
    model, ids = build("llama"), token_ids(MODELS["llama"])  # F32, F16 and BF16 matrices
    assert 1e-8 < nmse(forward(model, ids, activation_rounding=True), forward(model, ids)) < 1e-3


def test_half_precision_keys_and_values_move_logits_a_little(build):
    model, ids = build("llama"), token_ids(MODELS["llama"])
    assert 1e-9 < nmse(forward(model, ids, kv_dtype=np.float16), forward(model, ids)) < 1e-5
