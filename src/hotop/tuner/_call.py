"""One call of a tactic on copies, and all that can be seen of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hotop.tuner import _layout, _process
from hotop.tuner._key import is_tensor
from hotop.tuner._workspace import Arguments, Workspace, aligned_bytes, contents


class Refused(Exception):
    """A tactic may not win; the text says why."""


@dataclass(frozen=True)
class Form:
    """What of one Tensor of a result is not its values.

    Attributes:
        is_same: The argument, by place, or earlier Tensor of the result, by minus its number, that
            it is.
        shares: The arguments, by place, and the earlier Tensors of the result, by minus their
            number, whose storage or memory it shares, and how many bytes it begins after them.
        is_held: Somebody else holds it or its memory, and may write there later.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: torch.device
    layout: torch.layout
    requires_grad: bool
    is_conj: bool
    is_neg: bool
    is_inference: bool
    is_same: int | None
    shares: tuple[tuple[int, int], ...]
    is_held: bool


@dataclass
class Seen:
    """One call: its result and its effects.

    Attributes:
        structure: The result with a type in place of every value; Tensors and numbers apart.
        tensors: Of the result, in order; copies of those that lie in an argument, since the next
            call works there.
        forms: Of each of them.
        numbers: Everything else of the result.
        changed: Copies of the arguments' Tensors that may be changed, after the call.
        mutable: The names of those arguments.
        untouched: Of those whose Tensors are as they were.
        left: Arguments and settings that are not as they were, in words.
        random, generators: The states of the process's generators and of those that are arguments.
    """

    structure: Any
    tensors: list[torch.Tensor]
    forms: list[Form]
    numbers: list[Any]
    changed: list[torch.Tensor]
    mutable: set[str]
    untouched: set[str]
    left: list[str]
    random: _process.RandomState
    generators: list[bytes]
    ranges: list[tuple[int, int]]


