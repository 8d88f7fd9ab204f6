"""Makes tests/data/golden_*.npz: what transformers' own Qwen3, Qwen2 and Llama code computes, in float32 on
the CPU, from the random models of tests/golden_models.py and from SmolLM2's dequantised weights. It uses
nothing of cllm, so that the tests compare with an independent source. Needed again only when a model is added
or changed.

    pip install torch==2.14.1 transformers==5.24.0 accelerate==1.15.0 gguf==0.19.0
    python tools/fetch_smollm2.py
    python tools/make_golden.py models/SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))
import golden_models  # noqa: E402

CONFIGS = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig}
TENSOR_NAMES = {  # GGUF's name -> transformers' name; "blk.N." -> "model.layers.N."
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

SMOLLM2_TEXT = (
    "The lighthouse keeper climbed the narrow stairs every evening, counting each of the 214 steps aloud. "
    "On clear nights he could see the harbour lights of three towns; in fog he saw nothing but his lamp. "
    '"Ships don\'t need to see me," he told his daughter. "They only need to know that I am still here."'
)
NUM_LOGITS, NUM_COLUMNS = (
    512,
    8,
)  # how much of the SmolLM2 run is kept: vocabulary ids, and columns of the residual


def random_model(model: golden_models.GoldenModel) -> PreTrainedModel:
    """`model` as transformers' own class, with every weight replaced."""
    config = CONFIGS[model.architecture](
        vocab_size=golden_models.VOCAB_SIZE,
        hidden_size=model.width,
        intermediate_size=model.ffn_width,
        num_hidden_layers=golden_models.NUM_LAYERS,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_width,
        max_position_embeddings=golden_models.CONTEXT_LENGTH,
        rms_norm_eps=model.rms_eps,
        rope_parameters={**model.rope, "rope_theta": model.rope_base},
        tie_word_embeddings=model.tied,
    )
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    state = {hf_name(name): torch.from_numpy(x.copy()) for name, x in golden_models.weights(model).items()}
    if model.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    network.load_state_dict(state, strict=True)
    return network.eval()


def hf_name(name: str) -> str:
    """`blk.1.attn_q.weight` -> `model.layers.1.self_attn.q_proj.weight`."""
    *block, tensor, kind = name.split(".")
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{TENSOR_NAMES[tensor]}.{kind}"


@torch.no_grad()
def run(network: PreTrainedModel, token_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(logits [T, V], the residual after each block [layers, T, D])."""
    resid: list[torch.Tensor] = []
    for layer in network.model.layers:
        layer.register_forward_hook(
            lambda _module, _inputs, output: resid.append(output[0] if isinstance(output, tuple) else output)
        )
    logits = network(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits.numpy(), torch.cat(resid).numpy()


def save(name: str, **arrays: Any) -> None:
    path = TESTS / "data" / f"golden_{name}.npz"
    np.savez_compressed(path, **arrays)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def save_smollm2(file: Path) -> None:
    """The first tokens of SMOLLM2_TEXT; of the logits and residuals a fixed random choice of columns."""
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    token_ids = tokenizer(SMOLLM2_TEXT, add_special_tokens=False)["input_ids"][: golden_models.NUM_TOKENS]
    assert len(token_ids) == golden_models.NUM_TOKENS, "the text is too short"
    network = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    logits, resid = run(network, token_ids)
    rng = np.random.Generator(np.random.PCG64(7))
    logit_ids = np.sort(rng.permutation(logits.shape[1])[:NUM_LOGITS])
    columns = np.sort(rng.permutation(resid.shape[2])[:NUM_COLUMNS])
    save(
        "smollm2",
        token_ids=np.array(token_ids, np.int32),
        logit_ids=logit_ids.astype(np.int32),
        logits=logits[:, logit_ids],
        logsumexp=torch.logsumexp(torch.from_numpy(logits).double(), -1).numpy(),
        argmax=logits.argmax(-1).astype(np.int32),
        columns=columns.astype(np.int32),
        resid_post=resid[:, :, columns],
    )


def yarn_table() -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin) [8, 64] of transformers for the YaRN of Qwen3's model card: heads of 128, factor 4."""
    config = Qwen3Config(
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
    )
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), torch.arange(8)[None])
    return cos[0, :, :64].numpy(), sin[0, :, :64].numpy()


def main() -> None:
    for model in golden_models.MODELS.values():
        logits, resid_post = run(random_model(model), golden_models.token_ids(model))
        save(model.name, logits=logits, resid_post=resid_post)
    cos, sin = yarn_table()
    save("yarn_table", cos=cos, sin=sin)
    save_smollm2(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
