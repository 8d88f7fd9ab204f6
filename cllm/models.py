"""`cllm models`: finds, fetches and describes model files.

It reads a file's header and checks its tensors, but computes nothing with them. It must not know how names
become files (`hub.py` does).
"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import asdict
from typing import Any

import numpy as np

from .cli import CommandParser, naming_flags, printable, run_command
from .config import EngineConfig
from .errors import ModelFileError
from .hub import DEMO, CachedModel, cached_models, cached_path, part_paths, pull
from .kylin.gguf import GGUFFile, read_gguf
from .kylin.kv_cache import BLOCK, block_bytes, blocks_for
from .kylin.weights import ModelShape, Weights, load_weights
from .tokenizer import make_tokenizer

# What the keys `<architecture>.*` say of a network, whatever the architecture.
_SHAPE_KEYS = {
    "num_layers": "block_count",
    "width": "embedding_length",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_width": "attention.key_length",
    "ffn_width": "feed_forward_length",
    "context_length": "context_length",
}
_TEMPLATE_VARIABLES = ("enable_thinking", "tools")
_LONGEST_TEXT = 200  # characters, or items, shown of a value in the file


def inspect(path: str, *, context_length: int | None = None) -> dict[str, Any]:
    """What is in a GGUF file of any architecture, and how kylin would run it. JSON types; sizes in bytes.

    `context_length`: tokens of the KV cache that is counted (None: what an engine chooses for one sequence).
    A file that kylin refuses is described all the same: `kylin` then says why and `memory` is None. Raises
    `ModelFileError` for a file that cannot be read, `ConfigError` for a context beyond the trained one.
    """
    file = read_gguf(path)
    tokenizer = _describe_tokenizer(file)
    weights, reason = _try_kylin(file)
    reason = reason or tokenizer["problem"]
    parts = part_paths(path) if file.metadata.get("split.count", 1) > 1 else [path]
    return {
        "path": path,
        "num_parts": len(parts),
        "file_bytes": sum(map(os.path.getsize, parts)),
        "gguf_version": file.version,
        "name": _plain(file.metadata.get("general.name")),
        "architecture": _plain(file.metadata.get("general.architecture")),
        "shape": _describe_shape(file, weights.shape if weights else None),
        "tensor_types": _count_types(file),
        "tokenizer": tokenizer,
        "chat_template": _describe_template(file),
        "kylin": {
            "runs": reason is None,
            "reason": reason,
            "kernels": _kernels(weights) if weights and reason is None else None,
        },
        "memory": _count_memory(weights, context_length) if weights and reason is None else None,
    }


def _try_kylin(file: GGUFFile) -> tuple[Weights | None, str | None]:
    """The weights, or the reason why kylin does not run them."""
    try:
        return load_weights(file), None
    except ModelFileError as error:
        return None, str(error).removeprefix(f"{file.path}: ")


def _describe_shape(file: GGUFFile, shape: ModelShape | None) -> dict[str, Any]:
    """The sizes that kylin computes with; where it does not, what the metadata say (None: nothing)."""
    prefix = f"{file.metadata.get('general.architecture')}."
    known = {
        name: getattr(shape, name) if shape else _plain(file.metadata.get(prefix + key))
        for name, key in _SHAPE_KEYS.items()
    }
    embedding = file.tensors.get("token_embd.weight")
    return known | {
        "vocab_size": embedding.shape[0] if embedding else None,
        "has_tied_embeddings": embedding is not None and "output.weight" not in file.tensors,
        "num_parameters": sum(math.prod(tensor.shape) for tensor in file.tensors.values()),
    }


def _count_types(file: GGUFFile) -> dict[str, dict[str, int]]:
    """For each tensor type, by falling size: tensors, their parameters and bytes."""
    counts: dict[str, dict[str, int]] = {}
    for tensor in file.tensors.values():
        count = counts.setdefault(tensor.type.name, {"num_tensors": 0, "num_parameters": 0, "num_bytes": 0})
        count["num_tensors"] += 1
        count["num_parameters"] += math.prod(tensor.shape)
        count["num_bytes"] += tensor.nbytes
    return dict(sorted(counts.items(), key=lambda item: -item[1]["num_bytes"]))


def _describe_tokenizer(file: GGUFFile) -> dict[str, Any]:
    """`problem`: why cLLM's own tokenizer does not read it, else None."""
    get = file.metadata.get
    tokens = get("tokenizer.ggml.tokens")
    tokens = tokens if isinstance(tokens, list) else []
    problem = None
    try:
        make_tokenizer(file.metadata)
    except ModelFileError as error:
        problem = str(error)

    def special(name: str) -> dict[str, Any] | None:
        token_id = get(f"tokenizer.ggml.{name}_token_id")
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            return None
        return {"id": token_id, "text": _plain(tokens[token_id])}

    return {
        "model": _plain(get("tokenizer.ggml.model")),
        "pre": _plain(get("tokenizer.ggml.pre")),
        "num_tokens": len(tokens),
        "bos": special("bos"),
        "eos": special("eos"),
        "problem": problem,
    }