_PLAIN = (
    type(None), bool, int, float, complex, str, bytes,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip


def _flatten(value: Any, tensors: list[torch.Tensor], others: list[Any]) -> Any:
    """Return the structure of a result, and collect what is in it."""
    kind = type(value)
    if is_tensor(value):
        tensors.append(value)
        return kind
    if kind in _PLAIN:
        others.append(value)
        return kind
    if kind in (list, tuple) or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        return kind, tuple(_flatten(one, tensors, others) for one in value)
    if kind is dict:
        return kind, tuple((key, _flatten(one, tensors, others)) for key, one in value.items())
    raise Refused(f"returns a value of the type {kind.__name__}, which cannot be compared")


def synchronize(devices: Sequence[int]) -> None:
    """Wait for these CUDA devices."""
    for index in devices:
        torch.cuda.synchronize(index)


def run(
    workspace: Workspace,
    function: Callable[..., Any],
    before: tuple[_process.Settings, _process.RandomState],
    devices: Sequence[int],
) -> Seen:
    """Call a tactic on fresh copies, with the random generators set back, and look at everything.

    Raises:
        Refused: It returns what cannot be compared.
        BaseException: What the tactic raises.
    """
    settings, generators = before
    call = workspace.fresh()
    generators.restore()
    try:
        result = function(*call.args, **call.kwargs)
        synchronize(devices)
    finally:
        changed_settings = _process.put_back(settings)
    random = _process.random_state(devices)
    tensors: list[torch.Tensor] = []
    numbers: list[Any] = []
    structure = _flatten(result, tensors, numbers)
    del result
    holders = [_holders(tensor) for tensor in tensors]
    ranges = [_range(tensor) for tensor in tensors]
    left = [f"leaves {name} at {value}" for name, value in changed_settings.items()]
    left += _left_in_arguments(workspace, call)
    places = zip(workspace.places, workspace.mutated, strict=True)
    mutable = {place.name for place, mutated in places if mutated}
    forms = [_form(i, tensors, ranges, holders[i], call) for i in range(len(tensors))]
    return Seen(
        structure,
        [_lasting(tensor, form) for tensor, form in zip(tensors, forms, strict=True)],
        forms,
        numbers,
        [_copy(t) for t, m in zip(call.tensors, workspace.mutated, strict=True) if m],
        mutable,
        mutable - _touched(workspace, call),
        left,
        random,
        [_state(part) for _, part, _ in call.parts if type(part) is torch.Generator],
        ranges,
    )


def _holders(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return how many hold a Tensor, its memory and what it is a view of, this look included."""
    memory = base = storages = 0
    if tensor.layout is torch.strided and not tensor.is_meta:
        storage = tensor.untyped_storage()
        storages = sys.getrefcount(storage)
        memory = torch._C._storage_Use_Count(storage._cdata)
    if tensor._is_view():
        memory -= 1  # the base, which the view holds
        base = sys.getrefcount(tensor._base)
    return sys.getrefcount(tensor), memory, storages, base


def _is_held(holders: tuple[int, ...]) -> bool:
    return any(now > alone for now, alone in zip(holders, _ALONE, strict=True))


def _touched(workspace: Workspace, call: Arguments) -> set[str]:
    """Return the names of arguments of which a Tensor that may be changed was."""
    touched = set()
    for place, tensor, mutated in zip(
        workspace.places, call.tensors, workspace.mutated, strict=True
    ):
        if mutated:
            source = place.on(workspace.blocks[place.block].source, place.raw_dtype)
            same = tensor.shape == source.shape and torch.equal(
                tensor.detach().view(place.raw_dtype), source
            )
            if not same:
                touched.add(place.name)
    return touched


def _lasting(tensor: torch.Tensor, form: Form) -> torch.Tensor:
    in_argument = any(place >= 0 for place, _ in form.shares)
    return _copy(tensor) if in_argument else tensor


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of every bit: a bool may hold other bytes, and PyTorch cannot copy float4."""
    tensor = tensor.detach()
    if tensor.element_size() > 1:
        return tensor.clone()
    return tensor.view(torch.uint8).clone().view(tensor.dtype)


def _state(generator: torch.Generator) -> bytes:
    return bytes(generator.get_state().numpy())


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    return _layout.byte_range(tensor) if tensor.layout is torch.strided else (0, 0)


def _form(
    i: int,
    tensors: Sequence[torch.Tensor],
    ranges: Sequence[tuple[int, int]],
    holders: tuple[int, ...],
    call: Arguments,
) -> Form:
    tensor = tensors[i]
    shares = []
    is_same = None
    for place, argument in enumerate(call.tensors):
        if tensor is argument:
            is_same = place
        argument_range = _layout.byte_range(argument)
        if _layout.share(tensor, ranges[i], argument, argument_range):
            shares.append((place, ranges[i][0] - argument_range[0]))
    for earlier in range(i):
        if tensors[earlier] is tensor:
            is_same = -earlier - 1
        if _layout.share(tensor, ranges[i], tensors[earlier], ranges[earlier]):
            shares.append((-earlier - 1, ranges[i][0] - ranges[earlier][0]))
    # An argument is held by the call; views of one memory count each other.
    is_own = is_same is None and not shares
    return Form(
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride() if tensor.layout is torch.strided else (),
        tensor.device,
        tensor.layout,
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.is_inference(),
        is_same,
        tuple(shares),
        is_own and _is_held(holders),
    )


def _left_in_arguments(workspace: Workspace, call: Arguments) -> list[str]:
    """Return what a call changed in its arguments although it may not, in words."""
    left = []
    for place, tensor, version, mutated in zip(
        workspace.places, call.tensors, call.versions, workspace.mutated, strict=True
    ):
        was = place.tensor
        block = workspace.blocks[place.block]
        begin = _layout.address(block.copy) + place.offset
        if (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad) != (
            was.shape,
            was.stride(),
            was.dtype,
            was.requires_grad,
        ) or (tensor.numel() and _layout.address(tensor) != begin):
            left.append(f"gives {place.name} another shape, memory or requires_grad")
        elif tensor.is_leaf and tensor.grad is not None:
            left.append(f"sets the gradient of {place.name}")
        elif tensor.__dict__:
            left.append(f"sets attributes of {place.name}")
        elif not mutated and version is not None and tensor._version != version:
            left.append(f"changes {place.name}, which mutates_args does not name")
    for number, block in enumerate(workspace.blocks):
        places = [place for place in workspace.places if place.block == number]
        names = ", ".join(dict.fromkeys(place.name for place in places))
        if not block.is_in_place():
            left.append(f"resizes the storage of {names}")
            continue
        is_guarded = block.is_guarded()
        is_same = torch.equal(block.copy, block.source)
        block.is_clean = is_guarded and is_same
        if not is_guarded:
            left.append(f"writes outside of {names}")
        if not is_same and not _only_mutated(workspace, number):
            left.append(f"changes {names} where mutates_args does not name it")
    for name, part, before in call.parts:
        if contents(part) != before:
            left.append(f"changes {name} itself")
    return list(dict.fromkeys(left))


def _only_mutated(workspace: Workspace, number: int) -> bool:
    """Return whether a block changed only where Tensors lie that may be changed."""
    block = workspace.blocks[number]
    if not block.mutated:
        return False
    after = aligned_bytes(block.copy.numel(), block.begin, block.copy.device).copy_(block.copy)
    for place, mutated in zip(workspace.places, workspace.mutated, strict=True):
        if place.block == number and mutated:
            target = _layout.distinct(place.on(after, place.raw_dtype))
            origin = _layout.distinct(place.on(block.source, place.raw_dtype))
            target.copy_(origin)
    return torch.equal(after, block.source)


def _look(make: Callable[[], torch.Tensor]) -> tuple[int, ...]:
    tensors: list[torch.Tensor] = []
    result = make()
    _flatten(result, tensors, [])
    del result
    holders = [_holders(tensor) for tensor in tensors]
    return holders[0]


# What a look finds at a Tensor, and at a view, that nobody else holds.
_ALONE = (*_look(lambda: torch.empty(1))[:3], _look(lambda: torch.empty(2)[:1])[3])
