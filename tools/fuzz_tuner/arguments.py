"""Recipes of calls: what arguments are, so that both sides of a comparison get the same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from tools.fuzz_tuner import memory
from tools.fuzz_tuner.memory import Room, Spot
from torch import Tensor


@dataclass
class Meta:
    """An argument that has no place in a key: a dataclass with a Tensor."""

    lengths: Any
    name: str = "m"


@dataclass(frozen=True)
class Holder:
    """A container or an object in a recipe: ``kind`` of ``parts``."""

    kind: str
    parts: tuple[Any, ...] = ()


@dataclass
class Made:
    """Arguments of one call.

    Attributes:
        values: By parameter.
        rooms: All memory that the arguments lie in.
    """

    values: dict[str, Any]
    rooms: list[Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """How the arguments of a call are made.

    Attributes:
        positional: So many of the values are passed by place, the others by name.
        context: See :func:`entered`.
    """

    rooms: tuple[Room, ...]
    values: dict[str, Any]
    positional: int = 99
    context: str = "plain"

    def make(self) -> Made:
        """Return fresh arguments, always the same bits."""
        with torch.inference_mode(self.context == "inference"):
            rooms = [room.make() for room in self.rooms]
            values = {name: _made(value, rooms) for name, value in self.values.items()}
        items = list(values.items())
        return Made(
            values,
            rooms,
            tuple(value for _, value in items[: self.positional]),
            dict(items[self.positional :]),
        )

    def with_other_data(self, rng: Random, data: str | None = None) -> Recipe:
        """Return a call of the same key with other values in its memory."""
        rooms = tuple(
            memory.with_other_data(room, rng.getrandbits(32), data or rng.choice(memory.DATA))
            for room in self.rooms
        )
        return replace(self, rooms=rooms)


def _made(value: Any, rooms: list[Tensor]) -> Any:
    if isinstance(value, Spot):
        return value.make(rooms)
    if not isinstance(value, Holder):
        return value
    if value.kind == "generator":
        return torch.Generator().manual_seed(value.parts[0])
    parts = [_made(part, rooms) for part in value.parts]
    if value.kind == "list":
        return parts
    if value.kind == "tuple":
        return tuple(parts)
    if value.kind == "dict":
        return {f"k{i}": part for i, part in enumerate(parts)}
    if value.kind == "dataclass":
        return Meta(*parts)
    raise AssertionError(value.kind)


@contextlib.contextmanager
def entered(context: str) -> Iterator[None]:
    """Enter what surrounds a call."""
    with contextlib.ExitStack() as stack:
        if context == "no_grad":
            stack.enter_context(torch.no_grad())
        elif context == "inference":
            stack.enter_context(torch.inference_mode())
        elif context == "float64":
            torch.set_default_dtype(torch.float64)
            stack.callback(torch.set_default_dtype, torch.float32)
        elif context == "autocast":
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        yield


def tensors_in(value: Any) -> list[Tensor]:
    """Return every Tensor in a value, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in tensors_in(one)]
    if isinstance(value, dict):
        return [tensor for one in value.values() for tensor in tensors_in(one)]
    if isinstance(value, Meta):
        return tensors_in(value.lengths)
    return []
