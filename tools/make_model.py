"""Writes a Qwen3 model of any shape with random weights in real quantised types, for tests and benchmarks.

    python tools/make_model.py model.gguf                       # the shape of Qwen3-0.6B, Q4_K_M, 0.4 GB
    python tools/make_model.py tiny.gguf --layers 2 --width 256 --heads 4 --kv-heads 2 --head-dim 64 \
        --ffn 512 --vocab-size 1024

It owns the blocks' random content and the mixes of types; the blocks are valid, of mean near 0, and scaled so
that activations stay near 1 through all layers. It must not know cLLM, which is tested with these files.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType
from numpy.typing import NDArray
from qwen3_vocab import PADDED_SIZE, load_qwen3_vocab

Type = GGMLQuantizationType
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Shape:
    """Qwen3-0.6B unless told otherwise."""

    layers: int = 28
    width: int = 1024
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    ffn: int = 3072
    context: int = 40960
    vocab_size: int = PADDED_SIZE


@dataclass(frozen=True)
class Mix:
    """`more` is for the embedding and the attn_v and ffn_down that get more bits, `base` for the rest."""

    base: Type
    more: Type
    file_type: LlamaFileType


MIXES = {
    "q4_k_m": Mix(Type.Q4_K, Type.Q6_K, LlamaFileType.MOSTLY_Q4_K_M),
    # What becomes of q4_k_m where no row is a multiple of 256.
    "q5_0_q8_0": Mix(Type.Q5_0, Type.Q8_0, LlamaFileType.MOSTLY_Q4_K_M),
    "q4_0": Mix(Type.Q4_0, Type.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "q4_1": Mix(Type.Q4_1, Type.Q4_1, LlamaFileType.MOSTLY_Q4_1),
    "q5_0": Mix(Type.Q5_0, Type.Q5_0, LlamaFileType.MOSTLY_Q5_0),
    "q5_1": Mix(Type.Q5_1, Type.Q5_1, LlamaFileType.MOSTLY_Q5_1),
    "q8_0": Mix(Type.Q8_0, Type.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q4_k": Mix(Type.Q4_K, Type.Q4_K, LlamaFileType.MOSTLY_Q4_K_S),
    "q5_k": Mix(Type.Q5_K, Type.Q5_K, LlamaFileType.MOSTLY_Q5_K_S),
    "q6_k": Mix(Type.Q6_K, Type.Q6_K, LlamaFileType.MOSTLY_Q6_K),
    "f16": Mix(Type.F16, Type.F16, LlamaFileType.MOSTLY_F16),
    "bf16": Mix(Type.BF16, Type.BF16, LlamaFileType.MOSTLY_BF16),
    "f32": Mix(Type.F32, Type.F32, LlamaFileType.ALL_F32),
}

# llama.cpp's `tensor_type_fallback`, for rows that are no multiple of 256.
FALLBACK = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0}


def make_model(
    path: str | os.PathLike[str], *, type_mix: str = "q4_k_m", seed: int = 0, **shape: int
) -> None:
    """Writes the model of `shape` (fields of `Shape`) to `path`; the same arguments give the same bytes.

    Raises `ValueError` for rows that `type_mix` cannot hold, `TypeError` for an unknown field of the shape.
    """
    model, mix = Shape(**shape), MIXES[type_mix]
    rng = np.random.Generator(np.random.SFC64(seed))
    tensors = list(_tensors(model, mix))
    writer = GGUFWriter(Path(path), "qwen3")
    _add_metadata(writer, model, mix)
    for tensor in tensors:
        writer.add_tensor_info(
            tensor.name, tensor.byte_shape, np.dtype(np.uint8), tensor.num_bytes, raw_dtype=tensor.type
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:  # one at a time: the whole model is never in memory
        writer.write_tensor_data(random_tensor(rng, tensor))
    writer.close()


# --- What tensors there are ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tensor:
    """A tensor to be made: `rows` of `cols` values of the given mean and standard deviation."""

    name: str
    type: Type
    rows: int
    cols: int
    std: float
    mean: float = 0.0

    @property
    def num_blocks(self) -> int:
        return self.rows * self.cols // GGML_QUANT_SIZES[self.type][0]

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * GGML_QUANT_SIZES[self.type][1]

    @property
    def byte_shape(self) -> tuple[int, ...]:
        row = self.num_bytes // self.rows
        return (row,) if self.rows == 1 else (self.rows, row)


def _tensors(shape: Shape, mix: Mix) -> Iterator[Tensor]:
    def matrix(name: str, rows: int, cols: int, *, more: bool = False, std: float = 1.0) -> Tensor:
        kind = _fit(mix.more if more else mix.base, cols)
        return Tensor(f"{name}.weight", kind, rows, cols, std / cols**0.5)

    def norm(name: str, size: int, mean: float = 1.0) -> Tensor:
        return Tensor(f"{name}.weight", Type.F32, 1, size, 0.1, mean)

    width, q_width, kv_width = shape.width, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # So that all branches together are near 1, and that attention does not average all positions into one.
    branch, sharp = (2 * shape.layers) ** -0.5, 1.5
    yield matrix("token_embd", shape.vocab_size, width, more=True)
    yield norm("output_norm", width, mean=4.0)  # logits of standard deviation 4
    for layer in range(shape.layers):
        block, more = f"blk.{layer}", _gets_more_bits(layer, shape.layers)
        yield norm(f"{block}.attn_norm", width)
        yield matrix(f"{block}.attn_q", q_width, width)
        yield matrix(f"{block}.attn_k", kv_width, width)
        yield matrix(f"{block}.attn_v", kv_width, width, more=more)
        yield norm(f"{block}.attn_q_norm", shape.head_dim, mean=sharp)
        yield norm(f"{block}.attn_k_norm", shape.head_dim, mean=sharp)
        yield matrix(f"{block}.attn_output", width, q_width, std=branch)
        yield norm(f"{block}.ffn_norm", width)
        yield matrix(f"{block}.ffn_gate", shape.ffn, width)
        yield matrix(f"{block}.ffn_up", shape.ffn, width)
        yield matrix(f"{block}.ffn_down", width, shape.ffn, more=more, std=2 * branch)


def _gets_more_bits(layer: int, layers: int) -> bool:
    """llama.cpp's `use_more_bits`: the first and last eighth, and every third layer between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _fit(kind: Type, cols: int) -> Type:
    if cols % GGML_QUANT_SIZES[kind][0]:
        kind = FALLBACK.get(kind, kind)
    if cols % GGML_QUANT_SIZES[kind][0]:
        raise ValueError(f"expected rows of a multiple of {GGML_QUANT_SIZES[kind][0]} values, found {cols}")
    return kind


