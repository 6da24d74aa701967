"""Facts about the machine and the software that a measurement depends on."""

import os
import platform
import time
from pathlib import Path

import torch

import hotop

__all__ = ["facts"]


def facts() -> dict[str, object]:
    """Collects versions, the CPU and the thread count, ready for JSON."""
    return {
        "hotop": hotop.__version__,
        "core": hotop.is_native(),
        "torch": torch.__version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "cpu": _cpu_model(),
        "cpus_usable": _usable_cpus(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine() or "unknown"


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
