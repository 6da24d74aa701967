"""Whether data prove anything: constant data do not; other data of the same range are drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hotop.tuner._layout import distinct
from hotop.tuner._workspace import Block, Place, Workspace


def is_constant(tensor: torch.Tensor) -> bool:
    """Return whether a Tensor has two elements or more, and all of them alike or NaN."""
    if tensor.numel() < 2 or tensor.layout is not torch.strided:
        return False
    values = tensor.detach()
    if values.dtype in _FLOATS or values.dtype.is_complex:
        values = _readable(values)
        if bool(values.isnan().all()):
            return True
    elif values.element_size() == 1 and values.dtype is not torch.bool:
        values = values.view(torch.uint8)
    first = values[(0,) * values.dim()]
    return bool((values == first).all())


# Numbers that PyTorch can compute with, at least after a conversion: float4 is packed codes.
_FLOATS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)


def _readable(values: torch.Tensor) -> torch.Tensor:
    """Return values of a dtype that PyTorch can compare."""
    return (
        values.float() if values.dtype.is_floating_point and values.element_size() == 1 else values
    )


def constant_arguments(workspace: Workspace) -> list[str]:
    """Return the names of the arguments whose floating-point or bool data are all alike."""
    return sorted(
        {place.name for place in workspace.places if _may_draw(place) and is_constant(place.tensor)}
    )


def is_all_alike(workspace: Workspace) -> bool:
    """Return whether no argument has data that differ."""
    return all(is_constant(p.tensor) or p.tensor.numel() < 2 for p in workspace.places)


def _may_draw(place: Place) -> bool:
    # Whole numbers may be indices or packed codes: others could lead out of bounds.
    dtype = place.tensor.dtype
    return dtype in _FLOATS or dtype.is_complex or dtype is torch.bool


def draw(workspace: Workspace) -> list[torch.Tensor] | None:
    """Return other data for the blocks; None: there is nothing that may be drawn.

    Values that differ change their places and go towards zero, each by its own part, some to zero
    (so that no statistic of theirs stays); data that are all alike, and single numbers, are drawn
    from the range that they span with zero (on a CPU, of both signs). Whole numbers stay.
    """
    sources = [block.duplicate() for block in workspace.blocks]
    drawn = False
    for i, place in enumerate(workspace.places):
        others = [p for p in workspace.places if p.block == place.block and not _may_draw(p)]
        if place.tensor.numel() == 0 or not _may_draw(place) or others:
            continue
        raw = distinct(place.on(sources[place.block], place.raw_dtype))
        generator = torch.Generator(raw.device).manual_seed(i)
        values = _values(raw.view(place.tensor.dtype), generator)
        if values is not None:
            raw.copy_(values.view(place.raw_dtype))
            drawn = True
    return sources if drawn else None


def _values(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor | None:
    def uniform() -> torch.Tensor:
        return torch.rand(like.shape, generator=generator, device=like.device)

    if like.dtype is torch.bool:
        return uniform() < 0.5 if like.numel() > 1 else None
    values = _readable(like)
    if like.numel() > 1 and not is_constant(like):
        values = values.reshape(-1).roll(max(1, like.numel() * 3 // 8)).view(like.shape)
        # To zero, but no infinite value: that would be NaN.
        part = uniform().sub_(1 / 16).clamp_(min=0)
        return torch.where(values.isfinite(), values * part, values).to(like.dtype)
    first = values.reshape(-1)[:1].item()
    size = abs(first)
    if not math.isfinite(size) or size == 0:
        first = size = 1.0
    if like.numel() == 1:  # a scale, a probability, a temperature
        return (first * (0.5 + 0.5 * uniform())).to(like.dtype)
    if like.dtype.is_complex:
        return torch.complex(uniform() - 0.5, uniform() - 0.5).mul(2 * size).to(like.dtype)
    # A value out of its range ends a CUDA process; on a CPU it is an error.
    if like.device.type == "cpu":
        return ((uniform() * 2 - 1) * size).to(like.dtype)
    return (uniform() * first).to(like.dtype)


class Sources:
    """The data of the call while inside, other data for a while."""

    def __init__(self, blocks: Sequence[Block], sources: Sequence[torch.Tensor]) -> None:
        self._blocks = blocks
        self._sources = sources

    def __enter__(self) -> None:
        self._swap()

    def __exit__(self, *_: object) -> None:
        self._swap()

    def _swap(self) -> None:
        theirs = [block.source for block in self._blocks]
        for block, source in zip(self._blocks, self._sources, strict=True):
            block.source = source
            block.is_clean = False
        self._sources = theirs