def _add_metadata(writer: GGUFWriter, shape: Shape, mix: Mix) -> None:
    writer.add_name(f"random Qwen3, {shape.layers} layers of width {shape.width}")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_file_type(mix.file_type)
    writer.add_quantization_version(2)
    vocab = load_qwen3_vocab(shape.vocab_size)
    end_of_text = vocab.tokens.index("<|endoftext|>")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(vocab.tokens)
    writer.add_token_types(vocab.token_types)
    writer.add_token_merges(vocab.merges)
    writer.add_bos_token_id(end_of_text)
    writer.add_eos_token_id(vocab.tokens.index("<|im_end|>"))
    writer.add_pad_token_id(end_of_text)
    writer.add_add_bos_token(False)
    writer.add_chat_template(vocab.chat_template)


# --- Random blocks, laid out as ggml's `block_*` structs ----------------------------------------------------


def random_tensor(rng: np.random.Generator, tensor: Tensor) -> Bytes:
    """Returns the bytes of `tensor`, uint8 of `byte_shape`; only F32, F16 and BF16 heed its mean."""
    n, std, kind = tensor.num_blocks, tensor.std, tensor.type
    if kind in (Type.F32, Type.F16, Type.BF16):
        values = tensor.mean + std * rng.standard_normal(n, dtype=np.float32)
        if kind == Type.BF16:
            data = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        else:
            data = values.astype(np.float32 if kind == Type.F32 else np.float16).view(np.uint8)
    elif kind in (Type.Q4_K, Type.Q5_K):
        data = _k_blocks_with_minimums(rng, n, std, bits=4 if kind == Type.Q4_K else 5)
    elif kind == Type.Q6_K:
        scales = rng.integers(32, 64, (n, 16)) * rng.choice((-1, 1), (n, 16))
        d = _block_scales(rng, n, std, unit=_std_of_uniform(64) * 48)
        data = np.hstack([_random_bytes(rng, n, 192), scales.astype(np.int8).view(np.uint8), _f16(d)])
    elif kind == Type.Q8_0:
        d = _block_scales(rng, n, std, unit=_std_of_uniform(255))
        data = np.hstack([_f16(d), rng.integers(-127, 128, (n, 32), dtype=np.int8).view(np.uint8)])
    else:
        data = _simple_blocks(rng, n, std, kind)
    return data.reshape(tensor.byte_shape)


