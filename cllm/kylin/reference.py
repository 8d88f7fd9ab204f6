"""The forward pass in plain NumPy: the document of what the model computes, and the judge of the kernels.

One whole sequence at a time, no cache, every weight decoded to float32 when it is used, nothing clever.
Letters: T tokens, D width, H heads, K kv-heads, C head width, F ffn, V vocabulary.

Sources: Qwen3 (arXiv 2505.09388), Qwen2 (2407.10671), Llama (2302.13971).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..hooks import Tap
from .quants import ACTIVATION_ROUNDING, dequantize, round_activations
from .rope import rope_table
from .weights import Block, Floats, Linear, ModelShape, Weights

See = Callable[[str, Floats], Floats]


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """x / sqrt(mean(x^2) + eps) * weight, over the last axis."""
    mean_square = np.mean(np.square(x, dtype=np.float32), axis=-1, keepdims=True, dtype=np.float32)
    return (x / np.sqrt(mean_square + np.float32(eps)) * weight).astype(np.float32)


def linear(x: Floats, layer: Linear, *, rounded: bool) -> Floats:
    """[T, columns] -> [T, rows]. `rounded`: activations as the kernels of the weight's type see them."""
    if rounded:
        x = round_activations(x, ACTIVATION_ROUNDING[layer.weight.type])
    y = x @ dequantize(layer.weight.data, layer.weight.type).T
    return y if layer.bias is None else y + layer.bias


def rope(x: Floats, cos: Floats, sin: Floats, pairs: str) -> Floats:
    """Turns each pair of x [T, H, C] by its angle; cos, sin [T, C/2]."""
    half = x.shape[-1] // 2
    cos, sin = cos[:, None, :], sin[:, None, :]  # [T, 1, C/2]
    if pairs == "halves":
        first, second = slice(half), slice(half, None)
    else:
        first, second = slice(0, None, 2), slice(1, None, 2)
    a, b = x[..., first], x[..., second]  # [T, H, C/2]
    turned = np.empty_like(x)
    turned[..., first] = a * cos - b * sin
    turned[..., second] = a * sin + b * cos
    return turned


