"""Registrations before and between calls: kernels, devices, overrides, rules, twin against twin."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from twin import HOWS, Twin, needs_hotop
from twin_observe import NAMESPACES, normalise, recorded


def plus_one(x: Tensor, n: int = 1) -> Tensor:
    return x + n


def plus_ten(x: Tensor, n: int = 1) -> Tensor:
    return x + 10 * n


def plus_hundred(x, n=1):
    return x + 100 * n


def cpu() -> Any:
    return (torch.ones(2),), {}


def cpu_grad() -> Any:
    return (torch.ones(2, requires_grad=True),), {}


def meta() -> Any:
    return (torch.empty(2, device="meta"),), {}


def sparse() -> Any:
    return (torch.eye(2).to_sparse(),), {}


def quantized() -> Any:
    return (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),), {}


def wrong() -> Any:
    return (torch.ones(2), "one"), {}


ALL = [cpu, cpu_grad, meta, sparse, quantized, wrong]


def check(twin: Twin, makers: list[Callable] = ALL, modes: Any = (nullcontext, torch.no_grad)):
    for make in makers:
        for mode in modes:
            for how in HOWS:
                twin.compare(make, mode, how)


def register(function: Callable, *names: Any) -> Callable[[Any], Any]:
    wrapped = recorded(function)
    return lambda op: [op.register_kernel(name, wrapped) for name in names]


@pytest.mark.parametrize(
    "device_types",
    [None, "cpu", "cuda", "meta", ["cpu"], ["meta", "cpu"], ("cuda", "cpu"), "mps", "xla"],
    ids=str,
)
def test_device_types(device_types: Any) -> None:
    check(Twin(plus_one, device_types=device_types))


@pytest.mark.parametrize("device_type", ["nonsense", "", "CPU", 3, ["cpu", "nonsense"]], ids=str)
def test_wrong_device_types(device_type: Any) -> None:
    errors = []
    for namespace, op_type in zip(NAMESPACES, Twin(plus_one).each(type), strict=True):
        factory = torch.library.custom_op
        if op_type is not torch._library.custom_ops.CustomOpDef:
            import twin

            factory = twin.RIGHT_FACTORY
        with pytest.raises(Exception) as caught:  # noqa: PT011
            factory(f"{namespace}::baddev", plus_one, mutates_args=(), device_types=device_type)
        errors.append((type(caught.value), normalise(str(caught.value))))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("first", [None, "cpu", "meta"], ids=str)
@pytest.mark.parametrize("second", [None, "cpu", "meta"], ids=str)
def test_a_second_kernel(first: Any, second: Any) -> None:
    twin = Twin(plus_one, device_types=first)
    check(twin, [cpu, meta])
    twin.each(register(plus_ten, second))
    check(twin)
    twin.each(register(plus_hundred, second))
    check(twin)


@needs_hotop
def test_a_kernel_for_a_device_list_is_replaced_for_one_device() -> None:
    # PyTorch keeps the old kernel (its closure sees the last name of the list): hotop does not.
    twin = Twin(plus_one, device_types=["cpu", "meta"])
    check(twin, [cpu, meta])
    op = twin.ops[1]
    op.register_kernel("cpu", plus_hundred)
    assert op(torch.zeros(1)).item() == 100
    assert op(torch.empty(1, device="meta")).is_meta
    with op.set_kernel_enabled("cpu", enabled=False):
        assert op(torch.zeros(1)).item() == 1
    assert op(torch.zeros(1)).item() == 100


def test_kernels_without_and_with_other_defaults() -> None:
    def strict(x, n):
        return x + n

    def other(x, n=7):
        return x + n

    twin = Twin(plus_one)
    makers = [cpu, lambda: ((torch.ones(1), 1), {}), lambda: ((torch.ones(1),), {"n": 7})]
    twin.each(register(strict, "cpu"))
    check(twin, makers)
    twin.each(register(other, "cpu"))
    check(twin, makers)


def test_kernels_with_a_wrong_signature() -> None:
    def too_few(x):
        return x + 1

    def too_many(x, n, m):
        return x + n

    def keyword(x, *, n=1):
        return x + n

    for kernel in (too_few, too_many, keyword):
        twin = Twin(plus_one)
        twin.each(register(kernel, "cpu"))
        check(twin, [cpu, lambda: ((torch.ones(1), 5), {})])


def test_kernels_that_are_no_plain_functions() -> None:
    class Callable_:
        def __call__(self, x, n=1):
            return x + n

        def method(self, x, n=1):
            return x - n

        @staticmethod
        def static(x, n=1):
            return x * n

    import functools

    for kernel in (
        Callable_(),
        Callable_().method,
        Callable_.static,
        functools.partial(plus_one, n=1),
        functools.partial(torch.add, alpha=2),
        torch.add,
        torch.Tensor.add,
        torch.ops.aten.add.Tensor,
    ):
        twin = Twin(plus_one)
        twin.each(lambda op, k=kernel: op.register_kernel("cpu", k))
        twin.check_explain = False
        check(twin, [lambda: ((torch.ones(1), 5), {}), lambda: ((torch.ones(1), 1), {})])


def test_kernels_are_disabled_and_enabled() -> None:
    twin = Twin(plus_one)
    twin.each(register(plus_ten, "cpu"))

    def within(device: str, enabled: bool, inner: Callable | None = None) -> None:
        contexts = twin.each(lambda op: op.set_kernel_enabled(device, enabled))
        for context in contexts:
            context.__enter__()
        check(twin, [cpu, meta])
        if inner:
            inner()
        for context in contexts:
            context.__exit__(None, None, None)
        check(twin, [cpu, meta])

    within("cpu", enabled=False)
    within("cpu", enabled=True)
    within("meta", enabled=False)
    within("cpu", False, lambda: within("cpu", enabled=True))
    within("cpu", False, lambda: within("cpu", enabled=False))
    within("cpu", False, lambda: (twin.each(register(plus_hundred, "cpu")), check(twin, [cpu])))


def test_kernels_are_enabled_again_after_an_error() -> None:
    def values(op: Any) -> list[float]:
        op.register_kernel("cpu", plus_ten)
        found = []
        try:
            with op.set_kernel_enabled("cpu", enabled=False):
                found.append(op(torch.zeros(1)).item())
                raise KeyError
        except KeyError:
            pass
        return [*found, op(torch.zeros(1)).item()]

    left, right = Twin(plus_one).each(values)
    assert left == right == [1, 10]


# Ops without Tensor arguments.


def makes(n: int, device: torch.device = "cpu") -> Tensor:  # type: ignore[assignment]
    return torch.full((n,), 2.0, device=device)


def makes_optional(n: int) -> Tensor:
    return torch.full((n,), 3.0)


def computes(n: int, f: float = 0.5) -> float:
    return n * f


def makes_with_device(n: int, device: torch.device) -> Tensor:
    return torch.full((n,), 2.0, device=device)


def from_lists(xs: list[Tensor], n: int) -> Tensor:
    return torch.full((n,), float(len(xs)))


@pytest.mark.parametrize("device_types", [None, "cpu", ["cpu", "meta"]], ids=str)
def test_ops_without_tensors(device_types: Any) -> None:
    twin = Twin(makes_with_device, device_types=device_types)
    for how in HOWS:
        for device in ("cpu", torch.device("cpu"), "meta", "cuda", "nonsense", None, 3):
            twin.compare(lambda d=device: ((2, d), {}), how=how)
            twin.compare(lambda d=device: ((2,), {"device": d}), how=how, profile=True)
        twin.compare(lambda: (("x", "cpu"), {}), how=how)
        twin.compare(lambda: ((2,), {}), how=how)


@pytest.mark.parametrize("kernel", [makes_optional, computes])
def test_ops_without_tensors_and_device(kernel: Callable) -> None:
    twin = Twin(kernel)
    for how in HOWS:
        for context in (nullcontext, torch.no_grad, torch.inference_mode):
            twin.compare(lambda: ((3,), {}), context, how)
            twin.compare(lambda: (("3",), {}), context, how)
    errors = []
    for op in twin.ops:
        with pytest.raises(ValueError, match="device") as caught:
            op.register_kernel("cpu", kernel)
        errors.append(str(caught.value))
        with pytest.raises(ValueError, match="device"):
            op.register_kernel("cpu")
    assert errors[0] == errors[1]


@pytest.mark.parametrize("device_types", [None, "cpu"], ids=str)
def test_empty_tensor_lists(device_types: Any) -> None:
    twin = Twin(from_lists, device_types=device_types)
    for make in (lambda: (([], 2), {}), lambda: (([torch.ones(1)], 2), {})):
        check(twin, [make])


def test_optional_tensor_not_given() -> None:
    def maybe(x: Tensor | None = None, n: int = 2) -> Tensor:
        return torch.ones(n) if x is None else x * n

    for device_types in (None, "cpu"):
        twin = Twin(maybe, device_types=device_types)
        check(twin, [lambda: ((), {}), lambda: ((None, 3), {}), cpu, meta])


# Tensors of several devices.


def two(x: Tensor, y: Tensor | None = None) -> Tensor:
    return x.new_ones(2)


@pytest.mark.parametrize("device_types", [None, "cpu", "meta", ["cpu", "meta"]], ids=str)
def test_tensors_of_two_devices(device_types: Any) -> None:
    twin = Twin(two, device_types=device_types)
    for first in (cpu, meta, sparse):
        for second in (cpu, meta, sparse):
            check(twin, [lambda a=first, b=second: ((*a()[0], *b()[0]), {})], [nullcontext])
