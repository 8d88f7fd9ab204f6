"""Random two-layer models, made from a seed alone, so that golden values can be committed without weights.

It owns their sizes, their weights (under GGUF names, rows in transformers' order) and how they become a GGUF
file. tools/make_golden.py gives the same weights to transformers. It knows nothing of cllm.

The random numbers are those of PCG64's `random()`, which NumPy keeps the same from version to version.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Q
from gguf_builder import write_gguf
from numpy.typing import NDArray

Floats = NDArray[np.float32]

NUM_TOKENS = 64
CONTEXT_LENGTH = 128
NUM_LAYERS = 2
VOCAB_SIZE = 96


@dataclass(frozen=True)
class GoldenModel:
    """One model. `architecture` is GGUF's name; `rope` is transformers' `rope_parameters`, less the base."""

    name: str
    seed: int
    architecture: str
    width: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    ffn_width: int
    rms_eps: float
    rope_base: float
    rope: Mapping[str, Any]
    tied: bool = False


def _model(name: str, seed: int, **changes: Any) -> GoldenModel:
    """Heads are grouped three to a kv-head and wider than width / heads, and no two sizes are equal."""
    settings: dict[str, Any] = {
        "architecture": name.split("_")[0],
        "width": 48,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_width": 12,
        "ffn_width": 56,
        "rms_eps": 3e-5,
        "rope_base": 700.0,
        "rope": {"rope_type": "default"},
        **changes,
    }
    return GoldenModel(name, seed, **settings)


MODELS = {
    model.name: model
    for model in (
        _model("qwen3", 1, tied=True),
        _model("qwen2", 2, head_width=8),  # as Qwen2 has it: heads fill the width
        _model("llama", 3),
        _model("llama_linear", 4, rope={"rope_type": "linear", "factor": 2.5}),
        _model(
            "qwen3_yarn",
            5,
            rope_base=100.0,  # so that two pairs lie between kept and interpolated
            rope={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        _model(
            "llama_llama3",
            6,
            tied=True,
            rope={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
    )
}


def token_ids(model: GoldenModel) -> list[int]:
    """NUM_TOKENS random ids."""
    uniform = np.random.Generator(np.random.PCG64(1000 + model.seed)).random(NUM_TOKENS)
    return [int(x * VOCAB_SIZE) for x in uniform]


class _Random:
    """Every value is an integer up to 127 times a power of two, exact in F32, F16 and BF16."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.Generator(np.random.PCG64(seed))

    def integers(self, *shape: int) -> Floats:  # uniform in -127..127, deviation 73
        return np.floor(self.generator.random(shape) * 255 - 127).astype(np.float32)

    def matrix(self, rows: int, columns: int) -> Floats:  # keeps the size of its inputs, roughly
        return self.integers(rows, columns) * np.float32(2.0 ** -round(math.log2(73 * math.sqrt(columns))))

    def norm(self, size: int) -> Floats:  # 0.5..1.5
        return 1 + self.integers(size) / 256


def weights(model: GoldenModel) -> dict[str, Floats]:
    """GGUF name -> float32 weights, with the rows of q and k in transformers' order."""
    random = _Random(model.seed)
    tensors = {
        "token_embd.weight": random.integers(VOCAB_SIZE, model.width)
        / 4096,  # small: norms feel their epsilon
        "output_norm.weight": random.norm(model.width),
    }
    if not model.tied:
        tensors["output.weight"] = random.matrix(VOCAB_SIZE, model.width)
    for layer in range(NUM_LAYERS):
        tensors |= {f"blk.{layer}.{name}": values for name, values in _block(model, random).items()}
    return tensors


def _block(model: GoldenModel, random: _Random) -> dict[str, Floats]:
    width, query, kv = model.width, model.num_heads * model.head_width, model.num_kv_heads * model.head_width
    block = {
        "attn_norm.weight": random.norm(width),
        "attn_q.weight": 2 * random.matrix(query, width),  # sharper attention
        "attn_k.weight": random.matrix(kv, width),
        "attn_v.weight": random.matrix(kv, width),
        "attn_output.weight": random.matrix(width, query),
        "ffn_norm.weight": random.norm(width),
        "ffn_gate.weight": random.matrix(model.ffn_width, width),
        "ffn_up.weight": random.matrix(model.ffn_width, width),
        "ffn_down.weight": random.matrix(width, model.ffn_width),
    }
    if model.architecture == "qwen3":
        block |= {f"attn_{x}_norm.weight": random.norm(model.head_width) for x in "qk"}
    if model.architecture == "qwen2":
        sizes = {"q": query, "k": kv, "v": kv}
        block |= {f"attn_{x}.bias": random.integers(size) / 128 for x, size in sizes.items()}
    return block


