"""Faults of effects: what a tactic changes of its arguments, and what it does not change."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from random import Random
from typing import Any

import numpy
import torch
from tools.fuzz_tuner import memory
from tools.fuzz_tuner.arguments import Meta
from tools.fuzz_tuner.kernels import Core, Kernel, Values
from tools.fuzz_tuner.tactics import (
    Fault,
    Offer,
    containers,
    declared,
    differs_clearly,
    undeclared,
)
from torch import Tensor

# Changes one Tensor, and returns whether that can be seen; what it raises counts as nothing done.
Touch = Callable[[Tensor], bool]


def _touching(name: str, touch: Touch, *, of_declared: bool = False) -> Fault:
    """Change a Tensor of the arguments that the op leaves alone, or beside one that it changes."""

    def make(rng: Random, kernel: Kernel, core: Core) -> Any:
        number, is_first = rng.randrange(4), rng.random() < 0.5

        def run(offer: Offer, values: Values) -> Any:
            found = undeclared(kernel, values)
            # What lies beside one view of a base may be another one.
            if of_declared and kernel.name not in ("overlapping", "fill_views"):
                found = found + [t for t in declared(kernel, values) if t.numel()]
            result = None if is_first else core(values)
            if found:
                with contextlib.suppress(RuntimeError):
                    offer.shown += touch(found[number % len(found)])
            return core(values) if is_first else result

        return run

    return Fault(name, make)


def _first(x: Tensor) -> Tensor:
    return x.detach()[(0,) * x.dim()]


def _poke(x: Tensor) -> bool:
    first = _first(x)
    if x.dtype is torch.bool:
        first.logical_not_()
    else:
        first.fill_(8 if bool(first == 7) else 7)
    return True


def _add(x: Tensor) -> bool:
    if 0 in x.stride() or x.dtype is torch.bool:
        return False
    x.detach().add_(1)
    return True


def _bump(x: Tensor) -> bool:
    first = _first(x)
    first.copy_(first.clone())
    return not x.is_inference() and x.dtype is not torch.bool


def _by_numpy(x: Tensor) -> bool:
    if x.dtype is torch.bfloat16:
        return False
    array = x.detach().numpy()
    place = (0,) * x.dim()
    array[place] = 6 if array[place] == 5 else 5
    return x.dtype is not torch.bool


def _elements(x: Tensor) -> set[int]:
    if x.numel() == 0:
        return set()
    places = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(x.shape, x.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * stride
    return {x.storage_offset() + int(place) for place in places.reshape(-1)}


def _write_at(x: Tensor, element: int) -> bool:
    raw = memory.bytes_of(x)
    begin = element * x.element_size()
    if begin < 0 or begin + x.element_size() > raw.numel():
        return False
    raw[begin] = 0x5A if int(raw[begin]) != 0x5A else 0x33
    return True


def _in_gap(x: Tensor) -> bool:
    inside = _elements(x)
    gaps = set(range(min(inside), max(inside))) - inside
    return bool(gaps) and _write_at(x, min(gaps))


def _outside(x: Tensor) -> bool:
    return _write_at(x, max(_elements(x)) + 1)


def _resize(x: Tensor) -> bool:
    x.resize_(x.numel() + 2)
    return True


def _swap_data(x: Tensor) -> bool:
    x.data = x.detach().clone()
    return True


def _set(x: Tensor) -> bool:
    x.detach().numel()
    x.set_(x.detach().clone())
    return True


def _transpose(x: Tensor) -> bool:
    if x.requires_grad:
        return False
    x.unsqueeze_(0)
    return True


def _require_grad(x: Tensor) -> bool:
    if x.requires_grad or not (x.dtype.is_floating_point or x.dtype.is_complex):
        return False
    x.requires_grad_()
    return True


def _attribute(x: Tensor) -> bool:
    is_new = not hasattr(x, "note")
    x.note = 5  # type: ignore[attr-defined]
    return is_new


def _in_containers(rng: Random, kernel: Kernel, core: Core) -> Any:
    way = rng.choice(("more", "less", "another"))

    def run(offer: Offer, values: Values) -> Any:
        result = core(values)
        for one in containers(values):
            if isinstance(one, Meta):
                one.name = one.name + "!"
            elif isinstance(one, dict):
                one["more"] = 3
            elif way == "less" and one:
                one.pop()
            elif way == "another" and one:
                one[0] = None if one[0] is not None else 5
            else:
                one.append(None)
            offer.shown += 1
            break
        return result

    return run


def _in_meta_tensors(rng: Random, kernel: Kernel, core: Core) -> Any:
    def run(offer: Offer, values: Values) -> Any:
        meta = values.get("meta")
        result = core(values)
        if isinstance(meta, torch.Generator):
            torch.rand(2, generator=meta)
            offer.shown += 1
        elif meta is not None:
            found = [t for t in undeclared(kernel, {"meta": meta}) if not t.is_inference()]
            if found:
                offer.shown += _poke(found[-1])
        return result

    return run


def _change_missing(rng: Random, kernel: Kernel, core: Core) -> Any:
    if not kernel.mutates:
        return None
    number = rng.randrange(3)

    def run(offer: Offer, values: Values) -> Any:
        targets = declared(kernel, values)
        kept = [target.detach().clone() for target in targets]
        result = core(values)
        chosen = number % len(targets)
        if differs_clearly(kept[chosen], targets[chosen]):
            offer.shown += 1
            targets[chosen].detach().copy_(kept[chosen])
        return result

    return run


def _change_doubled(rng: Random, kernel: Kernel, core: Core) -> Any:
    if not kernel.mutates:
        return None

    def run(offer: Offer, values: Values) -> Any:
        result = core(values)
        once = [target.detach().clone() for target in declared(kernel, values)]
        core(values)
        now = declared(kernel, values)
        offer.shown += any(differs_clearly(a, b) for a, b in zip(now, once, strict=True))
        return result

    return run


DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(1),
    "python": random.random,
    "numpy": numpy.random.rand,
    "a seed": lambda: torch.manual_seed(5),
    "python's seed": lambda: random.seed(5),
}


def _random(rng: Random, kernel: Kernel, core: Core) -> Any:
    draw = DRAWS[rng.choice(list(DRAWS))]
    after = rng.random() < 0.5

    def run(offer: Offer, values: Values) -> Any:
        offer.shown += 1
        if not after:
            draw()
        result = core(values)
        if after:
            draw()
        return result

    return run


def _random_restored(rng: Random, kernel: Kernel, core: Core) -> Any:
    if not kernel.is_random:
        return None
    which = rng.choice(("torch", "python"))

    def run(offer: Offer, values: Values) -> Any:
        state, ours = torch.get_rng_state(), random.getstate()
        result = core(values)
        if which == "torch":
            offer.shown += not torch.equal(torch.get_rng_state(), state)
            torch.set_rng_state(state)
        else:
            offer.shown += 1
            random.setstate(ours)
        return result

    return run


FAULTS = [
    _touching("writes an argument", _poke),
    _touching("adds to an argument", _add),
    _touching("writes the same value", _bump),
    _touching("writes by NumPy", _by_numpy),
    _touching("writes into a gap", _in_gap, of_declared=True),
    _touching("writes outside of a view", _outside, of_declared=True),
    _touching("resizes an argument", _resize, of_declared=True),
    _touching("swaps an argument's data", _swap_data, of_declared=True),
    _touching("sets an argument's memory", _set),
    _touching("gives an argument another shape", _transpose, of_declared=True),
    _touching("lets an argument require grad", _require_grad),
    _touching("sets an attribute", _attribute, of_declared=True),
    Fault("changes a container", _in_containers),
    Fault("writes into an ignored argument", _in_meta_tensors),
    Fault("a declared change is missing", _change_missing),
    Fault("a declared change is made twice", _change_doubled),
    Fault("draws other random numbers", _random),
    Fault("gives its random numbers back", _random_restored),
]
