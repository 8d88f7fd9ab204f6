"""The tool that writes random models: valid blocks of the promised spread, in llama.cpp's mix of types."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from make_model import MIXES, Tensor, Type, make_model, random_tensor

from cllm.kylin.gguf import read_gguf
from cllm.tokenizer import load_tokenizer

TINY = {"layers": 8, "width": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "ffn": 512, "vocab_size": 512}


def types_of(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("kind", sorted({mix.base for mix in MIXES.values()} | {Type.Q6_K, Type.Q8_0}))
def test_blocks_have_the_promised_mean_and_spread(kind: Type) -> None:
    tensor = Tensor("any", kind, rows=64, cols=1024, std=0.02)
    data = random_tensor(np.random.default_rng(0), tensor)
    values = gguf.dequantize(data, kind).reshape(64, 1024)
    assert values.std() == pytest.approx(0.02, rel=0.05)
    assert abs(values.mean()) < 0.02 * 0.02
    # No common direction: the means of columns scatter as those of independent values do, or little more.
    assert values.mean(axis=0).std() < 2 * 0.02 / 64**0.5


def test_q4_k_m_is_llama_cpps_mix(tmp_path: Path) -> None:
    make_model(tmp_path / "m.gguf", **TINY)
    types = types_of(tmp_path / "m.gguf")
    more = {layer for layer in range(8) if types[f"blk.{layer}.attn_v.weight"] == "Q6_K"}
    assert more == {0, 3, 6, 7}  # 8 // 8 = 1: the first, the last, and 3, 6 of every third
    assert more == {layer for layer in range(8) if types[f"blk.{layer}.ffn_down.weight"] == "Q6_K"}
    assert types["token_embd.weight"] == "Q6_K"
    assert types["blk.3.attn_output.weight"] == types["blk.3.ffn_up.weight"] == "Q4_K"
    assert types["blk.0.attn_q_norm.weight"] == "F32"
    assert "output.weight" not in types


def test_narrow_rows_fall_back(tmp_path: Path) -> None:
    make_model(tmp_path / "m.gguf", **(TINY | {"width": 96, "layers": 1}))
    types = types_of(tmp_path / "m.gguf")
    assert types["token_embd.weight"] == types["blk.0.attn_v.weight"] == "Q8_0"
    assert types["blk.0.attn_q.weight"] == "Q5_0"
    assert types["blk.0.ffn_down.weight"] == "Q6_K"  # its rows are 512 wide
    with pytest.raises(ValueError, match="multiple of 32 values, found 40"):
        make_model(tmp_path / "m.gguf", **(TINY | {"width": 40}))


def test_the_file_is_whole_and_reproducible(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        make_model(tmp_path / name, type_mix="q8_0", seed=5, **TINY)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    file = read_gguf(tmp_path / "a.gguf")
    assert file.metadata["qwen3.attention.head_count_kv"] == 2
    assert file.metadata["general.file_type"] == 7
    assert len(file.tensors) == 2 + 11 * 8
    tokenizer = load_tokenizer(tmp_path / "a.gguf")
    assert tokenizer.vocab_size == 512
    assert tokenizer.decode(tokenizer.encode("tiny \u4f60")) == "tiny \u4f60"
    assert tokenizer.decode([tokenizer.eos_id or 0]) == "<|im_end|>"
