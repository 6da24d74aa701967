"""The first call of an accelerated operator makes its plan, and is then made as every later one."""

import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.profiler import profile

import hotop
from hotop import _accelerated, _existing
from twin_existing import roads

pytestmark = pytest.mark.usefixtures("nothing_stays")

A = torch.ops.aten
NUMBERS = count()
# A clone's folder may have that name too.
PACKAGE = str(Path(hotop.__file__).parent)


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    made = torch.library.Library("first", "FRAGMENT")
    yield made
    made._destroy()


def kernel_frames() -> list[str]:
    """Return what a kernel finds above itself, down to the test."""
    found = []
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "the_call":
        found.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")
        frame = frame.f_back
    return found


class Ops:
    """One new operator in each way that it can come to a plan in its first call."""

    def __init__(self, library: torch.library.Library) -> None:
        self.library = library
        self.frames: list[list[str]] = []
        self.raises = False

    def kernel(self, x: Tensor, y: int = 1) -> Tensor:
        self.frames.append(kernel_frames())
        if self.raises:
            raise ValueError("the kernel's own")
        return x + 1

    def define(self, *overloads: str) -> Any:
        name = f"f{next(NUMBERS)}"
        for overload in overloads or [""]:
            more = ", int y" if overload else ""
            full = f"{name}.{overload}".rstrip(".")
            self.library.define(f"{full}(Tensor x{more}) -> Tensor")
            self.library.impl(full, self.kernel, "CPU")
        return getattr(torch.ops.first, name)

    def overload(self) -> Any:
        op = self.define().default
        hotop.accelerate(op)
        return op

    def packet(self) -> Any:
        op = self.define()
        hotop.accelerate(op)
        return op

    def packet_by_rule(self) -> Any:
        op = self.define()
        hotop.accelerate("first")
        return op

    def packet_of_several(self) -> Any:
        op = self.define("", "two")
        hotop.accelerate("first")
        return op

    def installed(self) -> Any:
        op = self.define()
        hotop.install()
        return op.default

    def later_custom_op(self) -> Any:
        self.define()
        hotop.accelerate("first")

        def kernel(x: Tensor) -> Tensor:
            return self.kernel(x)

        op = torch.library.custom_op(f"first::f{next(NUMBERS)}", kernel, mutates_args=())
        op.register_autograd(lambda ctx, grad: grad)
        return op._opoverload


WAYS = [name for name in vars(Ops) if not name.startswith("_") and name not in ("kernel", "define")]


@pytest.fixture(params=WAYS)
def fresh(request: pytest.FixtureRequest, library: torch.library.Library) -> tuple[Ops, Any]:
    ops = Ops(library)
    return ops, getattr(ops, request.param)()


