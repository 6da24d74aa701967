"""Tensors that stand for a bucket: its own sizes, the call's data repeated, the call's layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hotop.tuner import _layout, _process
from hotop.tuner._key import NotKeyable, Parameter, describe, is_tensor


def representative(
    parameters: Sequence[Parameter], values: Sequence[Any], *, smallest: bool = False
) -> list[Any]:
    """Return the values on which a bucket is measured, or those of its smallest sizes.

    Tensors that lie in changed memory stand for themselves: then the key holds their very sizes.

    Raises:
        NotKeyable: Tensors of the bucket's sizes cannot have the layout that the key holds.
    """
    with _process.without_autocast():
        return _representative(parameters, values, smallest)


def _representative(
    parameters: Sequence[Parameter], values: Sequence[Any], smallest: bool
) -> list[Any]:
    last = describe(parameters, values)[-1:]
    if last and isinstance(last[0], dict):
        return list(values)
    shapes: dict[str, tuple[int, ...]] = {
        parameter.name: _bucketed(value, parameter, smallest)
        for parameter, value in zip(parameters, values, strict=True)
        if is_tensor(value)
    }
    for parameter in parameters:
        shape = shapes.get(parameter.name, ())
        for i in range(len(shape)):
            bucket = parameter.bucket_of(i, len(shape))
            if bucket is not None and bucket.size_of is not None:
                shape = (*shape[:i], int(bucket.size_of(shapes)), *shape[i + 1 :])
                shapes[parameter.name] = shape
    resized = []
    for parameter, value in zip(parameters, values, strict=True):
        if parameter.name in shapes:
            value = _resized(value, shapes[parameter.name], parameter)
        elif type(value) in (list, tuple) and parameter.buckets:
            parts = [
                _resized(one, _bucketed(one, parameter, smallest), parameter)
                if is_tensor(one)
                else one
                for one in value
            ]
            if any(new is not old for new, old in zip(parts, value, strict=True)):
                value = type(value)(parts)
        resized.append(value)
    return resized


def _bucketed(tensor: torch.Tensor, parameter: Parameter, smallest: bool) -> tuple[int, ...]:
    sizes = []
    for i, size in enumerate(tensor.shape):
        bucket = parameter.bucket_of(i, tensor.dim())
        if bucket is not None and not bucket.is_left_out:
            size = bucket.smallest(size) if smallest else bucket(size)
        sizes.append(size)
    return tuple(sizes)


def _resized(tensor: torch.Tensor, shape: tuple[int, ...], parameter: Parameter) -> torch.Tensor:
    if shape == tensor.shape:
        return tensor
    classes = _layout.stride_classes(tensor.shape, tensor.stride(), tensor.element_size())
    strides = _strides(tensor, shape, classes)
    if _layout.stride_classes(shape, strides, tensor.element_size()) != classes:
        raise NotKeyable(f"no Tensor of the bucket's sizes has the layout of {parameter.name}")
    overlap = _layout.overlaps_itself
    # A dimension of size 1 may have any stride; what is written twice is nobody's result.
    if parameter.mutated and overlap(shape, strides) and not overlap(tensor.shape, tensor.stride()):
        raise NotKeyable(f"{parameter.name} would overlap itself in the bucket's sizes")
    return _filled(tensor, shape, strides)


def _strides(
    tensor: torch.Tensor, shape: tuple[int, ...], classes: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Return strides of these classes for other sizes, inner dimensions first."""
    if classes is None:
        return _layout.packed_strides(shape)
    strides = list(tensor.stride())
    for i in sorted(range(tensor.dim()), key=lambda i: (tensor.stride(i), i)):
        follows = _layout.followed(classes[i])
        if follows is not None:
            strides[i] = strides[follows] * shape[follows]
        elif _layout.is_other(classes[i]):
            strides[i] = _other_stride(tensor, shape, strides, i, classes[i])
    return tuple(strides)


def _other_stride(
    tensor: torch.Tensor, shape: tuple[int, ...], strides: list[int], i: int, stride_class: int
) -> int:
    """Return a stride of this class that leaves the gap of the call behind what lies inside it."""
    old = tensor.stride(i)
    inner = [k for k in range(tensor.dim()) if k != i and 0 < tensor.stride(k) < old]
    before = max((tensor.stride(k) * tensor.shape[k] for k in inner), default=0)
    after = max((strides[k] * shape[k] for k in inner), default=0)
    first = old if before > old else old + after - before
    for stride in range(first, first + 64):
        strides[i] = stride
        classes = _layout.stride_classes(shape, strides, tensor.element_size())
        if classes is not None and classes[i] == stride_class:
            return stride
    return first


def _filled(tensor: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """Return a Tensor of this layout and of the same alignment, with the data repeated."""
    item = tensor.element_size()
    begin = 0 if _layout.is_aligned(tensor) else item
    extent = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    room = tensor.new_empty(begin // item + max(extent, 1), requires_grad=False)
    made = room.as_strided(shape, strides, begin // item)
    if 0 in shape:
        return made
    source = tensor.detach()
    for i, size in enumerate(shape):
        if size == source.shape[i]:
            continue
        if source.shape[i] == 0:
            source = source.new_zeros((*source.shape[:i], size, *source.shape[i + 1 :]))
            continue
        if strides[i] == 0:
            source = source.narrow(i, 0, 1).expand(*source.shape[:i], size, *source.shape[i + 1 :])
            continue
        places = torch.arange(size, device=tensor.device) % source.shape[i]
        source = source.index_select(i, places)
    for i, stride in enumerate(strides):
        if stride == 0:
            source = source.narrow(i, 0, 1)
    _layout.distinct(made).copy_(source)
    return made.as_strided(shape, strides, begin // item)
