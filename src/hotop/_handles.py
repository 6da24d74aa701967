"""Overloads and packets by name, and hotop's classes: how they are found, copied and pickled."""

from __future__ import annotations

import copyreg
import typing
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


class StandIn(type):
    """The class of hotop's classes that stand for one of PyTorch's."""


def stands_for(cls: type) -> type:
    """Return the class of PyTorch that a class of hotop stands for."""
    return next(
        c for c in cls.__mro__ if c.__module__.startswith("torch.") and not isinstance(c, StandIn)
    )


def take_name(cls: type) -> None:
    """Name a class of hotop as the class of PyTorch that it stands for: error texts tell it."""
    theirs = stands_for(cls)
    cls.__name__, cls.__qualname__ = theirs.__name__, theirs.__qualname__
    cls.__module__ = theirs.__module__


def _reduce_class(cls: StandIn) -> tuple[Any, ...]:
    # A pickle of PyTorch's class, which whoever reads it has: cast returns its second argument.
    return typing.cast, (None, stands_for(cls))


copyreg.pickle(StandIn, _reduce_class)
