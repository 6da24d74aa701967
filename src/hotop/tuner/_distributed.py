"""One choice per key for all ranks of a distributed program."""

from __future__ import annotations

import os
from typing import Any

import torch

from hotop.tuner import _devices, _store


def is_up() -> bool:
    """Return whether this process is a rank."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()


def writes_files() -> bool:
    """Return whether this process writes the machine's file: one rank per machine does."""
    if not is_up():
        return True
    return os.environ.get("LOCAL_RANK", str(torch.distributed.get_rank())) == "0"


def local_devices() -> list[torch.device]:
    """Return the CPU, and this rank's accelerator if there is one."""
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    return devices


def agreed(
    tables: dict[torch.device, _store.Table], group: Any = None
) -> dict[torch.device, _store.Table]:
    """Return the union of all ranks' tables, the same on every rank.

    Choices are united per device name; a rank takes those for the devices it has. Of two choices
    for one key the later one wins, and of two of the same instant the tactic's name decides.
    """
    mine = [table for table in tables.values()]
    gathered: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(gathered, mine, group=group)
    united: dict[str, _store.Table] = {}
    for tables_of_rank in gathered:
        for table in tables_of_rank:
            name = table.device["name"]
            united.setdefault(name, _store.Table(table.device)).merge(table)
    found = {}
    for device in local_devices():
        table = united.get(_devices.describe(device)["name"])
        if table is not None:
            found[device] = table
    return found
