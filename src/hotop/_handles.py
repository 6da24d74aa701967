"""Overloads and packets by name: how they are found, copied and pickled."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch._ops import OpOverload, OpOverloadPacket

_T = TypeVar("_T")


def find_overload(name: str, overload_name: str) -> OpOverload:
    """Return an overload by its names."""
    namespace, op_name = name.split("::")
    return getattr(getattr(getattr(torch.ops, namespace), op_name), overload_name)


def find_packet(qualified_name: str) -> OpOverloadPacket:
    """Return a packet by its name."""
    namespace, op_name = qualified_name.split("::")
    return getattr(getattr(torch.ops, namespace), op_name)


# Methods of hotop's classes. Both objects are singletons; FX copies and pickles node metadata that
# holds them.
def itself(self: _T) -> _T:
    """Copy a singleton."""
    return self


def reduce_overload(self: OpOverload) -> tuple[Any, ...]:
    """Pickle an overload by its names."""
    return find_overload, (self._schema.name, self._overloadname)


def reduce_packet(self: OpOverloadPacket) -> tuple[Any, ...]:
    """Pickle a packet by its name."""
    return find_packet, (self._qualified_op_name,)
