"""Every exception that cLLM raises on purpose. It knows nothing of models, requests or backends.

    CLLMError
    ├── ConfigError               a setting is wrong: raised before any work
    ├── ModelFileError            a model file is bad, truncated or of an unsupported kind
    ├── InvalidRequestError       a request is wrong: refused before it is queued
    │   └── ContextLengthError    prompt (and output) do not fit the context
    ├── QueueFullError            the queue is at its limit: try again later
    ├── BackendError              a step failed below the executor
    └── HookError                 a hook name does not exist, or a hook raised

The data that a caller may act on are attributes; the text is for people and says what to do next.
"""

from __future__ import annotations


class CLLMError(Exception):
    """Base of every error of this package."""


class ConfigError(CLLMError):
    """A setting is wrong. `field` is its name in `EngineConfig`, or None."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ModelFileError(CLLMError):
    """A model file is missing, damaged or unsupported. `path` is the file."""

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path


class InvalidRequestError(CLLMError):
    """A request is wrong. `field` names the offending field of the request or of `SamplingParams`."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ContextLengthError(InvalidRequestError):
    """A prompt leaves no room in the context. Both counts are in tokens."""

    def __init__(self, message: str, *, num_tokens: int, limit: int) -> None:
        super().__init__(message, field="prompt")
        self.num_tokens = num_tokens
        self.limit = limit


class QueueFullError(CLLMError):
    """Too many requests wait already."""


class BackendError(CLLMError):
    """A backend refused a batch or failed in a step.

    `nothing_changed`: the backend refused before it touched anything, so every slot is as it was.
    """

    def __init__(self, message: str, *, nothing_changed: bool = False) -> None:
        super().__init__(message)
        self.nothing_changed = nothing_changed


class HookError(CLLMError):
    """A hook name is unknown or was not reached, or a hook function raised. `name` is the hook point."""

    def __init__(self, message: str, *, name: str | None = None) -> None:
        super().__init__(message)
        self.name = name
