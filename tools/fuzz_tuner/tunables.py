"""A drawn tunable: an op, its rules, and the tactics on offer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Optional

import torch
from tools.fuzz_tuner import faults_control, faults_effects, faults_results
from tools.fuzz_tuner.arguments import Holder, Recipe, tensors_in
from tools.fuzz_tuner.kernels import PURE, Builder, Core, Kernel, Values
from tools.fuzz_tuner.kernels_mutating import MUTATING
from tools.fuzz_tuner.tactics import Fault, Offer
from torch import Tensor

import hotop
from hotop.tuner import Tactic, exact, follows, listed, power_of_two

FAULTS: list[Fault] = [*faults_results.FAULTS, *faults_effects.FAULTS, *faults_control.FAULTS]
# Those that a key must tell show in few calls, and zeros are right where nothing is proven.
FAULTS += [fault for fault in FAULTS if fault.name in {*faults_control.BY_KEY, "zeros"}] * 3
# What other threads would see, or trip over.
NOT_AMONG_THREADS = {
    "leaves a setting changed", "draws other random numbers", "raises in a later call",
    "raises after it changed all", "makes a warning an error",
}  # fmt: skip
_names = itertools.count()
_DEFAULT_TAKES_S = 30e-6


@hotop.tunable("fuzz::inner")
def inner(x: Tensor) -> Tensor:
    """Be called by tactics, from other threads too."""
    return x + 0


@dataclass
class Drawn:
    """A tunable and what is known of it.

    Attributes:
        usual: The default, as fast as it can be: the op without a tuner.
        offers: By name, the default left out.
        allowed: The texts that the parameter of backends takes; empty: there is none.
        has_bucket: The first dimension has a rule; ``last``: its last bucket, -1: none.
    """

    name: str
    kernel: Kernel
    tunable: Any
    usual: Callable[..., Any]
    offers: dict[str, Offer]
    names: list[str]
    has_meta: bool
    allowed: tuple[str, ...]
    has_bucket: bool
    last: int

    def recipe(self, style: int, lay: int, rows: int, data: int, *, is_op: bool) -> Recipe:
        """Return a call: of one style, layout and number of rows, one key."""
        builder = Builder(style, lay, rows, data, is_op=is_op)
        values = self.kernel.build(builder)
        extra = Random(style + 1)
        for name in self.names[len(values) :]:
            if name == "meta":
                values[name] = _meta(builder)
            elif name == "backends":
                values[name] = extra.choice(self.allowed)
            elif extra.random() < 0.5:
                values[name] = extra.choice((1, 2)) if name == "times" else extra.choice("pq")
            else:
                break
        if "default" not in values.get("backends", "default") and builder.context != "inference":
            # Another tactic answers then, and no two record the same for autograd.
            builder.context = "no_grad"
        positional = extra.randrange(len(values) + 1) if extra.random() < 0.3 else len(values)
        return builder.recipe(values, positional)


def _meta(builder: Builder) -> Any:
    kind = builder.style.choice(("dict", "dataclass", "generator", "list", "nothing"))
    if kind == "nothing":
        return None
    if kind == "generator":
        return Holder(kind, (builder.data.randrange(99),))
    parts = tuple(builder.tensor(torch.float32, (3,)) for _ in range(2))
    return Holder(kind, parts[:1] if kind == "dataclass" else parts)


def _packed(kernel: Kernel, kind: str) -> Kernel:
    """Return the op with its result in a container."""

    def within(core: Core) -> Core:
        if kind == "list":
            return lambda v: [core(v), core(v)]
        if kind == "tuple":
            return lambda v: (core(v), core(v))
        if kind == "dict":
            return lambda v: {"y": core(v), "n": 3, "more": [core(v), None, "text", 0.5]}
        return lambda v: [(core(v), {"y": core(v)}), None]

    cores = tuple(map(within, kernel.cores))
    returns = {"list": "list[Tensor]", "tuple": "tuple[Tensor, Tensor]"}.get(kind, "dict")
    is_op = kernel.is_op and kind in ("list", "tuple")
    name = f"{kernel.name} in {kind}"
    return replace(kernel, name=name, cores=cores, returns=returns, is_op=is_op)


def draw(rng: Random, *, among_threads: bool = False, name: str = "") -> Drawn:
    """Draw a tunable."""
    kernel = rng.choice(PURE if rng.random() < 0.6 else MUTATING)
    if kernel.returns == "Tensor" and kernel.is_op and rng.random() < 0.3:
        kernel = _packed(kernel, rng.choice(("list", "tuple", "dict", "nest")))
    names = [one for one, _ in kernel.parameters]
    notes = dict(kernel.parameters)
    if rng.random() < 0.3:
        names += ["times", "mode2"]
        notes |= {"times": "int = 1", "mode2": "str = 'p'"}
    has_meta = rng.random() < 0.25
    if has_meta:
        names.append("meta")
        notes["meta"] = "object = None"
    offers = _offers(rng, kernel, among_threads=among_threads)
    allowed = _allowed(rng, offers) if rng.random() < 0.2 else ()
    if allowed:
        names.insert(len(kernel.parameters), "backends")
        notes["backends"] = f"str = {allowed[0]!r}"
    bucket, last = _bucket(rng) if kernel.in_rows and rng.random() < 0.45 else (None, -1)
    name = name or f"fuzz_tuner::op{next(_names)}"
    core = kernel.cores[0]
    usual = _function(names, notes, kernel.returns, core)
    parameters = {"times": 1, "mode2": "p", "meta": None, "backends": (*allowed, "")[0]}
    defaults = {one: parameters.get(one) for one in names}
    for offer in offers.values():
        offer.parameters = defaults
    reference = None
    if rng.random() < 0.15:
        reference = _function(names, notes, kernel.returns, kernel.cores[-1])
    tunable = hotop.tunable(
        name,
        dims=_dims(rng, kernel, bucket),
        ignore=[*kernel.ignored, *(["meta"] if has_meta else [])],
        choices="backends" if allowed else None,
        mutates_args=kernel.mutates,
        reference=reference,
        version=1,
        tactics={
            one: Tactic(offer, offer.ask if offer.applies is not None else None)
            for one, offer in offers.items()
        },
    )(_function(names, notes, kernel.returns, core, slow=True))
    return Drawn(
        name, kernel, tunable, usual, offers, names, has_meta, allowed, bucket is not None, last
    )


def _function(
    names: list[str], notes: dict[str, str], returns: str, core: Core, *, slow: bool = False
) -> Callable[..., Any]:
    """Return a function with this signature, from Python text as a user's is."""

    def work(values: Values) -> Any:
        if slow:
            end = time.perf_counter() + _DEFAULT_TAKES_S
            while time.perf_counter() < end:
                pass
        return core(values)

    parameters = ", ".join(f"{name}: {notes[name]}" for name in names)
    values = ", ".join(f"{name!r}: {name}" for name in names)
    text = f"def op({parameters}) -> {returns}:\n    return work({{{values}}})\n"
    scope: dict[str, Any] = {"Tensor": Tensor, "Optional": Optional, "work": work}
    exec(text, scope)
    return scope["op"]


