"""`cllm models`: what it lists, finds and says of files; and, where a path to one is given, the real Qwen3-0.6B."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_helpers import Done, clear_environment, run_main, write_chat_vocabulary
from gguf import GGMLQuantizationType as Q
from gguf_builder import write_gguf
from huggingface_hub import constants
from tiny_models import FFN, LAYERS, WIDTH, tiny_metadata, tiny_tensors, write_tiny_model

from cllm import LLM, EngineConfig, ModelFileError, SamplingParams
from cllm.comparison import Limits
from cllm.hub import model_path
from cllm.kylin.isa import host_isa
from cllm.models import inspect, main

Run = Callable[..., Done]


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """`models(*argv)`: `cllm models ARGV` with an empty cache and no network."""
    clear_environment(monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return lambda *argv: run_main(capsys, main, *argv)


def put_in_cache(repo: str, files: dict[str, bytes]) -> Path:
    """Files of a repository in Hugging Face's cache; returns their folder."""
    folder = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


# --- list, path, pull ---------------------------------------------------------------------------------------


def test_list_and_path(models: Run) -> None:
    demo = model_path("demo")
    assert models("list").out.split() == ["demo", "11.0", "MiB", demo]
    folder = put_in_cache("a/b", {"m-Q4_K_M.gguf": bytes(2000), "m-Q8_0.gguf": bytes(5), "README.md": b"#"})
    lines = models("list").out.splitlines()
    assert [line.split()[0] for line in lines] == ["demo", "a/b:Q4_K_M", "a/b:Q8_0"]
    assert lines[1].endswith(f"  2.0 KiB  {folder / 'm-Q4_K_M.gguf'}")
    assert json.loads(models("list", "--json").out)[2] == {
        "name": "a/b:Q8_0",
        "path": str(folder / "m-Q8_0.gguf"),
        "size": 5,
    }
    assert models("path", "a/b").out == f"{folder / 'm-Q4_K_M.gguf'}\n"
    assert models("path", "demo").out == f"{demo}\n"


@pytest.mark.parametrize(
    ("argv", "status", "named"),
    [
        ([], 2, "the following arguments are required: ACTION"),
        (["fetch"], 2, "argument ACTION: invalid choice: 'fetch'"),
        (["pull"], 2, "the following arguments are required: USER/REPO[:QUANT]"),
        (["pull", "demo"], 2, "expected USER/REPO[:QUANT]"),
        (["pull", "a/b"], 1, "HF_HUB_OFFLINE is set; name a model that is here (demo)"),
        (["path", "a/b"], 1, "a/b: not downloaded yet; fetch it with cllm models pull a/b"),
        (["path", "nowhere"], 1, "nowhere: no such file; a model is demo, the path of a .gguf file or"),
        (["inspect", "a/b"], 1, "a/b: not downloaded yet"),
        (["inspect", __file__], 1, "this is not GGUF"),
        (["inspect", "demo", "-c", "1025"], 2, "argument -c/--ctx-size: context_length 1025 is beyond"),
        (["inspect", "demo", "-c", "0"], 2, "argument -c/--ctx-size: context_length should be"),
    ],
)
def test_mistakes_end_in_one_line(models: Run, argv: list[str], status: int, named: str) -> None:
    done = models(*argv)
    assert (done.status, done.out) == (status, "")
    assert named in done.error


# --- inspect ------------------------------------------------------------------------------------------------


