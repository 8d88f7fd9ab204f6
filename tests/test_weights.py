"""load_weights: what it reads from a file, and that it refuses, by a clear message, every file that the
forward pass would not compute exactly. What the values mean is tested in test_reference.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from gguf_builder import random_blocks, write_gguf
from golden_models import MODELS, VOCAB_SIZE, gguf_metadata, gguf_tensors

from cllm.errors import ModelFileError
from cllm.kylin.gguf import read_gguf
from cllm.kylin.rope import RopeScaling
from cllm.kylin.weights import Linear, ModelShape, Weights, load_weights

Metadata = dict[str, Any]
Tensors = dict[str, Any]  # name -> (bytes, shape, type)
Mutation = Callable[[Metadata, Tensors], object]
Load = Callable[..., Weights]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """load(mutate, name): a two-layer model, through a file, after mutate(metadata, tensors)."""

    def load(mutate: Mutation | None = None, name: str = "llama") -> Weights:
        metadata = gguf_metadata(MODELS[name])
        tensors: Tensors = {
            name: (values.astype("<f4").view(np.uint8), values.shape, Q.F32)
            for name, values in gguf_tensors(MODELS[name]).items()
        }
        if mutate is not None:
            mutate(metadata, tensors)
        return load_weights(read_gguf(write_gguf(tmp_path / "model.gguf", metadata, tensors)))

    return load


def setting(key: str, value: Any) -> Mutation:
    return lambda metadata, tensors: metadata.update({f"llama.{key}": value})


def settings(**values: Any) -> Mutation:
    """Keys below llama.rope, `__` for a dot."""
    return lambda metadata, tensors: metadata.update(
        {f"llama.rope.{key.replace('__', '.')}": value for key, value in values.items()}
    )


def without(key: str) -> Mutation:
    return lambda metadata, tensors: metadata.pop(f"llama.{key}")


def tensor(name: str, *shape: int, type: Q = Q.F32) -> Mutation:
    raw = (
        random_blocks(np.random.default_rng(0), type, shape) if type != Q.IQ2_XXS else np.zeros(66, np.uint8)
    )
    return lambda metadata, tensors: tensors.update({name: (raw, shape, type)})


def no_tensor(name: str) -> Mutation:
    return lambda metadata, tensors: tensors.pop(name)


def both(one: Mutation, other: Mutation) -> Mutation:
    return lambda metadata, tensors: (one(metadata, tensors), other(metadata, tensors))


# --- what is read


def test_shape_is_read_from_the_metadata(load):
    model = MODELS["llama"]
    assert load().shape == ModelShape(
        architecture="llama",
        num_layers=2,
        width=model.width,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_width=model.head_width,
        ffn_width=model.ffn_width,
        vocab_size=VOCAB_SIZE,
        context_length=128,
        rms_eps=float(np.float32(model.rms_eps)),
        rope_base=model.rope_base,
        rope_scaling=RopeScaling(),
    )


def test_every_tensor_lands_under_its_own_name(load):
    """By value: no two tensors of a model are equal."""
    for name, model in MODELS.items():
        loaded, expected = load(name=name), gguf_tensors(model)
        found = {"token_embd.weight": loaded.token_embd, "output_norm.weight": loaded.output_norm}
        found["rope_freqs.weight"] = loaded.rope_factors
        fields = {} if model.tied else {"output": loaded.output}
        for layer, block in enumerate(loaded.blocks):
            fields |= {f"blk.{layer}.{at}": getattr(block, at) for at in block.__slots__}
        for at, value in fields.items():
            if isinstance(value, Linear):
                found |= {f"{at}.weight": value.weight, f"{at}.bias": value.bias}
            else:
                found[f"{at}.weight"] = value
        found = {at: value for at, value in found.items() if value is not None}
        assert found.keys() == expected.keys()
        for at, value in found.items():
            values = value if isinstance(value, np.ndarray) else value.data.view("<f4")
            np.testing.assert_array_equal(values, expected[at], err_msg=at)


def test_output_is_the_embedding_where_they_are_tied(load):
    tied, untied = load(name="qwen3"), load(name="llama")
    assert tied.output.weight is tied.token_embd
    assert untied.output.weight is not untied.token_embd


def test_matrices_stay_in_the_file(load):
    model = load()
    for matrix in (model.token_embd, model.output.weight, model.blocks[1].ffn_down.weight):
        assert not matrix.data.flags.owndata
        assert not matrix.data.flags.writeable


def test_biases_are_read_where_a_file_brings_them(load):
    model = load(tensor("blk.1.attn_output.bias", 48))
    assert model.blocks[1].attn_output.bias.shape == (48,)
    assert model.blocks[0].attn_output.bias is None


def test_defaults(load):
    def every_head_its_own(metadata: Metadata, tensors: Tensors) -> None:
        for key in ("attention.head_count_kv", "rope.freq_base"):
            del metadata[f"llama.{key}"]
        for name in [name for name in tensors if "attn_k" in name or "attn_v" in name]:
            tensor(name, 6 * 12, 48)(metadata, tensors)

    shape = load(every_head_its_own).shape
    assert (shape.num_kv_heads, shape.rope_base) == (6, 10000.0)


def test_one_value_a_layer_counts_where_all_are_equal(load):
    assert load(setting("attention.head_count_kv", np.array([2, 2], np.int32))).shape.num_kv_heads == 2


@pytest.mark.parametrize(
    ("mutate", "expected"),
    [
        (settings(scaling__factor=2.5), RopeScaling("linear", 2.5, 128)),  # llama.cpp's default type
        (settings(scale_linear=2.5), RopeScaling("linear", 2.5, 128)),  # the old key
        (settings(scaling__type="none", scaling__factor=2.5), RopeScaling()),
        (settings(scaling__attn_factor=1.5), RopeScaling(attn_factor=1.5)),
        (
            settings(
                scaling__type="yarn",
                scaling__factor=4.0,
                scaling__original_context_length=32,
                scaling__attn_factor=1.25,
                scaling__finetuned=True,
            ),
            RopeScaling("yarn", 4.0, 32, 1.25),
        ),
    ],
)
def test_rope_scaling_is_read_as_llama_cpp_does(load, mutate, expected):
    assert load(mutate).shape.rope_scaling == expected


@pytest.mark.parametrize("key", ["expert_count", "attention.sliding_window"])
def test_settings_that_are_zero_mean_nothing(load, key):
    assert load(setting(key, 0)).shape == load().shape


# --- what is refused

REFUSALS: dict[str, tuple[Mutation, tuple[str, ...]]] = {
    "unknown architecture": (
        lambda metadata, tensors: metadata.update({"general.architecture": "gemma3"}),
        ("'gemma3'", "21 tensors", "qwen3, qwen2, llama", "--backend llama"),
    ),
    "no architecture": (
        lambda metadata, tensors: metadata.pop("general.architecture"),
        ("general.architecture is missing",),
    ),
    "vocabulary only": (
        lambda metadata, tensors: tensors.clear(),
        ("no token_embd.weight", "vocabulary only"),
    ),
    "unsupported types": (
        both(
            tensor("blk.0.ffn_up.weight", 1, 256, type=Q.IQ2_XXS),
            tensor("blk.1.ffn_up.weight", 1, 256, type=Q.IQ2_XXS),
        ),
        ("2 of type IQ2_XXS", "of 21 tensors", "--backend llama"),
    ),
    "missing matrix": (no_tensor("blk.1.ffn_up.weight"), ("blk.1.ffn_up.weight is missing", "incomplete")),
    "missing norm": (no_tensor("blk.0.attn_norm.weight"), ("blk.0.attn_norm.weight is missing",)),
    "missing output norm": (no_tensor("output_norm.weight"), ("output_norm.weight is missing",)),
    "more layers than the file has": (
        setting("block_count", 3),
        ("blk.2.attn_norm.weight is missing", "block_count"),
    ),
    "fewer layers than the file has": (setting("block_count", 1), ("would ignore: blk.1.", "and 6 more")),
    "matrix of another shape": (
        tensor("blk.1.ffn_down.weight", 48, 48),
        ("blk.1.ffn_down.weight", "[48, 48]", "[48, 56]"),
    ),
    "transposed matrix": (tensor("blk.0.ffn_down.weight", 56, 48), ("[56, 48]", "[48, 56]")),
    "flat matrix": (tensor("blk.0.ffn_down.weight", 48 * 56), ("[2688]", "[48, 56]")),
    "norm of another size": (tensor("output_norm.weight", 47), ("output_norm.weight", "[47]", "[48]")),
    "bias of another size": (tensor("blk.0.attn_q.bias", 48), ("blk.0.attn_q.bias", "[48]", "[72]")),
    "rope divisors of another size": (tensor("rope_freqs.weight", 12), ("rope_freqs.weight", "[12]", "[6]")),
    "unused tensor": (
        tensor("blk.0.ffn_gate_inp.weight", 8, 48),
        ("would ignore: blk.0.ffn_gate_inp.weight", "--backend llama"),
    ),
    "norm of another architecture": (
        tensor("blk.0.attn_q_norm.weight", 12),
        ("would ignore: blk.0.attn_q_norm",),
    ),
    "sliding window": (
        setting("attention.sliding_window", 4096),
        ("llama.attention.sliding_window is 4096", "--backend llama"),
    ),
    "sliding window a layer": (
        setting("attention.sliding_window", np.array([0, 4096], np.int32)),
        ("llama.attention.sliding_window is", "--backend llama"),
    ),
    "experts": (setting("expert_count", 8), ("llama.expert_count is 8",)),
    "softcapping": (setting("final_logit_softcapping", 30.0), ("final_logit_softcapping is 30.0",)),
    "attention scale": (setting("attention.scale", 0.25), ("llama.attention.scale is 0.25",)),
    "no causal mask": (setting("attention.causal", False), ("llama.attention.causal is False",)),
    "unknown rope scaling": (
        settings(scaling__type="longrope", scaling__factor=4.0),
        ("'longrope'", "none, linear, yarn", "--backend llama"),
    ),
    "rope scaling that is no text": (
        settings(scaling__type=[1, 2]),
        ("rope scaling array", "none, linear, yarn"),
    ),
    "rope setting that is not honoured": (
        settings(scaling__type="yarn", scaling__factor=4.0, scaling__yarn_beta_fast=16.0),
        ("llama.rope.scaling.yarn_beta_fast is set",),
    ),
    "rope setting without a type": (settings(scaling__alpha=2.0), ("llama.rope.scaling.alpha is set",)),
    "linear scaling without a factor": (
        settings(scaling__type="linear"),
        ("llama.rope.scaling.factor", "positive number", "found nothing"),
    ),
    "partial rotary": (settings(dimension_count=6), ("rotated width 6", "head width 12", "--backend llama")),
    "values of another width": (setting("attention.value_length", 16), ("value width 16", "head width 12")),
    "heads that do not group": (setting("attention.head_count_kv", 4), ("6 heads", "4 kv-heads")),
    "width that heads do not divide": (
        both(
            both(without("attention.key_length"), without("attention.value_length")),
            setting("embedding_length", 50),
        ),
        ("width 50 is not a multiple of its 6 heads",),
    ),
    "odd head width": (
        both(setting("attention.key_length", 13), setting("attention.value_length", 13)),
        ("head width 13 is odd",),
    ),
    "kv-heads that differ between layers": (
        setting("attention.head_count_kv", np.array([2, 3], np.int32)),
        ("llama.attention.head_count_kv", "positive integer", "array([2, 3]"),
    ),
    "no block count": (without("block_count"), ("llama.block_count", "positive integer", "found nothing")),
    "no epsilon": (without("attention.layer_norm_rms_epsilon"), ("rms_epsilon", "found nothing")),
    "zero layers": (setting("block_count", 0), ("llama.block_count", "found 0")),
    "negative width": (setting("embedding_length", -48), ("llama.embedding_length", "found -48")),
    "count past 2^31": (setting("context_length", 2**31), ("llama.context_length", "found 2147483648")),
    "count that is a float": (setting("block_count", 2.0), ("llama.block_count", "found 2.0")),
    "count that is a bool": (setting("block_count", True), ("llama.block_count", "found True")),
    "count that is a text": (setting("block_count", "2" * 99), ("llama.block_count", "222...")),
    "epsilon that is NaN": (setting("attention.layer_norm_rms_epsilon", float("nan")), ("found nan",)),
    "yarn on a base of one": (
        settings(scaling__type="yarn", scaling__factor=4.0, freq_base=1.0),
        ("llama.rope.freq_base above 1",),
    ),
    "infinite rope base": (settings(freq_base=float("inf")), ("llama.rope.freq_base", "found inf")),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(load, tmp_path, name):
    mutate, parts = REFUSALS[name]
    with pytest.raises(ModelFileError) as caught:
        load(mutate)
    assert caught.value.path == str(tmp_path / "model.gguf")
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "tensor_name"),
    [
        ("qwen2", "blk.1.attn_k.bias"),
        ("qwen3", "blk.1.attn_k_norm.weight"),
        ("qwen3", "blk.0.attn_q_norm.weight"),
    ],
)
def test_refusal_where_an_architecture_needs_more(load, architecture, tensor_name):
    with pytest.raises(ModelFileError, match=f"{tensor_name} is missing"):
        load(no_tensor(tensor_name), architecture)


ODD_NUMBERS = (0, -1, 1, 3, 2**31 - 1, 2**63, 0.0, -1.0, 1e-45, 3e38, float("nan"), True, False)
ODD_ARRAYS = ([[1], [2, 3]], np.zeros(2, np.int32), np.ones(2, np.float32), np.array([], np.int32))
ODD_VALUES = (*ODD_NUMBERS, *ODD_ARRAYS, "", "yarn", ["a", "b"])


@pytest.mark.parametrize("name", ["llama", "llama_linear", "qwen3_yarn"])
def test_odd_metadata_is_read_or_refused(load, name):
    """Whatever stands under a key, nothing but a ModelFileError comes out."""
    refused = 0
    for key in gguf_metadata(MODELS[name]):
        for value in ODD_VALUES:
            try:
                load(lambda metadata, tensors, key=key, value=value: metadata.update({key: value}), name)
            except ModelFileError:
                refused += 1
    assert refused > 100
