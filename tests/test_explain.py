"""``hotop.explain``: the first reason, in words, and it tells the truth."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import hotop


@hotop.custom_op("explain::f", mutates_args=())
def f(x: Tensor, n: int = 1, s: str = "a") -> Tensor:
    return x * n


@hotop.custom_op("explain::cpu_only", mutates_args=(), device_types="cpu")
def cpu_only(x: Tensor) -> Tensor:
    return x * 2


class Sub(Tensor):
    pass


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


@pytest.mark.parametrize("how", [f, torch.ops.explain.f, torch.ops.explain.f.default])
def test_direct(how: Callable[..., Tensor]) -> None:
    before = f._plan.direct_calls
    for args, kwargs in [((torch.ones(1),), {}), ((torch.ones(1), 2), {"s": "b"})]:
        assert hotop.explain(how, *args, **kwargs) == hotop.Explanation(True, "", "direct")
        how(*args, **kwargs)
    assert f._plan.direct_calls == before + 2


CASES = [
    ((torch.ones(2).as_subclass(Sub),), {}, "argument 0 \\('x'\\) is a Sub"),
    ((3,), {}, "argument 0 \\('x'\\) is a int"),
    ((), {}, "number of positional arguments"),
    ((torch.ones(1), 1, "a", 4), {}, "number of positional arguments"),
    ((torch.ones(1),), {"m": 3}, "keyword"),
    ((torch.ones(1), 2), {"n": 3}, "argument 1 \\('n'\\) is given twice"),
    ((), {"n": 3}, "argument 0 \\('x'\\) is missing"),
    ((torch.ones(1), 2**63), {}, "argument 1 \\('n'\\)"),
    ((torch.ones(1), 1.5), {}, "argument 1 \\('n'\\) is a float"),
    ((torch.ones(2, dtype=torch.cfloat).conj(),), {}, "Conjugate"),
]


@pytest.mark.parametrize(("args", "kwargs", "reason"), CASES)
def test_reasons(args: tuple, kwargs: dict, reason: str) -> None:
    import re

    explanation = hotop.explain(f, *args, **kwargs)
    assert not explanation.direct
    assert re.search(reason, explanation.reason), explanation.reason


@hotop.custom_op("explain::of_list", mutates_args=())
def of_list(xs: list[Tensor]) -> Tensor:
    return xs[0] * 2


double_ = hotop.custom_op(
    "explain::double_",
    lambda x: x.mul_(2),
    mutates_args={"x"},
    schema="(Tensor(a!) x) -> Tensor(a!)",
    tags=torch.Tag.inplace,
)


def test_recording() -> None:
    """Autograd records a call directly, unless the output is an input."""
    assert hotop.explain(f, leaf()).direct
    assert hotop.explain(of_list, [leaf()]).direct
    reason = hotop.explain(double_, leaf()).reason
    assert reason == "grad mode is on and argument 0 ('x') requires grad"
    with torch.no_grad():
        assert hotop.explain(double_, leaf()).direct


def test_contexts() -> None:
    x = torch.ones(2)
    with FunctionMode():
        assert "function mode" in hotop.explain(f, x).reason
    with DispatchMode():
        assert "Python" in hotop.explain(f, x).reason
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert hotop.explain(f, x).direct, "the event is recorded around the direct call"
    with torch.device("meta"):
        assert hotop.explain(f, x).direct
    with torch.no_grad():
        assert hotop.explain(f, leaf()).direct
    with torch.autocast("cpu"):
        assert hotop.explain(f, x).direct, "autocast without a rule has nothing to do"
    assert "no kernel" in hotop.explain(cpu_only, x.to_sparse()).reason
    assert hotop.explain(f, x.to_sparse()).direct, "the default kernel serves every layout"


def test_other_callables() -> None:
    assert "not made by hotop" in hotop.explain(torch.ops.aten.add, 1).reason
    with pytest.raises(TypeError, match="expects an op"):
        hotop.explain(3)


def test_explaining_does_not_call() -> None:
    calls = []

    @hotop.custom_op("explain::counted", mutates_args={"x"})
    def counted(x: Tensor) -> None:
        calls.append(1)

    x = torch.ones(1)
    assert hotop.explain(counted, x).direct
    assert calls == []
    assert x._version == 0
