"""The forward pass over a batch of tokens of many sequences, on the block cache.

It computes what `reference.py` defines, on the fast kernels or the plain ones. Operation by operation here, so
that hooks can look in between; without hooks the fast kernels run a whole step at once (`step.py`), which gives
the same bits. It knows slots and positions, never requests.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..hooks import Tap
from . import attention, ops, plain
from .arena import Progress
from .embedding import Embedding
from .fast import FastPath, can_run_fast
from .kv_cache import KVCache, to_stored
from .quants import ACTIVATION_ROUNDING
from .rope import rope_table
from .team import Team
from .weights import Block, Floats, Linear, Weights

Ids = NDArray[np.int32]


_SMALL = 1 << 15  # values that one thread norms sooner than two can share them


class Tokens(Protocol):
    """What `forward` needs of a batch: int32 arrays, one entry a token."""

    @property
    def token_ids(self) -> Ids: ...  # [T]
    @property
    def positions(self) -> Ids: ...  # [T]
    @property
    def slots(self) -> Ids: ...  # [T]
    @property
    def logit_rows(self) -> Ids: ...  # [R], the entries whose logits are wanted


class Model:
    """One model over one cache. `max_positions` bounds the positions of a sequence.

    `kernels`: "auto" for the fast ones where the model's types and the machine have them, or "plain".
    """

    def __init__(
        self,
        weights: Weights,
        cache: KVCache,
        team: Team,
        max_positions: int,
        kernels: str = "auto",
    ) -> None:
        self.weights, self.cache, self.team = weights, cache, team
        shape = weights.shape
        self._cos, self._sin = rope_table(
            max_positions, shape.head_width, shape.rope_base, shape.rope_scaling, weights.rope_factors
        )
        self._rope = ops.rope_halves if shape.table.rope_pairs == "halves" else ops.rope_neighbours
        self._embedding = Embedding(weights.token_embd)
        self._eps = np.float32(shape.rms_eps)
        self._fast: FastPath | None = None
        if kernels != "plain" and can_run_fast(weights):
            self._fast = FastPath(weights, self._embedding, cache, team, (self._cos, self._sin))

    def prepare(self, progress: Progress = lambda stage, done, total: None) -> None:
        """Makes the fast kernels ready: once, before the first step. `progress` is told (stage, done, total)."""
        if self._fast:
            self._fast.prepare(progress)

    @property
    def description(self) -> str:
        """Which kernels run, for people."""
        return self._fast.description if self._fast else "plain"

    def phase_cycles(self) -> dict[str, int]:
        """Where the time of all steps without hooks has gone: cycles by phase. Empty on the plain kernels."""
        return self._fast.phase_cycles() if self._fast else {}

    def forward(self, batch: Tokens, tap: Tap | None = None) -> Floats:
        """Logits float32[R, V] of the rows asked for. The cache already counts the batch's tokens as held.

        `tap(name, activation)` is called at the hook points of `cllm.hooks`, over all T tokens of the batch;
        `hook_pattern` is not among them, since this pass never holds a whole pattern. What a tap is shown
        may be overwritten afterwards: it copies what it keeps. The result is valid until the next call.
        """
        if self._fast and tap is None:
            return self._fast.forward(batch.token_ids, batch.slots, batch.positions, batch.logit_rows)
        x = _see(tap, "hook_embed", self._embedding.rows(batch.token_ids))  # [T, D]
        for layer in range(len(self.weights.blocks)):
            x = self._attention(layer, x, batch, tap)
            x = self._mlp(layer, x, tap)
        x = x[batch.logit_rows]  # [R, D]
        x = _see(tap, "ln_final.hook_out", self._norm(x, self.weights.output_norm))
        (logits,) = self._linear(x, self.weights.output)
        return _see(tap, "logits", logits)  # [R, V]

    def _attention(self, layer: int, x: Floats, batch: Tokens, tap: Tap | None) -> Floats:
        """x + attention(norm(x)), [T, D] -> [T, D]."""
        w, at = self.weights.blocks[layer], f"blocks.{layer}."
        x = _see(tap, at + "hook_resid_pre", x)
        h = _see(tap, at + "ln1.hook_out", self._norm(x, w.attn_norm))  # [T, D]
        q, k, v = (self._heads(y) for y in self._linear(h, w.attn_q, w.attn_k, w.attn_v))
        q = _see(tap, at + "attn.hook_q", q)  # [T, H, C]
        k = _see(tap, at + "attn.hook_k", k)  # [T, K, C]
        v = _see(tap, at + "attn.hook_v", v)  # [T, K, C]
        q, k = self._norm_heads(w, q, k, at, tap)
        for name, heads in (("attn.hook_rot_q", q), ("attn.hook_rot_k", k)):
            self._rotate(heads, batch.positions)
            heads[...] = _see(tap, at + name, heads)
        z = _see(tap, at + "attn.hook_z", self._attend(layer, q, k, v, batch))  # [T, H, C]
        (attn_out,) = self._linear(z.reshape(len(z), -1), w.attn_output)
        attn_out = _see(tap, at + "hook_attn_out", attn_out)  # [T, D]
        return _see(tap, at + "hook_resid_mid", x + attn_out)

    def _mlp(self, layer: int, x: Floats, tap: Tap | None) -> Floats:
        """x + down(silu(gate) * up), of norm(x), [T, D] -> [T, D]."""
        w, at = self.weights.blocks[layer], f"blocks.{layer}."
        h = _see(tap, at + "ln2.hook_out", self._norm(x, w.ffn_norm))  # [T, D]
        gate, up = self._linear(h, w.ffn_gate, w.ffn_up)
        gate = _see(tap, at + "mlp.hook_pre", gate)  # [T, F]
        up = _see(tap, at + "mlp.hook_pre_linear", up)  # [T, F]
        self.team.run(lambda begin, end: ops.silu_mul(gate, up, begin, end), len(gate))
        post = _see(tap, at + "mlp.hook_post", gate)  # [T, F]
        (mlp_out,) = self._linear(post, w.ffn_down)
        mlp_out = _see(tap, at + "hook_mlp_out", mlp_out)  # [T, D]
        return _see(tap, at + "hook_resid_post", x + mlp_out)

    def _linear(self, x: Floats, *layers: Linear) -> list[Floats]:
        """Each layer's product with the same x [T, columns]: [T, rows] each."""
        if self._fast:
            return self._fast.linear(x, *layers)
        roundings = {ACTIVATION_ROUNDING[layer.weight.type] for layer in layers}
        rounded = {rounding: plain.quantize(x, rounding) for rounding in roundings}
        outs = [np.empty((len(x), layer.weight.shape[0]), np.float32) for layer in layers]
        parts = self.team.num_threads

        def share(begin: int, end: int) -> None:
            for layer, out in zip(layers, outs, strict=True):
                weight, num_rows = layer.weight, layer.weight.shape[0]
                acts = rounded[ACTIVATION_ROUNDING[weight.type]]
                low, high = num_rows * begin // parts, num_rows * end // parts
                plain.matmul_rows(weight.data, weight.type, acts, out, low, high)
                if layer.bias is not None:
                    out[:, low:high] += layer.bias[low:high]

        self.team.run(share, parts)
        return outs

    def _norm(self, x: Floats, weight: Floats) -> Floats:
        """RMS norm of each row of x [N, D]."""
        out = np.empty_like(x)
        if x.size < _SMALL:
            ops.rms_norm(x, weight, self._eps, out, 0, len(x))
        else:
            self.team.run(lambda begin, end: ops.rms_norm(x, weight, self._eps, out, begin, end), len(x))
        return out

    def _norm_heads(self, w: Block, q: Floats, k: Floats, at: str, tap: Tap | None) -> tuple[Floats, Floats]:
        """Qwen3's norms of each query and key head; the other architectures have none."""
        if w.attn_q_norm is None or w.attn_k_norm is None:
            return q, k
        width = q.shape[-1]
        q = self._norm(q.reshape(-1, width), w.attn_q_norm).reshape(q.shape)
        k = self._norm(k.reshape(-1, width), w.attn_k_norm).reshape(k.shape)
        q = _see(tap, at + "attn.hook_q_normed", q)
        return q, _see(tap, at + "attn.hook_k_normed", k)

    def _rotate(self, x: Floats, positions: Ids) -> None:
        self.team.run(lambda begin, end: self._rope(x, positions, self._cos, self._sin, begin, end), len(x))

    def _attend(self, layer: int, q: Floats, k: Floats, v: Floats, batch: Tokens) -> Floats:
        """Stores k and v, then attends: q [T, H, C] -> z [T, H, C]."""
        if self._fast:
            return self._fast.attend(layer, q, k, v, batch.slots, batch.positions)
        keys, values, tables = self.cache.keys, self.cache.values, self.cache.tables
        slots, positions = batch.slots, batch.positions
        stored_k, stored_v = to_stored(k, keys), to_stored(v, values)
        attention.store(stored_k, stored_v, keys, values, layer, tables, slots, positions)
        z = np.empty_like(q)

        def share(begin: int, end: int) -> None:
            attention.attend(q, keys, values, layer, tables, slots, positions, z, begin, end)

        self.team.run(share, len(q) * k.shape[1])
        return z

    def _heads(self, x: Floats) -> Floats:
        """[T, n*C] -> [T, n, C]."""
        return x.reshape(len(x), -1, self.weights.shape.head_width)


def _see(tap: Tap | None, name: str, activation: Floats) -> Floats:
    if tap is None:
        return activation
    replaced = tap(name, activation)
    return activation if replaced is None else np.ascontiguousarray(replaced, np.float32)
