"""What a workload is made of: steps that call a package's own public functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Step:
    """One thing that a user of the package would do.

    Args:
        name: Says what it does; unique in the workload.
        run: Does it and returns Tensors and plain values in any nesting, mutated arguments too.
        kind: "eager", "compiled" (it calls `torch.compile` or `torch.export`), "error" (it must
            raise) or "once" (it changes the package for good: after all others, and not run again).
    """

    name: str
    run: Callable[[], Any]
    kind: str = "eager"
