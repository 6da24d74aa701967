"""What an independent attack on accelerated operators found; each mended."""

import copy
import gc
import re
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode

import hotop

A = torch.ops.aten


pytestmark = pytest.mark.usefixtures("nothing_stays")


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    made = torch.library.Library("attacked", "FRAGMENT")
    yield made
    made._destroy()


def test_a_second_overload_appears_inside_the_gate(
    library: torch.library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate makes the classes of a formula, which is Python; then the slot has other plans."""

    @torch.library.custom_op("attacked::one", mutates_args=())
    def one(x: Tensor) -> Tensor:
        return x.clone()

    one.register_autograd(lambda ctx, grad: grad)
    hotop.accelerate("attacked")
    packet = torch.ops.attacked.one
    record_directly = type(one)._record_directly

    def meanwhile(self: Any, kernel: Any) -> None:
        library.define("one.other(Tensor x, Tensor y) -> Tensor")
        library.impl("one.other", lambda x, y: x + y, "CPU")
        packet(torch.ones(1), torch.ones(1))
        record_directly(self, kernel)

    monkeypatch.setattr(type(one), "_record_directly", meanwhile)
    with torch.overrides.BaseTorchFunctionMode():
        packet(torch.ones(1, requires_grad=True))
    assert packet(torch.ones(1), torch.ones(1)).item() == 2
    assert packet(torch.ones(1)).item() == 1


def test_calls_while_another_thread_changes_what_is_accelerated(
    library: torch.library.Library,
) -> None:
    library.define("busy(Tensor x) -> Tensor")
    library.impl("busy", lambda x: x + 1, "CPU")
    packet, overload = torch.ops.attacked.busy, torch.ops.attacked.busy.default
    errors: list[BaseException] = []
    done = threading.Event()

    def call() -> None:
        x = torch.ones(1)
        try:
            while not done.is_set():
                assert packet(x).item() == overload(x).item() == 2
                assert str(hotop.report())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        hotop.accelerate("attacked")
        hotop.restore("attacked")
    done.set()
    for thread in threads:
        thread.join()
    assert not errors


def test_replaced_kernels_are_let_go(library: torch.library.Library) -> None:
    library.define("often(Tensor x) -> Tensor")
    hotop.accelerate("attacked")
    kernels = []
    for number in range(8):
        scoped = torch.library.Library("attacked", "IMPL")

        def kernel(x: Tensor, number: int = number) -> Tensor:
            return x + number

        scoped.impl("often", kernel, "CPU")
        assert torch.ops.attacked.often(torch.zeros(1)).item() == number
        kernels.append(weakref.ref(kernel))
        scoped._destroy()
        del kernel, scoped
    gc.collect()
    assert sum(kernel() is not None for kernel in kernels) <= 2


def test_a_predicate_that_raises_or_is_none() -> None:
    for wrong in (torch.add, lambda op: 1 / 0, lambda op: "yes"):
        with pytest.raises(TypeError, match="a predicate takes an OpOverload"):
            hotop.accelerate(wrong)
    asked = []

    def later(op: OpOverload) -> bool:
        asked.append(op)
        if op._opname == "log2":
            raise IndexError("late")
        return False

    hotop.accelerate(later)
    assert A.log2.default(torch.ones(1)).item() == 0
    assert asked
    with pytest.raises(ValueError, match=r"no operator 'aten::add\._op'"):
        hotop.accelerate("aten::add._op")


def test_inductor_demands_the_class_of_collectives() -> None:
    overload = torch.ops._c10d_functional.wait_tensor.default
    hotop.accelerate("_c10d_functional")
    assert type(overload) is OpOverload
    assert "very class" in hotop.report().left["_c10d_functional::wait_tensor"]


def test_what_is_given_back_stays_given_back(library: torch.library.Library) -> None:
    library.define("back(Tensor x) -> Tensor")
    library.impl("back", lambda x: x + 1, "CPU")
    packet, overload = torch.ops.attacked.back, torch.ops.attacked.back.default
    hotop.accelerate("attacked")
    hotop.restore(packet)
    hotop.accelerate("prims")
    assert type(overload) is OpOverload
    assert type(packet) is OpOverloadPacket
    hotop.accelerate(packet)
    assert hotop.explain(packet, torch.ones(1)).direct
    hotop.restore("attacked")
    hotop.restore()
    assert type(packet) is OpOverloadPacket


def test_packets_without_a_looked_up_overload_are_given_back(
    library: torch.library.Library,
) -> None:
    library.define("bare(Tensor x) -> Tensor")
    packet = torch.ops.attacked.bare
    hotop.install()
    assert type(packet) is not OpOverloadPacket
    hotop.uninstall()
    assert type(packet) is OpOverloadPacket


def test_copy_under_install() -> None:
    @torch.library.custom_op("attacked::copied", mutates_args=())
    def copied(x: Tensor) -> Tensor:
        return x + 1

    hotop.install()
    hotop.restore(copied)
    assert type(copied) is CustomOpDef
    assert copy.copy(copied)(torch.ones(1)).item() == 2


def test_torch_function_on_the_object() -> None:
    class Quiet(Tensor):
        __torch_function__ = torch._C._disabled_torch_function_impl

    seen = []

    def function(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> str:
        seen.append(func)
        return "asked"

    value = torch.ones(1).as_subclass(Quiet)
    hotop.accelerate(A.sin.default)
    assert hotop.explain(A.sin.default, value).road == "boxed"
    value.__torch_function__ = function
    assert hotop.explain(A.sin.default, value).road == "pytorch"
    assert A.sin.default(value) == "asked"
    assert seen == [A.sin.default]


def test_a_packet_outlives_the_library_of_an_overload(library: torch.library.Library) -> None:
    hotop.install()
    other = torch.library.Library("attacked", "FRAGMENT")
    library.define("kept(Tensor x) -> Tensor")
    library.impl("kept", lambda x: x + 1, "CPU")
    other.define("kept.two(Tensor x, Tensor y) -> Tensor")
    other.impl("kept.two", lambda x, y: x + y, "CPU")
    packet = torch.ops.attacked.kept
    other._destroy()
    for _ in range(2):
        assert packet(torch.ones(1)).item() == 2


def test_a_call_further_out_does_not_change_a_conversion(library: torch.library.Library) -> None:
    """aten::mul takes numbers for Tensors; an operator called below it does not return them."""
    library.define("number(int n) -> Tensor")
    library.impl("number", lambda n: 3, "CompositeExplicitAutograd")
    number = torch.ops.attacked.number.default
    answers = []

    class Calls(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            try:
                answers.append(number(1))
            except RuntimeError as error:
                answers.append(str(error).partition("\n")[0])
            return func(*args, **(kwargs or {}))

    for _ in range(2):
        with Calls():
            A.mul.Tensor(torch.ones(1), torch.ones(1))
        hotop.install()
        hotop.accelerate("aten")
    assert answers[0] == answers[1]
    assert isinstance(answers[0], str)


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        *("float?", "int?", "bool?", "Scalar?", "SymInt?", "str?", "Device?", "ScalarType?"),
        *("Layout?", "MemoryFormat?", "Tensor[]", "int[]", "SymInt[]", "float[]", "bool[]"),
        *("Scalar[]", "int[]?"),
    ],
)
def test_a_rejected_overload_may_enter_a_tensor(
    kind: str, as_list: bool, library: torch.library.Library
) -> None:
    # PyTorch converts `t` for the first overload before it finds that `u` is unknown there.
    tensors = "Tensor[]" if as_list else "Tensor"
    name = f"asks_{re.sub('[^a-zA-Z]', '_', kind)}_{as_list}"
    library.define(f"{name}(Tensor x, *, {kind} t, int v=0) -> Tensor")
    library.define(f"{name}.two(Tensor x, *, {tensors} t, int u=0) -> Tensor")
    library.impl(name, lambda x, t, v=0: x + 1, "CPU")
    library.impl(f"{name}.two", lambda x, t, u=0: x + 2, "CPU")
    packet = getattr(torch.ops.attacked, name)
    calls: list[str] = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.append(str(func))
            return func(*args, **kwargs or {})

    def seen(value: Tensor) -> list[str]:
        calls.clear()
        with Log():
            try:
                result = str(packet(torch.ones(1), t=[value] if as_list else value, u=1))
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
        return [*calls, result]

    values = [torch.ones(1), torch.ones(2), torch.ones(2, 2).to_sparse()]
    by_pytorch = [seen(value) for value in values]
    hotop.accelerate("attacked")
    for _ in range(2):
        assert [seen(value) for value in values] == by_pytorch
