"""The ops that ``bench --states`` calls: each with a formula, registered in every way there is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotop.bench.contenders import CUSTOM_OP, DEFINE_IMPL, HOTOP, PLAIN, Ops, register

__all__ = [
    "ATEN",
    "FUNCTION",
    "Contenders",
    "make_list",
    "make_many",
    "make_square",
    "make_square_autocast",
    "make_square_transformed",
]

FUNCTION = "autograd.Function"
ATEN = "aten op"

_BFLOAT16 = torch.bfloat16


@dataclass(frozen=True)
class Contenders:
    """One kernel behind every way to call it.

    Attributes:
        functions: What is called, by contender; always the plain function and the three ops.
        function: The call of a hand-written ``torch.autograd.Function``, for recorded rows.
        aten: PyTorch's own operator for the same result, where there is one.
    """

    functions: dict[str, Callable[..., Any]]
    function: Callable[..., Any] | None = None
    aten: Callable[..., Any] | None = None

    @property
    def hotop(self) -> Callable[..., Any]:
        """The op of ``hotop.custom_op``."""
        return self.functions[HOTOP]

    def without_function(self) -> dict[str, Callable[..., Any]]:
        """Returns the contenders of a row that autograd does not record."""
        return self.functions | ({ATEN: self.aten} if self.aten else {})

    def with_function(self) -> dict[str, Callable[..., Any]]:
        """Returns the contenders of a recorded row."""
        function = {FUNCTION: self.function} if self.function else {}
        aten = {ATEN: self.aten} if self.aten else {}
        return self.functions | function | aten


def _overloads(ops: Ops) -> tuple[Any, Any, Any]:
    return ops.custom_op, ops.define_impl, ops.hotop


def _contenders(ops: Ops) -> dict[str, Callable[..., Any]]:
    names = (CUSTOM_OP, DEFINE_IMPL, HOTOP)
    return {PLAIN: ops.kernel, **dict(zip(names, _overloads(ops), strict=True))}


def _register_formula(
    ops: Ops, backward: Callable[..., Any], setup_context: Callable[..., None]
) -> None:
    for op in _overloads(ops):
        torch.library.register_autograd(op, backward, setup_context=setup_context)


def _square(x: Tensor) -> Tensor:
    return x * x


def _square_backward(ctx: Any, grad: Tensor) -> Tensor:
    return 2 * grad * ctx.saved_tensors[0]


def _square_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0] * ctx.saved_tensors[0]


def _register_square(**others: Any) -> Ops:
    ops = register(_square, name="state", **others)
    _register_formula(ops, _square_backward, _square_setup)
    return ops


def make_square() -> Contenders:
    """Makes ``x * x`` with a formula and no other rule."""
    return Contenders(_contenders(_register_square()), _Square.apply, torch.square)


def make_square_autocast() -> Contenders:
    """Makes ``x * x`` with an autocast rule to bfloat16; the plain function casts by hand.

    There is no ATen op in it: autocast on CPU has no rule for ``aten::square``.
    """

    def cast_and_square(x: Tensor) -> Tensor:
        return _square(x.to(_BFLOAT16))

    ops = _register_square()
    for op in _overloads(ops):
        torch.library.register_autocast(op, "cpu", _BFLOAT16)
    return Contenders(_contenders(ops) | {PLAIN: cast_and_square})


def make_square_transformed() -> Contenders:
    """Makes ``x * x`` with a vmap rule, which calls the op once, and a fake implementation."""
    ops = _register_square(fake=torch.empty_like)
    for op in _overloads(ops):
        torch.library.register_vmap(op, _vmap_rule(op))
    return Contenders(_contenders(ops), aten=torch.square)


def _vmap_rule(op: Callable[..., Any]) -> Callable[..., Any]:
    def rule(info: Any, in_dims: tuple[int | None, ...], x: Tensor) -> tuple[Tensor, int | None]:
        return op(x), in_dims[0]

    return rule


def make_many(count: int) -> Contenders:
    """Makes an op of `count` Tensors that returns ``x0 * x0`` and saves ``x0`` only."""
    parameters = ", ".join(f"x{index}: Tensor" for index in range(count))
    namespace: dict[str, Any] = {"Tensor": Tensor}
    exec(f"def kernel({parameters}) -> Tensor:\n    return x0 * x0\n", namespace)
    nothing = (None,) * (count - 1)

    class First(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *xs: Tensor) -> Tensor:
            ctx.save_for_backward(xs[0])
            return xs[0] * xs[0]

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            return (2 * grads[0] * ctx.saved_tensors[0], *nothing)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (2 * grad * ctx.saved_tensors[0], *nothing)

    ops = register(namespace["kernel"], name=f"state_of_{count}")
    _register_formula(ops, backward, _square_setup)
    return Contenders(_contenders(ops), First.apply)


def make_list() -> Contenders:
    """Makes ``(Tensor[] xs, Tensor w) -> Tensor``, ``(xs[0] + xs[1]) * w``, with a formula.

    ``torch.autograd.Function`` sees no Tensor inside a list, so the hand-written one gets the
    Tensors one by one from a Python function, as its user would have it.
    """

    def kernel(xs: list[Tensor], w: Tensor) -> Tensor:
        return (xs[0] + xs[1]) * w

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        xs, w = inputs
        ctx.save_for_backward(xs[0], xs[1], w)

    def backward(ctx: Any, grad: Tensor) -> tuple[list[Tensor], Tensor]:
        first, second, w = ctx.saved_tensors
        shared = grad * w
        return [shared, shared], grad * (first + second)

    class Flat(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, first: Tensor, second: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(first, second, w)
            return (first + second) * w

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
            first, second, w = ctx.saved_tensors
            shared = grads[0] * w
            return shared, shared, grads[0] * (first + second)

    def flat(xs: list[Tensor], w: Tensor) -> Any:
        return Flat.apply(*xs, w)

    ops = register(kernel, name="state_list")
    _register_formula(ops, backward, setup_context)
    return Contenders(_contenders(ops), flat)
