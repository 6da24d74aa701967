"""Arguments whose `__class__` raises: their real type counts, and nothing is asked of them."""

import functools
import inspect
import itertools
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import hotop

A = torch.ops.aten
pytestmark = pytest.mark.usefixtures("nothing_stays")
NUMBERS = itertools.count()


class Raising:
    @property
    def __class__(self) -> type:
        raise ValueError("no class")


class Interrupting:
    @property
    def __class__(self) -> type:
        raise KeyboardInterrupt


def dead_proxy() -> Any:
    class Gone:
        pass

    return weakref.proxy(Gone())


ODD: dict[str, Callable[[], Any]] = {
    "dead proxy": dead_proxy,
    "raising": Raising,
    "interrupting": Interrupting,
}
ATEN: dict[str, Callable[[Any], Any]] = {
    "overload": lambda odd: A.add.Tensor(torch.ones(2), odd),
    "first": lambda odd: A.add.Tensor(odd, torch.ones(2)),
    "keyword": lambda odd: A.add.Tensor(torch.ones(2), other=odd),
    "packet": lambda odd: A.add(torch.ones(2), odd),
    "list": lambda odd: A.stack.default([torch.ones(2), odd]),
    "tuple": lambda odd: A.stack((odd, torch.ones(2))),
    "optional list": lambda odd: A.index.Tensor(torch.ones(2), [odd]),
    "int": lambda odd: A.sum.dim_IntList(torch.ones(2), odd),
    "number": lambda odd: A.add.Scalar(torch.ones(2), odd),
    "int list": lambda odd: A.view.default(torch.ones(2), [odd]),
    "bool": lambda odd: A.sum.dim_IntList(torch.ones(2), [0], odd),
    "dtype": lambda odd: A.sum.default(torch.ones(2), dtype=odd),
    "str": lambda odd: A.div.Tensor_mode(torch.ones(2), torch.ones(2), rounding_mode=odd),
    "generator": lambda odd: A.bernoulli.default(torch.ones(2), generator=odd),
}


def outcome(call: Callable[[Any], Any], odd: Any) -> Any:
    try:
        return repr(call(odd))
    except BaseException as error:
        return type(error), str(error)


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("place", ATEN)
def test_of_aten(place: str, kind: str) -> None:
    expected = outcome(ATEN[place], ODD[kind]())
    hotop.accelerate("aten")
    for _ in range(2):
        assert outcome(ATEN[place], ODD[kind]()) == expected


def ops_of(custom_op: Any) -> Iterator[Callable[[Any], Any]]:
    """Yield calls of new ops, made by one of the two factories."""
    number = next(NUMBERS)

    @custom_op(f"odd_classes::one{number}", mutates_args=())
    def one(x: Tensor, n: int = 1) -> Tensor:
        return x + n

    @custom_op(f"odd_classes::many{number}", mutates_args=())
    def many(xs: list[Tensor], y: Tensor | None = None) -> Tensor:
        return xs[0] + 1

    one.register_autograd(lambda ctx, grad: (grad, None))
    x = torch.ones(2)
    yield one
    yield one._opoverload
    yield lambda odd: one(x, odd)
    yield lambda odd: one(x.clone().requires_grad_(), odd)
    yield lambda odd: one(x, n=odd)
    yield lambda odd: many([odd])
    yield lambda odd: many([x, odd])
    yield lambda odd: many([x], odd)
    yield lambda odd: many([x], y=odd)


@pytest.mark.parametrize("kind", ODD)
def test_of_custom_ops(kind: str) -> None:
    theirs = [outcome(call, ODD[kind]()) for call in ops_of(torch.library.custom_op)]
    ours = [outcome(call, ODD[kind]()) for call in ops_of(hotop.custom_op)]
    assert without_numbers(ours) == without_numbers(theirs)


def without_numbers(outcomes: list[Any]) -> list[str]:
    return [re.sub(r"odd_classes::(one|many)\d+", r"odd_classes::\1", str(o)) for o in outcomes]


