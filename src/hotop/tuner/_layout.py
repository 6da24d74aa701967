"""What a key holds of a Tensor's memory: classes of strides, alignment, overlaps of arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

# The numbers are those of the core's stride_class: one byte per dimension.
_OTHER, _DENSE = 2, 128
# In text: 0, 1, d3 (follows dimension 3 without a gap), o8 (another, a multiple of 8 bytes).
_TEXT = {0: "0", 1: "1", **{_OTHER + i: f"o{1 << i}" for i in range(5)}}


def packed_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a fresh Tensor of these sizes."""
    strides = []
    stride = 1
    for size in reversed(sizes):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def stride_classes(
    sizes: Sequence[int], strides: Sequence[int], item_size: int
) -> tuple[int, ...] | None:
    """Return each stride's class as the core numbers it; None: those of a fresh Tensor."""
    if tuple(strides) == packed_strides(sizes):
        return None
    return tuple(_class(i, sizes, strides, item_size) for i in range(len(sizes)))


def _class(dimension: int, sizes: Sequence[int], strides: Sequence[int], item_size: int) -> int:
    stride = strides[dimension]
    if stride in (0, 1):
        return stride
    for inner, step in enumerate(strides):
        if inner != dimension and step != 0 and step * sizes[inner] == stride:
            return _DENSE + inner
    step = stride * item_size
    return _OTHER + min((step & -step).bit_length() - 1, 4)


def is_other(stride_class: int) -> bool:
    """Return whether a stride of this class is any number."""
    return _OTHER <= stride_class < _DENSE


def followed(stride_class: int) -> int | None:
    """Return the dimension that one of this class follows without a gap."""
    return stride_class - _DENSE if stride_class >= _DENSE else None


def class_text(stride_class: int) -> str:
    """Return a class as it stands in a file."""
    if stride_class >= _DENSE:
        return f"d{stride_class - _DENSE}"
    return _TEXT[stride_class]


def class_number(text: str) -> int:
    """Return the class of a text.

    Raises:
        ValueError: There is none.
    """
    if text.startswith("d"):
        return _DENSE + int(text[1:])
    for number, known in _TEXT.items():
        if known == text:
            return number
    raise ValueError(f"{text!r} is not a class of strides")


def class_words(classes: Sequence[int]) -> list[int]:
    """Return the words that the core makes of them: eight to a word."""
    parts = (classes[i : i + 8] for i in range(0, len(classes), 8))
    return [sum(number << 8 * i for i, number in enumerate(part)) for part in parts]


def address(tensor: torch.Tensor) -> int:
    """Return where the data begin; 0: nowhere. Never copies a lazily copied Tensor."""
    try:
        begin = int(torch._C._data_address(tensor))  # type: ignore[attr-defined]
    except RuntimeError:  # there is none
        return 0
    # That is the storage's.
    return begin + int(tensor.storage_offset()) * tensor.element_size() if begin else 0


def is_aligned(tensor: torch.Tensor) -> bool:
    """Return whether the data begin at a multiple of 16 bytes."""
    return address(tensor) % 16 == 0


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte and of that after the last; empty: no elements."""
    begin = address(tensor)
    if begin == 0 or tensor.numel() == 0:
        return begin, begin
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return begin, begin + (last + 1) * tensor.element_size()


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view without what an expanded dimension repeats: it can be written."""
    for i, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(i, 0, min(tensor.shape[i], 1))
    return tensor


def overlaps_itself(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether two elements may have one address."""
    reach = 0
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def share(
    a: torch.Tensor, a_range: tuple[int, int], b: torch.Tensor, b_range: tuple[int, int]
) -> bool:
    """Return whether two Tensors have one storage, as PyTorch's check of an op asks, or overlap."""
    if a.device != b.device or not a.layout == b.layout == torch.strided:
        return False
    same = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return same or (a_range[0] < b_range[1] and b_range[0] < a_range[1])


@dataclass(frozen=True)
class Memory:
    """What classes of strides do not say of the Tensors of a call that changes some of them.

    Attributes:
        exact: Sizes and strides of Tensors, by their place among the call's Tensors: those that
            are changed and have other strides, and those that lie in memory that is changed.
        overlaps: Two places, the later one first, and how many bytes it begins after the other.
    """

    exact: dict[int, tuple[tuple[int, ...], tuple[int, ...]]]
    overlaps: list[tuple[int, int, int]]

    def to_part(self) -> dict[str, Any] | None:
        """Return the description's last part, or None when there is nothing to say."""
        if not self.exact:
            return None
        exact = [[place, list(s), list(t)] for place, (s, t) in self.exact.items()]
        return {"exact": exact, "overlaps": [list(overlap) for overlap in self.overlaps]}


def memory_of(tensors: Sequence[tuple[torch.Tensor, bool]]) -> Memory:
    """Return what a key holds beside the classes, for Tensors and whether each is changed."""
    ranges = [byte_range(tensor) for tensor, _ in tensors]
    exact = set()
    overlaps = []
    for i, (tensor, changed) in enumerate(tensors):
        classes = stride_classes(tensor.shape, tensor.stride(), tensor.element_size())
        if changed and any(map(is_other, classes or ())):
            exact.add(i)
        for j in range(i):
            if not (changed or tensors[j][1]):
                continue
            if ranges[i][0] < ranges[j][1] and ranges[j][0] < ranges[i][1]:
                exact |= {i, j}
                overlaps.append((i, j, ranges[i][0] - ranges[j][0]))
    shapes = {i: (tuple(tensors[i][0].shape), tensors[i][0].stride()) for i in sorted(exact)}
    return Memory(shapes, overlaps)