def _describe_template(file: GGUFFile) -> dict[str, Any] | None:
    """`variables`: which of those that callers set it mentions."""
    source = file.metadata.get("tokenizer.chat_template")
    if not isinstance(source, str):
        return None
    return {
        "num_chars": len(source),
        "variables": [variable for variable in _TEMPLATE_VARIABLES if variable in source],
    }


def _kernels(weights: Weights) -> str:
    """What `kernels="auto"` means for these weights on this machine."""
    # Imported here, since it loads numba.
    from .kylin.fast import can_run_fast
    from .kylin.isa import host_isa
    from .kylin.matmul import is_fast
    from .kylin.program import matrices_of

    if can_run_fast(weights):
        return f"SIMD ({host_isa()})"
    slow = sorted({m.weight.type.name for m in matrices_of(weights) if not is_fast(m.weight.type)})
    return f"plain (there are no SIMD kernels for {', '.join(slow) or 'these widths, or for this system'})"


def _count_memory(weights: Weights, context_length: int | None) -> dict[str, int]:
    """Bytes that kylin holds for one sequence of `context_length` tokens, with a KV cache of f16."""
    from .kylin.fast import can_run_fast
    from .kylin.matmul import packed_bytes
    from .kylin.program import matrices_of

    shape = weights.shape
    context = EngineConfig(context_length=context_length).context_within(shape.context_length)
    tensors = [layer.weight for layer in matrices_of(weights)]
    a_block = block_bytes(shape.num_layers, shape.num_kv_heads, shape.head_width, "f16")
    size = packed_bytes if can_run_fast(weights) else lambda tensor: tensor.nbytes
    return {
        "weights_bytes": sum(map(size, tensors)),
        "context_length": context,
        "kv_cache_bytes": blocks_for(context) * a_block,
        "kv_cache_bytes_per_token": a_block // BLOCK,
    }


