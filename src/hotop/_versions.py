"""Everything that differs between PyTorch versions on the Python side."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._library import utils
from torch._ops import OpOverload

if TYPE_CHECKING:
    from hotop._planned_op import PlannedOpDef

# PyTorch 2.14 has a dispatch of its own between Python kernels, without IValues. It checks no
# returns and records no profiler event, so a hotop op keeps to the C++ dispatcher.
HAS_PYOBJECT_DISPATCH = hasattr(OpOverload, "_enable_pyobj_dispatch")

# The same release counts a formula's gradients itself.
COUNTS_GRADIENTS = HAS_PYOBJECT_DISPATCH


class _CountedFormula:
    """The formula of an op as ``make_autograd_impl`` reads it, with an honest count of gradients.

    PyTorch passes one hidden input, so its engine's message about the number of gradients counts
    one too many on both sides.
    """

    def __init__(self, op: PlannedOpDef) -> None:
        self._op = op
        # With list arguments PyTorch compares the structure of the gradients, and says so.
        self._counts = not _has_lists(op._opoverload)
        self._counted: tuple[Any, Callable[..., Any] | None] = (None, None)

    @property
    def _setup_context_fn(self) -> Callable[..., Any] | None:
        return self._op._setup_context_fn

    @property
    def _backward_fn(self) -> Callable[..., Any] | None:
        backward = self._op._backward_fn
        if backward is None or not self._counts:
            return backward
        known, counted = self._counted
        if known is not backward:
            counted = _counted(backward)
            self._counted = (backward, counted)
        return counted


def _counted(backward: Callable[..., Any]) -> Callable[..., Any]:
    def counted(ctx: Any, *grads: Any) -> Any:
        needs = ctx.needs_input_grad
        result = backward(ctx, *grads)
        if not isinstance(needs, tuple):
            return result  # set by the user: it says nothing about the inputs
        expected = len(needs)
        returned = len(result) if isinstance(result, tuple) else 1
        if returned == expected:
            return result
        surplus = result[expected:] if isinstance(result, tuple) else ()
        if returned < expected or any(grad is not None for grad in surplus):
            raise RuntimeError(
                f"function {type(ctx).__name__} returned an incorrect number of gradients "
                f"(expected {expected}, got {returned})"
            )
        return result

    return counted


def _has_lists(overload: OpOverload) -> bool:
    schema = overload._schema
    return any(utils.is_tensorlist_like_type(a.type) for a in (*schema.arguments, *schema.returns))


def formula_of(op: PlannedOpDef) -> Any:
    """Return what ``make_autograd_impl`` shall read the op's formula from."""
    return op if COUNTS_GRADIENTS else _CountedFormula(op)


def generated_function(kernel: Callable[..., Any]) -> Any:
    """Return the ``autograd.Function`` that ``make_autograd_impl`` made; None: not found."""
    names = getattr(kernel, "__code__", None)
    closure = getattr(kernel, "__closure__", None)
    if names is None or closure is None:
        return None
    found = dict(zip(names.co_freevars, closure, strict=True)).get("Generated")
    generated = None if found is None else found.cell_contents
    is_function = isinstance(generated, type) and issubclass(generated, torch.autograd.Function)
    return generated if is_function else None
