"""cLLM: one engine, two backends, one answer."""

from .config import EngineConfig
from .errors import (
    BackendError,
    CLLMError,
    ConfigError,
    ContextLengthError,
    HookError,
    InvalidRequestError,
    ModelFileError,
    QueueFullError,
)
from .llm import LLM
from .outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamPiece
from .params import SamplingParams
from .tokenizer import load_tokenizer

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "BackendError",
    "CLLMError",
    "CompletionOutput",
    "ConfigError",
    "ContextLengthError",
    "EngineConfig",
    "HookError",
    "InvalidRequestError",
    "Logprob",
    "ModelFileError",
    "QueueFullError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StreamPiece",
    "load_tokenizer",
]
