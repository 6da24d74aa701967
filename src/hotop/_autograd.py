"""What hotop adds to PyTorch's generated autograd kernel: two wrong answers become errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hotop import _core

if TYPE_CHECKING:
    from hotop._op import OpDef


class Formula:
    """The formula of an op as ``make_autograd_impl`` reads it, with an honest count of gradients.

    PyTorch passes one hidden input, so its engine's message about the number of gradients counts
    one too many on both sides.
    """

    def __init__(self, op: OpDef) -> None:
        self._op = op

    @property
    def _setup_context_fn(self) -> Callable[..., Any] | None:
        return self._op._setup_context_fn

    @property
    def _backward_fn(self) -> Callable[..., Any] | None:
        backward = self._op._backward_fn
        if backward is None:
            return None

        def counted(ctx: Any, *grads: Any) -> Any:
            result = backward(ctx, *grads)
            returned = len(result) if isinstance(result, tuple) else 1
            expected = len(ctx.needs_input_grad)
            surplus = result[expected:] if isinstance(result, tuple) else ()
            if returned < expected or any(grad is not None for grad in surplus):
                raise RuntimeError(
                    f"function {type(ctx).__name__} returned an incorrect number of gradients "
                    f"(expected {expected}, got {returned})"
                )
            return result

        return counted


def guarded_autograd_kernel(op: OpDef, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse inputs with forward-mode tangents, which PyTorch would drop without a word."""

    def refuse() -> None:
        raise NotImplementedError(
            f"{op._qualname}: an input has a forward-mode tangent, and custom operators have "
            "no jvp formula. Detach the input from forward-mode AD, or write the op with "
            "differentiable PyTorch operators."
        )

    return _core.guard_tangents(kernel, refuse)
