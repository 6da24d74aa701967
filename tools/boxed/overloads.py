"""The overloads of a namespace: those of the dispatcher, and those that only TorchScript has."""

from __future__ import annotations

import operator
from typing import Any

import torch

# Calls that are no test of a call, with the reason. All other overloads are tried.
SKIPPED: dict[str, str] = {
    "aten::_print": "prints",
    "aten::breakpoint": "starts a debugger",
    "aten::manual_seed": "sets the seed of the process",
    "aten::seed": "sets the seed of the process",
    "aten::wait": "waits for a future that never ends",
}
INT_DTYPES = 8  # the first of PyTorch's ScalarType: uint8 to float64


def dispatcher_names(namespace: str = "aten") -> list[str]:
    """Return the names of all overloads that the dispatcher knows, as `aten::add.Tensor`."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted(n for n in names if n.startswith(f"{namespace}::"))


def script_names(namespace: str = "aten") -> list[str]:
    """Return the names of the overloads that `torch.ops` serves from TorchScript alone."""
    known = set(dispatcher_names(namespace))
    names = {
        s.name + (f".{s.overload_name}" if s.overload_name else "")
        for s in torch._C._jit_get_all_schemas()
        if s.name.startswith(f"{namespace}::")
    }
    return sorted(names - known)


def overload(name: str) -> Any:
    """Return the `OpOverload` with this name."""
    namespace, _, rest = name.partition("::")
    packet, _, of = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), of or "default")


def name_of(op: Any) -> str:
    """Return the dispatcher's name of an overload."""
    schema = op._schema
    return schema.name + (f".{schema.overload_name}" if schema.overload_name else "")


def skip_reason(name: str) -> str | None:
    """Return why an overload is not called, or None."""
    return SKIPPED.get(name.partition(".")[0])


def is_undefined(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether PyTorch reads what is not there.

    `aten::_fft_*` takes any dim. TorchScript's `aten::to` takes any int for a dtype, and with
    `copy` it reads the dtype even when there is none.
    """
    name = name_of(op)
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if name.startswith("aten::_fft_"):
        tensor, dims = given.get("self"), given.get("dim")
        if not isinstance(tensor, torch.Tensor) or not isinstance(dims, list | tuple):
            return False
        return any(isinstance(dim, int) and not 0 <= dim < tensor.dim() for dim in dims)
    if not name.startswith("aten::to.prim_"):
        return False
    dtype = given.get("dtype")
    if dtype is None and given.get("device") is None:
        return given.get("copy", False) is not False
    try:
        return not 0 <= operator.index(dtype) < INT_DTYPES
    except (TypeError, RuntimeError):  # None, or refused
        return False
