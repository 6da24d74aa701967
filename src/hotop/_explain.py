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
        reason: The first thing that keeps it from that; empty when it is direct.
        road: ``"direct"``; ``"boxed"``: arguments converted in C++, then one call of the
            dispatcher; ``"pytorch"``: PyTorch's own entry.
    """

    direct: bool
    reason: str
    road: str = "pytorch"

    def __str__(self) -> str:
        if self.direct:
            return "direct"
        return f"{'boxed' if self.road == 'boxed' else 'by PyTorch'}: {self.reason}"


def is_native() -> bool:
    """Return whether the C++ core is in use; without it hotop is ``torch.library``."""
    return _load.CORE is not None


def explain(op: Any, /, *args: Any, **kwargs: Any) -> Explanation:
    """Say which way the call ``op(*args, **kwargs)`` would go here and now, without making it.

    Args:
        op: An op of :func:`hotop.custom_op`, its overload or its packet, or one that
            :func:`hotop.accelerate` or :func:`hotop.install` covers.
        *args: The call's positional arguments.
        **kwargs: The call's keyword arguments.

    Returns:
        The way, and the first reason when it is not direct.

    Raises:
        TypeError: ``op`` is not callable.
    """
    if _load.CORE is None:
        return Explanation(False, _load.PROBLEM)
    slot = op
    if not isinstance(op, _load.CORE.CallSlot):
        if not callable(op):
            raise TypeError(f"explain() expects an op, got {type(op).__name__}")
        slot = getattr(op, "__dict__", {}).get(_load.CORE.SLOT_NAME)
        if slot is None:
            return Explanation(False, f"{op!r} was not made by hotop, and is not accelerated")
        from hotop import _accelerated

        _accelerated.prepare(op)
        slot = op.__dict__.get(_load.CORE.SLOT_NAME, slot)
    found = _load.CORE.explain(slot, args, kwargs)
    if found is None:
        return Explanation(True, "", "direct")
    road, reason = found
    return Explanation(False, reason, road)
