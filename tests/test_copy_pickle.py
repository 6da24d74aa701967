"""The op object, its overload and its packet are singletons: copied and pickled by name."""

import copy
import copyreg
import io
import multiprocessing.reduction
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

import hotop
from hotop import _accelerated, _handles, _op, _planned_op


@hotop.custom_op("copied::f", mutates_args=())
def f(x: Tensor) -> Tensor:
    return x + 1


class Holder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.op = f
        self.overload = torch.ops.copied.f.default
        self.packet = torch.ops.copied.f
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x) + self.overload(x) + self.packet(x) + self.weight


HANDLES = [f, torch.ops.copied.f, torch.ops.copied.f.default]


@pytest.mark.parametrize("handle", HANDLES)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_handles(handle: object, protocol: int) -> None:
    assert copy.copy(handle) is handle
    assert copy.deepcopy(handle) is handle
    assert pickle.loads(pickle.dumps(handle, protocol)) is handle


def test_modules() -> None:
    module = Holder()
    x = torch.zeros(2)
    for clone in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert clone.op is f
        assert torch.equal(clone(x), module(x))


def test_hash_and_equality_are_those_of_pytorch() -> None:
    overload = torch.ops.copied.f.default
    assert {overload: 1}[torch.ops.copied.f.default] == 1
    assert hash(overload) == hash(overload._op)
    assert torch.ops.copied.f is overload.overloadpacket
    assert f._opoverload is overload


def test_unpickling_without_the_definition_names_it() -> None:
    data = pickle.dumps(f)
    program = (
        "import pickle, sys, hotop\n"
        "try:\n    pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "except RuntimeError as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, data.hex()], capture_output=True, text=True, check=True
    )
    assert "copied::f is not defined in this process" in done.stdout


CLASSES = {
    _op.OpDef: CustomOpDef,
    _op.FastOverload: OpOverload,
    _op.FastPacket: OpOverloadPacket,
    _accelerated.AcceleratedOpDef: CustomOpDef,
    _accelerated.AcceleratedOverload: OpOverload,
    _accelerated.AcceleratedPacket: OpOverloadPacket,
    _accelerated.LastingPacket: OpOverloadPacket,
}


class OwnTable(pickle.Pickler):
    """A pickler that copies copyreg's table, as Inductor's."""

    dispatch_table: ClassVar[dict] = copyreg.dispatch_table.copy()


def by_torch_save(what: object) -> object:
    buffer = io.BytesIO()
    torch.save(what, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def by_own_table(what: object) -> object:
    buffer = io.BytesIO()
    OwnTable(buffer).dump(what)
    return pickle.loads(buffer.getvalue())


def by_multiprocessing(what: object) -> object:
    return pickle.loads(multiprocessing.reduction.ForkingPickler.dumps(what))


PICKLERS = [
    *(lambda what, p=p: pickle.loads(pickle.dumps(what, p)) for p in range(6)),
    *(lambda what, p=p: pickle.loads(pickle._dumps(what, p)) for p in range(6)),  # type: ignore[attr-defined]
    by_torch_save,
    by_own_table,
    by_multiprocessing,
]


def subclasses(cls: type) -> Iterator[type]:
    for one in cls.__subclasses__():
        yield one
        yield from subclasses(one)


def test_all_classes_are_listed() -> None:
    """Whatever derives from PyTorch's classes of ops and is not PyTorch's own."""
    found = {one for cls in {*CLASSES.values()} for one in subclasses(cls)}
    of_hotop = {cls for cls in found if isinstance(cls, _handles.StandIn)}
    assert of_hotop == CLASSES.keys() | {_planned_op.PlannedOpDef}
    assert all(vars(torch._ops).get(cls.__name__) is cls for cls in found - of_hotop)
    assert {type(op) for op in HANDLES} <= CLASSES.keys()


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: f"{cls.__name__}")
@pytest.mark.parametrize("pickler", PICKLERS)
def test_classes_are_pickled_as_those_of_pytorch(cls: type, pickler) -> None:  # type: ignore[no-untyped-def]
    # What pickling type(op) of an op of PyTorch's gives.
    assert pickler(cls) is CLASSES[cls]
    assert pickler([cls, {"of": cls}]) == [CLASSES[cls], {"of": CLASSES[cls]}]
    assert issubclass(cls, CLASSES[cls])
    assert copy.copy(cls) is copy.deepcopy(cls) is cls
    assert (cls.__module__, cls.__qualname__) == (
        CLASSES[cls].__module__,
        CLASSES[cls].__qualname__,
    )
    assert repr(cls) == repr(CLASSES[cls])


@pytest.mark.usefixtures("nothing_stays")
def test_classes_of_ops() -> None:
    relu = torch.ops.aten.relu
    hotop.accelerate("aten")
    for op in (*HANDLES, relu, relu.default):
        assert pickle.loads(pickle.dumps(type(op))) is CLASSES[type(op)]


def test_classes_are_read_without_hotop() -> None:
    data = pickle.dumps(list(CLASSES))
    program = (
        "import pickle, sys\n"
        "print(pickle.loads(bytes.fromhex(sys.argv[1])))\n"
        "assert 'hotop' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, data.hex()], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(list(CLASSES.values()))


def test_node_classes_fail_as_those_of_pytorch() -> None:
    def plus(x: Tensor) -> Tensor:
        return x + 1

    errors = []
    for number, make in enumerate((torch.library.custom_op, hotop.custom_op)):
        op = make(f"copied::node{number}", plus, mutates_args=())
        op.register_autograd(lambda ctx, grad: grad)
        node = op(torch.ones(1, requires_grad=True)).grad_fn
        with pytest.raises((pickle.PicklingError, AttributeError)) as caught:
            pickle.dumps(type(node))
        errors.append(str(caught.value).replace("node1", "node0"))
    assert errors[0].partition(" at 0x")[0] == errors[1].partition(" at 0x")[0]
