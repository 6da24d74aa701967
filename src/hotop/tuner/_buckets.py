"""Bucket rules: which sizes of a dimension share one choice."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

Shapes = Mapping[str, tuple[int, ...]]

# The numbers are those of BucketRule::Kind in the core.
_EXACT, _POWER_OF_TWO, _LISTED, _LEFT = range(4)


@dataclass(frozen=True)
class Bucket:
    """How a dimension's size becomes part of a key; made by the functions of this module."""

    kind: int
    cap: int = -1
    sizes: tuple[int, ...] = ()
    size_of: Callable[[Shapes], int] | None = None

    @property
    def is_left_out(self) -> bool:
        """True when the size follows from other dimensions, so the key does not hold it."""
        return self.kind == _LEFT

    @property
    def last(self) -> int:
        """The last bucket's size; -1: there is none."""
        return self.sizes[-1] if self.kind == _LISTED else self.cap

    def is_above(self, size: int) -> bool:
        """Return whether a size is above the last bucket."""
        return 0 <= self.last < size

    def __call__(self, size: int) -> int:
        """Return the size that stands for ``size``; it is never smaller.

        Above the last bucket that is twice the last one, or ``size`` where it is larger.
        """
        if self.is_above(size):
            return max(2 * self.last, size)
        if self.kind == _LISTED:
            return self.sizes[bisect_left(self.sizes, size)]
        if self.kind == _POWER_OF_TWO and 0 < size <= 1 << 62:
            size = 1 << (size - 1).bit_length()
        return min(size, self.cap) if self.cap >= 0 else size

    def smallest(self, size: int) -> int:
        """Return the smallest size that shares a key with ``size``."""
        if self.is_above(size):
            return self.last + 1
        if self.kind == _LISTED:
            place = bisect_left(self.sizes, size)
            return self.sizes[place - 1] + 1 if place else 0
        if self.kind == _POWER_OF_TWO and size > 2:
            return (1 << (size - 1).bit_length() - 1) + 1
        return size

    def text(self, size: int) -> str:
        """Return what a key says of a size: the bucket's, ``64+`` above 64, ``*`` nothing."""
        if self.is_left_out:
            return "*"
        return f"{self.last}+" if self.is_above(size) else str(self(size))


def _check_size(what: str, size: int) -> None:
    if type(size) is not int:
        raise TypeError(f"{what} must be an int, got {size!r}")
    if size >= 1 << 62:
        raise ValueError(f"{what} must be below 2**62, got {size}")


def _checked_cap(cap: int | None) -> int:
    if cap is None:
        return -1
    _check_size("cap", cap)
    if cap < 1:
        raise ValueError(f"cap must be at least 1, got {cap}")
    return cap


def exact(cap: int | None = None) -> Bucket:
    """Every size up to ``cap`` has its own choice; those above share one."""
    return Bucket(_EXACT, _checked_cap(cap))


def power_of_two(cap: int | None = None) -> Bucket:
    """Sizes are rounded up to a power of two, at most ``cap``; those above share a choice."""
    return Bucket(_POWER_OF_TWO, _checked_cap(cap))


def listed(*sizes: int) -> Bucket:
    """Sizes are rounded up to the next one listed; those above the last share one choice.

    Raises:
        ValueError: No sizes, a negative one, or one not larger than that before it.
    """
    for size in sizes:
        _check_size("a size of listed()", size)
    if not sizes or sizes[0] < 0 or any(a >= b for a, b in pairwise(sizes)):
        raise ValueError(f"listed() expects ascending sizes, got {sizes}")
    return Bucket(_LISTED, sizes=tuple(sizes))


def follows(size_of: Callable[[Shapes], int]) -> Bucket:
    """The size follows from other dimensions: not part of the key.

    Args:
        size_of: From the shapes of the call's Tensors, by parameter name, to this size. Used to
            make the Tensors on which a bucket is measured.
    """
    if not callable(size_of):
        raise TypeError(f"follows() expects a function, got {size_of!r}")
    return Bucket(_LEFT, size_of=size_of)
