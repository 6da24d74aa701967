"""``hotop.custom_op``: PyTorch's own factory, making hotop's class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any, overload

import torch
from torch._library import custom_ops
from torch._library.custom_ops import CustomOpDef

from hotop import _load

_Tags = torch.Tag | Sequence[torch.Tag] | None
_DeviceTypes = str | Sequence[str] | None


def _factory() -> Callable[..., Any]:
    """Return ``torch.library.custom_op``, reading ``OpDef`` where it says ``CustomOpDef``.

    So schema inference, argument checks and error texts are those of the PyTorch at hand.
    """
    original = custom_ops.custom_op
    if _load.CORE is None:
        return original
    from hotop._op import OpDef

    twin = FunctionType(
        original.__code__,
        {**original.__globals__, "CustomOpDef": OpDef},
        original.__name__,
        original.__defaults__,
        original.__closure__,
    )
    twin.__kwdefaults__ = original.__kwdefaults__
    return twin


_make = _factory()


@overload
def custom_op(
    name: str,
    fn: None = None,
    /,
    *,
    mutates_args: str | Iterable[str],
    device_types: _DeviceTypes = None,
    schema: str | None = None,
    tags: _Tags = None,
) -> Callable[[Callable[..., object]], CustomOpDef]: ...


@overload
def custom_op(
    name: str,
    fn: Callable[..., object],
    /,
    *,
    mutates_args: str | Iterable[str],
    device_types: _DeviceTypes = None,
    schema: str | None = None,
    tags: _Tags = None,
) -> CustomOpDef: ...


def custom_op(
    name: str,
    fn: Callable[..., object] | None = None,
    /,
    *,
    mutates_args: str | Iterable[str],
    device_types: _DeviceTypes = None,
    schema: str | None = None,
    tags: _Tags = None,
) -> Callable[[Callable[..., object]], CustomOpDef] | CustomOpDef:
    """Make a PyTorch operator of a Python function.

    A drop-in for :func:`torch.library.custom_op`: the same arguments, schema, registrations and
    errors. The result is a :class:`torch._library.custom_ops.CustomOpDef`; a call of it, of
    ``torch.ops.ns.name`` or of ``torch.ops.ns.name.default`` goes straight to the kernel when
    nothing in PyTorch has work to do for that call, and through PyTorch when something has.

    Args:
        name: ``"namespace::name"``, or ``"namespace::name.overload"``.
        fn: The function; without it, a decorator is returned.
        mutates_args: Names of the arguments that the function changes, or ``"unknown"``.
        device_types: Device types that the function serves; None: all of them.
        schema: A schema such as ``"(Tensor x, int y) -> Tensor"``; None: inferred from the
            annotations.
        tags: Tags for the operator, for instance ``torch.Tag.inplace``.

    Returns:
        The op, or a decorator that returns it.

    Raises:
        ValueError: What ``torch.library.custom_op`` raises for a bad name, annotation or
            ``mutates_args``.

    Example:
        >>> import torch, hotop
        >>> @hotop.custom_op("docs::scale", mutates_args=())
        ... def scale(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        ...     return x * factor
        >>> scale(torch.ones(2))
        tensor([2., 2.])
    """
    return _make(
        name,
        fn,
        mutates_args=mutates_args,
        device_types=device_types,
        schema=schema,
        tags=tags,
    )
