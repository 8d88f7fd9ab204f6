"""Random two-layer models of every supported architecture and weight type, with a byte vocabulary.

Small enough to be made for each test session; widths are multiples of 256, so that K-quants fit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Q
from gguf import GGUFValueType
from gguf_builder import RawTensor, Typed, random_blocks, write_gguf

from cllm.backends.mock import byte_vocabulary

LAYERS, WIDTH, HEADS, KV_HEADS, FFN = 2, 256, 4, 2, 1024
HEAD_WIDTHS = {"llama": 128, "qwen2": WIDTH // HEADS, "qwen3": 128}  # llama.cpp's Qwen2 can have no other

# (attn_v and ffn_down, embedding and output, everything else)
TYPE_MIXES = {
    "q4_k_m": (Q.Q6_K, Q.Q6_K, Q.Q4_K),
    "q5_k": (Q.Q5_K, Q.Q6_K, Q.Q5_K),
    "q5_0_q8_0": (Q.Q8_0, Q.Q8_0, Q.Q5_0),
    "q4_1": (Q.Q4_1, Q.Q8_0, Q.Q4_1),
    "q4_0_q5_1": (Q.Q5_1, Q.Q5_0, Q.Q4_0),
    "f16_bf16": (Q.BF16, Q.F16, Q.F16),
    "f32": (Q.F32, Q.F32, Q.F32),
    "q2_k_q3_k": (Q.Q3_K, Q.IQ4_XS, Q.Q2_K),
    "iq4_nl": (Q.IQ4_NL, Q.IQ4_XS, Q.IQ4_NL),
}


def write_tiny_model(path: Path, architecture: str, types: str, *, seed: int = 0, context: int = 512) -> Path:
    """Writes the model; every tensor and bias differs from its neutral value. Qwen2's output is untied."""
    write_gguf(path, tiny_metadata(architecture, context), tiny_tensors(architecture, types, seed))
    return path


def tiny_metadata(architecture: str, context: int = 512) -> dict[str, Any]:
    head_width = HEAD_WIDTHS[architecture]
    shape = {
        "block_count": LAYERS,
        "context_length": context,
        "embedding_length": WIDTH,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": head_width,
        "attention.value_length": head_width,
        "attention.layer_norm_rms_epsilon": 3e-5,
        "rope.freq_base": 5000.0,
        "rope.dimension_count": head_width,
    }
    return {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in shape.items()},
        **byte_vocabulary(),
        "tokenizer.ggml.merges": Typed(GGUFValueType.STRING, []),  # an empty list would be one of integers
        "tokenizer.ggml.add_bos_token": False,
    }


def tiny_tensors(architecture: str, types: str, seed: int = 0) -> dict[str, RawTensor]:
    rng = np.random.default_rng(seed)
    careful, embedding, other = TYPE_MIXES[types]
    vocab_size = len(byte_vocabulary()["tokenizer.ggml.tokens"])

    def matrix(type: Q, rows: int, columns: int, magnitude: float | None = None) -> RawTensor:
        blocks = random_blocks(rng, type, (rows, columns), magnitude=magnitude or columns**-0.5)
        return blocks, (rows, columns), type

    # As in trained models, a block adds little to a large residual (the factor 0.05 below).
    def vector(size: int, centre: float = 1.0) -> RawTensor:
        return (centre + rng.uniform(-0.5, 0.5, size)).astype(np.float32).view(np.uint8), (size,), Q.F32

    head_width = HEAD_WIDTHS[architecture]
    query, kv = HEADS * head_width, KV_HEADS * head_width
    tensors = {
        "token_embd.weight": matrix(embedding, vocab_size, WIDTH, 1.0),
        "output_norm.weight": vector(WIDTH),
    }
    if architecture == "qwen2":
        tensors["output.weight"] = matrix(embedding, vocab_size, WIDTH)
    for layer in range(LAYERS):
        block = {
            "attn_norm.weight": vector(WIDTH),
            "attn_q.weight": matrix(other, query, WIDTH),
            "attn_k.weight": matrix(other, kv, WIDTH),
            "attn_v.weight": matrix(careful, kv, WIDTH),
            "attn_output.weight": matrix(other, WIDTH, query, 0.05 * query**-0.5),
            "ffn_norm.weight": vector(WIDTH),
            "ffn_gate.weight": matrix(other, FFN, WIDTH),
            "ffn_up.weight": matrix(other, FFN, WIDTH),
            "ffn_down.weight": matrix(careful, WIDTH, FFN, 0.05 * FFN**-0.5),
        }
        if architecture == "qwen3":
            block |= {"attn_q_norm.weight": vector(head_width), "attn_k_norm.weight": vector(head_width)}
        if architecture == "qwen2":
            sizes = {"attn_q.bias": query, "attn_k.bias": kv, "attn_v.bias": kv}
            block |= {name: vector(size, 0.0) for name, size in sizes.items()}
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in block.items()}
    return tensors