def _simple_blocks(rng: np.random.Generator, n: int, std: float, kind: Type) -> Bytes:
    """Scales of either sign cancel the mean of Q4_0 and Q5_0, -d/2; minimums cancel that of Q4_1 and Q5_1."""
    levels = 16 if kind in (Type.Q4_0, Type.Q4_1) else 32
    d = _block_scales(rng, n, std, unit=_std_of_uniform(levels))
    quants = _random_bytes(rng, n, 16 if levels == 16 else 20)  # Q5: 4 bytes of fifth bits come first
    if kind in (Type.Q4_0, Type.Q5_0):
        return np.hstack([_f16(d * rng.choice((-1, 1), n)), quants])
    return np.hstack([_f16(d), _f16(d * -(levels - 1) / 2), quants])


def _k_blocks_with_minimums(rng: np.random.Generator, n: int, std: float, bits: int) -> Bytes:
    """Q4_K and Q5_K: w = d * scale * q - dmin * m, with m near the scale, so that each mean is near 0."""
    scales = rng.integers(16, 61, (n, 8), dtype=np.int8)
    minimums = (scales + rng.integers(-3, 4, (n, 8), dtype=np.int8)).astype(np.uint8)
    levels = 1 << bits
    d = _block_scales(rng, n, std, unit=_std_of_uniform(levels) * 40)
    dmin = d * (levels - 1) / 2
    packed = _pack_6_bits(scales.astype(np.uint8), minimums)
    return np.hstack([_f16(d), _f16(dmin), packed, _random_bytes(rng, n, 32 * bits)])


def _pack_6_bits(scales: Bytes, minimums: Bytes) -> Bytes:
    """[n, 8] scales and minimums below 64 as [n, 12] bytes, the inverse of ggml's `get_scale_min_k4`."""
    low_s, high_s, low_m, high_m = scales[:, :4], scales[:, 4:], minimums[:, :4], minimums[:, 4:]
    return np.hstack(
        [low_s | (high_s >> 4) << 6, low_m | (high_m >> 4) << 6, (high_s & 15) | (high_m & 15) << 4]
    )


def _block_scales(rng: np.random.Generator, n: int, std: float, unit: float) -> NDArray[np.float32]:
    """One scale a block, such that quants of standard deviation `unit` become weights of about `std`."""
    return rng.uniform(0.75, 1.25, n).astype(np.float32) * np.float32(std / unit)


def _std_of_uniform(levels: int) -> float:
    return float(((levels**2 - 1) / 12) ** 0.5)


def _f16(values: NDArray[np.floating[Any]]) -> Bytes:
    return values.astype("<f2")[:, None].view(np.uint8)


def _random_bytes(rng: np.random.Generator, n: int, size: int) -> Bytes:
    words = rng.integers(0, 1 << 64, -(-n * size // 8), dtype=np.uint64)  # ten times as fast as rng.bytes
    return words.view(np.uint8)[: n * size].reshape(n, size)


def main() -> None:
    """Reads the command line and writes the file."""
    parser = argparse.ArgumentParser(description="Write a Qwen3 GGUF file with random weights.")
    parser.add_argument("path", metavar="OUT.gguf")
    parser.add_argument("--type-mix", choices=MIXES, default="q4_k_m")
    parser.add_argument("--seed", type=int, default=0)
    for field in fields(Shape):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    arguments = vars(parser.parse_args())
    path = Path(arguments.pop("path"))
    make_model(path, **arguments)
    print(f"{path}: {path.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
