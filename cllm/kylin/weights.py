"""A GGUF file as the weights of one model: the shape of the network, and every tensor checked against it.

Owns the table of what differs between the supported architectures. Tensors keep their GGUF names and stay
where they are, in the memory-mapped file; only norms and biases are copied, as float32. Nothing is ignored
in silence: a tensor, type or setting that the forward pass would not honour is refused here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelFileError
from .gguf import GGUFFile, Tensor
from .quants import DECODERS, dequantize
from .rope import RopeScaling

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Architecture:
    """What one architecture does differently from the others."""

    qk_norm: bool  # queries and keys are RMS-normed per head before rope
    qkv_bias: bool  # q, k and v have biases (where False a file may still bring them)
    rope_pairs: str  # "halves": (i, i + C/2), as NeoX; "neighbours": (2i, 2i + 1), as the first Llama


ARCHITECTURES = {
    "qwen3": Architecture(qk_norm=True, qkv_bias=False, rope_pairs="halves"),
    "qwen2": Architecture(qk_norm=False, qkv_bias=True, rope_pairs="halves"),
    "llama": Architecture(qk_norm=False, qkv_bias=False, rope_pairs="neighbours"),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes and constants of one network, in the letters of the shape comments."""

    architecture: str
    num_layers: int
    width: int  # D
    num_heads: int  # H
    num_kv_heads: int  # K
    head_width: int  # C
    ffn_width: int  # F
    vocab_size: int  # V
    context_length: int  # tokens that the model was trained for
    rms_eps: float
    rope_base: float
    rope_scaling: RopeScaling

    @property
    def table(self) -> Architecture:
        return ARCHITECTURES[self.architecture]


@dataclass(frozen=True, slots=True)
class Linear:
    """`y = x @ weight.T + bias`. weight: [rows, columns] in its GGUF type; bias: float32[rows] or None."""

    weight: Tensor
    bias: Floats | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """The weights of one transformer block, under their GGUF names."""

    attn_norm: Floats  # [D]
    attn_q: Linear  # [H*C, D]
    attn_k: Linear  # [K*C, D]
    attn_v: Linear  # [K*C, D]
    attn_q_norm: Floats | None  # [C]
    attn_k_norm: Floats | None  # [C]
    attn_output: Linear  # [D, H*C]
    ffn_norm: Floats  # [D]
    ffn_gate: Linear  # [F, D]
    ffn_up: Linear  # [F, D]
    ffn_down: Linear  # [D, F]


@dataclass(frozen=True, slots=True)
class Weights:
    """One model. `output` is `token_embd` itself where the two are tied."""

    shape: ModelShape
    token_embd: Tensor  # [V, D]
    blocks: tuple[Block, ...]
    output_norm: Floats  # [D]
    output: Linear  # [V, D]
    rope_factors: Floats | None  # [C/2], from rope_freqs.weight


