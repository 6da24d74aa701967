"""PyTorch's own database of custom ops, defined again with hotop: opcheck, and the same answers."""

import inspect
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._library.custom_ops import OPDEFS
from torch.testing._internal import custom_op_db as original
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils._pytree import tree_flatten, tree_map

import hotop
from hotop._core import CallSlot

OPCHECK = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)


def redefine() -> ModuleType:
    """Execute the database's source with hotop's factory, under a namespace of its own."""
    source = inspect.getsource(original)
    source, factories = re.subn(r"torch\.library\.custom_op\b", "hotop.custom_op", source)
    source = source.replace("_torch_testing", "_hotop_testing")
    assert factories > 10, "PyTorch's database is not written as this test knows it"
    module = ModuleType("hotop_custom_op_db")
    module.__dict__["hotop"] = hotop
    exec(compile(source, original.__file__, "exec"), module.__dict__)
    return module


twins = redefine()
NAMES = [info.name for info in original.custom_op_db]
ORIGINALS = {info.name: info for info in original.custom_op_db}
TWINS = {info.name: info for info in twins.custom_op_db}
DIFFERENTIABLE = [name for name in NAMES if ORIGINALS[name].supports_autograd]
# PyTorch's own definitions fail here: shapes that depend on data, and a fake of the wrong dtype.
FAILS_IN_PYTORCH = {
    ("NumpyNonzeroCustomOp", "torch.float32"),
    ("NumpyNonzeroCustomOp", "torch.int64"),
    ("NumpyNMSCustomOp", "torch.float32"),
    ("NumpyNMSCustomOp", "torch.int64"),
    ("NumpyMulScalarCustomOp", "torch.int64"),
}
VMAPPED = [name for name in NAMES if name not in ("NumpyNonzeroCustomOp", "NumpyNMSCustomOp")]


def overload(info: Any) -> Any:
    return getattr(info.op, "default", info.op)


def samples(info: Any, dtype: torch.dtype, requires_grad: bool = False) -> Iterator[SampleInput]:
    """The same values in every call, so that the two databases get the same."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        yield from info.sample_inputs("cpu", dtype, requires_grad=requires_grad)


def call(op: Callable[..., Any], sample: SampleInput) -> Any:
    return op(sample.input, *sample.args, **sample.kwargs)


def tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def observed(run: Callable[[], Any]) -> Any:
    """Everything a caller can see: values, classes, flags, or the error."""

    def look(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return type(leaf), leaf
        node = None if leaf.grad_fn is None else type(leaf.grad_fn).__name__
        return (
            leaf.dtype,
            leaf.shape,
            leaf.stride(),
            leaf.requires_grad,
            node is None,
            leaf.tolist(),
        )

    try:
        result = run()
    except Exception as error:
        return type(error), str(error).replace("_hotop_testing", "_torch_testing")
    leaves, structure = tree_flatten(result)
    return [look(leaf) for leaf in leaves], structure


def ways(info: Any) -> list[Callable[..., Any]]:
    """The overload, the packet, and the op object."""
    found = overload(info)
    return [found, found.overloadpacket, OPDEFS[found._schema.name]]


def test_every_op_of_the_database_has_a_twin() -> None:
    assert list(TWINS) == NAMES
    for name in NAMES:
        assert isinstance(overload(TWINS[name]), CallSlot), name
        assert not isinstance(overload(ORIGINALS[name]), CallSlot), name


@pytest.mark.parametrize("name", NAMES)
def test_plain_calls_are_direct(name: str) -> None:
    """Else the other tests would compare PyTorch with itself."""
    for sample in samples(TWINS[name], torch.float32):
        verdict = hotop.explain(overload(TWINS[name]), sample.input, *sample.args, **sample.kwargs)
        assert verdict.direct, verdict


def checked(info: Any, sample: SampleInput, test_utils: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, Any] = torch.library.opcheck(
        overload(info),
        (sample.input, *sample.args),
        sample.kwargs,
        test_utils=test_utils,
        raise_exception=False,
    )
    return {
        test: str(answer).replace("_hotop_testing", "_torch_testing")
        for test, answer in found.items()
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=["float32", "int64"])
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str, dtype: torch.dtype) -> None:
    """Passed, or failed word for word as PyTorch's own op fails (no static shapes, for one)."""
    requires_grad = dtype.is_floating_point and ORIGINALS[name].supports_autograd
    mine = samples(TWINS[name], dtype, requires_grad)
    theirs = samples(ORIGINALS[name], dtype, requires_grad)
    for left, right in zip(mine, theirs, strict=True):
        answers = checked(TWINS[name], left, OPCHECK)
        failed = tuple(test for test, answer in answers.items() if answer != "SUCCESS")
        assert len(answers) == len(OPCHECK)
        assert {test: answers[test] for test in failed} == checked(ORIGINALS[name], right, failed)
        if (name, str(dtype)) not in FAILS_IN_PYTORCH:
            assert failed == ()


@pytest.mark.parametrize("name", NAMES)
def test_results_in_every_dtype(name: str) -> None:
    for dtype in sorted(ORIGINALS[name].dtypes, key=str):
        if (name, dtype) == ("NumpyNonzeroCustomOp", torch.bool):
            continue  # PyTorch cannot make a sample of it
        mine = samples(TWINS[name], dtype)
        theirs = samples(ORIGINALS[name], dtype)
        for left, right in zip(mine, theirs, strict=True):
            for op, reference in zip(ways(TWINS[name]), ways(ORIGINALS[name]), strict=True):
                expected = observed(lambda: call(reference, right))  # noqa: B023
                assert observed(lambda: call(op, left)) == expected, (dtype, op)  # noqa: B023


