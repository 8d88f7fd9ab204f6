"""How kylin's kernels are compiled, and where the machine code is kept between runs.

numba notices a change of the file that holds a kernel, but not of the files whose functions were inlined into it.
So the folder of the cache carries a hash of all kernel sources, and the instruction set that they were compiled
for: other sources, other folder.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numba
import numba.extending
from numba import cfunc, config, njit, types

from .isa import host_isa
from .simd import call_emitted

intrinsic: Any = (
    numba.extending.intrinsic
)  # the signature that it is typed with is the definition's, not the call's

logger = logging.getLogger(__name__)


def kernel(function: Callable[..., Any], signature: Any = None) -> Any:
    """Compiles an entry point: without the GIL, without Python's errors, cached on disk.

    With a `signature` it is compiled now, otherwise at its first call.
    """
    return _cached(lambda: njit(signature, nogil=True, cache=True, error_model="numpy")(function))


@cache
def native_function(function: Callable[..., Any], num_arguments: int) -> Any:
    """Compiles a function of int64 arguments to machine code with a fixed `address`, and `ctypes` to call it by.

    Compiled code calls it through the address, so it is compiled once and not again with each of its callers. It is
    kept, since an address keeps nothing alive.
    """
    signature = types.void(*(types.int64,) * num_arguments)
    return _cached(lambda: cfunc(signature, cache=True, error_model="numpy")(function))


def _cached(compile_: Callable[[], Any]) -> Any:
    """Calls `compile_` such that numba keeps what it compiles in `cache_dir`."""
    before = config.CACHE_DIR  # type: ignore[attr-defined]  # set from the environment when numba is loaded
    config.CACHE_DIR = before or cache_dir()  # type: ignore[attr-defined]
    try:
        return compile_()
    finally:
        config.CACHE_DIR = before  # type: ignore[attr-defined]  # other users of numba in this process keep their own place


def inlined(function: Callable[..., Any]) -> Any:
    """Makes a helper a part of each kernel that calls it. It is never compiled by itself, which would take time."""
    return njit(nogil=True, error_model="numpy", inline="always")(function)


def emitted(name: str, emit: Callable[..., Any], num_arguments: int) -> Any:
    """What an intrinsic of so many int64 gives numba: its signature, and a call of the function `name` that
    `emit(module, isa)` puts into the module."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        call_emitted(builder, name, partial(emit, isa=host_isa()), values)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * num_arguments), generate


@cache
def cache_dir() -> str:
    """The folder of the compiled kernels; created. `NUMBA_CACHE_DIR`, where set, goes before it.

    In the user's cache directory, or, where that cannot be written, in a temporary one (and the log says so).
    """
    name = f"kernels-{host_isa()}-{_source_hash()}"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "cllm" / name
    fallback = Path(tempfile.gettempdir()) / f"cllm-{os.getuid() if hasattr(os, 'getuid') else 'user'}" / name
    for folder in (home, fallback):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return str(folder)
        except OSError as error:
            logger.warning("compiled kernels cannot be kept in %s: %s", folder, error)
    return tempfile.mkdtemp(prefix="cllm-")


def _source_hash() -> str:
    """A hash of every file that a kernel can come from."""
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