@pytest.mark.parametrize("kind", ["dead proxy", "raising"])
def test_explain(kind: str) -> None:
    hotop.accelerate("aten")
    assert hotop.explain(A.add.Tensor, torch.ones(2), ODD[kind]()).road == "pytorch"

    @hotop.custom_op(f"odd_classes::explained{next(NUMBERS)}", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x + 1

    assert hotop.explain(op, ODD[kind]()).road == "pytorch"


def test_a_kernel_puts_one_into_its_list() -> None:
    @hotop.custom_op(f"odd_classes::appends{next(NUMBERS)}", mutates_args=())
    def op(xs: list[Tensor]) -> Tensor:
        xs.append(Raising())  # type: ignore[arg-type]
        return xs[0] + 1

    assert op([torch.ones(2)]).tolist() == [2, 2]


@pytest.mark.parametrize("kind", ODD)
def test_a_kernel_or_formula_returns_one(kind: str) -> None:
    def outcomes(custom_op: Any) -> Iterator[Any]:
        number = next(NUMBERS)

        @custom_op(f"odd_classes::returns{number}", mutates_args=())
        def returns(x: Tensor) -> Tensor:
            return ODD[kind]()

        @custom_op(f"odd_classes::gradient{number}", mutates_args=())
        def gradient(xs: list[Tensor]) -> Tensor:
            return xs[0] + 1

        gradient.register_autograd(lambda ctx, grad: [ODD[kind]()])
        x = torch.ones(2, requires_grad=True)
        yield outcome(returns, x.detach())
        yield outcome(returns, x)
        yield outcome(lambda _: gradient([x]).sum().backward(), None)

    assert list(outcomes(hotop.custom_op)) == list(outcomes(torch.library.custom_op))


def test_a_subclass_that_computes_its_torch_function() -> None:
    class Computes(Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

        def __getattribute__(self, name: str) -> Any:
            if name == "__torch_function__":
                return lambda function, types, args=(), kwargs=None: "asked"
            return super().__getattribute__(name)

    hotop.accelerate("aten")
    value = torch.ones(2).as_subclass(Computes)
    assert A.add.Tensor(value, value) == "asked"
    assert A.stack.default([value]) == "asked"


def test_error_texts_name_pytorchs_classes() -> None:
    hotop.accelerate("aten")

    @hotop.custom_op(f"odd_classes::named{next(NUMBERS)}", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x + 1

    for what, name in (
        (A.add.Tensor, "OpOverload"),
        (A.add, "OpOverloadPacket"),
        (op, "CustomOpDef"),
        (op._opoverload, "OpOverload"),
        (op._opoverload.overloadpacket, "OpOverloadPacket"),
    ):
        with pytest.raises(TypeError, match=f"'<' not supported between instances of '{name}'"):
            what < what  # noqa: B015
        assert type(what).__name__ == name
    assert op.__module__ == "torch._library.custom_ops"
    with pytest.raises(AttributeError, match="'OpOverload' object has no attribute 'zork'"):
        A.add.Tensor.zork  # noqa: B018


def test_what_wraps_an_op_keeps_its_own_annotations() -> None:
    def annotations(factory: Callable) -> list[Any]:
        def kernel(x: Tensor) -> Tensor:
            return x + 1

        op = factory(f"odd_classes::wrapped{next(NUMBERS)}", kernel, mutates_args=())
        found: list[Any] = []
        for what in (op, op._opoverload, op._opoverload.overloadpacket):

            def wrapper(x: Tensor, scale: float = 1.0) -> Tensor:
                return x * scale

            functools.update_wrapper(wrapper, what)
            found.append((inspect.get_annotations(wrapper), getattr(what, "__annotations__", None)))
        return found

    of_pytorch = annotations(torch.library.custom_op)
    assert of_pytorch[0][0]["scale"] is float
    assert annotations(hotop.custom_op) == of_pytorch