def gradients(info: Any) -> Any:
    """First and second derivatives of the sum of all outputs."""
    found = []
    for sample in samples(info, torch.float64, requires_grad=True):
        inputs = [leaf for leaf in tensors((sample.input, sample.args)) if leaf.requires_grad]
        out = [leaf for leaf in tensors(call(overload(info), sample)) if leaf.requires_grad]
        first = torch.autograd.grad(
            sum((leaf * leaf).sum() for leaf in out), inputs, create_graph=True
        )
        found.append(tree_map(lambda leaf: leaf.detach(), first))
        second = torch.autograd.grad(
            sum((leaf * leaf).sum() for leaf in first), inputs, allow_unused=True
        )
        found.append(second)
    return found


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_first_and_second_derivatives(name: str) -> None:
    mine, theirs = gradients(TWINS[name]), gradients(ORIGINALS[name])
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradcheck(name: str) -> None:
    info = TWINS[name]

    def run(*args: Any, **kwargs: Any) -> Any:
        return info.gradcheck_wrapper(overload(info), *args, **kwargs)

    for sample in samples(info, torch.float64, requires_grad=True):
        if isinstance(sample.input, list):
            rest, count = sample.args, len(sample.input)
            inputs = (*sample.input,)
            assert torch.autograd.gradcheck(
                lambda *xs: run(list(xs[:count]), *rest),  # noqa: B023
                inputs,
            )
        else:
            assert torch.autograd.gradcheck(
                lambda x: run(x, *sample.args, **sample.kwargs),  # noqa: B023
                (sample.input,),
            )


@pytest.mark.parametrize("name", VMAPPED)
def test_vmap(name: str) -> None:
    def batched(info: Any) -> Any:
        op = overload(info)
        (sample,) = samples(info, torch.float32)
        stacked = tree_map(
            lambda leaf: torch.stack([leaf, leaf + 1]) if leaf.is_floating_point() else leaf,
            sample.input,
        )
        return observed(lambda: torch.vmap(lambda x: op(x, *sample.args, **sample.kwargs))(stacked))

    assert batched(TWINS[name]) == batched(ORIGINALS[name])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", ["no arguments", "a str", "too many", "unknown keyword"])
def test_wrong_calls(name: str, wrong: str) -> None:
    def run(info: Any) -> Any:
        (sample,) = samples(info, torch.float32)
        op = overload(info)
        args, kwargs = (sample.input, *sample.args), sample.kwargs
        if wrong == "no arguments":
            return observed(lambda: op())
        if wrong == "a str":
            return observed(lambda: op("x", *sample.args, **kwargs))
        if wrong == "too many":
            return observed(lambda: op(*args, *args, *args, *args))
        return observed(lambda: op(*args, **kwargs, nonsense=1))

    mine, theirs = run(TWINS[name]), run(ORIGINALS[name])
    assert isinstance(theirs[0], type), "not an error"
    assert mine == theirs


def body_of_add(x: torch.Tensor, z: torch.Tensor) -> None:
    x.add_(z)


class TestHigherOrderOps:
    """hop_db's functions call ATen ops; here their bodies call a hotop op, and its twin."""

    @pytest.fixture
    def pair(self) -> dict[str, Any]:
        """``x * 2`` with a formula, and ``x += z``, once as hotop's op and once as PyTorch's."""
        made: dict[str, Any] = {}
        factories = {"hotop": hotop.custom_op, "torch": torch.library.custom_op}
        for name, factory in factories.items():

            def double(x: torch.Tensor) -> torch.Tensor:
                return x * 2

            scale: Any = factory(f"hop_{name}::double", double, mutates_args=())
            scale.register_fake(torch.empty_like)
            scale.register_autograd(lambda ctx, grad: grad * 2)
            add: Any = factory(f"hop_{name}::add", body_of_add, mutates_args={"x"})
            add.register_fake(lambda x, z: None)
            made[name] = scale, add
        return made

    def compare(self, pair: dict[str, Any], function: Callable[..., Any]) -> None:
        answers = {}
        for name, (double, add) in pair.items():
            torch._dynamo.reset()
            x = torch.arange(6.0).reshape(3, 2).requires_grad_()
            compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
            eager = tensors(function(double, add, x))
            out = tensors(compiled(double, add, x))
            torch.testing.assert_close(out, eager)
            (grad,) = torch.autograd.grad(sum(leaf.sum() for leaf in out), x)
            answers[name] = [leaf.detach().tolist() for leaf in out], grad.tolist()
        assert answers["hotop"] == answers["torch"]

    def test_cond(self, pair: dict[str, Any]) -> None:
        def function(double: Any, add: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 4, lambda x: double(x), lambda x: x.sin(), (x,))

        self.compare(pair, function)

    def test_map(self, pair: dict[str, Any]) -> None:
        from torch._higher_order_ops.map import map as hop_map

        def function(double: Any, add: Any, x: torch.Tensor) -> torch.Tensor:
            return hop_map(lambda row: double(row).sin(), x)

        self.compare(pair, function)

    def test_scan(self, pair: dict[str, Any]) -> None:
        from torch._higher_order_ops.scan import scan

        def function(double: Any, add: Any, x: torch.Tensor) -> Any:
            return scan(lambda c, row: (double(c) + row, c.sin()), torch.zeros(2), x)

        self.compare(pair, function)

    def test_auto_functionalize(self, pair: dict[str, Any]) -> None:
        """As hop_db's ``auto_functionalize``: an op that mutates inside compiled code."""

        def function(double: Any, add: Any, x: torch.Tensor) -> torch.Tensor:
            held = x.sin()
            total = torch.zeros_like(x)
            add(total, held.detach())
            return total + held

        self.compare(pair, function)
