"""The kernels of an existing ``custom_op``: what PyTorch would call, read again when it changes.

PyTorch's kernel of a device looks a function up by a name that its closure holds (after a list of
devices all closures hold the last name), and that function asks whether it is disabled. Both tables
stand in the op; whoever changes them, a decorator or a context manager that is older than the
acceleration too, the plan hears of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch._library import custom_ops
from torch._ops import OpOverload

from hotop import _core
from hotop._lock import locked
from hotop._planned_op import PlannedOpDef, backend_key


class _Functions(dict[str | None, Callable[..., Any]]):
    """An op's functions by device."""

    def __init__(self, op: PlannedOpDef) -> None:
        super().__init__(op._backend_fns)
        self._op = weakref.ref(op)

    def __setitem__(self, name: str | None, function: Callable[..., Any]) -> None:
        super().__setitem__(name, function)
        _read_again(self._op)


class _Disabled(set[str]):
    """The devices whose functions are disabled."""

    def __init__(self, op: PlannedOpDef) -> None:
        super().__init__(op._disabled_kernel)
        self._op = weakref.ref(op)

    def add(self, name: str) -> None:
        super().add(name)
        _read_again(self._op)

    def remove(self, name: str) -> None:
        super().remove(name)
        _read_again(self._op)

    def discard(self, name: object) -> None:
        super().discard(name)
        _read_again(self._op)


@locked
def _read_again(reference: weakref.ref[PlannedOpDef]) -> None:
    op = reference()
    # It may have been given back.
    if isinstance(op, PlannedOpDef):
        read_kernels(op)


def watch(op: PlannedOpDef) -> None:
    """Read the op's kernels into its plan, now and whenever they change.

    The tables stay when the op is given back: a thread may be on its way into them.
    """
    if not isinstance(op._backend_fns, _Functions):
        _exchange_tables(op)
    read_kernels(op)


def _exchange_tables(op: PlannedOpDef) -> None:
    functions, disabled = _Functions(op), _Disabled(op)
    copied_functions, copied_disabled = dict(functions), set(disabled)
    old_functions, op._backend_fns = op._backend_fns, functions
    old_disabled, op._disabled_kernel = op._disabled_kernel, disabled
    # What another thread wrote to the old ones since.
    for name, function in old_functions.items():
        if copied_functions.get(name) is not function:
            functions[name] = function
    for device_type in old_disabled - copied_disabled:
        disabled.add(device_type)
    for device_type in copied_disabled - old_disabled:
        disabled.discard(device_type)


def pytorch_kernel(overload: OpOverload, key: str, module: str) -> Any:
    """Return PyTorch's own kernel of a custom op at this key; None: it is somebody else's."""
    schema = overload._schema
    kernel = _core.python_kernel(schema.name, schema.overload_name, key)
    return kernel if getattr(kernel, "__module__", None) == module else None


def read_kernels(op: PlannedOpDef) -> None:
    """Tell the plan what the kernel of each device calls."""
    plan = op._plan
    if plan is None:
        return
    for name in list(op._backend_fns):
        # An override may stand before a kernel just now.
        kernel = op._kernels.get(name)
        is_new = kernel is None
        if is_new:
            key = backend_key(name)
            kernel = pytorch_kernel(op._opoverload, key, custom_ops.__name__)
        variables = closure(kernel)
        if kernel is None or "device_type" not in variables:
            continue
        function = _function(op, variables["device_type"])
        if is_new:
            op._kernels[name] = kernel
            plan.add_kernel("backend", key, function, name)
        else:
            plan.set_function(name, function)


def _function(op: PlannedOpDef, looked_up: str | None) -> Callable[..., Any]:
    functions = op._backend_fns
    if looked_up not in functions:
        return lambda *args, **kwargs: functions[looked_up]  # raises PyTorch's KeyError
    # register_kernel's wrapper, which asks if it is enabled.
    wrapper = functions[looked_up]
    inner = getattr(wrapper, "__wrapped__", wrapper)
    variables = closure(inner)
    module = getattr(inner, "__module__", None)
    if module != custom_ops.__name__ or variables.keys() != {"device_type", "fn", "self"}:
        return wrapper
    return op._init_fn if variables["device_type"] in op._disabled_kernel else variables["fn"]


def closure(function: Any) -> dict[str, Any]:
    """Return the variables that a function closes over."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
