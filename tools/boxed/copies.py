"""Fresh copies of recorded arguments: strides, offsets, aliasing and flags as in the original."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LARGEST = 1 << 20  # bytes of a storage that is worth a copy


class TooLarge(Exception):
    """The arguments are not worth keeping."""


def _strided(tensor: Tensor, storages: dict[int, Any]) -> Tensor:
    storage = tensor.untyped_storage()
    if storage.nbytes() > LARGEST:
        raise TooLarge
    copy = storages.get(storage._cdata)
    if copy is None:
        copy = storages[storage._cdata] = storage.clone()
    fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    fresh.set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]
    if tensor.is_conj():
        fresh = torch._conj(fresh)
    if tensor.is_neg():
        fresh = torch._neg_view(fresh)
    return fresh


def _copy_tensor(tensor: Tensor, storages: dict[int, Any]) -> Tensor:
    plain = (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor._is_zerotensor()
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )
    fresh = _strided(tensor.detach(), storages) if plain else tensor.detach().clone()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(fresh, tensor.requires_grad)
    if tensor.requires_grad:
        fresh.requires_grad_()
    return fresh


def _copy(value: Any, storages: dict[int, Any], seen: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        if id(value) not in seen:
            seen[id(value)] = _copy_tensor(value, storages)
        return seen[id(value)]
    if type(value) is list:
        return [_copy(element, storages, seen) for element in value]
    if type(value) is tuple:
        return tuple(_copy(element, storages, seen) for element in value)
    if type(value) is dict:
        return {key: _copy(element, storages, seen) for key, element in value.items()}
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, torch.UntypedStorage):
        return value.clone()
    return value


def copied(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return fresh arguments; equal objects stay one object, shared storages stay shared."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.utils._python_dispatch._disable_current_modes(),
    ):
        args, kwargs = _copy([list(args), dict(kwargs)], {}, {})
    return tuple(args), kwargs
