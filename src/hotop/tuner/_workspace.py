"""Copies of a call's arguments, for tactics to work on: laid out as in the call, made anew."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hotop.tuner import _layout
from hotop.tuner._key import NotKeyable, Parameter, is_tensor, why_opaque

# Copies begin at the same distance from a multiple of this many bytes as the call's Tensors.
_ALIGNMENT = 512
# Bytes before and behind a copy that nothing may write.
_GUARD = 512
_GUARD_BYTE = 0xA5
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Values that nobody can change, and handles of the process.
_SHARED = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type, enum.Enum,
    types.FunctionType, types.BuiltinFunctionType, types.ModuleType,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Stream, torch.Event,
)  # fmt: skip


def aligned_bytes(size: int, begin: int, device: torch.device) -> torch.Tensor:
    """Return fresh bytes, with guards around them, as far from a multiple of 512 as ``begin``."""
    made = torch.empty(size + 2 * _GUARD + _ALIGNMENT, dtype=torch.uint8, device=device)
    # Memory that came by DLPack cannot be resized: what a function thinks the size of its
    # argument's storage is would be too small for one that begins behind a guard.
    room: torch.Tensor = torch.from_dlpack(made)  # type: ignore[attr-defined]
    return room.narrow(0, _GUARD + (begin - room.data_ptr() - _GUARD) % _ALIGNMENT, size)


@dataclass
class Block:
    """The memory of one Tensor, or of several that lie in one storage or overlap.

    Attributes:
        source: uint8: what a copy starts from; the call's own memory where that is in one piece.
        begin: The address of the call's first byte.
        mutated: The function may change it.
        copy: uint8: the bytes that tactics work on.
    """

    source: torch.Tensor
    begin: int
    mutated: bool
    copy: torch.Tensor = field(init=False)
    is_clean: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._make_copy()

    def _make_copy(self) -> None:
        self.copy = aligned_bytes(self.source.numel(), self.begin, self.source.device)
        self._room = self._where()

    def _where(self) -> tuple[int, int]:
        storage = self.copy.untyped_storage()
        return storage.data_ptr(), storage.nbytes()

    def is_in_place(self) -> bool:
        """Return whether the memory of the copy was left where it is."""
        return self._where() == self._room

    def _guards(self) -> list[torch.Tensor]:
        ends = (self.copy.storage_offset() - _GUARD, self.copy.storage_offset() + self.copy.numel())
        return [self.copy.as_strided((_GUARD,), (1,), end) for end in ends]

    def refresh(self) -> None:
        """Make the copy equal to its source."""
        if not self.is_in_place():
            self.is_clean = False
            self._make_copy()
        if not self.is_clean:
            for guard in self._guards():
                guard.fill_(_GUARD_BYTE)
            self.copy.copy_(self.source)
            self.is_clean = True

    def duplicate(self) -> torch.Tensor:
        """Return the source's bytes once more, aligned as they are."""
        size = self.source.numel()
        return aligned_bytes(size, self.begin, self.source.device).copy_(self.source)

    def is_intact(self) -> bool:
        """Return whether the copy and the bytes around it are as :meth:`refresh` made them."""
        self.is_clean = (
            self.is_in_place() and torch.equal(self.copy, self.source) and self.is_guarded()
        )
        return self.is_clean

    def is_guarded(self) -> bool:
        """Return whether the bytes around the copy are as they were."""
        return all(bool((guard == _GUARD_BYTE).all()) for guard in self._guards())


