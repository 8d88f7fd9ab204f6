"""The contract of a backend, on each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from backend_steps import load, make_batch, nmse, run

from cllm.backends.base import Backend
from cllm.errors import BackendError

IDS = np.random.default_rng(0).integers(0, 256, 256).tolist()
# Between ways of running the same tokens. kylin's law 1 is exactness; llama.cpp's sums depend on the batch,
# and the int8 rounding of activations makes more of that.
SAME_NMSE = {"kylin": 0.0, "mock": 0.0, "llama": 1e-3}


@pytest.fixture(params=["kylin", "llama", "mock"])
def name(request: pytest.FixtureRequest) -> str:
    if request.param == "llama":
        pytest.importorskip("llama_cpp")
    return str(request.param)


@pytest.fixture
def backend(name: str, tiny_model: Callable[..., Path]) -> Iterator[Backend]:
    backend = load(tiny_model("qwen3", "q4_k_m"), name, kv_cache_tokens=256)
    yield backend
    backend.close()


@pytest.fixture
def expect_same(name: str) -> Callable[[np.ndarray, np.ndarray], None]:
    def check(actual: np.ndarray, expected: np.ndarray) -> None:
        assert actual.shape == expected.shape
        assert nmse(actual, expected) <= SAME_NMSE[name]

    return check


Check = Callable[[np.ndarray, np.ndarray], None]


def test_info_is_what_was_asked_for(backend: Backend) -> None:
    info = backend.info
    assert (info.vocab_size, info.context_length, info.num_slots) == (259, 256, 16)
    assert info.kv_capacity == 256
    assert info.max_num_batched_tokens == 512
    assert info.max_logit_rows >= info.num_slots
    assert info.can_truncate


def test_chunks_equal_one_prefill(backend: Backend, expect_same: Check) -> None:
    whole = run(backend, (0, 0, IDS[:40]))
    run(backend, (1, 0, IDS[:7]), rows=[])
    run(backend, (1, 7, IDS[7:39]))
    expect_same(run(backend, (1, 39, IDS[39:40])), whole)


def test_sequences_of_a_batch_do_not_meet(backend: Backend, expect_same: Check) -> None:
    alone = [run(backend, (slot, 0, IDS[slot : slot + 20])) for slot in range(3)]
    for slot in range(3):
        backend.free(slot)
    together = run(backend, *((slot, 0, IDS[slot : slot + 20]) for slot in (2, 0, 1)))
    expect_same(together, np.concatenate([alone[2], alone[0], alone[1]]))


def test_rows_come_in_the_order_asked_for(backend: Backend, expect_same: Check) -> None:
    every = run(backend, (0, 0, IDS[:10]), (1, 0, IDS[10:20]), rows=list(range(20)))
    backend.free(0)
    backend.free(1)
    rows = [19, 3, 3, 0, 11]
    expect_same(run(backend, (0, 0, IDS[:10]), (1, 0, IDS[10:20]), rows=rows), every[rows])
    assert len({row.tobytes() for row in every}) > 10  # else the order could not show


def test_no_rows_give_no_logits(backend: Backend) -> None:
    assert run(backend, (0, 0, IDS[:5]), rows=[]).shape == (0, 259)


def test_a_copied_prefix_continues_like_a_fresh_one(backend: Backend, expect_same: Check) -> None:
    run(backend, (0, 0, IDS[:40]))
    backend.copy_prefix(0, 1, 32)
    continued = run(backend, (1, 32, IDS[50:60]))
    original = run(backend, (0, 40, IDS[40:50]))
    backend.free(0)
    backend.free(1)
    expect_same(continued, run(backend, (0, 0, IDS[:32] + IDS[50:60])))
    expect_same(original, run(backend, (1, 0, IDS[:50])))


def test_a_copy_outlives_its_source(backend: Backend, expect_same: Check) -> None:
    run(backend, (0, 0, IDS[:40]))
    backend.copy_prefix(0, 1, 32)
    backend.free(0)
    run(backend, (2, 0, IDS[100:160]))  # would take the cells if they were free
    expect_same(run(backend, (1, 32, IDS[32:40])), run(backend, (3, 0, IDS[:40])))


def test_copies_share_memory(backend: Backend) -> None:
    run(backend, (0, 0, IDS[:192]))
    for slot in (1, 2, 3):
        backend.copy_prefix(0, slot, 192)
    run(backend, *((slot, 192, IDS[:16]) for slot in range(4)))  # 832 tokens in a cache of 256


@pytest.mark.parametrize("length", [-1, 41])
def test_a_prefix_that_is_not_there_is_not_copied(backend: Backend, length: int) -> None:
    run(backend, (0, 0, IDS[:40]))
    with pytest.raises(BackendError, match=f"cannot copy {length} tokens of slot 0"):
        backend.copy_prefix(0, 1, length)


def test_a_truncated_slot_continues_from_there(backend: Backend, expect_same: Check) -> None:
    run(backend, (0, 0, IDS[:40]))
    backend.truncate(0, 25)
    continued = run(backend, (0, 25, IDS[100:110]))
    backend.free(0)
    expect_same(continued, run(backend, (0, 0, IDS[:25] + IDS[100:110])))


@pytest.mark.parametrize("length", [-1, 41])
def test_a_slot_is_not_truncated_to_what_it_never_was(backend: Backend, length: int) -> None:
    run(backend, (0, 0, IDS[:40]))
    with pytest.raises(BackendError, match=f"cannot truncate slot 0 of 40 tokens to {length}"):
        backend.truncate(0, length)


def test_a_freed_slot_is_empty(backend: Backend, expect_same: Check) -> None:
    first = run(backend, (0, 0, IDS[:10]))
    for slot in range(4):
        backend.free(slot)
    expect_same(run(backend, (0, 0, IDS[:10])), first)


@pytest.mark.parametrize(
    ("chunk", "rows", "message"),
    [
        ((0, 1, [1]), None, "stands at position 3"),
        ((0, 4, [1]), None, "stands at position 3"),
        ((1, 1, [1]), None, "stands at position 0"),
        ((16, 0, [1]), None, "slot 16 does not exist"),
        ((-1, 0, [1]), None, "slot -1 does not exist"),
        ((0, 3, [259]), None, "outside the vocabulary"),
        ((0, 3, [-1]), None, "outside the vocabulary"),
        ((0, 3, [1]), [1], "row of logits"),
        ((0, 3, [1]), [-1], "row of logits"),
        ((0, 3, [1]), [0] * 65, "row of logits"),
    ],
)
def test_a_wrong_batch_is_refused_and_changes_nothing(
    backend: Backend,
    expect_same: Check,
    chunk: tuple[int, int, list[int]],
    rows: list[int] | None,
    message: str,
) -> None:
    run(backend, (0, 0, IDS[:3]))
    with pytest.raises(BackendError, match=message) as caught:
        backend.launch(make_batch(chunk, rows=rows))
    assert caught.value.nothing_changed
    expect_same(run(backend, (0, 3, IDS[3:6])), run(backend, (1, 0, IDS[:6])))


def test_a_full_cache_changes_nothing(backend: Backend, expect_same: Check) -> None:
    run(backend, (0, 0, IDS[:200]))
    with pytest.raises(BackendError, match="KV cache full") as caught:
        run(backend, (1, 0, IDS[:40]), (0, 200, IDS[200:240]))
    assert caught.value.nothing_changed
    continued = run(backend, (0, 200, IDS[200:240]))
    backend.free(0)
    expect_same(continued, run(backend, (1, 0, IDS[:240])))


def test_a_warm_up_leaves_nothing(backend: Backend, expect_same: Check) -> None:
    first = run(backend, (0, 0, IDS[:10]))
    backend.free(0)
    backend.warm_up()
    expect_same(run(backend, (0, 0, IDS[:10])), first)
    backend.free(0)
    run(backend, (3, 0, IDS[:256]))  # the whole cache