def attention_pattern(q: Floats, k: Floats) -> Floats:
    """Causal softmax(q k^T / sqrt(C)): q [T, H, C], k [T, K, C] -> [H, T, T]; a kv-head serves H/K heads."""
    num_tokens, num_heads, head_width = q.shape
    k = k.repeat(num_heads // k.shape[1], axis=1)  # [T, H, C]
    scores = np.einsum("thc,shc->hts", q, k, optimize=True) / np.float32(np.sqrt(head_width))  # [H, T, T]
    scores[:, np.triu(np.ones((num_tokens, num_tokens), dtype=bool), 1)] = -np.inf
    return softmax(scores)


def attention_values(pattern: Floats, v: Floats) -> Floats:
    """pattern [H, T, T], v [T, K, C] -> z [T, H, C]."""
    v = v.repeat(pattern.shape[0] // v.shape[1], axis=1)  # [T, H, C]
    z: Floats = np.einsum("hts,shc->thc", pattern, v, optimize=True)
    return z


def softmax(scores: Floats) -> Floats:
    """exp(scores) / sum exp(scores), over the last axis."""
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares: Floats = weights / weights.sum(axis=-1, keepdims=True)
    return shares


def silu(x: Floats) -> Floats:
    """x * sigmoid(x), written so that no exponential overflows."""
    small: Floats = np.exp(-np.abs(x))
    return x * np.where(x >= 0, 1, small) / (1 + small)


def forward(
    weights: Weights,
    token_ids: Sequence[int],
    *,
    activation_rounding: bool = False,
    kv_dtype: type[np.floating] = np.float32,
    tap: Tap | None = None,
) -> Floats:
    """Logits float32[T, V] of one sequence of T token ids.

    activation_rounding: round the inputs of each matrix product as the integer kernels do (ggml's
    `vec_dot_type` of the weight's type); by default nothing is rounded. kv_dtype: what keys and values are
    stored as. `tap(name, activation)` is called at every hook point (`cllm.hooks`).
    """
    shape = weights.shape
    see = _seer(tap)
    cos, sin = rope_table(
        len(token_ids), shape.head_width, shape.rope_base, shape.rope_scaling, weights.rope_factors
    )  # [T, C/2]
    embd = weights.token_embd
    x = see("hook_embed", dequantize(embd.data[np.asarray(token_ids)], embd.type))  # [T, D]
    for layer, block in enumerate(weights.blocks):
        x = block_forward(
            x,
            block,
            shape,
            cos,
            sin,
            at=f"blocks.{layer}.",
            rounded=activation_rounding,
            kv_dtype=kv_dtype,
            tap=see,
        )
    x = see("ln_final.hook_out", rms_norm(x, weights.output_norm, shape.rms_eps))  # [T, D]
    return see("logits", linear(x, weights.output, rounded=activation_rounding))  # [T, V]


def block_forward(
    x: Floats,
    w: Block,
    shape: ModelShape,
    cos: Floats,
    sin: Floats,
    *,
    at: str,
    rounded: bool,
    kv_dtype: type[np.floating],
    tap: Tap | None = None,
) -> Floats:
    """One transformer block, [T, D] -> [T, D]. `at`: what its hook names begin with. See `forward`."""
    see = _seer(tap)

    def heads(y: Floats) -> Floats:  # [T, n*C] -> [T, n, C]
        return y.reshape(len(y), -1, shape.head_width)

    x = see(at + "hook_resid_pre", x)  # [T, D]
    h = see(at + "ln1.hook_out", rms_norm(x, w.attn_norm, shape.rms_eps))  # [T, D]
    q = see(at + "attn.hook_q", heads(linear(h, w.attn_q, rounded=rounded)))  # [T, H, C]
    k = see(at + "attn.hook_k", heads(linear(h, w.attn_k, rounded=rounded)))  # [T, K, C]
    v = see(at + "attn.hook_v", heads(linear(h, w.attn_v, rounded=rounded)))  # [T, K, C]
    if w.attn_q_norm is not None and w.attn_k_norm is not None:
        q = see(at + "attn.hook_q_normed", rms_norm(q, w.attn_q_norm, shape.rms_eps))  # [T, H, C]
        k = see(at + "attn.hook_k_normed", rms_norm(k, w.attn_k_norm, shape.rms_eps))  # [T, K, C]
    q = see(at + "attn.hook_rot_q", rope(q, cos, sin, shape.table.rope_pairs))  # [T, H, C]
    k = see(at + "attn.hook_rot_k", rope(k, cos, sin, shape.table.rope_pairs))  # [T, K, C]
    k, v = stored(k, kv_dtype), stored(v, kv_dtype)
    pattern = see(at + "attn.hook_pattern", attention_pattern(q, k))  # [H, T, T]
    z = see(at + "attn.hook_z", attention_values(pattern, v))  # [T, H, C]
    attn_out = linear(z.reshape(len(z), -1), w.attn_output, rounded=rounded)  # [T, H*C] -> [T, D]
    x = see(at + "hook_resid_mid", x + see(at + "hook_attn_out", attn_out))  # [T, D]
    h = see(at + "ln2.hook_out", rms_norm(x, w.ffn_norm, shape.rms_eps))  # [T, D]
    gate = see(at + "mlp.hook_pre", linear(h, w.ffn_gate, rounded=rounded))  # [T, F]
    up = see(at + "mlp.hook_pre_linear", linear(h, w.ffn_up, rounded=rounded))  # [T, F]
    post = see(at + "mlp.hook_post", silu(gate) * up)  # [T, F]
    mlp_out = see(at + "hook_mlp_out", linear(post, w.ffn_down, rounded=rounded))  # [T, D]
    return see(at + "hook_resid_post", x + mlp_out)  # [T, D]


def stored(x: Floats, dtype: type[np.floating]) -> Floats:
    """What the KV cache gives back for x. Values past the range of float16 become infinite, as stored."""
    with np.errstate(over="ignore"):
        return x.astype(dtype).astype(np.float32)


def _seer(tap: Tap | None) -> See:
    """Shows an activation to `tap` and returns what the pass goes on with."""

    def see(name: str, activation: Floats) -> Floats:
        replaced: Floats | None = None if tap is None else tap(name, activation)
        return activation if replaced is None else replaced

    return see
