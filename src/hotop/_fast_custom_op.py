"""``hotop.fast_custom_op``: the helper that TensorRT-LLM's code base has, with every check kept."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef

from hotop._define import custom_op

# Dispatch keys that are written where a device type is meant, and mean every device.
_ALL_DEVICES = {"compositeexplicitautograd", "default"}


def _device_type(name: str) -> str | None:
    lowered = name.lower()
    if lowered in _ALL_DEVICES:
        return None
    if lowered == "privateuse1":
        lowered = torch._C._get_privateuse1_backend_name()
    try:
        return torch.device(lowered).type
    except RuntimeError:
        raise ValueError(
            f"fast_custom_op: device_types has {name!r}, which is neither a device type nor a "
            "backend's dispatch key (for instance 'cuda' or 'CUDA')"
        ) from None


def _device_types(names: str | Sequence[str]) -> list[str] | None:
    listed = [names] if isinstance(names, str) else list(names)
    if not listed:
        raise ValueError("fast_custom_op: device_types is empty")
    found = [_device_type(name) for name in listed]
    if None in found:
        return None
    return list(dict.fromkeys(name for name in found if name is not None))


def _check(qualname: str, fn: Callable[..., Any], mutates_args: str | Iterable[str]) -> None:
    if mutates_args == "unknown":
        return
    if isinstance(mutates_args, str):
        raise ValueError(
            f"fast_custom_op: {qualname}: mutates_args must be a list of names or 'unknown', got "
            f"the str {mutates_args!r}"
        )
    known = list(inspect.signature(fn).parameters)
    unknown = [name for name in mutates_args if name not in known]
    if unknown:
        raise ValueError(
            f"fast_custom_op: {qualname}: mutates_args names {unknown}, but the function's "
            f"parameters are {known}"
        )


def fast_custom_op(
    qualname: str,
    *,
    mutates_args: str | Iterable[str] = (),
    device_types: str | Sequence[str] = "CUDA",
) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Make an operator of a Python function for the given devices.

    The schema is the one that :func:`torch.library.custom_op` infers, defaults included. The
    result has ``register_fake`` and all else of a ``CustomOpDef``, and ``python_impl``, the
    function itself.

    Args:
        qualname: ``"namespace::name"``.
        mutates_args: Names of the arguments that the function changes, or ``"unknown"``.
        device_types: Device types or backend dispatch keys, in any case (``"CUDA"``, ``"cpu"``,
            ``"PrivateUse1"``), one or a list. ``"CompositeExplicitAutograd"`` means all devices.

    Returns:
        A decorator that returns the op.

    Raises:
        ValueError: ``qualname`` has no ``::``, ``mutates_args`` names an unknown parameter, a
            device type is unknown, or an annotation has no schema type.
    """
    if not isinstance(qualname, str) or len(qualname.split("::")) != 2:
        raise ValueError(
            f"fast_custom_op: expected a name of the form 'namespace::name', got {qualname!r}"
        )
    devices = _device_types(device_types)
    if not isinstance(mutates_args, str):
        mutates_args = tuple(mutates_args)

    def decorate(fn: Callable[..., Any]) -> CustomOpDef:
        _check(qualname, fn, mutates_args)
        op = custom_op(qualname, fn, mutates_args=mutates_args, device_types=devices)
        op.python_impl = fn  # type: ignore[attr-defined]
        return op

    return decorate