def _plain(value: Any) -> Any:
    """A text, a number or an array of integers for JSON; None for all else. Long ones are cut, and an array of
    equal values (one a layer) counts as that value."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size:
        return int(value[0]) if (value == value[0]).all() else value[:_LONGEST_TEXT].tolist()
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        return value[:_LONGEST_TEXT] + "..."
    return value if isinstance(value, int | str) else None


# --- For people ---------------------------------------------------------------------------------------------


def format_inspection(found: dict[str, Any]) -> str:
    """What `inspect` returns, one line a subject."""
    lines = {
        "file": f"{found['path']}: {_size(found['file_bytes'])}, GGUF version {found['gguf_version']}"
        + (f", {found['num_parts']} parts" if found["num_parts"] > 1 else ""),
        "architecture": f"{found['architecture']}" + (f" ({found['name']})" if found["name"] else ""),
        "shape": _format_shape(found["shape"]),
        "tensor types": ", ".join(
            f"{name} {count['num_tensors']} tensors {_size(count['num_bytes'])}"
            for name, count in found["tensor_types"].items()
        ),
        "tokenizer": _format_tokenizer(found["tokenizer"]),
        "chat template": _format_template(found["chat_template"]),
        "kylin": _format_kylin(found["kylin"]),
    }
    if memory := found["memory"]:
        lines["memory"] = (
            f"weights {_size(memory['weights_bytes'])}, KV cache {_size(memory['kv_cache_bytes'])} for a sequence "
            f"of {memory['context_length']} tokens ({_size(memory['kv_cache_bytes_per_token'])} a token)"
        )
    return "\n".join(f"{subject:15}{printable(text)}" for subject, text in lines.items())


def _format_shape(shape: dict[str, Any]) -> str:
    tied = ", tied embeddings" if shape["has_tied_embeddings"] else ""
    return (
        "{num_parameters:,} parameters: {num_layers} layers, width {width}, {num_heads} heads, {num_kv_heads} kv-heads "
        "of {head_width}, ffn {ffn_width}, vocabulary {vocab_size}, trained for {context_length} tokens"
    ).format(**{name: "?" if value is None else value for name, value in shape.items()}) + tied


def _format_tokenizer(tokenizer: dict[str, Any]) -> str:
    specials = [
        f"{name.upper()} {tokenizer[name]['id']} {tokenizer[name]['text']}"
        for name in ("bos", "eos")
        if tokenizer[name]
    ]
    kind = f"{tokenizer['model']}, pre-tokenizer {tokenizer['pre']}, {tokenizer['num_tokens']} tokens"
    return ", ".join([kind, *specials])


def _format_template(template: dict[str, Any] | None) -> str:
    if template is None:
        return "none"
    return ", ".join([f"{template['num_chars']} characters", *template["variables"]])


def _format_kylin(kylin: dict[str, Any]) -> str:
    return f"runs it, kernels {kylin['kernels']}" if kylin["runs"] else f"does not run it: {kylin['reason']}"


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} bytes"


# --- The command --------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status. Raises `CLLMError` for what goes wrong."""
    args = _parser().parse_args(argv)
    if args.action == "list":
        _list(as_json=args.json)
    elif args.action == "inspect":
        with naming_flags(args):
            found = inspect(cached_path(args.name), context_length=args.context_length)
        print(json.dumps(found) if args.json else format_inspection(found))
    else:
        print(pull(args.name) if args.action == "pull" else cached_path(args.name))
    return 0


def _list(*, as_json: bool) -> None:
    """The model in the package and those in Hugging Face's cache."""
    demo = cached_path(DEMO)
    models = [CachedModel(DEMO, demo, os.path.getsize(demo)), *cached_models()]
    if as_json:
        print(json.dumps([asdict(model) for model in models]))
        return
    width = max(len(model.name) for model in models)
    for model in models:
        print(f"{model.name:{width}}  {_size(model.size):>10}  {model.path}")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="cllm models",
        description="Finds and describes model files. NAME is demo, the path of a .gguf file or USER/REPO[:QUANT] on "
        "Hugging Face (without QUANT: Q4_K_M), whose cache and environment variables are used.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    fetch = actions.add_parser(
        "pull", help="download what the cache lacks of the newest version; print the path"
    )
    fetch.add_argument("name", metavar="USER/REPO[:QUANT]")
    show = actions.add_parser("list", help="the models that are here: name, size, path")
    where = actions.add_parser("path", help="print the path of a model that is here")
    where.add_argument("name", metavar="NAME")
    look = actions.add_parser(
        "inspect",
        help="architecture, shape, tensor types, tokenizer, chat template, and what kylin needs to run it",
    )
    look.add_argument("name", metavar="NAME")
    look.add_argument(
        "-c",
        "--ctx-size",
        dest="context_length",
        type=int,
        metavar="N",
        help="count a KV cache of N tokens (default: what the model was trained for, at most 4096)",
    )
    for action in (show, look):
        action.add_argument("--json", action="store_true", help="print JSON")
    return parser


if __name__ == "__main__":
    run_command(main)
