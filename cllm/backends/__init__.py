"""The backends: one contract (`base.py`), its implementations, and the one function that loads them."""

from __future__ import annotations

from dataclasses import replace

from ..config import EngineConfig
from ..hub import DEMO, model_path
from ..kylin.gguf import read_gguf
from ..tokenizer import Tokenizer, make_tokenizer
from .base import Backend


def load_backend(config: EngineConfig) -> tuple[Backend, Tokenizer]:
    """The model that `config` names, downloaded where it must be, and the tokenizer of its file.

    Raises `ConfigError` or `ModelFileError`.
    """
    if config.backend != "mock" or config.model != DEMO:  # the mock's own vocabulary needs no file
        config = replace(config, model=model_path(config.model))
    # Imported here so that `import cllm` loads no numba.
    if config.backend == "mock":
        from .mock import load_mock

        return load_mock(config)
    if config.backend == "llama":
        from .llama import load_llama

        return load_llama(config)
    from .kylin import load_kylin

    file = read_gguf(config.model)
    backend, tokenizer = load_kylin(file, config), make_tokenizer(file.metadata)
    backend.prepare()  # last: meanwhile the system hands out the memory that it needs
    return backend, tokenizer
