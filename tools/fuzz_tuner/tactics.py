"""Tactics on offer: a way to compute an op, with a fault or without, that knows when it shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from tools.fuzz_tuner.arguments import Meta, tensors_in
from tools.fuzz_tuner.kernels import Core, Kernel, Values
from torch import Tensor
from torch.testing._comparison import default_tolerances

# How far beyond the tuner's tolerances a value must lie to be wrong for certain.
_CLEAR = 4.0


@dataclass
class Offer:
    """A tactic as the tunable gets it.

    Attributes:
        fault: What is wrong with it; empty: nothing.
        run: Computes the call from the values by name, and counts in ``shown``.
        parameters: Names and defaults of the op's parameters.
        applies: By values; the tunable asks, and a call without it is a difference.
        by_key: The fault depends on nothing but what a key holds.
        must_go: It may not win the key of the last call, though its fault may not have shown.
        is_partial: It serves a part of a bucket, so that the tuner may put it out.
        shown: Calls in which the fault could be seen.
        strayed: Calls for which ``applies`` says no.
        scratch: Memory of its own.
    """

    name: str
    fault: str
    run: Callable[[Offer, Values], Any]
    parameters: dict[str, Any] = field(default_factory=dict)
    applies: Callable[[Values], bool] | None = None
    by_key: bool = False
    must_go: bool = False
    is_partial: bool = False
    calls: int = 0
    shown: int = 0
    strayed: int = 0
    scratch: Any = None

    def values(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Values:
        """Return a call's values by name."""
        names = list(self.parameters)
        return {**self.parameters, **dict(zip(names, args, strict=False)), **kwargs}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Serve a call, right or wrong."""
        values = self.values(args, kwargs)
        self.calls += 1
        if self.applies is not None and not self.truly_applies(values):
            self.strayed += 1
        return self.run(self, values)

    def truly_applies(self, values: Values) -> bool:
        """Return what ``applies`` says, no when it raises."""
        assert self.applies is not None
        try:
            return self.applies(values)
        except Exception:
            return False

    def ask(self, *args: Any, **kwargs: Any) -> bool:
        """Be the tactic's ``applies``."""
        assert self.applies is not None
        return self.applies(self.values(args, kwargs))


@dataclass(frozen=True)
class Fault:
    """A way to spoil a right core: ``make`` returns the run of an `Offer`, or None: not this op."""

    name: str
    make: Callable[[Random, Kernel, Core], Any]


def differs_clearly(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether values differ by more than any tolerance of the tuner excuses."""
    if theirs.numel() == 0:
        return False
    rtol, atol = default_tolerances(theirs.dtype)
    ours, theirs = ours.detach(), theirs.detach()
    if theirs.dtype.is_complex:
        parts = zip(*(map(torch.view_as_real, (ours.resolve_conj(), theirs))), strict=True)
        return any(_far(a, b, rtol, atol) for a, b in parts)
    return _far(ours, theirs, rtol, atol)


def _far(ours: Tensor, theirs: Tensor, rtol: float, atol: float) -> bool:
    if not theirs.dtype.is_floating_point:
        return not torch.equal(ours, theirs)
    a, b = ours.double(), theirs.double()
    sizes = b.abs()
    sizes = sizes[sizes.isfinite() & (sizes > 0)]
    atol *= min(1.0, float(sizes.max())) if sizes.numel() else 0.0
    near = torch.isclose(a, b, rtol=_CLEAR * rtol, atol=_CLEAR * atol, equal_nan=True)
    return not bool(near.all())


def shares(tensor: Tensor, values: Values) -> bool:
    """Return whether a result lies in the memory of an argument."""
    own = tensor.untyped_storage()._cdata
    return any(own == one.untyped_storage()._cdata for one in tensors_in(list(values.values())))


def like(form: Tensor, values: Tensor) -> Tensor:
    """Return values in fresh memory of the same form."""
    return torch.empty_strided(form.shape, form.stride(), dtype=form.dtype).copy_(values)


def exchanged(result: Any, old: Tensor, new: Any) -> Any:
    """Return a result with one Tensor exchanged."""
    if result is old:
        return new
    if isinstance(result, (list, tuple)):
        return type(result)(exchanged(one, old, new) for one in result)
    if isinstance(result, dict):
        return {key: exchanged(one, old, new) for key, one in result.items()}
    return result


def undeclared(kernel: Kernel, values: Values) -> list[Tensor]:
    """Return the Tensors with elements that a kernel must not change."""
    if kernel.name == "overlapping":
        return []
    found = [tensors_in(value) for name, value in values.items() if name not in kernel.mutates]
    return [tensor for tensors in found for tensor in tensors if tensor.numel()]


def declared(kernel: Kernel, values: Values) -> list[Tensor]:
    """Return the Tensors that a kernel changes."""
    return [tensor for name in kernel.mutates for tensor in tensors_in(values[name])]


def containers(values: Values) -> list[Any]:
    """Return the lists, dicts and dataclasses among a call's values."""
    return [value for value in values.values() if isinstance(value, (list, dict, Meta))]
