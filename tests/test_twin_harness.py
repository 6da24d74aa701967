"""The twin harness must report every kind of difference: each fault here is put in on purpose."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import BaseTorchFunctionMode

import twin
from twin_observe import normalise


def scale(x: Tensor, factor: int = 2, note: str = "n") -> Tensor:
    """The sound kernel."""
    return x * factor


class Faulty:
    """An op whose call behaves differently from the op that it wraps."""

    def __init__(self, op: Any, fault: Callable) -> None:
        """Wrap an op."""
        self.op, self.fault = op, fault
        self._qualname, self._opoverload = op._qualname, op._opoverload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call through the fault."""
        return self.fault(self.op, *args, **kwargs)


def value(op, x, *rest):
    return op(x, *rest) + 1


def dtype(op, x, *rest):
    return op(x, *rest).to(torch.int32)


def stride(op, x, *rest):
    return op(x, *rest).set_(torch.zeros(4) + 2)[::2].detach()


def object_returned(op, x, *rest):
    return op(x, *rest).clone()


def alias(op, x, *rest):
    op(x, *rest)
    return x


def result_type(op, x, *rest):
    return [op(x, *rest)]


def input_version(op, x, *rest):
    torch.autograd.graph.increment_version(x)
    return op(x, *rest)


def input_value(op, x, *rest):
    result = op(x, *rest)
    x.data.add_(1)
    return result


def output_version(op, x, *rest):
    result = op(x, *rest)
    result.add_(0)
    return result


def requires_grad(op, x, *rest):
    return op(x, *rest).detach()


def grad_fn(op, x, *rest):
    return op(x, *rest) * 1


def argument_object(op, x, *rest):
    return op(x.view_as(x), *rest)


def kernel_twice(op, x, *rest):
    op(x, *rest)
    return op(x, *rest)


def kernel_never(op, x, *rest):
    return x * 2


def grad_mode_in_kernel(op, x, *rest):
    with torch.no_grad():
        result = op(x, *rest)
    return result.requires_grad_(x.requires_grad)


def dispatch_keys_in_kernel(op, x, *rest):
    with torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey.FuncTorchDynamicLayerBackMode):
        state = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchDynamicLayerBackMode)
        with torch._C._ExcludeDispatchKeyGuard(state):
            return op(x, *rest)


def state_left_behind(op, x, *rest):
    result = op(x, *rest)
    torch.set_default_dtype(torch.float64)
    return result


def warning(op, x, *rest):
    warnings.warn("something", stacklevel=1)
    return op(x, *rest)


def events(op, x, *rest):
    with torch.autograd.profiler.record_function("extra"):
        return op(x, *rest)


FAULTS = {
    value: "result.data",
    dtype: "result.dtype",
    stride: "result.stride",
    object_returned: "result.is:",
    alias: "result.storage",
    result_type: "result.type",
    input_version: r"after.\[0\].\[0\].version",
    input_value: r"after.\[0\].\[0\].data",
    output_version: "result.version",
    argument_object: r"kernel\[0\].args\[0\].is:",
    kernel_twice: "kernel:",
    kernel_never: "kernel:",
    grad_mode_in_kernel: r"kernel\[0\].state.grad",
    dispatch_keys_in_kernel: r"kernel\[0\].state.excluded",
    state_left_behind: "state left",
    warning: "warnings",
    events: "events",
}
WITH_GRAD = {
    requires_grad: "result.requires_grad",
    grad_fn: "result.grad_fn",
    grad_mode_in_kernel: r"result.is_leaf",
}


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable], None]]:
    """Put a fault into the right-hand twins of a test."""

    def install(fault: Callable) -> None:
        def factory(*args: Any, **kwargs: Any) -> Faulty:
            return Faulty(torch.library.custom_op(*args, **kwargs), fault)

        monkeypatch.setattr(twin, "RIGHT_FACTORY", factory)

    default_dtype = torch.get_default_dtype()
    yield install
    torch.set_default_dtype(default_dtype)


def call(x_requires_grad: bool = False) -> Callable[[], twin.Arguments]:
    return lambda: ((torch.ones(2, requires_grad=x_requires_grad), 2), {})


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_each_fault_is_reported(fault: Callable, faulty: Callable) -> None:
    faulty(fault)
    pair = twin.Twin(scale)
    with pytest.raises(AssertionError, match=FAULTS[fault]):
        pair.compare(call(), profile=fault is events)


