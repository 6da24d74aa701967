"""The kernels of a ``custom_op`` change around its acceleration: PyTorch chooses what is called."""

import gc
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

import hotop
import twin_existing

pytestmark = pytest.mark.usefixtures("nothing_stays")
NUMBERS = itertools.count()
Switch = Callable[[CustomOpDef], None]


def make(device_types: Any = None) -> CustomOpDef:
    def kernel(x: Tensor) -> Tensor:
        return x + 1

    name = f"kernels::op{next(NUMBERS)}"
    return torch.library.custom_op(name, kernel, mutates_args=(), device_types=device_types)


def adds(number: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x + number


def answers(op: CustomOpDef) -> list[float]:
    x = torch.zeros(1)
    overload = op._opoverload
    wanted = x.clone().requires_grad_()
    calls = (op, overload, overload.overloadpacket)
    return [call(value).item() for call in calls for value in (x, wanted)]


# Each is a program: it gets the op's switch at every point where it may be thrown, and says what
# was answered between.


def later_kernel(switch: Switch) -> Iterator[list[float]]:
    op = make()
    switch(op)
    op.register_kernel("cpu")(adds(2))
    yield answers(op)
    switch(op)
    op.register_kernel("cpu")(adds(3))
    yield answers(op)


def list_of_devices(switch: Switch) -> Iterator[list[float]]:
    op = make(["cpu", "cuda"])
    switch(op)
    yield answers(op)
    op.register_kernel("cpu")(adds(2))  # PyTorch: every device has the last one's kernel
    switch(op)
    yield answers(op)
    op.register_kernel("cuda")(adds(3))
    switch(op)
    yield answers(op)
    op.register_kernel(["cuda", "cpu"])(adds(4))
    yield answers(op)


def later_list_of_devices(switch: Switch) -> Iterator[list[float]]:
    op = make("cuda")
    switch(op)
    op.register_kernel(["cpu", "xpu"], adds(2))
    yield answers(op)
    op.register_kernel("cpu", adds(3))
    switch(op)
    yield answers(op)
    op.register_kernel("xpu", adds(4))
    yield answers(op)


def old_decorator(switch: Switch) -> Iterator[list[float]]:
    op = make()
    first, second = op.register_kernel("cpu"), op.register_kernel("cpu")
    switch(op)
    first(adds(2))
    yield answers(op)
    switch(op)
    second(adds(3))
    yield answers(op)


def disabled(switch: Switch) -> Iterator[list[float]]:
    op = make()
    op.register_kernel("cpu")(adds(2))
    switch(op)
    yield answers(op)
    with op.set_kernel_enabled("cpu", False):
        switch(op)
        yield answers(op)
        with op.set_kernel_enabled("cpu", True):
            yield answers(op)
            switch(op)
        yield answers(op)
        switch(op)
        op.register_kernel("cpu")(adds(3))
        yield answers(op)
    yield answers(op)
    switch(op)
    yield answers(op)


def disabled_of_a_list(switch: Switch) -> Iterator[list[float]]:
    op = make()
    op.register_kernel(["cpu", "cuda"])(adds(2))
    for device in ("cpu", "cuda"):
        with op.set_kernel_enabled(device, False):
            switch(op)
            yield answers(op)
        switch(op)
        yield answers(op)


def overridden(switch: Switch) -> Iterator[list[float]]:
    op = make()
    op.register_kernel("cpu")(adds(2))
    switch(op)
    library = torch.library.Library("kernels", "IMPL")
    library.impl(op._name, adds(100), "CPU", allow_override=True)
    switch(op)
    yield answers(op)
    op.register_kernel("cpu")(adds(3))
    yield answers(op)
    disabled = op.set_kernel_enabled("cpu", False)
    disabled.__enter__()
    library._destroy()
    switch(op)
    yield answers(op)
    disabled.__exit__(None, None, None)
    yield answers(op)


def gradient_times(number: int) -> Callable[..., Tensor]:
    return lambda ctx, grad: grad * number


def formulas(switch: Switch) -> Iterator[list[float]]:
    op = make()
    x = torch.ones(1, requires_grad=True)

    def gradient(result: Tensor) -> list[float]:
        return torch.autograd.grad(result, x)[0].tolist()

    older = op.register_autograd
    op.register_autograd(gradient_times(2))
    switch(op)
    yield gradient(op(x))
    older(gradient_times(3))
    yield gradient(op(x))
    switch(op)
    CustomOpDef.register_autograd(op, gradient_times(4))
    yield gradient(op(x))
    waiting = op(x)  # PyTorch asks for the formula in the backward
    switch(op)
    op.register_autograd(gradient_times(5))
    switch(op)
    yield gradient(waiting)


def autocast_rules(switch: Switch) -> Iterator[list[float]]:
    op = make()
    older = op.register_autocast
    op.register_autocast("cpu", torch.bfloat16)
    kernel = op.register_autocast("cpu", torch.float16)  # not registered: there is a rule
    switch(op)

    def dtype() -> list[float]:
        with torch.autocast("cpu"):
            return [
                float(op(torch.ones(1)).dtype.itemsize),
                torch.finfo(op(torch.ones(1)).dtype).max,
            ]

    yield dtype()
    library = torch.library.Library("kernels", "IMPL")
    library.impl(op._name, kernel, "AutocastCPU", with_keyset=True, allow_override=True)
    switch(op)
    yield dtype()
    library._destroy()
    switch(op)
    older("cpu", torch.float16)
    yield dtype()


PROGRAMS = (
    *(overridden, formulas, autocast_rules),
    *(later_kernel, list_of_devices, later_list_of_devices),
    *(old_decorator, disabled, disabled_of_a_list),
)
SWITCHES = 5


def switch_at(points: set[int]) -> Switch:
    """Return a switch that accelerates, or gives back, at these points."""
    counter = itertools.count()

    def switch(op: CustomOpDef) -> None:
        if next(counter) in points:
            twin_existing.switch(op)

    return switch


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_answers_are_pytorchs(program: Callable[[Switch], Iterator[list[float]]]) -> None:
    by_pytorch = list(program(switch_at(set())))
    assert len({tuple(answer) for answer in by_pytorch}) > 1, "nothing changes"
    for size in (1, 2, 3):
        for points in itertools.combinations(range(SWITCHES), size):
            assert list(program(switch_at(set(points)))) == by_pytorch, points


@pytest.mark.parametrize("recorded", [False, True])
def test_an_op_that_is_defined_again_can_go(recorded: bool) -> None:
    op = make()
    name, overload = op._qualname, op._opoverload
    hotop.accelerate(op)
    op(torch.ones(1, requires_grad=recorded))
    again = torch.library.custom_op(name, op._init_fn, mutates_args=())
    assert type(op) is CustomOpDef
    assert not hasattr(overload, "_hotop_plan")
    gone = weakref.ref(op)
    del op, overload
    gc.collect()
    assert gone() is None
    assert again(torch.zeros(1)).item() == 1


def test_threads_that_register_while_others_accelerate() -> None:
    op = make()
    stop = threading.Event()
    wrong: list[Any] = []

    def switches() -> None:
        while not stop.is_set():
            twin_existing.switch(op)
            time.sleep(1e-4)  # the lock is not fair

    thread = threading.Thread(target=switches)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(2, 150):
            op.register_kernel("cpu")(adds(number))
            wrong += [number] * (op(torch.zeros(1)).item() != number)
            with op.set_kernel_enabled("cpu", False):
                wrong += [-number] * (op(torch.zeros(1)).item() != 1)
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert not wrong


def test_an_ordinary_kernel_is_called_directly() -> None:
    op = make()
    with op.set_kernel_enabled("cpu", False):
        hotop.accelerate(op)
    callers = []

    def kernel(x: Tensor) -> Tensor:
        callers.append(sys._getframe(1).f_code.co_filename)
        return x + 2

    op.register_kernel("cpu")(kernel)
    op(torch.zeros(1))
    assert hotop.explain(op, torch.zeros(1)).direct
    assert callers == [__file__]
