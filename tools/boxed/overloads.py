"""The overloads of a namespace: those of the dispatcher, and those that only TorchScript has."""

from __future__ import annotations

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
