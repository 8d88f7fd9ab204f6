"""The fast forward pass against the reference (law 2), and against itself under every way of running (law 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny_models import TYPE_MIXES

from cllm.batch import Batch
from cllm.kylin import reference
from cllm.kylin.gguf import read_gguf
from cllm.kylin.kv_cache import KVCache, blocks_for
from cllm.kylin.layout import MAX_TOKENS
from cllm.kylin.model import Model
from cllm.kylin.quants import dequantize
from cllm.kylin.team import Team
from cllm.kylin.weights import Weights, load_weights

OPERATION_NMSE = 1e-10  # one operation of model.py against reference.py, from the same input
LAYER_NMSE = 1e-7  # one whole layer: a last bit may turn one rounded activation

TOKENS = [72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100, 33, 10, 0, 255, 128, 256, 7, 7, 7]


def nmse(actual: np.ndarray, expected: np.ndarray) -> float:
    """Mean square of the difference over the mean square of what was expected."""
    return float(
        np.square(actual - expected, dtype=np.float64).sum() / np.square(expected, dtype=np.float64).sum()
    )


class Runner:
    """A model with its own cache, fed step by step."""

    def __init__(
        self,
        weights: Weights,
        num_threads: int = 1,
        kv_dtype: str = "f16",
        num_tokens: int = 128,
        kernels: str = "auto",
    ) -> None:
        shape = weights.shape
        self.cache = KVCache(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_width=shape.head_width,
            num_blocks=blocks_for(num_tokens) * 5,
            num_slots=8,
            slot_tokens=num_tokens,
            dtype=kv_dtype,
        )
        self.team = Team(num_threads)
        self.model = Model(weights, self.cache, self.team, num_tokens, kernels)
        self.model.prepare()

    def step(
        self, *chunks: tuple[int, list[int]], tap: Any = None, wanted: list[int] | None = None
    ) -> np.ndarray:
        """Runs (slot, token ids) chunks in one batch; the logits of the wanted tokens, or of each."""
        positions = [
            position
            for slot, ids in chunks
            for position in range(self.cache.lengths[slot], self.cache.lengths[slot] + len(ids))
        ]
        token_ids = [token_id for _, ids in chunks for token_id in ids]
        slots = [slot for slot, ids in chunks for _ in ids]
        rows = list(range(len(token_ids))) if wanted is None else wanted
        arrays = (np.array(values, np.int32) for values in (token_ids, positions, slots, rows))
        self.cache.extend({slot: len(ids) for slot, ids in chunks})
        return self.model.forward(Batch(*arrays), tap).copy()  # it is overwritten by the next step


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Iterator[Callable[..., Runner]]:
    runners: list[Runner] = []

    def make(*args: Any, **settings: Any) -> Runner:
        runners.append(Runner(*args, **settings))
        return runners[-1]

    yield make
    for runner in runners:
        runner.team.close()


def captured(runner: Runner, token_ids: list[int]) -> dict[str, np.ndarray]:
    """Every hook point of one run, copied when it was reached."""
    seen: dict[str, np.ndarray] = {}

    def tap(name: str, activation: np.ndarray) -> None:
        seen[name] = activation.copy()

    runner.step((0, token_ids), tap=tap)
    return seen


def operation_errors(
    weights: Weights, seen: dict[str, np.ndarray], kv_dtype: Any = np.float16
) -> dict[str, float]:
    """NMSE of each operation's output in `seen` against the reference on the inputs in `seen`."""
    s = weights.shape
    num_tokens = len(seen["hook_embed"])
    cos, sin = reference.rope_table(
        num_tokens, s.head_width, s.rope_base, s.rope_scaling, weights.rope_factors
    )
    expected = {
        "hook_embed": dequantize(weights.token_embd.data[TOKENS[:num_tokens]], weights.token_embd.type)
    }
    x = seen["hook_embed"]

    def product(x: np.ndarray, layer: reference.Linear) -> np.ndarray:
        return reference.linear(x.reshape(num_tokens, -1), layer, rounded=True)

    for layer, w in enumerate(weights.blocks):
        at = f"blocks.{layer}."
        expected[at + "hook_resid_pre"] = x
        expected[at + "ln1.hook_out"] = reference.rms_norm(x, w.attn_norm, s.rms_eps)
        for letter, linear in zip("qkv", (w.attn_q, w.attn_k, w.attn_v), strict=True):
            expected[at + f"attn.hook_{letter}"] = product(seen[at + "ln1.hook_out"], linear)
        for letter, norm in (("q", w.attn_q_norm), ("k", w.attn_k_norm)):
            source = seen[at + f"attn.hook_{letter}"]
            if norm is not None:
                expected[at + f"attn.hook_{letter}_normed"] = reference.rms_norm(source, norm, s.rms_eps)
                source = seen[at + f"attn.hook_{letter}_normed"]
            expected[at + f"attn.hook_rot_{letter}"] = reference.rope(source, cos, sin, s.table.rope_pairs)
        k, v = (reference.stored(seen[at + f"attn.hook_{name}"], kv_dtype) for name in ("rot_k", "v"))
        pattern = reference.attention_pattern(seen[at + "attn.hook_rot_q"], k)
        expected[at + "attn.hook_z"] = reference.attention_values(pattern, v)
        expected[at + "hook_attn_out"] = product(seen[at + "attn.hook_z"], w.attn_output)
        expected[at + "hook_resid_mid"] = x + seen[at + "hook_attn_out"]
        expected[at + "ln2.hook_out"] = reference.rms_norm(seen[at + "hook_resid_mid"], w.ffn_norm, s.rms_eps)
        expected[at + "mlp.hook_pre"] = product(seen[at + "ln2.hook_out"], w.ffn_gate)
        expected[at + "mlp.hook_pre_linear"] = product(seen[at + "ln2.hook_out"], w.ffn_up)
        expected[at + "mlp.hook_post"] = (
            reference.silu(seen[at + "mlp.hook_pre"]) * seen[at + "mlp.hook_pre_linear"]
        )
        expected[at + "hook_mlp_out"] = product(seen[at + "mlp.hook_post"], w.ffn_down)
        expected[at + "hook_resid_post"] = seen[at + "hook_resid_mid"] + seen[at + "hook_mlp_out"]
        x = seen[at + "hook_resid_post"]
    expected["ln_final.hook_out"] = reference.rms_norm(x, weights.output_norm, s.rms_eps)
    expected["logits"] = product(seen["ln_final.hook_out"], weights.output)
    assert set(expected) == set(seen)
    return {name: nmse(seen[name].reshape(expected[name].shape), expected[name]) for name in seen}


