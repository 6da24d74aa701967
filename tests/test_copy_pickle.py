"""The op object, its overload and its packet are singletons: copied and pickled by name."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import hotop


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
