"""Kernels and callers that fight the call: recursion, dirty state, finalizers, redefinition."""

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fw
from torch import Tensor

import hotop

FACTORIES = {"torch": torch.library.custom_op, "hotop": hotop.custom_op}


def state() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        str(torch._C._dispatch_tls_local_exclude_set()),
        str(torch._C._dispatch_tls_local_include_set()),
        torch._C._len_torch_function_stack(),
        torch.is_autocast_enabled("cpu"),
        torch._C._is_torch_function_enabled(),
        torch.get_default_device().type,
    )


@pytest.fixture(autouse=True)
def clean_state() -> Iterator[None]:
    before = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    yield
    torch.set_grad_enabled(before[0])
    torch.set_autocast_enabled("cpu", before[1])
    torch.set_default_device(None)


def dirty_autocast(x: Tensor) -> Tensor:
    torch.set_autocast_enabled("cpu", True)
    return x * 2


def dirty_grad(x: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    return x * 2


def dirty_raise(x: Tensor) -> Tensor:
    torch.set_autocast_enabled("cpu", True)
    raise KeyError("x")


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("device_context", [False, True])
@pytest.mark.parametrize("kernel", [dirty_autocast, dirty_grad, dirty_raise])
def test_dirty_kernels_leave_what_they_leave_in_pytorch(
    kernel: Callable[..., Tensor], device_context: bool, inference: bool
) -> None:
    after = {}
    for name, factory in FACTORIES.items():
        op = factory(f"hostile_{name}::{kernel.__name__}", kernel, mutates_args=())
        with torch.inference_mode(inference):
            x = torch.ones(1)
            if device_context:
                torch.set_default_device("cpu")
            with contextlib.suppress(KeyError):
                op(x)
            after[name] = state()
            torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled("cpu", False)
    assert after["hotop"] == after["torch"]


def template(x: Tensor) -> Tensor:
    raise NotImplementedError


@pytest.mark.parametrize("way", ["op", "overload", "packet", "partial", "function"])
def test_endless_recursion_is_a_python_error(way: str) -> None:
    op = hotop.custom_op(f"hostile_recursion::{way}", template, mutates_args=())
    kernels: dict[str, Callable[..., Any]] = {
        "op": op,
        "overload": op._opoverload,
        "packet": op._opoverload.overloadpacket,
        "partial": functools.partial(op),
        "function": lambda x: op(x),
    }
    op.register_kernel("cpu", kernels[way])
    before = state()
    with pytest.raises(RecursionError):
        op(torch.ones(1))
    assert state() == before


@pytest.mark.parametrize("kind", ["tensors", "ints"])
def test_finalizers_that_change_the_list_being_copied(kind: str) -> None:
    """CPython 3.11 may collect inside a list's allocation, and a finalizer may run there."""

    @hotop.custom_op(f"hostile_gc::{kind}", mutates_args=())
    def count(xs: list[Tensor], ns: list[int]) -> Tensor:
        return torch.zeros(1) + len(xs) + len(ns)

    class Evil:
        def __init__(self, target: list[Any]) -> None:
            self.cycle, self.target = self, target

        def __del__(self) -> None:
            self.target.clear()

    threshold = gc.get_threshold()
    for _ in range(60):
        xs = [torch.ones(1) for _ in range(300)]
        ns = list(range(1000, 1300))
        gc.collect()
        gc.disable()
        Evil(xs if kind == "tensors" else ns)
        gc.set_threshold(1, 1, 1)
        gc.enable()
        result = count(xs, ns).item()
        gc.set_threshold(*threshold)
        assert result in (300.0, 600.0)  # before or after the finalizer, never a half of it


def test_many_list_defaults_before_a_keyword() -> None:
    names = [f"a{i}" for i in range(62)]
    seen: list[Any] = []
    namespace: dict[str, Any] = {"Tensor": Tensor, "seen": seen, "torch": torch}
    arguments = ", ".join(f"{name}: list[int] = (1, 2, 3)" for name in names)
    exec(
        f"def body(x: Tensor, {arguments}) -> Tensor:\n"
        f"    seen[:] = [{', '.join(names)}]\n    return torch.ones(1)",
        namespace,
    )
    schema = "(Tensor x, " + ", ".join(f"int[] {name}=[1, 2, 3]" for name in names) + ") -> Tensor"
    op = hotop.custom_op("hostile_lists::f", namespace["body"], mutates_args=(), schema=schema)
    x = torch.ones(1)
    assert hotop.explain(op, x, a61=[5]).direct
    op(x, a61=[5])
    assert seen == [[1, 2, 3]] * 61 + [[5]]
    seen[0].append(4)
    op(x, a61=[6])
    assert seen[0] == [1, 2, 3], "each call has a list of its own"


class TestTangents:
    def op(self, name: str, schema: str, body: Callable[..., Any], **options: Any) -> Any:
        return hotop.custom_op(f"hostile_dual::{name}", body, schema=schema, **options)

    def test_refused_where_one_would_be_lost(self) -> None:
        double = self.op("double", "(Tensor x) -> Tensor", lambda x: x * 2, mutates_args=())
        fill = self.op(
            "fill", "(Tensor(a!) x) -> ()", lambda x: x.fill_(1) and None, mutates_args=["x"]
        )
        with fw.dual_level():
            dual = fw.make_dual(torch.ones(2), torch.ones(2))
            for op in (double, fill):
                with pytest.raises(NotImplementedError, match="forward-mode tangent"):
                    op(dual)
                assert "tangent" in hotop.explain(op, dual).reason
        assert torch.equal(double(dual), torch.full((2,), 2.0)), "the level is left"

    def test_accepted_where_none_can_be_lost(self) -> None:
        count = self.op("count", "(Tensor x) -> int", lambda x: x.numel(), mutates_args=())
        best = self.op("best", "(Tensor x) -> Tensor", lambda x: x.argmax(), mutates_args=())
        double = self.op("double2", "(Tensor x) -> Tensor", lambda x: x * 2, mutates_args=())
        with fw.dual_level():
            dual = fw.make_dual(torch.ones(2), torch.ones(2))
            assert count(dual) == 2
            assert best(dual).item() == 0
            with fw._set_fwd_grad_enabled(False):
                assert torch.equal(double(dual), torch.full((2,), 2.0))


def test_kernel_redefines_its_own_op() -> None:
    """The old call ends well: its plan lives until it is done, its result is checked."""

    def again(x: Tensor) -> Tensor:
        return x + 7

    def body(x: Tensor) -> Tensor:
        hotop.custom_op("hostile_self::f", again, mutates_args=())
        gc.collect()
        return x + 1

    op = hotop.custom_op("hostile_self::f", body, mutates_args=())
    assert op(torch.zeros(1)).item() == 1
    assert op(torch.zeros(1)).item() == 7

    def wrong(x: Tensor) -> Tensor:
        hotop.custom_op("hostile_self::g", again, mutates_args=())
        gc.collect()
        return "no Tensor"  # type: ignore[return-value]

    with pytest.raises(RuntimeError, match="Unable to cast"):
        hotop.custom_op("hostile_self::g", wrong, mutates_args=())(torch.zeros(1))


def test_kernel_drops_its_own_function() -> None:
    def body(x: Tensor) -> Tensor:
        op.register_kernel(None, lambda x: x + 2)
        gc.collect()
        return x + 1

    op = hotop.custom_op("hostile_drop::f", body, mutates_args=())
    del body
    assert op(torch.zeros(1)).item() == 1
    assert op(torch.zeros(1)).item() == 2
    assert sys.getrefcount(op._plan) < 10