CASES = [("qwen3", types) for types in TYPE_MIXES] + [
    ("qwen2", "q4_k_m"),
    ("llama", "q4_1"),
    ("llama", "f32"),
]


KERNELS = pytest.mark.parametrize("kernels", ["auto", "plain"])


@KERNELS
@pytest.mark.parametrize(("architecture", "types"), CASES)
def test_operations_match_reference(
    tiny_model: Any, run: Any, architecture: str, types: str, kernels: str
) -> None:
    weights = load_weights(read_gguf(tiny_model(architecture, types)))
    errors = operation_errors(weights, captured(run(weights, kernels=kernels), TOKENS))
    assert max(errors.values()) <= OPERATION_NMSE, {k: v for k, v in errors.items() if v > OPERATION_NMSE}


def test_operations_match_reference_with_float32_cache(tiny_model: Any, run: Any) -> None:
    weights = load_weights(read_gguf(tiny_model("qwen3", "q4_k_m")))
    errors = operation_errors(weights, captured(run(weights, kv_dtype="f32"), TOKENS), np.float32)
    assert max(errors.values()) <= OPERATION_NMSE


def with_block(weights: Weights, **changes: Any) -> Weights:
    first, *rest = weights.blocks
    return replace(weights, blocks=(replace(first, **changes), *rest))


def one_scale_changed(weights: Weights) -> Weights:
    """The first scale of one block of attn_q, doubled."""
    layer = weights.blocks[0].attn_q
    data = layer.weight.data.copy()
    data[0, :2] = (data[0, :2].view(np.float16) * np.float16(2)).view(np.uint8)
    return with_block(weights, attn_q=replace(layer, weight=replace(layer.weight, data=data)))