@pytest.mark.parametrize("fault", WITH_GRAD, ids=lambda fault: fault.__name__)
def test_each_autograd_fault_is_reported(fault: Callable, faulty: Callable) -> None:
    faulty(fault)
    pair = twin.Twin(scale)
    for op in pair.ops:
        getattr(op, "op", op).register_autograd(lambda ctx, grad: (grad, None, None))
    with pytest.raises(AssertionError, match=WITH_GRAD[fault]):
        pair.compare(call(x_requires_grad=True))


def test_wrong_gradients_are_reported(faulty: Callable) -> None:
    faulty(lambda op, *args: op(*args))
    pair = twin.Twin(scale)
    pair.ops[0].register_autograd(lambda ctx, grad: (grad, None, None))
    pair.ops[1].op.register_autograd(lambda ctx, grad: (grad * 3, None, None))
    with pytest.raises(AssertionError, match=r"grads\[0\].data"):
        pair.compare(call(x_requires_grad=True))


def test_wrong_argument_conversion_is_reported(faulty: Callable) -> None:
    faulty(lambda op, x, factor: op(x, factor + 1))
    with pytest.raises(AssertionError, match=r"kernel\[0\].args\[1\]"):
        twin.Twin(scale).compare(call())


@pytest.mark.parametrize(
    ("error", "place"),
    [(RuntimeError("other words"), "error.text"), (KeyError("x"), "error.type"), (None, "error")],
)
def test_errors_are_compared(error: Exception | None, place: str, faulty: Callable) -> None:
    def fault(op, x, factor):
        if error is not None:
            raise error
        return x * 2

    faulty(fault)
    with pytest.raises(AssertionError, match=place):
        twin.Twin(scale).compare(lambda: ((torch.ones(2), "two"), {}))


def test_a_copied_kernel_error_is_reported(faulty: Callable) -> None:
    def explode(x: Tensor) -> Tensor:
        raise ValueError("boom")

    def fault(op, x):
        try:
            return op(x)
        except ValueError as error:
            raise ValueError(*error.args) from None

    faulty(fault)
    with pytest.raises(AssertionError, match=r"error\.kernel's own"):
        twin.Twin(explode).compare(lambda: ((torch.ones(1),), {}))


def test_mode_logs_are_compared(faulty: Callable) -> None:
    class Count(torch.overrides.TorchFunctionMode):
        log: list

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.log.append(str(func))
            return func(*args, **(kwargs or {}))

    @contextmanager
    def counting() -> Iterator[Count]:
        mode = Count()
        mode.log = []
        with mode:
            yield mode

    def fault(op, *args):
        with torch._C.DisableTorchFunction():
            return op(*args)

    faulty(fault)
    with pytest.raises(AssertionError, match="mode log"):
        twin.Twin(scale).compare(call(), counting)


def test_equal_ops_are_equal(faulty: Callable) -> None:
    faulty(lambda op, *args: op(*args))
    seen = twin.Twin(scale).compare(call(), profile=True)
    assert seen["error"] is None
    assert seen["result"]["data"] == "[2.0, 2.0]"
    assert seen["kernel"][0]["args"][1] == "int 2"


@twin.needs_hotop
@pytest.mark.parametrize("context", [nullcontext, BaseTorchFunctionMode])
def test_a_wrong_explanation_is_reported(context: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = twin.Twin(scale)
    pair.compare(call(), context=context)
    direct = context is nullcontext
    assert pair.direct is direct
    lie = SimpleNamespace(direct=not direct)
    monkeypatch.setattr(twin, "explain", lambda op, *args, **kwargs: lie)
    with pytest.raises(AssertionError, match="explain says"):
        pair.compare(call(), context=context)


def test_differences_name_the_place() -> None:
    left = {"a": [1, {"b": 2}], "c": 3}
    right = {"a": [1, {"b": 4}], "d": 5}
    assert [line.split(":")[0] for line in twin.differences(left, right)] == ["a[1].b", "c", "d"]
    assert twin.differences(left, left) == []
    assert twin.differences([1], [1, 2]) == [":\n    torch: [1]\n    hotop: [1, 2]"]


def test_normalise_hides_only_what_must_differ() -> None:
    text = "twin_hotop::f <object at 0x7f00> twin_torch"
    assert normalise(text) == "NS::f <object at 0x> NS"
    assert normalise("argument 12 of f_3") == "argument 12 of f_3"


def test_the_kernel_without_recording_is_called_the_same() -> None:
    seen = twin.Twin(scale, record=False).compare(call())
    assert seen["kernel"] == []
    assert seen["result"]["data"] == "[2.0, 2.0]"
