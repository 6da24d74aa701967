"""Finds modules and Tensors that an object leads to: in containers, closures, partials, fields."""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

# Where nothing of a model's can be, and what would lead to half the process.
_NO_WAY = (str, bytes, int, float, complex, type, types.ModuleType)


def held_in(value: Any) -> Iterator[nn.Module | Tensor]:
    """Return the modules and Tensors that a value holds, however deep; not what these hold."""
    waiting: list[Any] = [value]
    seen: set[int] = set()
    while waiting:
        held = waiting.pop()
        if isinstance(held, nn.Module | Tensor):
            yield held
            continue
        if id(held) in seen or isinstance(held, _NO_WAY):
            continue
        seen.add(id(held))
        waiting += _parts(held)


def _parts(held: Any) -> list[Any]:
    if isinstance(held, Mapping):
        return [*held.keys(), *held.values()]
    if isinstance(held, list | tuple | set | frozenset):
        return list(held)
    if isinstance(held, weakref.ref):
        return [held()]
    if isinstance(held, functools.partial):
        return [held.func, *held.args, *held.keywords.values()]
    if isinstance(held, types.MethodType):
        return [held.__self__, held.__func__]
    if isinstance(held, types.FunctionType):
        return [*closed_over(held), *(held.__defaults__ or ())]
    fields = getattr(held, "__dict__", None)
    return list(fields.values()) if isinstance(fields, dict) else []


def closed_over(function: types.FunctionType) -> Iterator[Any]:
    """Return what a function's closure holds, without cells that are empty yet."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            yield cell.cell_contents
