"""A model's weights repacked for the fast kernels, the buffers of a step, and the calls into compiled code.

It decides which models have the fast path, and owns the memory that the kernels only know as addresses. The
order of operations is not decided here: a whole step is `step.py`, one at a time `model.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import attention_simd, step
from .arena import Progress, make_arena, pack_all
from .attendance import Attendance
from .embedding import Embedding
from .isa import host_isa
from .kv_cache import KVCache
from .layout import MAX_TOKENS, PHASE_NAMES
from .matmul import PackedMatrix, compiled_kernel, is_fast, multiply
from .phases import PHASES
from .program import make_program, matrices_of
from .rounding import round_rows
from .step import compile_loops, phase_address
from .team import CAN_ENLIST, Team
from .tiles import ROWS
from .weights import Floats, Linear, Weights

Bytes = NDArray[np.uint8]
Ids = NDArray[np.int32]


def can_run_fast(weights: Weights) -> bool:
    """Whether every matrix has fast kernels, every width fits them, and this system can park threads."""
    shape = weights.shape
    widths = (shape.head_width, shape.width, shape.ffn_width)
    fits = all(width % ROWS == 0 for width in widths)
    return CAN_ENLIST and fits and all(is_fast(layer.weight.type) for layer in matrices_of(weights))


class FastPath:
    """The fast kernels over one model, one cache and one team, which is enlisted at the first step.

    Made, it only asks the system for memory, which comes while the caller does other things; `prepare` does the rest.
    Until then nobody may use it, nor the `cache`, which must be new.
    """

    def __init__(
        self,
        weights: Weights,
        embedding: Embedding,
        cache: KVCache,
        team: Team,
        rope: tuple[Floats, Floats],
    ) -> None:
        self.description = f"SIMD ({host_isa()})"
        self._weights, self._cache, self._team, self._rope = weights, cache, team, rope
        self._embedding = embedding
        self._arena = make_arena(weights)
        # Without the GIL. The wait for memory would otherwise be up to half of a start.
        fresh = (self._arena, cache.keys[:1], cache.values[:1])
        self._memory = threading.Thread(target=_write_to, args=fresh, name="cllm-kylin-memory", daemon=True)
        self._memory.start()
        self._is_enlisted = False
        self._attendance = Attendance(team.num_threads)

    def prepare(self, progress: Progress) -> None:
        """Compiles and repacks. To be called once, before anything else."""
        _compile_all(self._weights, self._embedding, progress)
        self._memory.join()
        self._packed = pack_all(self._weights, self._arena, self._team, progress)
        self._program = make_program(
            self._weights, self._packed, self._cache, self._rope, self._team.num_threads
        )
        self._logits = np.empty((0, self._packed[self._weights.output.weight].padded_rows), np.float32)

    def forward(self, token_ids: Ids, slots: Ids, positions: Ids, logit_rows: Ids) -> Floats:
        """Logits float32[R, V] of the rows asked for of token ids [T]; valid until the next call."""
        if not self._is_enlisted:
            self._team.enlist(step.serve, self._program.arguments)
            self._is_enlisted = True
        if len(token_ids) <= MAX_TOKENS:
            logits = self._logit_buffer(len(logit_rows))
            self._run(token_ids, slots, positions, logit_rows, logits)
            return logits[:, : self._weights.shape.vocab_size]
        order = np.argsort(logit_rows // MAX_TOKENS, kind="stable")
        rows = logit_rows[order]
        logits = self._logit_buffer(len(rows))
        for begin in range(0, len(token_ids), MAX_TOKENS):
            end = min(begin + MAX_TOKENS, len(token_ids))
            first, last = np.searchsorted(rows // MAX_TOKENS, (begin // MAX_TOKENS, begin // MAX_TOKENS + 1))
            part = slice(begin, end)
            self._run(token_ids[part], slots[part], positions[part], rows[first:last] - begin, logits[first:])
        logits = logits[:, : self._weights.shape.vocab_size]
        in_order = (order[1:] > order[:-1]).all()
        return logits if in_order else logits[np.argsort(order)]

    def phase_cycles(self) -> dict[str, int]:
        """Cycles of the processor's counter that the first thread spent in each phase, since the model was made."""
        return dict(zip(PHASE_NAMES, self._program.phase_cycles.tolist(), strict=True))

    # --- one operation at a time, for a step that hooks look into ---

    def linear(self, x: Floats, *layers: Linear) -> list[Floats]:
        """Each layer's product with float32[T, columns]: [T, rows] each."""
        matrices = [self._packed[layer.weight] for layer in layers]
        acts = {kind: round_rows(x, kind) for kind in {matrix.rounding for matrix in matrices}}
        results = []
        for layer, matrix in zip(layers, matrices, strict=True):
            out = np.empty((len(x), matrix.padded_rows), np.float32)

            def share(begin: int, end: int, matrix: PackedMatrix = matrix, out: Floats = out) -> None:
                multiply(matrix, acts[matrix.rounding], out, begin, end)

            self._team.run(share, matrix.num_groups)
            out = np.ascontiguousarray(out[:, : matrix.num_rows])
            if layer.bias is not None:
                out += layer.bias
            results.append(out)
        return results

    def attend(self, layer: int, q: Floats, k: Floats, v: Floats, slots: Ids, positions: Ids) -> Floats:
        """Stores k and v [T, K, C], then attends: q [T, H, C] -> z [T, H, C]."""
        keys, values, tables = self._cache.keys, self._cache.values, self._cache.tables
        kv_heads = k.shape[1]
        for head in range(kv_heads):
            attention_simd.store_head(k, v, keys, values, layer, tables, slots, positions, head, 0, len(q))
        tiles = np.empty((len(q), 2), np.int32)
        num_tiles = attention_simd.find_tiles(slots, positions, len(q), tiles)
        z = np.empty_like(q)

        def share(first: int, last: int) -> None:
            group = q.shape[1] // kv_heads
            rows, scores = attention_simd.make_scratch(group, q.shape[2], int(positions.max()) + 1)
            for item in range(first, last):
                begin, end = tiles[item // kv_heads]
                kv_head = item % kv_heads
                attention_simd.take_queries(q, begin, end, kv_head, rows)
                attention_simd.attend_tile(
                    keys, values, layer, tables, slots, positions, begin, end, kv_head, rows, scores
                )
                attention_simd.put_results(rows, begin, end, kv_head, z)

        self._team.run(share, num_tiles * kv_heads)
        return z

    def _logit_buffer(self, num_rows: int) -> Floats:
        if num_rows > len(self._logits):
            self._logits = np.empty((num_rows, self._logits.shape[1]), np.float32)
        return self._logits[:num_rows]

    def _run(self, token_ids: Ids, slots: Ids, positions: Ids, rows: Ids, logits: Floats) -> None:
        program, num_members = self._program, self._attendance.of_step(len(token_ids))
        if not self._embedding.is_compiled:
            program.arrays["X"][0, : len(token_ids)] = self._embedding.rows(token_ids)
        inputs = (self._embedding.operands, token_ids, slots, positions, rows, logits)
        arguments = (*program.arguments, program.matrices[-1], *inputs)
        time, waited = step.lead(self._team.state, num_members, *arguments)
        if waited or self._attendance.is_watching:
            self._attendance.learn(len(token_ids), time, waited)
        if self._weights.output.bias is not None:
            logits[: len(rows), : self._weights.shape.vocab_size] += self._weights.output.bias


def _compile_all(weights: Weights, embedding: Embedding, progress: Progress) -> None:
    """Compiles what the model needs, or loads it from the cache on disk."""
    types = {layer.weight.type for layer in matrices_of(weights)}
    compilers: list[Callable[[], object]] = [partial(compiled_kernel, ggml_type) for ggml_type in types]
    compilers += [*(partial(phase_address, phase) for phase in PHASES), compile_loops]
    compilers.append(lambda: embedding.operands)
    for number, compiler in enumerate(compilers):
        progress("compiling kernels", number, len(compilers))
        compiler()


def _write_to(*fresh: NDArray[Any]) -> None:
    """Zeroes memory that was never used, upon which the system hands it out."""
    for memory in fresh:
        memory.fill(0)