def load_weights(file: GGUFFile) -> Weights:
    """The weights in `file`. Raises `ModelFileError` where it is not one that kylin computes exactly."""
    loader = _Loader(file)
    shape = loader.shape
    blocks = tuple(loader.block(layer) for layer in range(shape.num_layers))
    token_embd = loader.matrix("token_embd.weight", shape.vocab_size, shape.width)
    tied = "output.weight" not in file.tensors
    output = Linear(token_embd) if tied else loader.linear("output", shape.vocab_size, shape.width)
    output_norm = loader.vector("output_norm.weight", shape.width)
    rope_factors = loader.optional_vector("rope_freqs.weight", shape.head_width // 2)
    loader.finish()
    return Weights(shape, token_embd, blocks, output_norm, output, rope_factors)


def read_shape(file: GGUFFile) -> ModelShape:
    """The sizes and constants in the file's metadata, each present, of the right type and in range."""
    meta = _Metadata(file)
    arch = meta.architecture
    if arch not in ARCHITECTURES:
        raise ModelFileError(
            f"kylin does not run architecture {arch!r} ({len(file.tensors)} tensors); it runs "
            f"{', '.join(ARCHITECTURES)}. Try --backend llama.",
            path=file.path,
        )
    meta.refuse_unsupported()
    width, num_heads = meta.count("embedding_length"), meta.count("attention.head_count")
    num_kv_heads = meta.count("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise meta.error(f"{num_heads} heads do not share {num_kv_heads} kv-heads evenly")
    embd = file.tensors.get("token_embd.weight")
    if embd is None:
        raise meta.error("the file has no token_embd.weight: it holds no model (a vocabulary only?)")
    return ModelShape(
        architecture=arch,
        num_layers=meta.count("block_count"),
        width=width,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_width=_read_head_width(meta, width, num_heads),
        ffn_width=meta.count("feed_forward_length"),
        vocab_size=embd.shape[0],
        context_length=meta.count("context_length"),
        rms_eps=meta.number("attention.layer_norm_rms_epsilon"),
        rope_base=meta.number("rope.freq_base", _ROPE_BASE),
        rope_scaling=meta.rope_scaling(),
    )


def _read_head_width(meta: _Metadata, width: int, num_heads: int) -> int:
    """The one width of queries, keys and values, all of which rope turns."""
    if "attention.key_length" not in meta and width % num_heads:
        raise meta.error(f"width {width} is not a multiple of its {num_heads} heads")
    head_width = meta.count("attention.key_length", width // num_heads)
    for key, what in (("attention.value_length", "value width"), ("rope.dimension_count", "rotated width")):
        if meta.count(key, head_width) != head_width:
            raise meta.error(f"{what} {meta.count(key)} is not the head width {head_width}; {_TRY_LLAMA}")
    if head_width % 2:
        raise meta.error(f"head width {head_width} is odd, but rope turns pairs")
    return head_width


_ROPE_BASE = 10000.0  # where a file names none
_TRY_LLAMA = "kylin does not compute that. Try --backend llama."
_UNSUPPORTED = (
    "expert_count",
    "attention.sliding_window",
    "attention.clamp_kqv",
    "attention.scale",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "final_logit_softcapping",
)


class _Metadata:
    """The keys `<architecture>.*`, checked one by one."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        arch = file.metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise self.error("general.architecture is missing: this GGUF file names no model")
        self.architecture = arch
        prefix = arch + "."
        self.values: Mapping[str, Any] = {
            key[len(prefix) :]: value for key, value in file.metadata.items() if key.startswith(prefix)
        }

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def error(self, message: str) -> ModelFileError:
        return ModelFileError(message, path=self.file.path)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer below 2^31. An array of equal values (one a layer) counts as that value."""
        value = self.values.get(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise self.error(f"{self.architecture}.{key} should be a positive integer; found {_show(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(f"{self.architecture}.{key} should be a positive number; found {_show(value)}")
        return float(value)

    def refuse_unsupported(self) -> None:
        """Settings of related models that would change the answer, unless they are zero."""
        for key in _UNSUPPORTED:
            value = self.values.get(key)
            if value.any() if isinstance(value, np.ndarray) else value:
                raise self.error(f"{self.architecture}.{key} is {_show(value)}; {_TRY_LLAMA}")
        if self.values.get("attention.causal") is False:
            raise self.error(f"{self.architecture}.attention.causal is False; {_TRY_LLAMA}")

    def rope_scaling(self) -> RopeScaling:
        """As llama.cpp reads it: a factor without a type is linear; `attn_factor` counts for every type."""
        scaled = "rope.scaling.factor" in self or "rope.scale_linear" in self
        kind = self.values.get("rope.scaling.type", "linear" if scaled else "none")
        if not isinstance(kind, str) or kind not in RopeScaling.KINDS:
            kinds = ", ".join(RopeScaling.KINDS)
            raise self.error(f"rope scaling {_show(kind)} is not one of {kinds}; {_TRY_LLAMA}")
        known = ("type", "factor", "original_context_length", "finetuned", "attn_factor")
        for key in self.values:
            if key.startswith("rope.scaling.") and key.removeprefix("rope.scaling.") not in known:
                raise self.error(f"{self.architecture}.{key} is set; {_TRY_LLAMA}")
        attn_factor = self.number("rope.scaling.attn_factor", 1.0)
        if kind == "none":
            return RopeScaling(attn_factor=attn_factor)
        factor = self.number("rope.scaling.factor", self.values.get("rope.scale_linear"))
        original = self.count("rope.scaling.original_context_length", self.count("context_length"))
        if kind == "yarn" and self.number("rope.freq_base", _ROPE_BASE) <= 1:
            raise self.error(f"yarn needs {self.architecture}.rope.freq_base above 1")
        return RopeScaling(kind, factor, original, attn_factor)


class _Loader:
    """Takes tensors out of the file by name, each with its expected shape, and knows which were taken."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.shape = read_shape(file)
        self.taken: set[str] = set()
        missing = Counter(t.type.name for t in file.tensors.values() if t.type not in DECODERS)
        if missing:
            counts = ", ".join(f"{count} of type {name}" for name, count in missing.items())
            total = len(file.tensors)
            raise self.error(f"kylin does not read {counts} (of {total} tensors). Try --backend llama.")

    def error(self, message: str) -> ModelFileError:
        return ModelFileError(message, path=self.file.path)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.file.tensors.get(name)
        if tensor is None:
            raise self.error(f"tensor {name} is missing: the file is incomplete, or its block_count is wrong")
        if tensor.shape != shape:
            raise self.error(f"tensor {name} has shape {list(tensor.shape)}; expected {list(shape)}")
        self.taken.add(name)
        return tensor

    def matrix(self, name: str, rows: int, columns: int) -> Tensor:
        return self.tensor(name, (rows, columns))

    def vector(self, name: str, size: int) -> Floats:
        tensor = self.tensor(name, (size,))
        return dequantize(tensor.data, tensor.type)

    def optional_vector(self, name: str, size: int) -> Floats | None:
        return self.vector(name, size) if name in self.file.tensors else None

    def linear(self, name: str, rows: int, columns: int, *, bias: bool = False) -> Linear:
        """`name.weight`, and `name.bias` where the file has one or `bias` says that it must."""
        weight = self.matrix(f"{name}.weight", rows, columns)
        if bias:
            return Linear(weight, self.vector(f"{name}.bias", rows))
        return Linear(weight, self.optional_vector(f"{name}.bias", rows))

    def block(self, layer: int) -> Block:
        s, at = self.shape, f"blk.{layer}."
        query, kv = s.num_heads * s.head_width, s.num_kv_heads * s.head_width
        norm = self.vector if s.table.qk_norm else lambda name, size: None
        bias = s.table.qkv_bias
        return Block(
            attn_norm=self.vector(at + "attn_norm.weight", s.width),
            attn_q=self.linear(at + "attn_q", query, s.width, bias=bias),
            attn_k=self.linear(at + "attn_k", kv, s.width, bias=bias),
            attn_v=self.linear(at + "attn_v", kv, s.width, bias=bias),
            attn_q_norm=norm(at + "attn_q_norm.weight", s.head_width),
            attn_k_norm=norm(at + "attn_k_norm.weight", s.head_width),
            attn_output=self.linear(at + "attn_output", s.width, query),
            ffn_norm=self.vector(at + "ffn_norm.weight", s.width),
            ffn_gate=self.linear(at + "ffn_gate", s.ffn_width, s.width),
            ffn_up=self.linear(at + "ffn_up", s.ffn_width, s.width),
            ffn_down=self.linear(at + "ffn_down", s.width, s.ffn_width),
        )

    def finish(self) -> None:
        """Refuses a file with tensors that the forward pass would leave unused."""
        unused = sorted(set(self.file.tensors) - self.taken)
        if unused:
            names = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
            raise self.error(f"tensors that kylin would ignore: {names}. Try --backend llama.")


def _show(value: Any) -> str:
    text = repr(value)
    return "nothing" if value is None else text if len(text) <= 60 else text[:57] + "..."
