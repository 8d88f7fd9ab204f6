"""The shape of the code: who may import whom, how long files and functions may be, what an import may load."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "cllm"
MODULES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))

# A module imports from the rows above its own, or from its own row to its left.
LEVELS = [
    ["errors.py", "__init__.py"],
    ["machine.py", "config.py", "params.py", "outputs.py", "hooks.py", "sequence.py", "plan.py", "stats.py"],
    [
        "kylin/__init__.py",
        "kylin/isa.py",
        "kylin/simd.py",
        "kylin/jit.py",
        "kylin/native.py",
        "kylin/memory.py",
        "kylin/team.py",
        "kylin/attendance.py",
        "kylin/gguf_cursor.py",
        "kylin/gguf.py",
        "kylin/quants.py",
        "kylin/rope.py",
        "kylin/weights.py",
        "kylin/kv_cache.py",
        "kylin/reference.py",
        "kylin/plain_blocks.py",
        "kylin/plain_kernels.py",
        "kylin/plain.py",
        "kylin/embedding.py",
        "kylin/ops.py",
        "kylin/ops_simd.py",
        "kylin/attention.py",
        "kylin/tiles.py",
        "kylin/tile_types.py",
        "kylin/tile_loops.py",
        "kylin/rounding_simd.py",
        "kylin/rounding.py",
        "kylin/matmul.py",
        "kylin/attention_simd.py",
        "kylin/layout.py",
        "kylin/phases.py",
        "kylin/step.py",
        "kylin/program.py",
        "kylin/arena.py",
        "kylin/fast.py",
        "kylin/model.py",
    ],
    ["kv_tree.py", "row_argmax.py", "sampler_kernels.py", "sampler.py", "scheduler.py", "batch.py"],
    ["vocabulary.py", "tokenizer.py", "reasoning.py", "answer_text.py", "chat.py", "hub.py"],
    [
        "backends/base.py",
        "backends/kylin.py",
        "backends/llama_library.py",
        "backends/llama_cells.py",
        "backends/llama_context.py",
        "backends/llama_anchor.py",
        "backends/llama_tokenizer.py",
        "backends/llama.py",
        "backends/llama_bare.py",
        "backends/mock.py",
        "backends/__init__.py",
    ],
    ["executor.py"],
    ["engine.py", "request_maker.py", "llm.py"],
    [
        "cli.py",
        "conversation.py",
        "run.py",
        "comparison.py",
        "compare.py",
        "bench/ceilings.py",
        "bench/__init__.py",
        "bench/__main__.py",
        "bench/speed.py",
        "bench/load.py",
        "bench/answers.py",
        "bench/http.py",
        "models.py",
        "server/__init__.py",
        "server/failures.py",
        "server/schemas.py",
        "server/web.py",
        "server/hand_over.py",
        "server/service.py",
        "server/logprobs.py",
        "server/sse.py",
        "server/openai_events.py",
        "server/openai.py",
        "server/native.py",
        "server/metrics.py",
        "server/benchmark.py",
        "server/routes.py",
        "server/app.py",
        "server/protocol.py",
        "server/draining.py",
        "serve.py",
        "bench/ladder/load.py",
        "bench/ladder/rig.py",
        "bench/ladder/full_batches.py",
        "bench/ladder/rungs.py",
        "bench/ladder/measure.py",
        "bench/ladder/targets.py",
        "bench/ladder/web.py",
        "bench/ladder/llama_tools.py",
        "bench/ladder/report.py",
        "bench/ladder/__init__.py",
        "__main__.py",
    ],
]
ORDER = [module for row in LEVELS for module in row]
KYLIN_MAY_IMPORT = {"numpy", "numba", "llvmlite", "gguf.constants", "cllm.errors", "cllm.hooks"}
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 60


def imported_modules(module: str) -> set[str]:
    """The dotted names of the modules that `module` imports, anywhere in it."""
    tree = ast.parse((PACKAGE / module).read_text(encoding="utf-8"))
    package = ["cllm", *Path(module).parts[:-1]]
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *filter(None, [node.module])])
            inside = [alias.name for alias in node.names if is_module(f"{origin}.{alias.name}")]
            names |= {f"{origin}.{name}" for name in inside} or {origin}
    return names


def is_module(dotted: str) -> bool:
    path = PACKAGE.parent.joinpath(*dotted.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def file_of(dotted: str) -> str:
    path = PACKAGE.parent.joinpath(*dotted.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return str(file.relative_to(PACKAGE))


def test_every_module_has_its_level() -> None:
    assert sorted(ORDER) == MODULES


@pytest.mark.parametrize("module", [m for m in MODULES if m != "__init__.py"])
def test_imports_point_upwards(module: str) -> None:
    for name in imported_modules(module):
        if name.split(".")[0] == "cllm":
            assert ORDER.index(file_of(name)) < ORDER.index(module), f"{module} imports {name}"


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("kylin/")])
def test_kylin_knows_arrays_only(module: str) -> None:
    for name in imported_modules(module):
        inside = name.startswith("cllm.kylin") or name.split(".")[0] in sys.stdlib_module_names
        assert inside or name in KYLIN_MAY_IMPORT or name.split(".")[0] in {"numpy", "numba", "llvmlite"}, (
            name
        )


@pytest.mark.parametrize("module", MODULES)
def test_files_and_functions_are_short(module: str) -> None:
    text = (PACKAGE / module).read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, node.name


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_it_owns(module: str) -> None:
    assert ast.get_docstring(ast.parse((PACKAGE / module).read_text(encoding="utf-8")))


def test_import_loads_no_heavy_library() -> None:
    heavy = ("numba", "llvmlite", "llama_cpp", "jinja2", "torch", "huggingface_hub")
    code = f"import sys, cllm; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_are_sorted_and_exist() -> None:
    import cllm

    assert cllm.__all__ == sorted(cllm.__all__, key=lambda name: (not name.isupper(), name))
    assert all(hasattr(cllm, name) for name in cllm.__all__)


@pytest.mark.parametrize("module", [m for m in MODULES if not m.startswith("backends/llama")])
def test_only_the_llama_backend_imports_llama_cpp(module: str) -> None:
    assert "llama_cpp" not in {name.split(".")[0] for name in imported_modules(module)}
