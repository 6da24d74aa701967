"""Estimate the host time that accelerated calls saved, from what the benchmark measured."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

SOURCE = (
    "python -m hotop bench (PyTorch 2.13.0+cpu, CPython 3.11.7, AMD EPYC, two shared cores, "
    "2026-11-30)"
)

# Tax per call in us by the number of arguments: the op's call minus the plain Python function's.
# From benchmarks/results/suite.json, which SOURCE wrote: cases tensors-1 to tensors-51, and
# tensors-1-inference_mode and tensors-10-inference_mode. Every argument of those is a Tensor,
# which is what an argument costs least as; tests/test_run.py compares the numbers with the file.
_Points = tuple[tuple[int, float], ...]

PYTORCH_TAX: dict[tuple[str, str], _Points] = {
    ("custom_op", "grad"): (
        (1, 9.030),
        (4, 10.161),
        (10, 12.319),
        (30, 19.028),
        (51, 25.297),
    ),
    ("custom_op", "inference_mode"): ((1, 4.017), (10, 6.175)),
    ("Library", "grad"): ((1, 1.355), (4, 1.914), (10, 2.970), (30, 6.295), (51, 9.528)),
    ("Library", "inference_mode"): ((1, 1.318), (10, 2.882)),
}
DIRECT_TAX: dict[str, _Points] = {
    "grad": ((1, 0.055), (4, 0.059), (10, 0.079), (30, 0.147), (51, 0.180)),
    "inference_mode": ((1, 0.052), (10, 0.075)),
}

# What a call on the boxed road saves at least against PyTorch's entry, by how the op was made and
# the number of arguments: the smallest saving of ATen's operators of that many in `python -m hotop
# bench --existing` (benchmarks/results/existing.json, same machine). Calls of ops made in other
# ways are counted, and the report says that they are not in the estimate.
BOXED_SAVING: dict[str, _Points] = {"C++": ((1, 0.648), (2, 0.784))}


@dataclass(frozen=True)
class Saving:
    """Host time saved by one call, in us.

    Attributes:
        low: Where the call ran in ``inference_mode`` or otherwise, whichever saves less.
        high: And more.
    """

    low: float
    high: float


def saving(how: str, road: str, arguments: int) -> Saving | None:
    """Return what one call saved, or None if that was not measured.

    Args:
        how: How the op is made: ``custom_op``, ``Library`` or ``C++``.
        road: ``direct``, ``boxed`` or ``pytorch``.
        arguments: How many arguments the call has.
    """
    if road == "pytorch":
        return Saving(0.0, 0.0)
    if road == "boxed":
        points = BOXED_SAVING.get(how)
        return None if points is None else Saving(*[max(0.0, _at(points, arguments))] * 2)
    if road != "direct" or (how, "grad") not in PYTORCH_TAX:
        return None
    saved = sorted(
        max(0.0, _at(PYTORCH_TAX[how, mode], arguments) - _at(direct, arguments))
        for mode, direct in DIRECT_TAX.items()
    )
    return Saving(saved[0], saved[-1])


def _at(points: Sequence[tuple[int, float]], arguments: int) -> float:
    """Return the value on the line through the points; beyond the last, its last piece goes on."""
    if len(points) == 1 or arguments <= points[0][0]:
        return points[0][1]
    right = min(bisect_right([count for count, _ in points], arguments), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (arguments - x0) / (x1 - x0)
