"""The llama backend beyond the contract (see test_backends.py): agreement with kylin, settings, faults, files."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_steps import load, make_batch, nmse, run
from command_helpers import resident_bytes
from gguf import GGMLQuantizationType as Q
from gguf_builder import RawTensor, write_gguf
from tiny_models import TYPE_MIXES, tiny_metadata, tiny_tensors

pytest.importorskip("llama_cpp")

from cllm import LLM, ConfigError, EngineConfig, ModelFileError, SamplingParams, row_argmax
from cllm.backends import llama, load_backend
from cllm.backends.base import Backend
from cllm.backends.llama import LlamaBackend
from cllm.backends.llama_anchor import STEPS
from cllm.backends.llama_cells import SHORTEST_COPY, Cells
from cllm.backends.llama_library import free_gpu_memory, load_library
from cllm.backends.llama_tokenizer import LlamaTokenizer
from cllm.config import KV_CACHE_DTYPES
from cllm.errors import BackendError
from cllm.tokenizer import Tokenizer

IDS = np.random.default_rng(0).integers(0, 256, 256).tolist()
# kylin against llama.cpp, whole models of two layers. Measured: 9e-9, 1e-7, and 4e-4 where activations are
# rounded to int8, in another order of sums.
AGREEMENT_NMSE = {"f32": 1e-7, "f16_bf16": 1e-6}
AGREEMENT_NMSE_INT8 = 1e-3
TinyModel = Callable[..., Path]


@pytest.fixture
def backend(tiny_model: TinyModel) -> Iterator[LlamaBackend]:
    backend = load(tiny_model("qwen3", "q4_k_m"), "llama", kv_cache_tokens=512)
    assert isinstance(backend, LlamaBackend)
    yield backend
    backend.close()


def logits_of(model: object, name: str, token_ids: list[int], **settings: Any) -> np.ndarray:
    """Logits of every token of one sequence."""
    backend = load(model, name, **settings)
    logits = run(backend, (0, 0, token_ids), rows=list(range(len(token_ids))))
    backend.close()
    return logits


# --- Agreement with kylin --------------------------------------------------------------------------------------


@pytest.mark.parametrize("types", TYPE_MIXES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_kylin_agrees(tiny_model: TinyModel, architecture: str, types: str) -> None:
    path = tiny_model(architecture, types)
    ours, theirs = logits_of(path, "kylin", IDS[:60]), logits_of(path, "llama", IDS[:60])
    assert nmse(ours, theirs) < AGREEMENT_NMSE.get(types, AGREEMENT_NMSE_INT8)
    assert (ours.argmax(1) == theirs.argmax(1)).mean() > 0.9


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_kylin_agrees_to_the_last_digits_in_float32(tiny_model: TinyModel, architecture: str) -> None:
    path = tiny_model(architecture, "f32")
    ours = logits_of(path, "kylin", IDS[:60], kv_cache_dtype="f32")
    assert nmse(ours, logits_of(path, "llama", IDS[:60], kv_cache_dtype="f32")) < 1e-11


@pytest.mark.model
def test_kylin_agrees_on_a_real_model(smollm2_path: Path) -> None:
    text = (
        "The sea was calm that night, and the keeper of the lighthouse wrote a letter to his daughter. " * 2
    )
    ids = load_backend(EngineConfig(model=str(smollm2_path), backend="llama"))[1].encode(text)
    ours, theirs = logits_of(smollm2_path, "kylin", ids), logits_of(smollm2_path, "llama", ids)
    assert nmse(ours, theirs) < 0.01
    second, best = np.sort(theirs, axis=1)[:, -2:].T
    is_clear = best - second > 0.5
    assert is_clear.sum() > len(ids) // 2
    assert (ours.argmax(1) == theirs.argmax(1))[is_clear].all()


def test_answers_through_the_engine(tiny_model: TinyModel) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = ["one", "two two", "three three three", "4" * 40]
    with LLM(str(tiny_model("qwen3", "q5_0_q8_0")), backend="llama", max_num_seqs=3, num_threads=1) as llm:
        together = [output.outputs[0] for output in llm.generate(prompts, params)]
        assert [output.finish_reason for output in together] == ["length"] * 4
        alone = [llm.generate(prompt, params)[0].outputs[0] for prompt in prompts]
        # This mix of types gives the same bits in every batch; others may turn at a near-tie.
        assert [output.token_ids for output in alone] == [output.token_ids for output in together]
        streamed = "".join(piece.text for piece in llm.stream(prompts[0], params))
        assert streamed == together[0].text


# --- Batches ---------------------------------------------------------------------------------------------------


def test_a_batch_past_n_batch_is_split(tiny_model: TinyModel) -> None:
    path = tiny_model("qwen3", "q4_k_m")
    whole, split = load(path, "llama"), load(path, "llama", max_num_batched_tokens=16)
    rows = [63, 0, 15, 16, 31, 33, 62, 0]
    chunks = ((0, 0, IDS[:40]), (2, 0, IDS[40:64]))
    assert nmse(run(split, *chunks, rows=rows), run(whole, *chunks, rows=rows)) < 1e-3
    more = ((0, 40, IDS[:1]), (2, 24, IDS[1:2]))
    assert nmse(run(split, *more), run(whole, *more)) < 1e-3
    whole.close()
    split.close()


def test_logits_are_a_view_of_llamas_buffer(backend: LlamaBackend) -> None:
    first = backend.launch(make_batch((0, 0, IDS[:10]), (1, 0, IDS[:5]))).logits()
    assert not first.flags.owndata
    kept = first.copy()
    run(backend, (0, 10, IDS[10:11]), (1, 5, IDS[5:6]))
    assert (first != kept).any()


def test_a_started_step_is_the_recorded_one(backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = run(backend, (0, 0, IDS[:30]))
    monkeypatch.setattr(backend, "info", replace(backend.info, launches_early=True))  # as on a GPU
    step = backend.launch(make_batch((1, 0, IDS[:30])))
    backend.truncate(1, 20)  # so it has been done
    assert np.array_equal(step.logits(), recorded)


def test_the_way_of_a_gpu_gives_the_same_answers(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps started early, their text made late, the best tokens found by threads; all but the card itself."""
    monkeypatch.setattr(row_argmax, "_FEW", 0)
    params = [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.8, seed=1, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=["e", "\ufffd"]),
    ]
    answers = []
    for num_gpu_layers in (0, -1):  # a build without a GPU computes those layers itself
        monkeypatch.setattr(llama, "_num_gpu_layers", lambda config, layers=num_gpu_layers: layers)
        config: dict[str, Any] = {"max_num_seqs": 4, "kv_cache_tokens": 1024, "num_threads": 2}
        with LLM(str(tiny_model("qwen3", "q4_k_m")), backend="llama", **config) as llm:
            assert llm.info.launches_early == bool(num_gpu_layers)
            outputs = llm.generate([IDS[:9], IDS[5:30], IDS[40:60], IDS[:12]], params)
            answers.append(
                [(o.outputs[0].token_ids, o.outputs[0].text, o.outputs[0].finish_reason) for o in outputs]
            )
            llm._scheduler.check_integrity()
    assert answers[0] == answers[1]


