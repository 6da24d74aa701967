"""``hotop.explain``: which way a call goes, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hotop import _load


@dataclass(frozen=True)
class Explanation:
    """Which way one call would go.

    Attributes:
        direct: True when the call goes straight to the kernel.
        reason: The first thing that makes it PyTorch's call; empty when it is direct.
    """

    direct: bool
    reason: str

    def __str__(self) -> str:
        return "direct" if self.direct else f"by PyTorch: {self.reason}"


def is_native() -> bool:
    """Return whether the C++ core is in use; without it hotop is ``torch.library``."""
    return _load.CORE is not None


def explain(op: Any, /, *args: Any, **kwargs: Any) -> Explanation:
    """Say which way the call ``op(*args, **kwargs)`` would go here and now, without making it.

    Args:
        op: An op of :func:`hotop.custom_op`, its overload or its packet.
        *args: The call's positional arguments.
        **kwargs: The call's keyword arguments.

    Returns:
        The way, and the first reason when it is not direct.

    Raises:
        TypeError: ``op`` is not callable.
    """
    if _load.CORE is None:
        return Explanation(False, _load.PROBLEM)
    if not isinstance(op, _load.CORE.CallSlot):
        if not callable(op):
            raise TypeError(f"explain() expects an op, got {type(op).__name__}")
        return Explanation(False, f"{op!r} was not made by hotop")
    reason = _load.CORE.explain(op, args, kwargs)
    return Explanation(reason is None, reason or "")
