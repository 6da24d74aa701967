"""The kernels of a ``custom_op`` change around its acceleration: PyTorch chooses what is called."""

import contextlib
import itertools
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


PROGRAMS = (
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


def test_an_ordinary_kernel_is_called_directly() -> None:
    op = make()
    with op.set_kernel_enabled("cpu", False):
        hotop.accelerate(op)
    kernel = adds(2)
    op.register_kernel("cpu")(kernel)
    assert hotop.explain(op, torch.zeros(1)).direct
    assert op._functions == {None: op._init_fn, "cpu": kernel}
    with contextlib.ExitStack() as stack:
        stack.enter_context(op.set_kernel_enabled("cpu", False))
        hotop.restore(op)
    assert type(op._backend_fns) is dict
    assert type(op._disabled_kernel) is set
