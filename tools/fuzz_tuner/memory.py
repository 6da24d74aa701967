"""Drawn memory: Tensors of every layout, data and class, made again bit by bit from a recipe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor, nn

FLOATS = (torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTS = (torch.int64, torch.int32, torch.uint8)
COMPLEX = (torch.complex64,)
EXACT = (*FLOATS, *INTS, *COMPLEX)

DATA = ("random",) * 8 + ("tiny", "huge", "constant", "zeros", "ones", "NaN", "some NaN", "inf")
LAYOUTS = (
    *("plain",) * 4, "transposed", "channels last", "expanded", "gaps", "pitch", "offset",
    "odd offset", "size 1", "windows", "far offset",
)  # fmt: skip
# How the Tensor is held: by whom, and whether autograd knows it.
WRAPS = ("plain", "view", "parameter", "leaf", "non-leaf", "frozen parameter")
_BEHIND = 24  # elements of a room behind the last one that a Tensor reaches


@dataclass(frozen=True)
class Room:
    """Memory of some Tensors: elements of one dtype.

    Attributes:
        between: Whole numbers are drawn from this range, its end not included.
    """

    dtype: torch.dtype
    size: int
    data: str
    seed: int
    between: tuple[int, int] | None = None

    def make(self) -> Tensor:
        """Return the memory, filled."""
        generator = torch.Generator().manual_seed(self.seed)
        size, dtype = self.size, self.dtype
        if dtype is torch.bool:
            # Any byte but 0 is true.
            high = 2 if self.data != "tiny" else 256
            values = torch.randint(0, high, (size,), generator=generator, dtype=torch.uint8)
            return _alike(self.data, values).view(torch.bool)
        if not dtype.is_floating_point and not dtype.is_complex:
            low, high = self.between or ((0, 256) if dtype is torch.uint8 else (-9, 10))
            values = torch.randint(low, high, (size,), generator=generator)
            return (values if self.between else _alike(self.data, values)).to(dtype)
        real = torch.float64 if dtype is torch.float64 else torch.float32
        values = torch.randn(size, generator=generator, dtype=real)
        if dtype.is_complex:
            values = torch.complex(values, torch.randn(size, generator=generator, dtype=real))
        return _special(self.data, values, dtype, self.seed).to(dtype)


def _alike(data: str, values: Tensor) -> Tensor:
    if data in ("constant", "ones"):
        return torch.ones_like(values) * (3 if data == "constant" else 1)
    return torch.zeros_like(values) if data == "zeros" else values


def _special(data: str, values: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    half = dtype in (torch.float16, torch.bfloat16)
    if data == "tiny":
        return values * (1e-3 if half else 1e-9)
    if data == "huge":
        return values * (1e3 if half else 1e30)
    if data == "constant":
        return torch.full_like(values, 1.5)
    if data == "zeros":
        return torch.zeros_like(values)
    if data == "ones":
        return torch.ones_like(values)
    if data == "NaN":
        return torch.full_like(values, math.nan)
    if data in ("some NaN", "inf"):
        values[seed % 3 :: 3] = math.nan if data == "some NaN" else math.inf
    return values


@dataclass(frozen=True)
class Spot:
    """One Tensor: where in a room it lies, and who holds it.

    Attributes:
        dtype: Another one than the room's, of the same size: a view of other bytes.
    """

    room: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    wrap: str = "plain"
    dtype: torch.dtype | None = None

    def make(self, rooms: Sequence[Tensor]) -> Tensor:
        """Return the Tensor."""
        room = rooms[self.room]
        if self.dtype is not None:
            room = room.view(self.dtype)
        if self.wrap == "view":
            return room.as_strided(self.shape, self.strides, self.offset)
        made = torch.empty(0, dtype=room.dtype)
        made.set_(room.untyped_storage(), self.offset, self.shape, self.strides)
        if self.wrap in ("parameter", "frozen parameter"):
            return nn.Parameter(made, requires_grad=self.wrap == "parameter")
        if self.wrap == "leaf":
            return made.requires_grad_()
        if self.wrap == "non-leaf":
            with torch.enable_grad():
                return made.requires_grad_().as_strided(self.shape, self.strides, self.offset)
        return made


def packed(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a fresh Tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def layout(kind: str, shape: Sequence[int], rng: Random) -> tuple[int, tuple[int, ...]]:
    """Return offset and strides of a layout for this shape, as far as it has it."""
    draws = [rng.random() for _ in range(6)]  # always as many, so that sizes decide nothing
    dims = len(shape)
    strides = list(packed(shape))
    offset = 0
    if kind in ("transposed", "channels last"):
        order = list(range(dims))
        Random(draws[0]).shuffle(order)
        if kind == "channels last" and dims in (4, 5):
            order = [0, *range(2, dims), 1]
        step = 1
        for i in reversed(order):
            strides[i] = step
            step *= max(shape[i], 1)
    elif kind == "expanded" and dims:
        strides = list(packed([size if draws[i] < 0.6 else 1 for i, size in enumerate(shape)]))
        strides = [0 if draws[i] >= 0.6 else s for i, s in enumerate(strides)]
    elif kind == "gaps" and dims:
        strides = [stride * (2 + int(draws[0] * 3)) for stride in strides]
    elif kind == "pitch" and dims > 1:
        wide = (*shape[:-1], shape[-1] + 1 + int(draws[0] * 8))
        strides = list(packed(wide))
    elif kind == "size 1":
        strides = [
            stride if size != 1 else 1 + int(draws[i] * 40)
            for i, (size, stride) in enumerate(zip(shape, strides, strict=True))
        ]
    elif kind == "windows" and dims > 1:
        strides = [1] * dims
    if kind == "offset":
        offset = 1 + int(draws[1] * 5)
    elif kind == "odd offset" or draws[2] < 0.05:
        offset = 1
    elif kind == "far offset":
        offset = 64
    return offset, tuple(strides)


def reach(offset: int, shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the elements of a room in which a Tensor fits, with some behind it."""
    last = sum((max(n, 1) - 1) * step for n, step in zip(shape, strides, strict=True))
    return offset + last + 1 + _BEHIND


def with_other_data(room: Room, seed: int, data: str) -> Room:
    """Return the room with other values."""
    return replace(room, seed=seed, data=data)


def bytes_of(storage_of: Tensor) -> Tensor:
    """Return all bytes of a Tensor's storage."""
    with torch.inference_mode(storage_of.is_inference()):
        made = torch.empty(0, dtype=torch.uint8)
        storage = storage_of.untyped_storage()
        return made.set_(storage, 0, (storage.nbytes(),), (1,))