MUTANTS: dict[str, tuple[str, Callable[[Weights], Weights]]] = {
    "eps": ("ln1.hook_out", lambda w: replace(w, shape=replace(w.shape, rms_eps=1e-3))),
    "rope pairing": ("attn.hook_rot_q", lambda w: replace(w, shape=replace(w.shape, architecture="llama"))),
    "rope base": ("attn.hook_rot_q", lambda w: replace(w, shape=replace(w.shape, rope_base=5100.0))),
    "scale": ("attn.hook_q", one_scale_changed),
    "bias": (
        "attn.hook_k",
        lambda w: with_block(w, attn_k=replace(w.blocks[0].attn_k, bias=w.blocks[0].attn_k.bias * 1.05)),
    ),
    "norm": ("ln2.hook_out", lambda w: with_block(w, ffn_norm=w.blocks[0].ffn_norm * np.float32(1.01))),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_operation_test_sees_mutants(tiny_model: Any, run: Any, mutant: str) -> None:
    """The limit above is sharp: each change of the model that is run shows at the operation that it concerns."""
    hook, change = MUTANTS[mutant]
    weights = load_weights(read_gguf(tiny_model("qwen2", "q4_k_m")))
    errors = operation_errors(weights, captured(run(change(weights)), TOKENS))
    assert errors[f"blocks.0.{hook}"] > OPERATION_NMSE


@KERNELS
@pytest.mark.parametrize(("architecture", "types"), CASES)
def test_layers_match_reference(
    tiny_model: Any, run: Any, architecture: str, types: str, kernels: str
) -> None:
    weights = load_weights(read_gguf(tiny_model(architecture, types)))
    seen = captured(run(weights, kernels=kernels), TOKENS)
    assert max(layer_errors(weights, seen)) <= LAYER_NMSE


@pytest.mark.parametrize("mutant", MUTANTS)
def test_layer_test_sees_mutants(tiny_model: Any, run: Any, mutant: str) -> None:
    weights = load_weights(read_gguf(tiny_model("qwen2", "q4_k_m")))
    assert max(layer_errors(weights, captured(run(MUTANTS[mutant][1](weights)), TOKENS))) > LAYER_NMSE


def layer_errors(weights: Weights, seen: dict[str, np.ndarray]) -> list[float]:
    """NMSE of each layer's residual in `seen` against the reference from the layer's input in `seen`."""
    s = weights.shape
    cos, sin = reference.rope_table(
        len(TOKENS), s.head_width, s.rope_base, s.rope_scaling, weights.rope_factors
    )
    errors = []
    for layer, block in enumerate(weights.blocks):
        at = f"blocks.{layer}."
        x = seen[at + "hook_resid_pre"]
        expected = reference.block_forward(x, block, s, cos, sin, at=at, rounded=True, kv_dtype=np.float16)
        errors.append(nmse(seen[at + "hook_resid_post"], expected))
    return errors


@KERNELS
@pytest.mark.parametrize(("architecture", "types"), CASES)
def test_same_bits_however_it_runs(
    tiny_model: Any, run: Any, architecture: str, types: str, kernels: str
) -> None:
    """Law 1: alone, token by token, in chunks, beside others, on 1, 2 and 3 threads."""
    weights = load_weights(read_gguf(tiny_model(architecture, types)))
    whole = run(weights, kernels=kernels).step((0, TOKENS))
    for threads in (1, 2, 3):
        runner = run(weights, num_threads=threads, kernels=kernels)
        for name, logits in {
            "token by token": np.concatenate([runner.step((0, [token])) for token in TOKENS]),
            "in chunks": np.concatenate(
                [runner.step((1, part)) for part in (TOKENS[:5], TOKENS[5:18], TOKENS[18:])]
            ),
            "beside others": runner.step((2, [1, 2, 3]), (3, TOKENS), (4, TOKENS[::-1]))[3 : 3 + len(TOKENS)],
            "beside decoding": np.concatenate([runner.step((0, [9]), (5, [token]))[1:] for token in TOKENS]),
        }.items():
            assert logits.tobytes() == whole.tobytes(), f"{name}, {threads} threads"


@KERNELS
def test_same_bits_of_long_prompts(tiny_model: Any, run: Any, kernels: str) -> None:
    """Steps in several passes, whose tokens the threads share, and of which few logits are wanted or none."""
    weights = load_weights(read_gguf(tiny_model()))
    prompt = (TOKENS * 25)[: 2 * MAX_TOKENS + 9]
    whole = run(weights, num_tokens=600, kernels=kernels).step((0, [*prompt, 5]))
    for threads in (1, 2, 3):
        runner = run(weights, num_threads=threads, num_tokens=600, kernels=kernels)
        wanted = [MAX_TOKENS + 3, 7, len(prompt) - 1, 7, 6, MAX_TOKENS + 2]
        found = runner.step((0, prompt), (1, prompt[:70]), wanted=wanted)
        assert found.tobytes() == whole[wanted].tobytes(), f"{threads} threads"
        assert runner.step((0, [5])).tobytes() == whole[-1:].tobytes(), f"{threads} threads"
        assert runner.step((2, prompt[:39]), wanted=[]).shape == (0, 259)
        assert runner.step((2, prompt[39:40]), wanted=[]).shape == (0, 259)
        # A token of the second sequence, after one of the first without logits.
        found = runner.step((2, prompt[40:43]), (1, prompt[70:71]), wanted=[3, 1])
        assert found.tobytes() == whole[[70, 41]].tobytes(), f"{threads} threads"


def test_same_bits_on_many_threads(tiny_model: Any, run: Any) -> None:
    """More than a step has blocks of tokens: of a single one each thread has a block of its own."""
    weights = load_weights(read_gguf(tiny_model()))
    one, many = (run(weights, num_threads=threads) for threads in (1, MAX_TOKENS // 8 + 8))
    for token in TOKENS[:8]:
        assert one.step((0, [token])).tobytes() == many.step((0, [token])).tobytes()


@pytest.mark.parametrize(("architecture", "types"), CASES)
def test_a_whole_step_matches_its_operations(
    tiny_model: Any, run: Any, architecture: str, types: str
) -> None:
    """What hooks see belongs to the logits of a step without hooks: both give the same bits."""
    weights = load_weights(read_gguf(tiny_model(architecture, types)))
    for kv_dtype in ("f16", "f32"):
        runner = run(weights, num_threads=2, kv_dtype=kv_dtype)
        whole = runner.step((0, TOKENS), (1, TOKENS[:3]))
        hooked = runner.step((2, TOKENS), (3, TOKENS[:3]), tap=lambda name, activation: None)
        assert whole.tobytes() == hooked.tobytes()
        single = runner.step((0, [9]))
        hooked = runner.step((2, [9]), tap=lambda name, activation: None)
        assert single.tobytes() == hooked.tobytes()


def test_same_bits_after_a_shared_prefix(tiny_model: Any, run: Any) -> None:
    weights = load_weights(read_gguf(tiny_model()))
    whole = run(weights).step((0, TOKENS))
    runner = run(weights)
    runner.step((0, TOKENS))
    runner.cache.copy_prefix(0, 1, 16)
    assert runner.step((1, TOKENS[16:])).tobytes() == whole[16:].tobytes()
    runner.cache.truncate(1, 10)  # inside the shared block: the next write must not touch slot 0
    assert runner.step((1, [5] * 3), (0, [6])).shape == (4, 259)
    runner.cache.truncate(0, 16)
    assert runner.step((0, TOKENS[16:])).tobytes() == whole[16:].tobytes()
    runner.cache.check_integrity()


def test_non_finite_activations_stay_in_their_own_sequence(tiny_model: Any, run: Any) -> None:
    weights = load_weights(read_gguf(tiny_model()))
    whole = run(weights).step((0, TOKENS))

    def poison(name: str, activation: np.ndarray) -> np.ndarray | None:
        if name != "blocks.0.hook_resid_mid":
            return None
        activation = activation.copy()
        activation[: len(TOKENS)] = np.nan
        return activation

    logits = run(weights).step((0, TOKENS), (1, TOKENS), tap=poison)
    assert np.isnan(logits[: len(TOKENS)]).all()
    assert logits[len(TOKENS) :].tobytes() == whole.tobytes()
