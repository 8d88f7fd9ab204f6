"""The choice of instruction set: made once, from what the machine has, for all kernels."""

from __future__ import annotations

import os
from functools import cache

import llvmlite.binding as llvm

from ..errors import ConfigError

ISAS = ("avx512vnni", "avxvnni", "avx2", "sdot", "generic")  # the best first
_REQUIRED = {
    "avx512vnni": ("avx512f", "avx512bw", "avx512vl", "avx512vnni"),
    "avxvnni": ("avx2", "fma", "f16c", "avxvnni"),
    "avx2": ("avx2", "fma", "f16c"),
    "sdot": ("dotprod",),
    "generic": (),
}


def usable_isas() -> list[str]:
    """The instruction sets that this machine has, the best first."""
    features = llvm.get_host_cpu_features()
    return [isa for isa in ISAS if all(features.get(feature) for feature in _REQUIRED[isa])]


@cache
def host_isa() -> str:
    """The best instruction set of this machine, or the one that the environment variable CLLM_ISA forces.

    Raises `ConfigError` where CLLM_ISA names none, or one that this machine lacks.
    """
    usable = usable_isas()
    forced = os.environ.get("CLLM_ISA")
    if forced and forced not in usable:
        raise ConfigError(
            f"CLLM_ISA should be one of {', '.join(usable)} on this machine; found {forced!r}",
            field="CLLM_ISA",
        )
    return forced or usable[0]