def test_the_anchor_holds_the_top_of_the_cache(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One cell stays used when all slots are empty; it goes when it is needed or has long been far above the rest."""
    monkeypatch.setattr(llama, "_num_gpu_layers", lambda config: -1)  # as on a GPU
    backend = load(tiny_model("qwen3", "q4_k_m"), "llama")
    assert isinstance(backend, LlamaBackend)
    context, sequence = backend._context, backend.info.num_slots

    def held() -> int:
        return int(context._library.llama_memory_seq_pos_max(context._memory, sequence))

    expected = run(backend, (0, 0, IDS[:30]))
    run(backend, (1, 0, IDS[:100]))
    assert held() == -1
    backend.free(1)
    backend.free(0)
    assert held() == 99  # of the first, when the most was in use
    assert np.array_equal(run(backend, (0, 0, IDS[:30])), expected)
    for _ in range(STEPS - 1):
        assert held() == 99
        backend.truncate(0, 29)
        run(backend, (0, 29, IDS[29:30]))
    assert held() == -1

    backend.truncate(0, 20)
    assert held() == 29
    assert backend.info.kv_capacity == 256  # all of it can be had
    run(backend, (0, 20, IDS[20:256]))
    assert held() == -1
    backend.close()


class FakeCodes:
    """llama_cpp, but `llama_decode` returns the given codes first."""

    def __init__(self, *codes: int) -> None:
        self.codes, self.library = list(codes), load_library()

    def llama_decode(self, *arguments: Any) -> int:
        if self.codes and (code := self.codes.pop(0)):
            return code
        return int(self.library.llama_decode(*arguments))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.library, name)


@pytest.mark.parametrize(
    ("codes", "nothing_changed", "message"),
    [
        ([1], True, "KV cache full: no room for 40 more tokens in 512"),
        ([-1], True, "llama.cpp refused the batch: llama.cpp gave no reason"),
        ([2], False, r"failed in a step \(code 2\)"),
        ([-3], False, r"failed in a step \(code -3\)"),
    ],
)
def test_return_codes_are_errors(
    backend: LlamaBackend, codes: list[int], nothing_changed: bool, message: str
) -> None:
    run(backend, (0, 0, IDS[:5]))
    backend._context._library = FakeCodes(*codes)
    with pytest.raises(BackendError, match=message) as caught:
        run(backend, (1, 0, IDS[:40]))
    assert caught.value.nothing_changed is nothing_changed
    backend.free(1)
    assert run(backend, (1, 0, IDS[:40]), (0, 5, IDS[:1])).shape == (2, 259)


def test_a_later_part_that_fails_has_changed_something(tiny_model: TinyModel) -> None:
    backend = load(tiny_model(), "llama", max_num_batched_tokens=16)
    expected = run(backend, (0, 0, IDS[:40]))
    assert isinstance(backend, LlamaBackend)
    backend._context._library = FakeCodes(0, 1)
    with pytest.raises(BackendError, match="KV cache full") as caught:
        run(backend, (1, 0, IDS[:40]))
    assert not caught.value.nothing_changed
    backend.free(1)
    assert nmse(run(backend, (1, 0, IDS[:40])), expected) < 1e-3
    backend.close()


def test_llama_gives_the_reason_of_a_refusal(backend: LlamaBackend) -> None:
    batch = make_batch((0, 7, IDS[:1]))
    run(backend, (0, 0, IDS[:2]))
    with pytest.raises(BackendError, match="sequence positions remain consecutive"):
        backend._context.decode(batch.token_ids, batch.positions, batch.slots, batch.logit_rows)


@pytest.mark.parametrize("slot", [-1, 16])
def test_sequences_that_would_end_the_process_are_refused(backend: Backend, slot: int) -> None:
    run(backend, (0, 0, IDS[:5]))
    for act in (backend.free, lambda s: backend.copy_prefix(s, 0, 1), lambda s: backend.copy_prefix(0, s, 1)):
        with pytest.raises(BackendError, match=f"slot {slot} does not exist: there are 16"):
            act(slot)
    assert run(backend, (0, 5, IDS[:1])).shape == (1, 259)


# --- The KV cache ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "own", "num_slots"), [
    ({}, 256, 4),
    ({"context_length": 300}, 512, 4),
    ({"kv_cache_tokens": 1023}, 256, 4),
    ({"kv_cache_tokens": 6 * 256}, 256, 6),
    ({"kv_cache_tokens": 1 << 16}, 256, 16),
    ({"kv_cache_tokens": 1 << 16, "enable_prefix_caching": False}, 256, 4),
    ({"kv_cache_tokens": 768}, None, 16),
    ({"max_num_seqs": 1}, None, 4),
])  # fmt: skip
def test_each_slot_has_cells_of_its_own_where_there_are_enough(
    tiny_model: TinyModel, settings: Any, own: int | None, num_slots: int
) -> None:
    backend = load(tiny_model(), "llama", **settings)
    info = backend.info
    assert info.num_slots == num_slots
    assert info.kv_capacity % info.kv_block == 0
    if own is None:
        assert info.kv_block == 1
        assert "unified KV cache" in info.description
    else:
        assert (info.kv_capacity, info.kv_block) == (own * num_slots, 16)
        assert f"KV cache of {num_slots} x {own} tokens" in info.description
        everything = [(slot, 0, IDS[: info.context_length]) for slot in range(num_slots)]
        for chunk in everything:
            run(backend, chunk)
    backend.close()


def test_cells_of_its_own_give_the_same_answers(tiny_model: TinyModel) -> None:
    """Prompts beside streams, slots that are no neighbours or in no order, beginnings copied and cut."""
    path = tiny_model("qwen3", "f32")
    found: list[list[np.ndarray]] = []
    for cells in (768, 1024):  # unified, own
        backend = load(path, "llama", kv_cache_tokens=cells, kv_cache_dtype="f32")
        assert (backend.info.kv_block == 1) == (cells == 768)
        rows = [run(backend, (2, 0, IDS[:40]), (0, 0, IDS[40:43]))]
        rows.append(run(backend, (0, 3, IDS[:1]), (3, 0, IDS[:30]), (2, 40, IDS[1:2])))
        backend.copy_prefix(2, 1, 32)
        backend.truncate(2, 20)  # before the copy has been carried out
        rows.append(run(backend, (1, 32, IDS[:5]), (2, 20, IDS[5:7]), (3, 30, IDS[7:8])))
        backend.free(2)
        backend.copy_prefix(1, 2, 16)
        rows.append(run(backend, (2, 16, IDS[:3]), (1, 37, IDS[3:4])))
        found.append(rows)
        backend.close()
    for unified, own in zip(*found, strict=True):
        assert nmse(own, unified) < 1e-10


@pytest.mark.parametrize("own", [256, 4096, 4352, 32768])
def test_a_block_divides_the_cells_of_a_slot(own: int) -> None:
    cells = Cells(4 * own, 4, own)
    assert own % cells.block == 0
    assert cells.block >= SHORTEST_COPY


# --- Settings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
def test_every_kv_type_serves(tiny_model: TinyModel, dtype: str) -> None:
    path = tiny_model("llama", "f32")
    expected = logits_of(path, "llama", IDS[:50], kv_cache_dtype="f32")
    found = logits_of(path, "llama", IDS[:50], kv_cache_dtype=dtype)
    assert nmse(found, expected) < {"f32": 1e-12, "f16": 1e-6, "bf16": 1e-4}.get(dtype, 0.05)
    assert (found == expected).all() == (dtype == "f32")


@pytest.mark.parametrize(("settings", "context", "capacity", "tokens"), [
    ({"context_length": None}, 512, 2048, 512),
    ({"context_length": 100}, 100, 1024, 512),
    ({"kv_cache_tokens": 257}, 256, 512, 512),
    ({"kv_cache_tokens": 1600}, 256, 1792, 512),
    ({"max_num_seqs": 256, "max_num_batched_tokens": 300}, 256, 65536, 300),
])  # fmt: skip
def test_sizes(tiny_model: TinyModel, settings: Any, context: int, capacity: int, tokens: int) -> None:
    backend = load(tiny_model(), "llama", **settings)
    info = backend.info
    assert (info.context_length, info.kv_capacity) == (context, capacity)
    assert (info.max_num_batched_tokens, info.trained_context) == (tokens, 512)
    assert run(backend, (info.num_slots - 1, 0, IDS[:3])).shape == (1, 259)
    backend.close()


def test_the_cache_takes_a_quarter_of_the_memory(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Keys and values of 2 layers, 2 heads of 128 values, 2 bytes each: 2 KiB a token.
    monkeypatch.setattr("cllm.backends.llama.available_memory", lambda: 4 * 512 * 2048)
    backend = load(tiny_model(), "llama")
    assert backend.info.kv_capacity == 512
    assert "unified KV cache of 512 tokens (1 MiB, f16)" in backend.info.description
    backend.close()


@pytest.mark.parametrize(
    ("settings", "field", "message"),
    [
        ({"max_num_seqs": 257}, "max_num_seqs", "at most 256 sequences"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "max_num_batched_tokens", "is below max_num_seqs"),
        ({"context_length": 513}, "context_length", "beyond the 512 tokens"),
        ({"kernels": "numpy"}, "kernels", "belongs to the kylin backend"),
        ({"kv_cache_dtype": "q9"}, "kv_cache_dtype", "q8_0"),
        ({"num_gpu_layers": -2}, "num_gpu_layers", "from 0 to 10000"),
        ({"num_gpu_layers": True}, "num_gpu_layers", "from 0 to 10000"),
        ({"backend": "kylin", "num_gpu_layers": 0}, "num_gpu_layers", "belongs to the llama backend"),
        ({"backend": "kylin", "kv_cache_dtype": "q8_0"}, "kv_cache_dtype", "one of f16, f32"),
    ],
)
def test_wrong_settings_are_one_clear_line(
    tiny_model: TinyModel, settings: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_backend(EngineConfig(**{"model": str(tiny_model()), "backend": "llama", **settings}))
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layers", [1, -1])
def test_gpu_layers_without_a_gpu_are_refused(tiny_model: TinyModel, layers: int) -> None:
    if load_library().llama_supports_gpu_offload():
        pytest.skip("this build has a GPU")
    assert free_gpu_memory() == 0
    with pytest.raises(
        ConfigError, match=f"num_gpu_layers is {layers}, but this llama-cpp-python has no GPU"
    ):
        load(tiny_model(), "llama", num_gpu_layers=layers)


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(ConfigError, match=r"pip install 'cllm\[llama\]'"):
        load_library.__wrapped__()


# --- Files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda meta, tensors: meta.update({"general.architecture": "chatgpt"}),
            "unknown model architecture",
        ),
        (lambda meta, tensors: tensors.pop("blk.1.attn_k.weight"), "blk.1.attn_k.weight"),
        (lambda meta, tensors: tensors.clear(), "token_embd.weight"),
    ],
)
def test_a_file_that_llama_cannot_load(tmp_path: Path, change: Callable[..., Any], message: str) -> None:
    metadata, tensors = tiny_metadata("qwen3"), tiny_tensors("qwen3", "q4_1")
    change(metadata, tensors)
    path = write_gguf(tmp_path / "model.gguf", metadata, tensors)
    with pytest.raises(ModelFileError, match=f"model.gguf: llama.cpp cannot load it: .*{message}"):
        load(path, "llama")


@pytest.mark.parametrize(
    ("architecture", "key", "value", "message"),
    [
        ("llama", "block_count", 0, r"block_count is 0; llama.cpp takes 1\.\.512"),
        ("llama", "block_count", 2**32 - 1, "block_count is 4294967295"),
        ("qwen2", "attention.head_count", 3, "found 85 .*64 .*64 "),
        ("qwen2", "attention.key_length", 1, "found 64 .*1 .*64 "),
        ("qwen3", "rope.dimension_count", 2**31 - 1, "found 64 .*128 .*2147483647 "),
    ],
)
def test_sizes_that_would_end_the_process_are_refused(
    tmp_path: Path, architecture: str, key: str, value: int, message: str
) -> None:
    metadata = {**tiny_metadata(architecture), f"{architecture}.{key}": value}
    path = write_gguf(tmp_path / "model.gguf", metadata, tiny_tensors(architecture, "q4_1"))
    with pytest.raises(ModelFileError, match=message):
        load(path, "llama")


def test_missing_and_damaged_files(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        load(tmp_path / "nothing.gguf", "llama")
    (tmp_path / "half.gguf").write_bytes(tiny_model().read_bytes()[:-5000])
    with pytest.raises(ModelFileError, match=r"half\.gguf"):
        load(tmp_path / "half.gguf", "llama")


def floats(shapes: dict[str, tuple[int, ...]]) -> dict[str, RawTensor]:
    rng = np.random.default_rng(0)
    values = {name: rng.standard_normal(shape).astype(np.float32) / 8 for name, shape in shapes.items()}
    return {name: (value.view(np.uint8), value.shape, Q.F32) for name, value in values.items()}


def write_mamba(path: Path) -> Path:
    """One block of Mamba, whose state cannot be cut: width 64, inner width 128, state 16, rank 4."""
    sizes = {"embedding_length": 64, "block_count": 1, "context_length": 512, "feed_forward_length": 0}
    sizes |= {"attention.head_count": 0, "ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16}
    sizes |= {"ssm.time_step_rank": 4, "attention.layer_norm_rms_epsilon": 1e-5}
    vocabulary = {k: v for k, v in tiny_metadata("llama").items() if k.startswith("tokenizer.")}
    metadata = {"general.architecture": "mamba", **{f"mamba.{k}": v for k, v in sizes.items()}, **vocabulary}
    block = {"attn_norm.weight": (64,), "ssm_in.weight": (256, 64), "ssm_conv1d.weight": (128, 4)}
    block |= {"ssm_conv1d.bias": (128,), "ssm_x.weight": (36, 128), "ssm_dt.weight": (128, 4)}
    block |= {"ssm_dt.bias": (128,), "ssm_a": (128, 16), "ssm_d": (128,), "ssm_out.weight": (64, 128)}
    shapes = {"token_embd.weight": (259, 64), "output_norm.weight": (64,)}
    shapes |= {f"blk.0.{name}": shape for name, shape in block.items()}
    return write_gguf(path, metadata, floats(shapes))


def write_bert(path: Path) -> Path:
    """One block of BERT, an encoder: width 64, 4 heads."""
    sizes = {"embedding_length": 64, "block_count": 1, "context_length": 256, "feed_forward_length": 128}
    sizes |= {"attention.head_count": 4, "attention.layer_norm_epsilon": 1e-5, "attention.causal": False}
    vocabulary = {k: v for k, v in tiny_metadata("llama").items() if k.startswith("tokenizer.")}
    vocabulary["tokenizer.ggml.token_type_count"] = 2
    metadata = {"general.architecture": "bert", **{f"bert.{k}": v for k, v in sizes.items()}, **vocabulary}
    shapes = {
        "token_embd.weight": (259, 64),
        "token_types.weight": (2, 64),
        "position_embd.weight": (256, 64),
    }
    names = {"attn_q": 64, "attn_k": 64, "attn_v": 64, "attn_output": 64, "ffn_up": 128, "ffn_down": 64}
    for name, rows in names.items():
        shapes |= {f"blk.0.{name}.weight": (rows, 128 if name == "ffn_down" else 64)}
        shapes |= {f"blk.0.{name}.bias": (rows,)}
    for name in ("token_embd_norm", "blk.0.attn_output_norm", "blk.0.layer_output_norm"):
        shapes |= {f"{name}.weight": (64,), f"{name}.bias": (64,)}
    return write_gguf(path, metadata, floats(shapes))


def test_a_recurrent_model_is_copied_and_freed_whole(tmp_path: Path) -> None:
    backend = load(write_mamba(tmp_path / "mamba.gguf"), "llama")
    assert not backend.info.can_truncate
    run(backend, (0, 0, IDS[:20]))
    for act in (lambda: backend.truncate(0, 10), lambda: backend.copy_prefix(0, 1, 10)):
        with pytest.raises(BackendError, match=r"cannot (truncate|copy)"):
            act()
    backend.copy_prefix(0, 1, 20)
    continued = run(backend, (1, 20, IDS[20:30]))
    backend.free(0)
    backend.free(1)
    assert nmse(continued, run(backend, (0, 0, IDS[:30]))) < 1e-6
    backend.close()


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="found an encoder"):
        load(write_bert(tmp_path / "bert.gguf"), "llama")


def test_the_tokenizer_is_ours_where_it_can_be(tmp_path: Path, tiny_model: TinyModel) -> None:
    def tokenizer(path: Path) -> Tokenizer:
        backend, tokenizer = load_backend(EngineConfig(model=str(path), backend="llama", max_num_seqs=1))
        backend.close()
        return tokenizer

    assert type(tokenizer(tiny_model("qwen3", "q4_1"))) is Tokenizer
    metadata = {**tiny_metadata("qwen3"), "tokenizer.ggml.pre": "falcon"}
    other = tokenizer(write_gguf(tmp_path / "falcon.gguf", metadata, tiny_tensors("qwen3", "q4_1")))
    assert type(other) is LlamaTokenizer
    assert other.decode(other.encode("Hello")) == "Hello"


# --- One process -----------------------------------------------------------------------------------------------


def test_two_at_once_do_not_meet(tiny_model: TinyModel) -> None:
    paths = [tiny_model("qwen3", "q4_k_m"), tiny_model("llama", "q4_1")]
    steps = [(0, 0, IDS[:9]), (0, 9, IDS[9:20])]
    alone = []
    for path in paths:
        backend = load(path, "llama")
        alone.append([run(backend, step) for step in steps])
        backend.close()
    both = [load(path, "llama") for path in paths]
    by_step = [[run(backend, step) for backend in both] for step in steps]
    assert np.array_equal(np.swapaxes(by_step, 0, 1), alone)
    both[0].close()
    run(both[1], (0, 20, IDS[:1]))
    both[1].close()


@pytest.mark.skipif(not resident_bytes(), reason="reads /proc")
def test_closing_gives_the_memory_back(tiny_model: TinyModel) -> None:
    def cycle() -> None:  # 32 MiB of cache and 1 MiB of weights
        backend = load(tiny_model(), "llama", kv_cache_tokens=16384)
        run(backend, (0, 0, IDS))
        backend.close()
        backend.close()

    for _ in range(3):
        cycle()
    gc.collect()
    before = resident_bytes()
    for _ in range(5):
        cycle()
    gc.collect()
    assert resident_bytes() - before < 64 * 2**20  # the allocator may keep one cache


def test_an_object_that_is_dropped_gives_its_memory_back(tiny_model: TinyModel) -> None:
    backend = load(tiny_model(), "llama")
    assert isinstance(backend, LlamaBackend)
    context, model = backend._context.close, backend._model.close
    del backend
    gc.collect()
    assert not context.alive
    assert not model.alive


def test_llama_is_silent_unless_asked(
    tiny_model: TinyModel, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def use() -> None:
        backend = load(tiny_model(), "llama")
        run(backend, (0, 0, IDS[:5]))
        backend.close()

    use()
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    with caplog.at_level(logging.DEBUG, logger="cllm.llama"):
        use()
    assert any("llama_context" in record.message for record in caplog.records)
    assert {record.name for record in caplog.records} == {"cllm.llama"}
    assert capfd.readouterr() == ("", "")