def gguf_tensors(model: GoldenModel) -> dict[str, Floats]:
    """The weights as llama.cpp's converter writes them."""
    tensors = weights(model)
    if model.architecture == "llama":
        heads = {"attn_q.weight": model.num_heads, "attn_k.weight": model.num_kv_heads}
        for name, values in tensors.items():
            if num_heads := heads.get(name.split(".", 2)[-1]):
                tensors[name] = _pairs_to_neighbours(values, num_heads)
    if model.rope["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = _llama3_divisors(model)
    return tensors


def gguf_metadata(model: GoldenModel) -> dict[str, Any]:
    """The metadata as llama.cpp's converter writes it, without a tokenizer."""
    metadata: dict[str, Any] = {
        "block_count": NUM_LAYERS,
        "context_length": CONTEXT_LENGTH,
        "embedding_length": model.width,
        "feed_forward_length": model.ffn_width,
        "attention.head_count": model.num_heads,
        "attention.head_count_kv": model.num_kv_heads,
        "attention.layer_norm_rms_epsilon": model.rms_eps,
        "rope.freq_base": model.rope_base,
    }
    if model.width != model.num_heads * model.head_width:
        metadata |= {"attention.key_length": model.head_width, "attention.value_length": model.head_width}
    if model.rope["rope_type"] in ("linear", "yarn"):
        metadata |= {
            "rope.scaling.type": model.rope["rope_type"],
            "rope.scaling.factor": model.rope["factor"],
        }
    if model.rope["rope_type"] == "yarn":
        original = model.rope["original_max_position_embeddings"]
        metadata["rope.scaling.original_context_length"] = original
    prefixed = {f"{model.architecture}.{key}": value for key, value in metadata.items()}
    return {"general.architecture": model.architecture, **prefixed}


def write_model(path: Path, metadata: dict[str, Any], tensors: dict[str, Floats]) -> None:
    """A GGUF file whose matrices are F32, F16 and BF16 in turn, all of them exact; vectors are F32."""
    encoded = {}
    for number, (name, values) in enumerate(tensors.items()):
        type = (Q.F32, Q.F16, Q.BF16)[number % 3] if values.ndim == 2 else Q.F32
        encoded[name] = (_encode(values, type), values.shape, type)
    write_gguf(path, metadata, encoded)


def _encode(values: Floats, type: Q) -> NDArray[np.uint8]:
    if type == Q.BF16:
        halves = np.ascontiguousarray(values).view("<u2")
        assert not halves[..., 0::2].any(), "the values do not fit BF16"
        return np.ascontiguousarray(halves[..., 1::2]).view(np.uint8)
    encoded = values.astype("<f4" if type == Q.F32 else "<f2")
    assert (encoded == values).all(), f"the values do not fit {type.name}"
    return encoded.view(np.uint8)


def _pairs_to_neighbours(rows: Floats, num_heads: int) -> Floats:
    """Rope turns rows i and i + C/2 of a head together in transformers, 2i and 2i + 1 in a llama GGUF."""
    halves = rows.reshape(num_heads, 2, -1, rows.shape[-1])  # [head, half, i, column]
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _llama3_divisors(model: GoldenModel) -> Floats:
    """`rope_freqs.weight` [C/2]: Llama 3.1's rescaling as a divisor of each pair's frequency.

    Pairs that turn fewer than `low_freq_factor` times over the original context are slowed by `factor`, those
    that turn more than `high_freq_factor` times are left alone, and between the two the speeds are blended.
    """
    half = model.head_width // 2
    turns = model.rope["original_max_position_embeddings"] / (2 * np.pi)
    turns = turns * model.rope_base ** (-np.arange(half) / half)
    low, high = model.rope["low_freq_factor"], model.rope["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 / (kept + (1 - kept) / model.rope["factor"])).astype(np.float32)
