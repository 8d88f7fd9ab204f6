"""What this process may use of the machine: processor cores and memory. It knows nothing of models."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Cores that this process may run on: its affinity mask, cut by the cgroup's CPU quota; at least 1."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    quota = _read(_CGROUP / "cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def available_memory() -> int:
    """Bytes that this process may still allocate: the least of free memory, cgroup and address-space limits."""
    limits = [_meminfo("MemAvailable")]
    maximum, used = _read(_CGROUP / "memory.max").strip(), _read(_CGROUP / "memory.current").strip()
    if maximum.isdigit() and used.isdigit():
        limits.append(max(0, int(maximum) - int(used)))
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            mapped = int(_read(Path("/proc/self/statm")).split()[0] or 0) * resource.getpagesize()
            limits.append(max(0, soft - mapped))
    except (ImportError, IndexError):
        pass
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else 4 << 30


def _meminfo(key: str) -> int | None:
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
