"""Late overrides, rules by name, redefinition and overloads, twin against twin."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import Library

from test_twin_registration import (
    check,
    cpu,
    cpu_grad,
    meta,
    plus_hundred,
    plus_one,
    plus_ten,
    sparse,
    wrong,
)
from twin import HOWS, Twin
from twin_observe import NAMESPACES, normalise, recorded

# Overrides through torch.library.Library after the definition.

KEYS = [
    "CPU",
    "Meta",
    "SparseCPU",
    "Autograd",
    "AutogradCPU",
    "ADInplaceOrView",
    "AutocastCPU",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "BackendSelect",
    "Functionalize",
    "FuncTorchBatched",
    "PythonTLSSnapshot",
    "Conjugate",
    "ZeroTensor",
]


@pytest.mark.parametrize("mutates", [False, True], ids=["functional", "mutating"])
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.filterwarnings("ignore")
def test_late_impl(key: str, mutates: bool) -> None:
    def bump(x: Tensor, n: int = 1) -> Tensor:
        x.add_(n)
        return x * n

    twin = Twin(bump if mutates else plus_one, mutates_args={"x"} if mutates else ())
    makers = [cpu, cpu_grad, meta, sparse]
    if mutates:
        makers = [cpu, lambda: ((torch.ones(2, requires_grad=True) * 1,), {})]
    check(twin, makers)
    twin.check_explain = False
    outcomes, libraries = [], []
    for namespace in NAMESPACES:
        library = Library(namespace, "IMPL")
        libraries.append(library)
        try:
            library.impl(twin.name, recorded(plus_hundred, varargs=True), key)
            outcomes.append("registered")
        except Exception as error:
            outcomes.append(normalise(str(error)).replace("twin.py", ""))
    assert outcomes[0].split(":")[0] == outcomes[1].split(":")[0]
    modes = [nullcontext, torch.no_grad, torch.inference_mode]
    modes.append(lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    check(twin, makers, modes)
    for library in libraries:
        library._destroy()
    twin.check_explain = True
    check(twin, makers, modes)


def test_late_impl_with_keyset_and_redispatch() -> None:
    twin = Twin(plus_one)
    libraries = []
    below = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    for namespace, op in zip(NAMESPACES, twin.ops, strict=True):
        library = Library(namespace, "IMPL")
        libraries.append(library)

        def kernel(keys, x, n=1, op=op):
            return op._opoverload.redispatch(keys & below, x, n) * 2

        library.impl(twin.name, kernel, "Autograd", with_keyset=True)
    check(twin, [cpu, cpu_grad, wrong])
    for library in libraries:
        library._destroy()
    check(twin, [cpu, cpu_grad, wrong])


def test_fallthrough() -> None:
    twin = Twin(plus_one)
    libraries = [Library(namespace, "IMPL") for namespace in NAMESPACES]
    for library in libraries:
        library.impl(twin.name, torch.library.fallthrough_kernel, "AutocastCPU")
    check(twin, [cpu, wrong], [nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)])
    for library in libraries:
        library._destroy()


# torch.library functions that take the op by name, object or overload.


def handles(op: Any) -> list[Any]:
    return [op._qualname, op, op._opoverload]


@pytest.mark.parametrize("which", range(3), ids=["name", "object", "overload"])
def test_register_by_handle(which: int) -> None:
    twin = Twin(plus_one)
    fake = torch._subclasses.FakeTensorMode

    def faked() -> Any:
        with fake():
            return (torch.ones(2),), {}

    check(twin, [faked], [nullcontext])
    twin.each(
        lambda op: torch.library.register_fake(
            handles(op)[which], recorded(lambda x, n=1: torch.zeros_like(x))
        )
    )
    check(twin, [faked, cpu, cpu_grad, meta], [nullcontext])

    twin.each(
        lambda op: torch.library.register_kernel(handles(op)[which], "cpu", recorded(plus_ten))
    )
    check(twin, [cpu, meta])

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.n = inputs[1]

    twin.each(
        lambda op: torch.library.register_autograd(
            handles(op)[which], lambda ctx, grad: (grad * ctx.n, None), setup_context=setup
        )
    )
    check(twin, [cpu, cpu_grad, lambda: ((*cpu_grad()[0], 5), {})])

    twin.each(lambda op: torch.library.register_autocast(handles(op)[which], "cpu", torch.bfloat16))
    check(twin, [cpu, cpu_grad], [nullcontext, lambda: torch.autocast("cpu")])

    twin.each(
        lambda op: torch.library.register_vmap(
            handles(op)[which], lambda info, in_dims, x, n=1: (x + 1000, in_dims[0])
        )
    )
    for how in HOWS:
        twin.compare(lambda: ((torch.ones(3, 2),), {}), how=how, transform=torch.vmap)


def test_register_torch_dispatch() -> None:
    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    twin = Twin(plus_one)
    twin.each(
        lambda op: torch.library.register_torch_dispatch(
            op._qualname, Mode, lambda mode, func, types, args, kwargs: torch.zeros(7)
        )
    )
    check(twin, [cpu], [nullcontext, Mode])


def test_register_autograd_on_a_mutable_op_is_refused() -> None:
    def mutates(x: Tensor) -> None:
        x.add_(1)

    texts = []
    for op in Twin(mutates, mutates_args={"x"}).ops:
        with pytest.raises(RuntimeError) as caught:
            op.register_autograd(lambda ctx, grad: grad)
        texts.append(normalise(str(caught.value)))
    assert texts[0] == texts[1]


# Redefinition and overloads.


def test_redefinition() -> None:
    twin = Twin(plus_one, name="redefined")
    check(twin, [cpu, cpu_grad])
    old = twin.ops
    other = Twin(plus_ten, name="redefined")
    check(other, [cpu, cpu_grad])
    assert other.ops != old

    def changed(x: Tensor, y: Tensor, s: str = "s") -> tuple[Tensor, str]:
        return x + y, s

    third = Twin(
        changed, name="redefined", schema="(Tensor x, Tensor y, str s='s') -> (Tensor, str)"
    )
    check(third, [cpu, lambda: ((torch.ones(1), torch.ones(1)), {})])


def test_overloads() -> None:
    def for_int(x: Tensor, n: int) -> Tensor:
        return x + n

    def for_str(x: Tensor, s: str) -> Tensor:
        return x + len(s)

    ints = Twin(for_int, name="overloaded", overload="int")
    makers = [
        lambda: ((torch.ones(2), 3), {}),
        lambda: ((torch.ones(2), "abc"), {}),
        lambda: ((torch.ones(2),), {"s": "abc"}),
        lambda: ((torch.ones(2), None), {}),
        lambda: ((torch.ones(2, requires_grad=True), 3), {}),
    ]
    check(ints, makers)
    strs = Twin(for_str, name="overloaded", overload="str")
    for twin in (ints, strs):
        check(twin, makers)
    for namespace in NAMESPACES:
        packet = getattr(getattr(torch.ops, namespace), "overloaded")  # noqa: B009
        assert sorted(packet.overloads()) == ["int", "str"]


def test_default_and_a_named_overload() -> None:
    first = Twin(plus_one, name="mixed")
    check(first, [cpu, wrong])

    def named(x: Tensor, s: str) -> Tensor:
        return x + len(s)

    second = Twin(named, name="mixed", overload="named")
    for twin in (first, second):
        check(twin, [cpu, wrong, lambda: ((torch.ones(2), "abc"), {})])
