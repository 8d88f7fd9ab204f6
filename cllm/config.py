"""`EngineConfig`: the settings of one engine, frozen, checked when it is made. It loads nothing."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .errors import ConfigError

BACKENDS = ("kylin", "llama", "mock")
KYLIN_KV_CACHE_DTYPES = ("f16", "f32")
KV_CACHE_DTYPES = (*KYLIN_KV_CACHE_DTYPES, "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
KERNELS = ("auto", "plain", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. None means: chosen when the model is known.

    model: "demo" for the model in the package, the path of a GGUF file, or "user/repo[:quant]" on Hugging Face.
    backend: "kylin", "llama" or "mock".
    context_length: tokens of one sequence, prompt and output (None: the trained context, at most 4096).
    max_num_seqs: sequences that run at once. max_num_batched_tokens: tokens of one step (None: 512 on a CPU,
    2048 with GPU layers).
    kv_cache_tokens: tokens that the KV cache holds (None: context_length * max_num_seqs, at most a quarter of
    the free memory). llama on a CPU runs several sequences faster with that many, each in cells of its own.
    num_threads: None for all cores that this process may use; on llama with all layers on a GPU 1.
    num_gpu_layers (llama): layers on the GPU, -1 for all (None: all where llama.cpp has a GPU, else 0).
    kv_cache_dtype: "f16" or "f32"; on llama any of `KV_CACHE_DTYPES`. max_queue: requests that may wait.
    enable_prefix_caching: keep what finished requests computed, for others that begin alike.
    kernels (kylin): "auto" for the fastest here, "plain" for portable numba, "numpy" for the reference,
    which computes the whole sequence again for each token.

    Raises `ConfigError` naming the field.
    """

    model: str = "demo"
    backend: str = "kylin"
    context_length: int | None = None
    max_num_seqs: int = 8
    max_num_batched_tokens: int | None = None
    kv_cache_tokens: int | None = None
    num_threads: int | None = None
    num_gpu_layers: int | None = None
    kv_cache_dtype: str = "f16"
    enable_prefix_caching: bool = True
    kernels: str = "auto"
    max_queue: int = 256

    def __post_init__(self) -> None:
        _check_choice("backend", self.backend, BACKENDS)
        dtypes = KV_CACHE_DTYPES if self.backend == "llama" else KYLIN_KV_CACHE_DTYPES
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, dtypes)
        _check_choice("kernels", self.kernels, KERNELS)
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model should be the path of a GGUF file; found {self.model!r}", field="model")
        for field, largest in _COUNTS.items():
            _check_count(field, getattr(self, field), largest)
        if not isinstance(self.enable_prefix_caching, bool):
            raise ConfigError(
                f"enable_prefix_caching should be True or False; found {self.enable_prefix_caching!r}",
                field="enable_prefix_caching",
            )
        if self.num_gpu_layers != -1:
            _check_count("num_gpu_layers", self.num_gpu_layers, 10_000, smallest=0)
        if self.backend != "llama" and self.num_gpu_layers is not None:
            raise ConfigError("num_gpu_layers belongs to the llama backend", field="num_gpu_layers")
        if self.backend == "llama" and self.kernels != "auto":
            raise ConfigError("kernels belongs to the kylin backend", field="kernels")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs "
                f"({self.max_num_seqs}): each running sequence needs one token a step",
                field="max_num_batched_tokens",
            )

    def num_slots(self) -> int:
        """Slots of the backend: those of running sequences, and more for prefixes that are kept."""
        if not self.enable_prefix_caching:
            return self.max_num_seqs
        return max(self.max_num_seqs, min(4 * self.max_num_seqs, 256))  # 256 is llama.cpp's limit

    def batched_tokens(self, default: int = 512) -> int:
        """`max_num_batched_tokens`, else `default`, but a token for each sequence at least."""
        return self.max_num_batched_tokens or max(default, self.max_num_seqs)

    def context_within(self, trained: int) -> int:
        """Tokens of one sequence for a model trained with so many. Raises `ConfigError` where more are asked for."""
        if self.context_length is None:
            return min(4096, trained)
        if self.context_length > trained:
            raise ConfigError(
                f"context_length {self.context_length} is beyond the {trained} tokens that the model was trained for",
                field="context_length",
            )
        return self.context_length


# Each count with the largest value that makes sense; the fields that may be None have one chosen later.
_COUNTS = {
    "context_length": 2**24,
    "max_num_seqs": 1024,
    "max_num_batched_tokens": 2**20,
    "kv_cache_tokens": 2**31 - 1,
    "num_threads": 1024,
    "max_queue": 2**20,
}
_CHOSEN_LATER = {field.name for field in fields(EngineConfig) if field.default is None}


def make_config(settings: Mapping[str, Any]) -> EngineConfig:
    """An `EngineConfig` of keyword settings; an unknown name is a `ConfigError` that names the nearest."""
    known = [field.name for field in fields(EngineConfig)]
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known settings: {', '.join(known)}"
            raise ConfigError(f"unknown setting {name!r}; {hint}", field=name)
    return EngineConfig(**settings)


def _check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{field} should be one of {', '.join(choices)}; found {value!r}", field=field)


def _check_count(field: str, value: object, largest: int, smallest: int = 1) -> None:
    if value is None and field in _CHOSEN_LATER:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not smallest <= value <= largest:
        raise ConfigError(
            f"{field} should be a whole number from {smallest} to {largest}; found {value!r}", field=field
        )
