"""Compares what two runs of a workload produced, bit for bit."""

from __future__ import annotations

from typing import Any

import torch


def same(one: Any, other: Any) -> bool:
    """Whether two leaves are the same to the last bit: kind, dtype, shape, strides and values."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and (one == other or (one != one and other != other))
    if (one.dtype, one.shape, one.stride()) != (other.dtype, other.shape, other.stride()):
        return False
    if one.numel() == 0:
        return True
    # As bytes: NaNs equal themselves, and 0.0 is not -0.0.
    return torch.equal(
        one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8)
    )


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Tells, a line each, in what two runs' results differ."""
    found = []
    for step in one.keys() | other.keys():
        if step not in one or step not in other:
            found.append(f"{step}: only one of the two ran it")
            continue
        here, there = one[step], other[step]
        if [path for path, _ in here] != [path for path, _ in there]:
            found.append(f"{step}: the results are not built alike")
            continue
        for (path, a), (_, b) in zip(here, there, strict=True):
            if not same(a, b):
                found.append(f"{step}: {path or 'the result'} differs: {_short(a)} and {_short(b)}")
    return sorted(found)


def _short(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)[:200]
