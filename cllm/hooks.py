"""The names of the points at which activations can be seen, in the order in which a forward pass reaches them.

The names follow TransformerLens, without a batch axis. This list is public API and knows no arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# tap(name, activation) sees one activation; what it returns, unless None, takes the activation's place.
Tap = Callable[[str, Any], Any]


def block_hook_names(layer: int, *, qk_norm: bool) -> list[str]:
    """Names inside block `layer`. Shapes: residuals [T, D]; q, k, v, z [T, H or K, C]; pattern [H, T, T]."""
    normed = ["attn.hook_q_normed", "attn.hook_k_normed"] if qk_norm else []
    names = [
        "hook_resid_pre",
        "ln1.hook_out",
        "attn.hook_q",
        "attn.hook_k",
        "attn.hook_v",
        *normed,
        "attn.hook_rot_q",
        "attn.hook_rot_k",
        "attn.hook_pattern",
        "attn.hook_z",
        "hook_attn_out",
        "hook_resid_mid",
        "ln2.hook_out",
        "mlp.hook_pre",
        "mlp.hook_pre_linear",
        "mlp.hook_post",
        "hook_mlp_out",
        "hook_resid_post",
    ]
    return [f"blocks.{layer}.{name}" for name in names]


def hook_names(num_layers: int, *, qk_norm: bool) -> list[str]:
    """All hook names of a model, in order. `qk_norm`: whether queries and keys are normed a head (Qwen3)."""
    blocks = [name for layer in range(num_layers) for name in block_hook_names(layer, qk_norm=qk_norm)]
    return ["hook_embed", *blocks, "ln_final.hook_out", "logits"]
