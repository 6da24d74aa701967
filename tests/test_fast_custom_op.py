"""``hotop.fast_custom_op``: names, devices, schema, errors, and the checks that it keeps."""

import inspect

import pytest
import torch
from torch import Tensor

import hotop


def body(x: Tensor, y: Tensor, alpha: float = 1.0, flag: bool = False) -> Tensor:
    return x + alpha * y


@pytest.mark.parametrize(
    "devices", ["CPU", "cpu", "Cpu", ["CPU"], ["cpu", "CUDA"], ("cuda", "cpu")]
)
def test_device_names_in_any_case(devices: object) -> None:
    op = hotop.fast_custom_op("fco_devices::f", device_types=devices)(body)
    x = torch.ones(2)
    assert torch.equal(op(x, x), x * 2)
    assert hotop.explain(op, x, x).direct
    assert torch.equal(torch.ops.fco_devices.f(x, x, 2.0), x * 3)


def test_schema_is_that_of_custom_op() -> None:
    op = hotop.fast_custom_op("fco_schema::f", device_types="cpu")(body)
    twin = torch.library.custom_op("fco_schema_twin::f", body, mutates_args=(), device_types="cpu")
    ours = str(op._opoverload._schema)
    assert ours == str(twin._opoverload._schema).replace("fco_schema_twin", "fco_schema")
    assert "float alpha=1." in ours


def test_default_is_cuda() -> None:
    assert inspect.signature(hotop.fast_custom_op).parameters["device_types"].default == "CUDA"
    op = hotop.fast_custom_op("fco_cuda::f")(body)
    with pytest.raises(NotImplementedError, match="'fco_cuda::f' with arguments from the 'CPU'"):
        op(torch.ones(1), torch.ones(1))


def test_python_impl_and_fake() -> None:
    op = hotop.fast_custom_op("fco_impl::f", device_types="cpu")(body)
    assert op.python_impl is body

    @op.register_fake
    def _(x: Tensor, y: Tensor, alpha: float = 1.0, flag: bool = False) -> Tensor:
        return torch.empty_like(x)

    compiled = torch.compile(lambda x: op(x, x) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))


def test_all_devices() -> None:
    op = hotop.fast_custom_op("fco_all::f", device_types="CompositeExplicitAutograd")(body)
    assert hotop.explain(op, torch.ones(1), torch.ones(1)).direct


@pytest.mark.parametrize("name", ["no_namespace", "a::b::c", "", 3])
def test_bad_qualname(name: object) -> None:
    with pytest.raises(ValueError, match="namespace::name"):
        hotop.fast_custom_op(name)  # type: ignore[arg-type]


def test_bad_mutates_args() -> None:
    with pytest.raises(ValueError, match=r"'z'.*parameters are \['x', 'y', 'alpha', 'flag'\]"):
        hotop.fast_custom_op("fco_bad::f", mutates_args=["z"])(body)
    with pytest.raises(ValueError, match="must be a list of names"):
        hotop.fast_custom_op("fco_bad::g", mutates_args="x")(body)


def test_bad_annotation() -> None:
    def no_schema_type(x: dict) -> Tensor:
        return torch.empty(1)

    with pytest.raises(ValueError, match="unsupported type"):
        hotop.fast_custom_op("fco_bad::h")(no_schema_type)


@pytest.mark.parametrize("devices", ["gpuu", [], ["cpu", "nonsense"]])
def test_bad_device(devices: object) -> None:
    with pytest.raises(ValueError, match="device_types"):
        hotop.fast_custom_op("fco_bad::i", device_types=devices)  # type: ignore[arg-type]


def test_checks_are_kept() -> None:
    same = hotop.fast_custom_op("fco_checks::same", device_types="cpu")
    op = same(lambda_identity)
    with pytest.raises(RuntimeError, match="may not alias"):
        op(torch.ones(1))
    fill = hotop.fast_custom_op("fco_checks::fill", mutates_args=["x"], device_types="cpu")(fill_)
    x = torch.zeros(2)
    version = x._version
    fill(x, 3.0)
    assert x.tolist() == [3.0, 3.0]
    assert x._version == version + 2  # the op's own, and the kernel's fill_


def lambda_identity(x: Tensor) -> Tensor:
    return x


def fill_(x: Tensor, value: float) -> None:
    x.fill_(value)