def test_jit_trace(fresh: tuple[Ops, Any]) -> None:
    _, op = fresh
    # It traces twice and compares the graphs, their lines of source included.
    traced = torch.jit.trace(lambda x: op(x), torch.ones(2))
    assert torch.equal(traced(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.parametrize("namespace", [False, True])
def test_jit_trace_of_aten(namespace: bool) -> None:
    x = torch.ones(2)
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda s: A.add(s, s),
        lambda s: A.add.Tensor(s, s),
        lambda s: A.relu(A.sub(s, 2)),
        lambda s: A.cat([s, s]),
        lambda s: A.sum(s),
    ]
    expected = [function(x) for function in functions]
    for one in ("aten",) if namespace else (A.add, A.add.Tensor, A.relu, A.sub, A.cat, A.sum):
        hotop.accelerate(one)
    for function, result in zip(functions, expected, strict=True):
        assert torch.equal(torch.jit.trace(function, x)(x), result)


@pytest.mark.parametrize("grad", [False, True])
def test_a_kernel_finds_the_frames_of_a_later_call(fresh: tuple[Ops, Any], grad: bool) -> None:
    ops, op = fresh

    def the_call() -> Tensor:
        return op(torch.ones(2, requires_grad=grad))

    for _ in range(3):
        the_call()
    assert ops.frames[0] == ops.frames[1] == ops.frames[2]
    assert not any("hotop" in frame and "tests" not in frame for frame in ops.frames[0])


def test_tracebacks(fresh: tuple[Ops, Any]) -> None:
    ops, op = fresh
    ops.raises = True
    found = []
    for _ in range(2):
        with pytest.raises(ValueError, match="the kernel's own") as caught:
            op(torch.ones(2))
        error = caught.value
        assert error.__context__ is None
        assert error.__cause__ is None
        frames = traceback.extract_tb(error.__traceback__)[1:]
        found.append([(frame.filename, frame.name) for frame in frames])
    assert found[0] == found[1]
    assert not any(filename.startswith(PACKAGE) for filename, _ in found[0])


def test_profiles_with_stack(fresh: tuple[Ops, Any]) -> None:
    _, op = fresh
    with profile(with_stack=True) as profiled:
        op(torch.ones(2))
    events = profiled.profiler.kineto_results.experimental_event_tree()
    above: list[list[str]] = []

    def walk(event: Any, path: list[str]) -> None:
        if event.name.startswith("first::"):
            above.append(path)
        for child in event.children:
            walk(child, [*path, event.name])

    for event in events:
        walk(event, [])
    assert above
    assert not any("hotop" in name and "test_first_call" not in name for p in above for name in p)


def test_the_first_call_counts_and_takes_its_road(library: torch.library.Library) -> None:
    op = Ops(library).overload()
    op(torch.ones(1))
    assert [report.direct for report in hotop.report().ops if report.name == op._name] == [1]


def test_keywords_and_many_arguments(library: torch.library.Library) -> None:
    ops = Ops(library)
    assert ops.overload()(x=torch.ones(1)).item() == 2
    assert ops.packet()(x=torch.ones(1)).item() == 2
    with pytest.raises(RuntimeError, match="expected at most 1 argument"):
        ops.overload()(torch.ones(1), **{f"k{i}": i for i in range(80)})


class Stop(BaseException):
    pass


@pytest.mark.parametrize("way", ["overload", "packet_of_several"])
@pytest.mark.parametrize("error", [RuntimeError("no"), RecursionError("deep"), MemoryError()])
def test_a_plan_that_cannot_be_made(
    way: str, error: Exception, library: torch.library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch serves the call, which needs no plan; the next one tries again."""
    op = getattr(Ops(library), way)()
    tries = []

    def fails(*args: Any) -> None:
        tries.append(args)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(_accelerated._core, "Plan", fails)
        for _ in range(2):
            assert op(torch.ones(1)).item() == 2
    assert len(tries) == 2
    assert op(torch.ones(1)).item() == 2
    assert hotop.explain(op, torch.ones(1)).direct


def test_an_interrupt_ends_the_call_and_the_next_one_is_whole(
    library: torch.library.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops = Ops(library)
    op = ops.overload()

    def stops(*args: Any) -> None:
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(_accelerated._core, "Plan", stops)
        for _ in range(2):
            with pytest.raises(Stop):
                op(torch.ones(1))
    assert not ops.frames
    assert roads(op, torch.ones(1)) == ("direct", "direct")


def test_calls_while_the_plan_is_made(library: torch.library.Library) -> None:
    """By a predicate from that thread, and from another: PyTorch's, without waiting."""
    ops = Ops(library)
    packet = ops.define("", "two")
    results: list[float] = []

    def call() -> None:
        results.append(packet(torch.ones(1)).item())

    def picks(overload: OpOverload) -> bool:
        if overload.namespace != "first" or overload._overloadname != "default":
            return overload.namespace == "first"
        call()
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(60)
        return not thread.is_alive()

    hotop.accelerate(picks)
    assert packet(torch.ones(1), 2).item() == 2
    assert results
    assert set(results) == {2}
    assert hotop.explain(packet, torch.ones(1)).direct


def test_threads_race_for_the_first_call(library: torch.library.Library) -> None:
    ops = Ops(library)
    for way in WAYS * 4:
        op = getattr(ops, way)()
        barrier = threading.Barrier(4)
        results: list[float] = []

        def call(op: Any = op, barrier: Any = barrier, results: list = results) -> None:
            barrier.wait()
            results.extend(op(torch.ones(1)).item() for _ in range(3))

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [2.0] * 12
        assert hotop.explain(op, torch.ones(1)).road != "pytorch"
        hotop.restore()


def test_given_back_by_the_first_call(library: torch.library.Library) -> None:
    packet = Ops(library).define()
    hotop.accelerate(lambda overload: False)
    _existing.cover_packet(packet)
    assert packet(torch.ones(1)).item() == 2
    assert type(packet) is torch._ops.OpOverloadPacket


@pytest.mark.parametrize("what", ["prim", torch.ops.prim], ids=str)
def test_a_namespace_of_torchscript_is_named_so(what: Any) -> None:
    with pytest.raises(ValueError, match=r"namespace '\w+' are TorchScript's own"):
        hotop.accelerate(what)
    with pytest.raises(ValueError, match="no operator is defined in the namespace 'primm'"):
        hotop.accelerate("primm")


def test_operators_of_torchscript_are_left_by_that_name() -> None:
    overload = torch.ops.prim.device.default
    hotop.accelerate(overload)
    assert type(overload) is OpOverload
    assert "TorchScript's" in hotop.report().left["prim::device"]
    hotop.accelerate("aten")
    op = torch.ops.aten.len.str
    assert op("ab") == torch.ops.aten.len("ab") == 2
    assert type(op) is OpOverload
    assert "TorchScript's" in hotop.report().left["aten::len.str"]
