"""Faults of results: other values, forms and classes, memory that is somebody else's."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import numpy
import torch
from tools.fuzz_tuner.arguments import tensors_in
from tools.fuzz_tuner.kernels import Core, Kernel, Values
from tools.fuzz_tuner.tactics import Fault, Offer, differs_clearly, exchanged, like, shares
from torch import Tensor, nn

# From a result and the call's values to what is returned in its place; None: it stays.
Change = Callable[[Tensor, Values], Any]


class _Sub(Tensor):
    """A subclass that nothing expects."""


def _on_result(name: str, change: Change, *, of_values: bool = False) -> Fault:
    """Exchange one Tensor of the result; where only values change, it may not show."""

    def make(rng: Random, kernel: Kernel, core: Core) -> Any:
        if kernel.returns == "None":
            return None
        number = rng.randrange(3)

        def run(offer: Offer, values: Values) -> Any:
            result = core(values)
            tensors = tensors_in(result)
            if not tensors:
                return result
            old = tensors[number % len(tensors)]
            new = change(old, values)
            if new is None:
                return result
            if not of_values or differs_clearly(new, old) or (old.numel() and shares(old, values)):
                offer.shown += 1
            return exchanged(result, old, new)

        return run

    return Fault(name, make)


def _argument(old: Tensor, values: Values) -> Any:
    for one in tensors_in(list(values.values())):
        if one is not old and one.shape == old.shape and one.dtype == old.dtype:
            return one
    return None


def _added(old: Tensor, _: Values) -> Any:
    return like(old, ~old if old.dtype is torch.bool else old + (3 if old.numel() else 0))


def _other_by(change: Callable[[Tensor], Tensor]) -> Change:
    return lambda old, _: like(old, change(old))


def _floating(change: Callable[[Tensor], Tensor]) -> Change:
    def changed(old: Tensor, _: Values) -> Any:
        if not old.dtype.is_floating_point and not old.dtype.is_complex:
            return None
        return like(old, change(old))

    return changed


def _one_element(old: Tensor, _: Values) -> Any:
    if old.numel() == 0:
        return None
    new = like(old, old)
    last = new[(-1,) * new.dim()]
    last.fill_(0 if bool(last) else 1)
    return new


def _for_negative(old: Tensor, values: Values) -> Any:
    inputs = [one for one in tensors_in(list(values.values())) if not one.dtype.is_complex]
    if old.numel() and any(bool((one < 0).any()) for one in inputs if one.dtype is not torch.bool):
        return _one_element(old, values)
    return None


def _strided(old: Tensor, _: Values) -> Any:
    if old.dim() == 0:
        return None
    new = torch.empty_strided(old.shape, [2 * s or 1 for s in old.stride()], dtype=old.dtype)
    return new.copy_(old)


def _to_other(old: Tensor, _: Values) -> Any:
    return old.to(torch.float64 if old.dtype is not torch.float64 else torch.float32)


def _lazily_conjugated(old: Tensor, _: Values) -> Any:
    return torch.conj_physical(old).conj() if old.dtype.is_complex else None


def _lazily_negated(old: Tensor, _: Values) -> Any:
    return None if old.dtype in (torch.bool, torch.uint8) else torch._neg_view(-old)


def _recording(old: Tensor, values: Values) -> Any:
    if not (old.dtype.is_floating_point or old.dtype.is_complex) or old.is_inference():
        return None
    return None if old.requires_grad or shares(old, values) else old.requires_grad_()


def _in_other_container(rng: Random, kernel: Kernel, core: Core) -> Any:
    if kernel.returns == "None":
        return None

    def run(offer: Offer, values: Values) -> Any:
        result = core(values)
        offer.shown += 1
        if isinstance(result, list):
            return tuple(result)
        if isinstance(result, tuple):
            return list(result)
        return (result,) if isinstance(result, Tensor) else list(result.values())

    return run


def _something_for_nothing(rng: Random, kernel: Kernel, core: Core) -> Any:
    if kernel.returns != "None":
        return None
    other = rng.choice((0, [], False, "argument"))

    def run(offer: Offer, values: Values) -> Any:
        core(values)
        offer.shown += 1
        return tensors_in(list(values.values()))[0] if other == "argument" else other

    return run


def _number_of_other_type(rng: Random, kernel: Kernel, core: Core) -> Any:
    def run(offer: Offer, values: Values) -> Any:
        result = core(values)
        if isinstance(result, dict) and "n" in result:
            offer.shown += 1
            result["n"] = float(result["n"])
        return result

    return run if kernel.returns == "dict" else None


class _Ring:
    """Memory that is returned again after so many calls."""

    def __init__(self, size: int, kind: str) -> None:
        self.size, self.kind = size, kind
        self.buffers: dict[Any, list[Any]] = {}
        self.turn = 0

    def filled(self, old: Tensor) -> Tensor:
        """Return the values in the next buffer."""
        self.turn += 1
        extent = sum((n - 1) * s for n, s in zip(old.shape, old.stride(), strict=True)) + 1
        form = old.shape, old.stride(), old.dtype, torch.is_inference_mode_enabled()
        ring = self.buffers.setdefault(form, [])
        if len(ring) < self.size:
            ring.append(self._new(old, extent))
        held = ring[self.turn % self.size % len(ring)]
        if self.kind == "memory of NumPy":
            flat = torch.from_numpy(held).view(old.dtype)
            buffer = torch.empty(0, dtype=old.dtype)
            buffer.set_(flat.untyped_storage(), 0, old.shape, old.stride())
        elif self.kind == "a new view":
            buffer = held.as_strided(old.shape, old.stride())
        else:
            buffer = held
        return buffer.copy_(old)

    def _new(self, old: Tensor, extent: int) -> Any:
        if self.kind == "memory of NumPy":
            return numpy.zeros(extent * old.element_size(), dtype=numpy.uint8)
        if self.kind == "a new view":
            return torch.empty(extent, dtype=old.dtype)
        return torch.empty_strided(old.shape, old.stride(), dtype=old.dtype)


def _ring(kind: str) -> Fault:
    def make(rng: Random, kernel: Kernel, core: Core) -> Any:
        if kernel.returns == "None":
            return None
        ring = _Ring(rng.choice((1, 1, 2, 3)), kind)

        def run(offer: Offer, values: Values) -> Any:
            result = core(values)
            for old in tensors_in(result):
                if old.numel() and not shares(old, values):
                    offer.shown += 1
                    return exchanged(result, old, ring.filled(old))
            return result

        return run

    return Fault(f"returns {kind} again", make)


def _kept(name: str, *, is_memoized: bool) -> Fault:
    def make(rng: Random, kernel: Kernel, core: Core) -> Any:
        if kernel.returns == "None":
            return None
        known: dict[Any, Any] = {}
        later: list[Any] = []

        def run(offer: Offer, values: Values) -> Any:
            result = core(values)
            own = [t for t in tensors_in(result) if t.numel() and not shares(t, values)]
            if not own:
                return result
            offer.shown += 1
            if not is_memoized:
                later[:] = [*later[-3:], own[0] if rng.random() < 0.5 else own[0].view_as(own[0])]
                return result
            form = own[0].shape, own[0].stride(), own[0].dtype, own[0].is_inference()
            return exchanged(result, own[0], known.setdefault(form, own[0]))

        return run

    return Fault(name, make)


FAULTS = [
    _on_result("returns its argument", _argument),
    _on_result("big values", _added, of_values=True),
    _on_result("1e-3 off", _floating(lambda y: y * 1.001), of_values=True),
    _on_result("zeros", _other_by(torch.zeros_like), of_values=True),
    _on_result("NaN", _floating(lambda y: torch.full_like(y, math.nan)), of_values=True),
    _on_result("one element off", _one_element, of_values=True),
    _on_result("off for negative inputs", _for_negative, of_values=True),
    _on_result("another dtype", _to_other),
    _on_result("another shape", lambda old, _: old.unsqueeze(0)),
    _on_result("other strides", _strided),
    _on_result("a Parameter", lambda old, _: nn.Parameter(old.detach(), requires_grad=False)),
    _on_result("a subclass", lambda old, _: old.detach().as_subclass(_Sub)),
    _on_result("requires grad", _recording),
    _on_result("lazily conjugated", _lazily_conjugated),
    _on_result("lazily negated", _lazily_negated),
    _on_result("sparse", lambda old, _: old.detach().to_sparse() if old.dim() else None),
    _on_result("None", lambda old, _: "None of it"),
    Fault("another container", _in_other_container),
    Fault("something for None", _something_for_nothing),
    Fault("a number of another type", _number_of_other_type),
    _ring("a buffer"),
    _ring("a new view"),
    _ring("memory of NumPy"),
    _kept("keeps its result", is_memoized=False),
    _kept("remembers its first result", is_memoized=True),
]
