"""Mutating, in-place and out ops: values, version counters and return rules, twin against twin."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from twin import HOWS, Arguments, Twin

MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


def add_one(x: Tensor) -> None:
    x.add_(1)


def touch_nothing(x: Tensor) -> None:
    pass


def mutate_data_only(x: Tensor) -> None:
    x.detach().numpy()[...] = 5


def fail_after(x: Tensor, message: str) -> None:
    x.add_(1)
    raise ValueError(message)


def mutate_second(x: Tensor, y: Tensor) -> Tensor:
    y.mul_(2)
    return x + y


def mutate_both(x: Tensor, y: Tensor, n: int = 1) -> None:
    x.add_(n)
    y.sub_(n)


def mutate_list(xs: list[Tensor], n: int) -> None:
    for x in xs:
        x.add_(n)


def mutate_sequence(x: Tensor, ys: Sequence[Tensor]) -> Tensor:
    for y in ys:
        y.zero_()
    return x.clone()


def mutate_optional(x: Tensor, y: Tensor | None = None) -> Tensor:
    if y is not None:
        y.add_(1)
    return x * 2


def mutate_optionals_in_list(xs: list[Tensor | None]) -> None:
    for x in xs:
        if x is not None:
            x.add_(1)


def mutate_first_of_many(a: Tensor, b: Tensor, c: Tensor | None, ds: list[Tensor], n: int) -> int:
    a.add_(b)
    ds[0].add_(n)
    return n + 1


def view_inside(x: Tensor) -> None:
    view = x[0:1]
    assert view._is_view()
    assert view._base is not None
    view.add_(3)


def t(*values: float, **options: Any) -> Tensor:
    return torch.tensor(values or (1.0, 2.0), **options)


def leaf() -> Tensor:
    return t(requires_grad=True)


def through_base() -> Arguments:
    base = torch.zeros(4)
    return (base[1:3],), {}


OPS: dict[Callable, tuple[Any, list[Callable[[], Arguments]]]] = {
    add_one: (
        {"x"},
        [
            lambda: ((t(),), {}),
            lambda: ((), {"x": t()}),
            lambda: ((t()[1:],), {}),
            through_base,
            lambda: ((leaf(),), {}),
            lambda: ((leaf() * 1,), {}),
            lambda: ((leaf().detach(),), {}),
            lambda: ((torch.nn.Parameter(t(), requires_grad=False),), {}),
            lambda: ((torch.nn.Parameter(t()),), {}),
            lambda: ((t().expand(3, 2),), {}),
            lambda: ((torch.tensor([1, 2]),), {}),
            lambda: ((torch.tensor([1j]).conj(),), {}),
            lambda: ((torch.tensor([1j]).conj().imag,), {}),
            lambda: ((torch.empty(2, device="meta"),), {}),
            lambda: ((torch._efficientzerotensor((2,)),), {}),
            lambda: ((None,), {}),
            lambda: ((3,), {}),
            lambda: ((), {}),
        ],
    ),
    touch_nothing: ({"x"}, [lambda: ((t(),), {}), lambda: ((t()[0:1],), {})]),
    mutate_data_only: ({"x"}, [lambda: ((t(),), {})]),
    fail_after: (
        {"x"},
        [
            lambda: ((t(), "boom"), {}),
            lambda: ((leaf(), "boom"), {}),
            lambda: ((t(), 3), {}),  # refused before the kernel: no version bump
        ],
    ),
    mutate_second: (
        {"y"},
        [
            lambda: ((t(), t()), {}),
            lambda: ((leaf(), t()), {}),
            lambda: ((t(), leaf()), {}),
            lambda: ((leaf(), leaf() * 2), {}),
            lambda: ((), {"y": t(), "x": t()}),
            lambda: ((t(), None), {}),
        ],
    ),
    mutate_both: (
        "unknown",
        [
            lambda: ((t(), t()), {}),
            lambda: ((t(), t(), 1), {}),
            lambda: ((t(),), {"n": 4, "y": t()}),
        ],
    ),
    mutate_list: (
        {"xs"},
        [
            lambda: (([t(), t()], 2), {}),
            lambda: (((t(), t()), 2), {}),
            lambda: (([], 2), {}),
            lambda: (([t()] * 2, 2), {}),
            lambda: (([t(), leaf()], 2), {}),
            lambda: (([t(), None], 2), {}),
            lambda: (([t(), 1], 2), {}),
            lambda: ((t(), 2), {}),
        ],
    ),
    mutate_sequence: (
        {"ys"},
        [
            lambda: ((t(), [t(), t()]), {}),
            lambda: ((leaf(), (t(),)), {}),
            lambda: ((t(),), {"ys": [t()]}),
        ],
    ),
    mutate_optional: (
        {"y"},
        [
            lambda: ((t(), t()), {}),
            lambda: ((t(), None), {}),
            lambda: ((t(),), {}),
            lambda: ((leaf(),), {}),
            lambda: ((t(),), {"y": leaf()}),
        ],
    ),
    mutate_optionals_in_list: (
        {"xs"},
        [
            lambda: (([t(), None, t()],), {}),
            lambda: (([None],), {}),
            lambda: (([],), {}),
            lambda: (([None, leaf()],), {}),
            lambda: ((t(),), {}),
        ],
    ),
    mutate_first_of_many: (
        {"a", "ds"},
        [
            lambda: ((t(), t(), None, [t()], 3), {}),
            lambda: ((t(), t(), t(), [t(), t()], 3), {}),
            lambda: ((t(), leaf(), None, [t()], 3), {}),
            lambda: ((t(), t(), None, [], 3), {}),
        ],
    ),
    view_inside: ({"x"}, [lambda: ((t(),), {}), lambda: ((leaf(),), {}), through_base]),
}
CASES = [(kernel, index) for kernel, (_, calls) in OPS.items() for index in range(len(calls))]
_defined: dict[Callable, Twin] = {}


def defined(kernel: Callable) -> Twin:
    if kernel not in _defined:
        _defined[kernel] = Twin(kernel, mutates_args=OPS[kernel][0])
    return _defined[kernel]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize(("kernel", "index"), CASES, ids=lambda v: getattr(v, "__name__", v))
def test_mutating_ops(kernel: Callable, index: int, mode: Callable) -> None:
    for how in HOWS:
        defined(kernel).compare(OPS[kernel][1][index], mode, how)


@pytest.mark.parametrize("kernel", [add_one, mutate_list, mutate_optional])
def test_profiler_sees_mutating_ops(kernel: Callable) -> None:
    defined(kernel).compare(OPS[kernel][1][0], profile=True)


def test_versions_are_exact() -> None:
    def versions(op: Any) -> list[int]:
        tensors = [t(), t(), t()]
        for _ in range(3):
            op([tensors[0], tensors[1]], 1)
        op([tensors[2]] * 2, 1)
        return [tensor._version for tensor in tensors]

    twin = defined(mutate_list)
    left, right = twin.each(versions)
    assert left == right == [6, 6, 4]  # one by the op, one by the kernel's add_, per element
    left, right = defined(mutate_data_only).each(lambda op: (x := t(), op(x), x._version)[-1])
    assert left == right == 1  # the kernel goes past autograd: the op's own bump only


def test_a_tensor_saved_for_backward_is_protected() -> None:
    def backward_after(op: Any) -> str:
        x, y = leaf(), t()
        product = x * y
        op(y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            product.sum().backward()
        return str(caught.value)

    left, right = defined(mutate_data_only).each(backward_after)
    assert left == right


# In-place and out ops: what the kernel returns is checked by identity.


def inplace_right(x: Tensor, n: int = 1) -> Tensor:
    return x.add_(n)


def inplace_clone(x: Tensor, n: int = 1) -> Tensor:
    return x.add_(n).clone()


def inplace_view(x: Tensor, n: int = 1) -> Tensor:
    return x.add_(n).view_as(x)


def inplace_none(x: Tensor, n: int = 1) -> Tensor:
    x.add_(n)
    return None  # type: ignore[return-value]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("kernel", [inplace_right, inplace_clone, inplace_view, inplace_none])
def test_inplace_ops(kernel: Callable, mode: Callable) -> None:
    twin = Twin(kernel, mutates_args={"x"}, tags=torch.Tag.inplace)
    for how in HOWS:
        for make in (
            lambda: ((t(),), {}),
            lambda: ((t(), 5), {}),
            lambda: ((), {"n": 2, "x": t()}),
            lambda: ((t()[1:], 5), {}),
            lambda: ((leaf() * 1, 5), {}),
            lambda: ((leaf(),), {}),
            lambda: ((t(), "x"), {}),
        ):
            seen = twin.compare(make, mode, how)
            plain = seen["error"] is None and not seen["result"]["requires_grad"]
            if kernel is inplace_right and plain:
                assert seen["result"]["is"].startswith(("args[0]", "kwargs[x]"))


def out_right(x: Tensor, *, out: Tensor) -> Tensor:
    torch.mul(x, 2, out=out)
    return out


def out_clone(x: Tensor, *, out: Tensor) -> Tensor:
    return torch.mul(x, 2, out=out).clone()


def out_input(x: Tensor, *, out: Tensor) -> Tensor:
    out.copy_(x)
    return x


def outs_right(x: Tensor, *, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    low.copy_(x - 1)
    high.copy_(x + 1)
    return low, high


def outs_swapped(x: Tensor, *, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    return high, low


def outs_list(x: Tensor, *, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    return [low, high]  # type: ignore[return-value]


def outs_one(x: Tensor, *, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    return low  # type: ignore[return-value]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("kernel", [out_right, out_clone, out_input])
def test_out_ops(kernel: Callable, mode: Callable) -> None:
    twin = Twin(kernel, mutates_args={"out"}, tags=torch.Tag.out)
    for how in HOWS:
        for make in (
            lambda: ((t(),), {"out": t()}),
            lambda: ((), {"out": t(), "x": t()}),
            lambda: ((t(),), {}),
            lambda: ((t(), t()), {}),
            lambda: ((t(),), {"out": None}),
            lambda: ((leaf(),), {"out": t()}),
            lambda: ((t(),), {"out": leaf()}),
            lambda: ((leaf(),), {"out": leaf()}),
            lambda: ((t(),), {"out": [t()]}),
        ):
            twin.compare(make, mode, how)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("kernel", [outs_right, outs_swapped, outs_list, outs_one])
def test_ops_with_two_outs(kernel: Callable, mode: Callable) -> None:
    twin = Twin(kernel, mutates_args={"low", "high"}, tags=torch.Tag.out)
    for how in HOWS:
        for make in (
            lambda: ((t(),), {"low": t(), "high": t()}),
            lambda: ((t(),), {"high": t(), "low": t()}),
            lambda: ((leaf(),), {"low": t(), "high": t()}),
            lambda: ((t(),), {"low": t()}),
        ):
            twin.compare(make, mode, how)


def test_profiler_sees_inplace_and_out_ops() -> None:
    Twin(inplace_right, mutates_args={"x"}, tags=torch.Tag.inplace).compare(
        lambda: ((t(),), {}), profile=True
    )
    Twin(out_right, mutates_args={"out"}, tags=torch.Tag.out).compare(
        lambda: ((t(),), {"out": t()}), profile=True
    )
