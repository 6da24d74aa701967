"""A guard around PyTorch's generated autograd kernel: a wrong answer becomes an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hotop import _core

if TYPE_CHECKING:
    from hotop._op import OpDef


def guarded_autograd_kernel(op: OpDef, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse inputs with forward-mode tangents, which PyTorch would drop without a word."""

    def refuse() -> None:
        raise NotImplementedError(
            f"{op._qualname}: an input has a forward-mode tangent, and custom operators have "
            "no jvp formula. Detach the input from forward-mode AD, or write the op with "
            "differentiable PyTorch operators."
        )

    return _core.guard_tangents(kernel, refuse)