def test_inspect_says_what_the_demo_is(models: Run) -> None:
    lines = models("inspect", "demo", "-c", "100").out.splitlines()
    subjects = dict(line.split("  ", 1) for line in lines)
    assert list(subjects) == [
        "file",
        "architecture",
        "shape",
        "tensor types",
        "tokenizer",
        "chat template",
        "kylin",
        "memory",
    ]
    assert "qwen3" in subjects["architecture"]
    assert "6 layers, width 512, 8 heads, 4 kv-heads of 64, ffn 1280, vocabulary 4096" in subjects["shape"]
    assert "EOS 4089 <|im_end|>" in subjects["tokenizer"]
    assert "enable_thinking" in subjects["chat template"]
    assert f"runs it, kernels SIMD ({host_isa()})" in subjects["kylin"]
    # 7 blocks of 16 tokens; a token has a key and a value of 4 * 64 numbers of 2 bytes in each of 6 layers.
    assert (
        f"KV cache {7 * 16 * 6 * 2 * 4 * 64 * 2 / 2**10:.1f} KiB for a sequence of 100" in subjects["memory"]
    )


def test_inspect_as_json(models: Run, tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("qwen2", "q4_k_m")  # its output is a matrix of its own
    found = json.loads(models("inspect", str(path), "--json").out)
    assert found == inspect(str(path))
    assert found["file_bytes"] == path.stat().st_size
    assert found["shape"]["num_layers"] == LAYERS
    assert found["shape"]["width"] == WIDTH
    assert found["shape"]["ffn_width"] == FFN
    assert found["shape"]["has_tied_embeddings"] is False
    tensors = tiny_tensors("qwen2", "q4_k_m").values()
    for name, count in found["tensor_types"].items():
        ours = [tensor for tensor in tensors if Q(tensor[2]).name == name]
        assert count["num_tensors"] == len(ours)
        assert count["num_parameters"] == sum(int(np.prod(shape)) for _, shape, _ in ours)
        assert count["num_bytes"] == sum(data.nbytes for data, _, _ in ours)
    assert sum(count["num_tensors"] for count in found["tensor_types"].values()) == len(tensors)
    assert found["tokenizer"]["eos"] == {"id": 258, "text": "<|im_end|>"}
    assert found["chat_template"] is None
    assert found["kylin"] == {"runs": True, "reason": None, "kernels": f"SIMD ({host_isa()})"}
    assert found["memory"]["context_length"] == 512


def test_counted_memory_is_what_an_engine_holds(tmp_path: Path) -> None:
    path = str(write_tiny_model(tmp_path / "m.gguf", "llama", "f32"))
    found = inspect(path)
    with LLM(path, kernels="plain", max_num_seqs=1) as llm:
        cache = llm.info.description
    assert f"({found['memory']['kv_cache_bytes'] / 2**20:.0f} MiB, f16)" in cache
    tensors = tiny_tensors("llama", "f32")
    matrices = sum(data.nbytes for data, shape, _ in tensors.values() if len(shape) == 2)
    assert matrices <= found["memory"]["weights_bytes"] < 1.1 * matrices  # rows are filled up to 16


def test_types_without_fast_kernels_are_named(tiny_model: Callable[..., Path]) -> None:
    kernels = inspect(str(tiny_model("qwen3", "q2_k_q3_k")))["kylin"]["kernels"]
    assert kernels == "plain (there are no SIMD kernels for IQ4_XS, Q2_K, Q3_K)"


def test_a_model_that_kylin_does_not_run_is_described_all_the_same(models: Run, tmp_path: Path) -> None:
    metadata = {
        "general.architecture": "gemma3",
        "gemma3.block_count": 3,
        "gemma3.attention.head_count_kv": np.array([2, 2, 2], np.int32),
        "gemma3.attention.key_length": np.array([64, 32, 64], np.int32),
        "gemma3.context_length": float("nan"),
        "general.name": "A\x1b[31m\nB" + "c" * 500,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.bos_token_id": 7,
        "tokenizer.chat_template": "{{ tools }}",
    }
    tensors = {"token_embd.weight": (np.zeros(64, np.uint8), (2, 8), Q.F32)}
    path = str(write_gguf(tmp_path / "m.gguf", metadata, tensors))
    found = json.loads(models("inspect", path, "--json").out)
    assert found["kylin"]["runs"] is False
    assert "kylin does not run architecture 'gemma3'" in found["kylin"]["reason"]
    assert (found["memory"], found["kylin"]["kernels"]) == (None, None)
    assert found["shape"]["num_layers"] == 3
    assert found["shape"]["num_kv_heads"] == 2
    assert found["shape"]["head_width"] == [64, 32, 64]
    assert found["shape"]["width"] is None
    assert found["shape"]["context_length"] is None
    assert found["tokenizer"]["bos"] is None
    assert "tokenizer.ggml.model is 'llama'" in found["tokenizer"]["problem"]
    assert found["chat_template"] == {"num_chars": 11, "variables": ["tools"]}
    text = models("inspect", path).out
    assert "does not run it: kylin does not run architecture 'gemma3'" in text
    assert "A\\x1b[31m\\nB" in text
    assert max(map(len, text.splitlines())) < 400


def test_a_tokenizer_that_is_not_ours_is_a_reason_too(tmp_path: Path) -> None:
    metadata = tiny_metadata("qwen3") | {"tokenizer.ggml.pre": "tekken"}
    found = inspect(str(write_gguf(tmp_path / "m.gguf", metadata, tiny_tensors("qwen3", "f32"))))
    assert found["kylin"]["runs"] is False
    assert "tokenizer.ggml.pre is 'tekken'" in found["kylin"]["reason"]


def test_a_vocabulary_alone(models: Run, tmp_path: Path) -> None:
    path = str(write_chat_vocabulary(tmp_path / "chat.gguf"))
    found = inspect(path)
    assert found["tensor_types"] == {}
    assert found["tokenizer"]["problem"] is None
    assert found["chat_template"]["variables"] == ["enable_thinking"]
    assert "general.architecture is missing" in found["kylin"]["reason"]
    assert models("inspect", path).status == 0


def test_all_parts_of_a_split_file_count(tmp_path: Path) -> None:
    tensors = list(tiny_tensors("qwen3", "f32").items())
    split: dict[str, Any] = {"split.count": 2, "split.tensors.count": len(tensors)}
    paths = [tmp_path / f"m-0000{part}-of-00002.gguf" for part in (1, 2)]
    write_gguf(paths[0], tiny_metadata("qwen3") | split | {"split.no": 0}, dict(tensors[:5]))
    write_gguf(paths[1], split | {"split.no": 1}, dict(tensors[5:]))
    found = inspect(str(paths[0]))
    assert found["kylin"]["runs"]
    assert found["num_parts"] == 2
    assert found["file_bytes"] == sum(path.stat().st_size for path in paths)
    paths[1].unlink()
    with pytest.raises(ModelFileError, match="part 2 of 2 is missing"):
        inspect(str(paths[0]))


# --- The real Qwen3-0.6B ------------------------------------------------------------------------------------

QWEN3 = os.environ.get("CLLM_TEST_QWEN3", "")
needs_qwen3 = pytest.mark.skipif(not QWEN3, reason="CLLM_TEST_QWEN3 names no file of a real Qwen3-0.6B")


@needs_qwen3
def test_the_real_qwen3_thinks_where_it_may() -> None:
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    params = SamplingParams(temperature=0, max_tokens=600)
    assert inspect(QWEN3)["kylin"]["runs"]
    with LLM(QWEN3, context_length=1024, max_num_seqs=1) as llm:
        (thinking,) = llm.chat(question, params)
        (direct,) = llm.chat(question, params, chat_template_kwargs={"enable_thinking": False})
    assert thinking.outputs[0].reasoning
    assert not direct.outputs[0].reasoning
    assert direct.outputs[0].content is not None
    assert "Paris" in direct.outputs[0].content
    assert direct.outputs[0].finish_reason == "stop"


@needs_qwen3
def test_the_real_qwen3_agrees_with_llama() -> None:
    pytest.importorskip("llama_cpp")
    from cllm.compare import compare

    config = {"model": QWEN3, "context_length": 1024, "max_num_seqs": 1}
    found = compare(EngineConfig(**config), EngineConfig(**config, backend="llama"))
    assert Limits().exceeded(found) == []