@dataclass(frozen=True)
class Place:
    """One Tensor of the call: whose it is and where it lies."""

    name: str
    tensor: torch.Tensor
    block: int
    offset: int  # bytes from the block's begin

    def on(self, block_bytes: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the Tensor that lies in this place of other bytes of the block."""
        like = self.tensor
        made = torch.empty(0, dtype=dtype or like.dtype, device=block_bytes.device)
        begin = block_bytes.storage_offset() + self.offset
        return made.set_(
            block_bytes.untyped_storage(), begin // like.element_size(), like.shape, like.stride()
        )

    @property
    def raw_dtype(self) -> torch.dtype:
        """A dtype that keeps every bit: copying a bool makes other bytes into True."""
        return _WHOLE_NUMBERS.get(self.tensor.element_size(), self.tensor.dtype)


@dataclass(frozen=True)
class Arguments:
    """One call's arguments, all of them copies.

    Attributes:
        tensors: The copies, in the order of :attr:`Workspace.places`.
        versions: Their version counters at the start, None for inference Tensors.
        parts: The containers and objects, with what they held at the start; the generators.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[torch.Tensor]
    versions: list[int | None]
    parts: list[tuple[str, Any, Any]]


class Workspace:
    """Makes arguments for calls that shall all start from the same data.

    Raises:
        NotKeyable: An argument cannot be copied.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        apart: frozenset[int] = frozenset(),
    ) -> None:
        self._call = parameters, args, kwargs
        by_name = {parameter.name: parameter for parameter in parameters}
        named = list(zip((p.name for p in parameters), args, strict=False))
        self._given = [*named, *kwargs.items()]
        self._positional = len(named)
        self._has_objects = False
        self._apart = apart
        self._found: list[tuple[str, torch.Tensor, bool]] = []
        self._order: list[
            int
        ] = []  # the places of the Tensors, as a walk through the values meets them
        for name, value in self._given:
            mutated = by_name[name].mutated
            self._rebuild(name, value, functools.partial(self._find, name, mutated), [])
        self.blocks, self.places = _lay_out(self._found, apart)
        self.mutated = [mutated for _, _, mutated in self._found]
        #: Whether a call leaves traces in its arguments, so that the next one needs new ones.
        self.is_consumed = any(self.mutated) or self._has_objects

    def _find(self, name: str, mutated: bool, tensor: torch.Tensor) -> torch.Tensor:
        reason = why_opaque(tensor)
        if reason is not None or tensor.is_meta:
            raise NotKeyable(f"{name} is {reason or 'on meta, without data'}")
        if _layout.address(tensor) % tensor.element_size():
            raise NotKeyable(f"{name} lies at an address that its dtype does not allow")
        known = None if id(tensor) in self._apart else self._place_of(tensor)
        if known is None:
            known = len(self._found)
            self._found.append((name, tensor, mutated))
        elif mutated:
            self._found[known] = (name, tensor, True)
        self._order.append(known)
        return tensor

    def _place_of(self, tensor: torch.Tensor) -> int | None:
        return next((i for i, (_, one, _) in enumerate(self._found) if one is tensor), None)

    def apart(self) -> Workspace | None:
        """Return one where arguments that share memory have their own; None: none of them do.

        Memory that may be changed stays shared: then the key tells it.
        """
        counts = Counter(place.block for place in self.places)
        again = Counter(self._order)
        shared = frozenset(
            id(place.tensor)
            for i, place in enumerate(self.places)
            if not self.blocks[place.block].mutated and (counts[place.block] > 1 or again[i] > 1)
        )
        return Workspace(*self._call, apart=shared) if shared else None

    def fresh(self) -> Arguments:
        """Return arguments for one call, in the state of the measured call."""
        for block in self.blocks:
            block.refresh()
            block.is_clean = False
        tensors = [self._make(place) for place in self.places]
        parts: list[tuple[str, Any, Any]] = []
        order = iter(self._order)

        def copied(_: torch.Tensor) -> torch.Tensor:
            return tensors[next(order)]

        values = [self._rebuild(name, value, copied, parts) for name, value in self._given]
        names = [name for name, _ in self._given[self._positional :]]
        return Arguments(
            tuple(values[: self._positional]),
            dict(zip(names, values[self._positional :], strict=True)),
            tensors,
            [None if tensor.is_inference() else tensor._version for tensor in tensors],
            parts,
        )

    def _make(self, place: Place) -> torch.Tensor:
        original = place.tensor
        block = self.blocks[place.block]
        with torch.inference_mode(original.is_inference()), torch.no_grad():
            made = place.on(block.copy)
            if type(original) is torch.nn.Parameter:
                made = torch.nn.Parameter(made, requires_grad=original.requires_grad)
        # No attributes: the key does not hold them, so no tactic may depend on one.
        return made.requires_grad_(original.requires_grad)

    def _rebuild(
        self,
        name: str,
        value: Any,
        copied: Callable[[torch.Tensor], torch.Tensor],
        parts: list[tuple[str, Any, Any]],
    ) -> Any:
        """Return a value with its containers made anew and its Tensors exchanged."""

        def again(one: Any) -> Any:
            return self._rebuild(name, one, copied, parts)

        if is_tensor(value):
            return copied(value)
        kind = type(value)
        if kind is torch.Size or issubclass(kind, _SHARED):
            return value
        made: Any
        if kind in (list, set, frozenset, tuple):
            made = kind(again(one) for one in value)
        elif issubclass(kind, tuple) and hasattr(kind, "_fields"):
            made = kind(*(again(one) for one in value))
        elif kind is dict:
            made = {again(key): again(one) for key, one in value.items()}
        elif kind is torch.Generator:
            made = value.clone_state()
        elif dataclasses.is_dataclass(kind) and not hasattr(kind, "__deepcopy__"):
            self._has_objects = True
            made = copy.copy(value)
            for one in dataclasses.fields(kind):
                if hasattr(value, one.name):
                    object.__setattr__(made, one.name, again(getattr(value, one.name)))
        else:
            self._has_objects = True
            try:
                made = copy.deepcopy(value)
            except Exception as error:
                text = f"{name} is a {kind.__name__}, which cannot be copied ({error})"
                raise NotKeyable(text) from None
        self._has_objects |= kind is torch.Generator
        if not issubclass(kind, tuple | frozenset):
            parts.append((name, made, contents(made)))
        return made


def contents(whole: Any) -> Any:
    """Return what a container or an object holds, in a form that can be compared."""
    if type(whole) is dict:
        return [(id(key), id(value)) for key, value in whole.items()]
    if type(whole) is set:
        return {id(one) for one in whole}
    if type(whole) is list:
        return [id(one) for one in whole]
    slots = [name for cls in type(whole).__mro__ for name in vars(cls).get("__slots__", ())]
    held = [getattr(whole, name, None) for name in slots]
    return contents(getattr(whole, "__dict__", {})), [id(one) for one in held]


def _lay_out(
    found: Sequence[tuple[str, torch.Tensor, bool]], apart: frozenset[int]
) -> tuple[list[Block], list[Place]]:
    """Group Tensors by memory: one storage, or addresses that overlap."""
    ranges = [_layout.byte_range(tensor) for _, tensor, _ in found]
    groups: list[list[int]] = []
    for i, (_, tensor, _) in enumerate(found):
        mine = [i]
        for group in list(groups) if id(tensor) not in apart else ():
            if any(_layout.share(found[j][1], ranges[j], tensor, ranges[i]) for j in group):
                groups.remove(group)
                mine = group + mine
        groups.append(mine)
    blocks, places = [], {}
    for number, group in enumerate(groups):
        begin = min(ranges[i][0] for i in group)
        end = max(ranges[i][1] for i in group)
        for i in group:
            name, tensor, _ = found[i]
            places[i] = Place(name, tensor, number, ranges[i][0] - begin)
        members = [places[i] for i in group]
        mutated = any(found[i][2] for i in group)
        blocks.append(Block(_source(members, end - begin), begin, mutated))
    return blocks, [places[i] for i in range(len(found))]


def _source(members: Sequence[Place], size: int) -> torch.Tensor:
    first = min(members, key=lambda place: place.offset).tensor
    storages = {place.tensor.untyped_storage()._cdata for place in members}
    if len(storages) == 1:
        begin = first.storage_offset() * first.element_size()
        made = torch.empty(0, dtype=torch.uint8, device=first.device)
        return made.set_(first.untyped_storage(), begin, (size,), (1,))
    begin = min(_layout.address(place.tensor) - place.offset for place in members)
    made = aligned_bytes(size, begin, first.device).zero_()
    for place in members:
        raw = _layout.distinct(place.tensor.detach().view(place.raw_dtype))
        _layout.distinct(place.on(made, place.raw_dtype)).copy_(raw)
    return made
