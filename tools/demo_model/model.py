"""Qwen3 in PyTorch, small, with every parameter under its GGUF name.

It owns the network and its initial values. It must not know files, training or text.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

VOCAB_SIZE, CONTEXT = 4096, 1024
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, FFN = 6, 512, 8, 4, 64, 1280
RMS_EPS, ROPE_BASE = 1e-6, 10_000.0


class Model(nn.Module):
    """Token ids [B, T] to logits [B, T, V]; `dropout` acts on the embedding and on every branch."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.token_embd = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.blk = nn.ModuleList(Block(dropout) for _ in range(LAYERS))
        self.output_norm = nn.RMSNorm(WIDTH, RMS_EPS)
        self.dropout = nn.Dropout(dropout)
        angles = torch.arange(CONTEXT)[:, None] * ROPE_BASE ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        self.register_buffer("cos", angles.cos(), persistent=False)  # [T, C/2]
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if name == "token_embd.weight":
                nn.init.normal_(parameter, std=0.01)  # a tied output that begins near uniform
            elif "attn_output" in name or "ffn_down" in name:
                nn.init.zeros_(parameter)  # each branch begins as nothing
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.dropout(self.token_embd(tokens))
        for block in self.blk:
            x = block(x, self.cos[:length], self.sin[:length])
        return F.linear(self.output_norm(x), self.token_embd.weight)  # tied


class Block(nn.Module):
    """Attention and a gated feed-forward network, each behind a norm and added to its input."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(WIDTH, RMS_EPS)
        self.attn_q = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.attn_k = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.attn_v = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.attn_q_norm = nn.RMSNorm(HEAD_DIM, RMS_EPS)
        self.attn_k_norm = nn.RMSNorm(HEAD_DIM, RMS_EPS)
        self.attn_output = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.ffn_norm = nn.RMSNorm(WIDTH, RMS_EPS)
        self.ffn_gate = nn.Linear(WIDTH, FFN, bias=False)
        self.ffn_up = nn.Linear(WIDTH, FFN, bias=False)
        self.ffn_down = nn.Linear(FFN, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attn_norm(x), cos, sin))
        h = self.ffn_norm(x)
        return x + self.dropout(self.ffn_down(F.silu(self.ffn_gate(h)) * self.ffn_up(h)))

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.attn_q(x).view(batch, length, HEADS, HEAD_DIM).transpose(1, 2)  # [B, H, T, C]
        k = self.attn_k(x).view(batch, length, KV_HEADS, HEAD_DIM).transpose(1, 2)
        v = self.attn_v(x).view(batch, length, KV_HEADS, HEAD_DIM).transpose(1, 2)
        q = rotate(self.attn_q_norm(q), cos, sin).to(v.dtype)
        k = rotate(self.attn_k_norm(k), cos, sin).to(v.dtype)
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.attn_output(z.transpose(1, 2).reshape(batch, length, HEADS * HEAD_DIM))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on [B, H, T, C], pairs (i, i + C/2)."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
