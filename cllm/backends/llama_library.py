"""llama.cpp as a loaded library: its log, its devices, and model handles that are freed once.

It knows files and pointers, no slots and no batches. With `llama_context.py` and `llama_tokenizer.py` it is
the only place that calls the raw API of llama-cpp-python (llama.h).
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
import weakref
from collections import deque
from typing import Any

from ..errors import ConfigError, ModelFileError

logger = logging.getLogger("cllm.llama")

_ERROR, _CONTINUED = 4, 5  # ggml_log_level in ggml.h
_GPU_DEVICES = (1, 2)  # GPU and integrated GPU of ggml_backend_dev_type in ggml-backend.h


class _Log:
    """llama.cpp's log: silent but for `logging` at level DEBUG; keeps the errors of each thread."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def receive(self, level: int, text: bytes, user_data: object) -> None:
        line = text.decode(errors="replace").rstrip()
        if level == _ERROR:
            self._errors().append(line)
        if line and level != _CONTINUED:  # a continued line is a progress bar
            logger.debug("%s", line)

    def clear(self) -> None:
        self._errors().clear()

    def reason(self) -> str:
        """The first error since `clear`: those that follow only say which caller failed."""
        errors = self._errors()
        return errors[0].partition(": ")[2] or errors[0] if errors else "llama.cpp gave no reason"

    def _errors(self) -> deque[str]:
        if not hasattr(self._of_thread, "errors"):
            self._of_thread.errors = deque(maxlen=16)
        errors: deque[str] = self._of_thread.errors
        return errors


log = _Log()


@functools.cache
def load_library() -> Any:
    """The module `llama_cpp`, initialised. Raises `ConfigError` that says what to install."""
    try:
        import llama_cpp
    except ImportError as error:
        raise ConfigError(
            f"backend 'llama' needs llama-cpp-python ({error}): pip install 'cllm[llama]'", field="backend"
        ) from None
    except (OSError, RuntimeError) as error:  # installed, but its shared library does not load
        raise ConfigError(f"llama-cpp-python does not load: {error}", field="backend") from error
    library: Any = llama_cpp
    library.cllm_log_callback = library.llama_log_callback(log.receive)  # must outlive every call
    library.llama_log_set(library.cllm_log_callback, None)
    library.llama_backend_init()
    return library


def free_gpu_memory() -> int:
    """Bytes free on all GPUs together; 0 where llama.cpp has none."""
    ggml = load_library().llama_cpp._lib  # the library's handle also finds the symbols of ggml
    ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
    total = 0
    for index in range(ggml.ggml_backend_dev_count()):
        device = ctypes.c_void_p(ggml.ggml_backend_dev_get(ctypes.c_size_t(index)))
        if ggml.ggml_backend_dev_type(device) in _GPU_DEVICES:
            free, size = ctypes.c_size_t(), ctypes.c_size_t()
            ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(size))
            total += free.value
    return total


class LlamaModel:
    """A `llama_model`. `close` may be called twice; without it the memory goes back with the object."""

    def __init__(
        self, path: str | os.PathLike[str], *, num_gpu_layers: int = 0, vocab_only: bool = False
    ) -> None:
        """Raises `ModelFileError` with llama.cpp's reason. The file should have passed `read_gguf` before."""
        library = load_library()
        params = library.llama_model_default_params()
        params.vocab_only = vocab_only
        params.n_gpu_layers = 10_000 if num_gpu_layers == -1 else num_gpu_layers
        log.clear()
        self.pointer = library.llama_model_load_from_file(os.fsencode(path), params)
        if not self.pointer:
            raise ModelFileError(f"llama.cpp cannot load it: {log.reason()}", path=os.fspath(path))
        self.vocab = library.llama_model_get_vocab(self.pointer)
        keeps_state = library.llama_model_is_recurrent(self.pointer) or library.llama_model_is_hybrid(
            self.pointer
        )
        # Whether the cache holds every token, and not a state or a window in place of some.
        self.keeps_tokens: bool = not keeps_state and not library.llama_model_n_swa(self.pointer)
        self.close = weakref.finalize(self, library.llama_model_free, self.pointer)
        self.close.atexit = False  # a daemon thread may still compute when the interpreter goes
