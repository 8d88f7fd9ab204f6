"""Compiles emitted LLVM IR without numba: to a function of this machine, or to the assembly of another."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from mmap import PAGESIZE, mmap
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

PROT_NONE, PROT_READ_WRITE = 0, 3
libc = ctypes.CDLL(None, use_errno=True)


def compile_here(
    emit: Callable[[ir.Module], Any], num_arguments: int, float_argument: int | None = None
) -> Callable[..., None]:
    """The function of i64 arguments (but for one float) that `emit` puts into a module, for this machine."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = ir.Module()
    module.triple = llvm.get_default_triple()
    function = emit(module)
    function.linkage = ""
    features = llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=1)
    engine = llvm.create_mcjit_compiler(optimized(module, machine), machine)
    engine.finalize_object()
    arguments: list[Any] = [ctypes.c_int64] * num_arguments
    if float_argument is not None:
        arguments[float_argument] = ctypes.c_float
    kind = ctypes.CFUNCTYPE(None, *arguments)
    call = kind(engine.get_function_address(function.name))
    call.engine = engine  # which owns the code
    return call


def assembly_for(emit: Callable[[ir.Module], Any], triple: str, cpu: str) -> str:
    """What `emit` becomes on another processor."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    module.triple = triple
    emit(module).linkage = ""
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=1)
    return str(machine.emit_assembly(optimized(module, machine)))


def optimized(module: ir.Module, machine: Any) -> Any:
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=1))
    builder.getModulePassManager().run(parsed, builder)
    return parsed


@contextmanager
def guarded(data: np.ndarray) -> Iterator[np.ndarray]:
    """A copy of `data` that ends where a page begins that nobody may touch: one byte too far is a crash."""
    pages = -(-data.nbytes // PAGESIZE)
    memory = mmap(-1, (pages + 1) * PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    fence = ctypes.c_void_p(start + pages * PAGESIZE)
    assert libc.mprotect(fence, ctypes.c_size_t(PAGESIZE), PROT_NONE) == 0
    kept = np.frombuffer(memory, np.uint8)[pages * PAGESIZE - data.nbytes : pages * PAGESIZE]
    copy = kept.view(data.dtype).reshape(data.shape)
    copy[...] = data
    yield copy
    libc.mprotect(fence, ctypes.c_size_t(PAGESIZE), PROT_READ_WRITE)