def _bucket(rng: Random) -> tuple[Any, int]:
    cap = rng.choice((4, 16, 32))
    return rng.choice(
        (
            (power_of_two(), -1),
            (power_of_two(cap=cap), cap),
            (listed(1, 8, 24), 24),
            (listed(4, 64), 64),
            (exact(cap=cap), cap),
        )
    )


def _dims(rng: Random, kernel: Kernel, bucket: Any) -> dict[str, dict[int, Any]]:
    if bucket is None:
        return {}
    dims = {name: {0: bucket} for name in kernel.in_rows}
    bare = [name for name, note in kernel.parameters if note == "Tensor" and name in dims]
    if len(bare) > 1 and kernel.in_rows[0] in bare and rng.random() < 0.4:
        first = bare[0]
        for name in bare[1:]:
            dims[name] = {0: follows(lambda shapes, first=first: (*shapes[first], 1)[0])}
    return dims


def _allowed(rng: Random, offers: dict[str, Offer]) -> tuple[str, ...]:
    names = list(offers)
    texts = ["default," + ",".join(names), "right0," + ",".join(names)]
    texts += ["default,right0", " default , " + ",".join(names[1:])]
    return tuple(rng.sample(texts, 3))


def _offers(rng: Random, kernel: Kernel, *, among_threads: bool) -> dict[str, Offer]:
    offers = {"right0": _right("right0", rng, kernel)}
    if rng.random() < 0.3:
        offers["right1"] = _right("right1", rng, kernel)
    if rng.random() < 0.25:
        offers["asked"] = _asked(rng, kernel)
    number = 0
    while number < 3:
        fault = rng.choice(FAULTS)
        if among_threads and fault.name in NOT_AMONG_THREADS:
            continue
        run = fault.make(rng, kernel, rng.choice(kernel.cores))
        if run is None:
            continue
        name = f"wrong{number}"
        offers[name] = Offer(name, fault.name, run, by_key=fault.name in faults_control.BY_KEY)
        number += 1
    return offers


def _right(name: str, rng: Random, kernel: Kernel) -> Offer:
    core = rng.choice(kernel.cores[1:])
    way = rng.choice(("bare", "bare", "bare", "restores", "scratch", "pool"))

    def run(offer: Offer, values: Values) -> Any:
        if way == "restores":
            state = None if kernel.is_random else torch.get_rng_state()
            with torch.set_grad_enabled(torch.is_grad_enabled()):
                if state is not None:
                    torch.rand(2)
                    torch.set_rng_state(state)
                return core(values)
        if way == "pool" and offer.calls % 5 == 1:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(inner, torch.ones(2)).result(timeout=20)
        if way == "scratch":
            for tensor in tensors_in(list(values.values())):
                offer.scratch = torch.zeros(tensor.shape, dtype=tensor.dtype)
        return core(values)

    return Offer(name, "", run)


def _asked(rng: Random, kernel: Kernel) -> Offer:
    """Return a right tactic that says when it applies, and is nothing where it does not."""
    core = rng.choice(kernel.cores[1:])
    way = rng.choice(("raises", "never", "even rows", "few rows", "contiguous", "no stride 0"))
    most = rng.choice((4, 8, 20))

    def first(values: Values) -> Tensor | None:
        found = tensors_in([values[name] for name, _ in kernel.parameters])
        return found[0] if found else None

    def applies(values: Values) -> bool:
        x = first(values)
        if way == "raises":
            raise LookupError("cannot tell")
        if way == "never" or x is None:
            return False
        if way in ("even rows", "few rows"):
            rows = x.shape[0] if x.dim() else 0
            return rows % 2 == 0 if way == "even rows" else rows <= most
        return x.is_contiguous() if way == "contiguous" else 0 not in x.stride()

    def run(offer: Offer, values: Values) -> Any:
        if not offer.truly_applies(values):
            raise RuntimeError("it said that it does not apply")
        return core(values)

    return Offer("asked", "", run, applies=applies, is_partial=True)
