"""Writes the demo model as GGUF: float16, then Q4_K_M by llama.cpp's own quantiser.

    python tools/demo_model/export.py weights.npz build/demo/tokenizer.json build/demo/f16.gguf cllm/assets/demo.gguf

It owns the metadata of the file. Needs NumPy, gguf and llama-cpp-python. It must not know PyTorch.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from pathlib import Path

import llama_cpp
import numpy as np
from gguf import GGUFWriter, LlamaFileType, TokenType

HEADS, KV_HEADS, CONTEXT, RMS_EPS, ROPE_BASE = 8, 4, 1024, 1e-6, 10_000.0  # as in model.py
TEMPLATE = Path(__file__).parent / "chat_template.jinja"


def write_f16(weights: dict[str, np.ndarray], vocabulary: Path, out: Path) -> None:
    """Writes the float16 matrices and float32 norms under their own names, which are GGUF's."""
    writer = GGUFWriter(out, "qwen3")
    writer.add_name("cLLM demo")
    writer.add_description("A small Qwen3 that tells simple stories, trained for cLLM")
    writer.add_license("apache-2.0")
    writer.add_languages(["en"])
    add_shape(writer, weights)
    add_vocabulary(writer, vocabulary)
    for name, array in weights.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_shape(writer: GGUFWriter, weights: dict[str, np.ndarray]) -> None:
    """Adds the sizes of the network, most of them read from the weights."""
    head_dim = weights["blk.0.attn_q_norm.weight"].size
    writer.add_block_count(sum(name.endswith("attn_q.weight") for name in weights))
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(weights["output_norm.weight"].size)
    writer.add_feed_forward_length(weights["blk.0.ffn_up.weight"].shape[0])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(RMS_EPS)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_file_type(LlamaFileType.MOSTLY_F16)


def add_vocabulary(writer: GGUFWriter, path: Path) -> None:
    """Adds the tokens, types and merges of a tokenizer.json, and the chat template, as Qwen3 files have them."""
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    model, added = tokenizer["model"], [entry["content"] for entry in tokenizer["added_tokens"]]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [TokenType.NORMAL] * len(tokens)
    tokens += added
    types += [TokenType.CONTROL if text.startswith("<|") else TokenType.USER_DEFINED for text in added]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE.read_text(encoding="utf-8"))


def quantize(source: Path, out: Path) -> None:
    """Writes `source` as Q4_K_M with llama.cpp's default mix of types."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params))
    if status:
        raise SystemExit(f"llama.cpp could not quantise {source}: status {status}")


def main() -> None:
    """Reads the command line and writes both files."""
    parser = argparse.ArgumentParser(description="Export the demo model to GGUF.")
    parser.add_argument("weights", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("f16", type=Path)
    parser.add_argument("q4_k_m", type=Path)
    args = parser.parse_args()
    args.q4_k_m.parent.mkdir(parents=True, exist_ok=True)
    write_f16(dict(np.load(args.weights)), args.tokenizer, args.f16)
    quantize(args.f16, args.q4_k_m)
    for path in (args.f16, args.q4_k_m):
        print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
