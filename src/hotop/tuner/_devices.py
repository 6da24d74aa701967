"""The devices of this process, as files name them."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

import torch


def describe(device: torch.device) -> dict[str, str]:
    """Return what a file says of the device it is for."""
    if device.type == "cpu":
        capability = torch.backends.cpu.get_cpu_capability()
        name = f"{_cpu_model()}, {capability}, {os.cpu_count()} threads"
    elif device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        name = f"{torch.cuda.get_device_name(device)}, sm_{major}{minor}"
    else:
        name = device.type
    return {"type": device.type, "name": name}


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def of_type(device_type: str) -> list[torch.device]:
    """Return this process's devices of a type."""
    if device_type == "cuda":
        return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return [torch.device(device_type)]


def alike(device: torch.device) -> list[int | None]:
    """Return the indices of the devices that are like this one, itself included."""
    if device.type != "cuda":
        return [device.index]
    described = describe(device)
    return [d.index for d in of_type("cuda") if describe(d) == described]
