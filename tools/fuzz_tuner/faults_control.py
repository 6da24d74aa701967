"""Faults in time and place: settings left changed, errors, calls and layouts it cannot serve."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from tools.fuzz_tuner.arguments import tensors_in
from tools.fuzz_tuner.kernels import Core, Kernel, Values
from tools.fuzz_tuner.tactics import Fault, Offer, differs_clearly, exchanged, like, shares
from torch import Tensor

SETTINGS: dict[str, Callable[[], object]] = {
    "grad mode": lambda: torch.set_grad_enabled(not torch.is_grad_enabled()),
    "default dtype": lambda: torch.set_default_dtype(torch.float16),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "determinism": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "a function mode": lambda: torch.overrides.BaseTorchFunctionMode().__enter__(),
    "autocast": lambda: torch.set_autocast_enabled("cpu", not torch.is_autocast_enabled("cpu")),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "denormals": lambda: torch.set_flush_denormal(True),
    "matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "garbage collection": gc.disable,
    "the switch interval": lambda: sys.setswitchinterval(0.25),
}


def _setting(rng: Random, kernel: Kernel, core: Core) -> Any:
    change = SETTINGS[rng.choice(list(SETTINGS))]

    def run(offer: Offer, values: Values) -> Any:
        result = core(values)
        offer.shown += 1
        change()
        return result

    return run


def _raises_later(rng: Random, kernel: Kernel, core: Core) -> Any:
    first = rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 10, 15, 20, 40))
    for_good = rng.random() < 0.7
    error = rng.choice((RuntimeError("no more"), SystemExit(3), KeyError("k"), GeneratorExit()))

    def run(offer: Offer, values: Values) -> Any:
        if offer.calls == first or (for_good and offer.calls > first):
            offer.shown += 1
            raise error
        return core(values)

    return run


def _warns_as_error(rng: Random, kernel: Kernel, core: Core) -> Any:
    import warnings

    first = rng.randrange(1, 6)

    def run(offer: Offer, values: Values) -> Any:
        result = core(values)
        if offer.calls >= first:
            offer.shown += 1
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.warn("deprecated", DeprecationWarning, stacklevel=1)
        return result

    return run


def _raises_after_change(rng: Random, kernel: Kernel, core: Core) -> Any:
    def run(offer: Offer, values: Values) -> Any:
        core(values)
        torch.set_grad_enabled(not torch.is_grad_enabled())
        for tensor in tensors_in(list(values.values())):
            if tensor.numel():
                tensor.detach()[(0,) * tensor.dim()].fill_(1)
        offer.shown += 1
        raise ValueError("after all")

    return run


def _wrong_later(rng: Random, kernel: Kernel, core: Core) -> Any:
    if kernel.returns == "None":
        return None
    first = rng.randrange(1, 7)

    def run(offer: Offer, values: Values) -> Any:
        result = core(values)
        if offer.calls >= first:
            for old in tensors_in(result):
                if old.dtype is not torch.bool and old.numel() and not shares(old, values):
                    new = like(old, old + 1)
                    offer.shown += differs_clearly(new, old)
                    return exchanged(result, old, new)
        return result

    return run


def _never_comes_back_alone(rng: Random, kernel: Kernel, core: Core) -> Any:
    """It is right, once for each value of its arguments' first element, then remembers."""
    if kernel.returns == "None" or kernel.is_random or kernel.mutates:
        return None
    known: dict[Any, Any] = {}

    def run(offer: Offer, values: Values) -> Any:
        result = core(values)
        own = [t for t in tensors_in(result) if t.numel() and not shares(t, values)]
        if not own:
            return result
        form = own[0].shape, own[0].stride(), own[0].dtype
        if form not in known:
            known[form] = own[0].detach().clone()
            return result
        offer.shown += differs_clearly(known[form], own[0])
        return exchanged(result, own[0], like(own[0], known[form]))

    return run


def _ignores_an_argument(rng: Random, kernel: Kernel, core: Core) -> Any:
    names = [name for name in kernel.essential if name not in kernel.mutates]
    if not names or kernel.mutates:
        return None
    name = rng.choice(names)

    def run(offer: Offer, values: Values) -> Any:
        given = values[name]
        right = tensors_in(core(values))
        other = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype).fill_(1)
        # Whole numbers are not drawn: they may be indices.
        offer.must_go = given.numel() > 0 and (given.is_floating_point() or given.is_complex())
        if any(shares(one, values) for one in right):
            offer.must_go = False
            return core(values)
        result = core({**values, name: other})
        pairs = zip(tensors_in(result), right, strict=True)
        offer.shown += any(differs_clearly(a, b) for a, b in pairs)
        return result

    return run


# What a layout, dtype or value must not be: all of it is in a key.
REFUSALS: dict[str, Callable[[Tensor], bool]] = {
    "stride 0": lambda x: 0 in x.stride(),
    "not contiguous": lambda x: not x.is_contiguous(),
    "not aligned": lambda x: x.data_ptr() % 16 != 0,
    "a last stride of not 1": lambda x: x.dim() > 0 and x.stride(-1) != 1,
    "rows of no multiple of 16 bytes": lambda x: (
        x.dim() > 1 and x.stride(0) * x.element_size() % 16 != 0
    ),
    "not channels last": lambda x: (
        x.dim() == 4 and not x.is_contiguous(memory_format=torch.channels_last)
    ),
    "transposed": lambda x: x.dim() == 2 and x.t().is_contiguous() and not x.is_contiguous(),
    "not dense": lambda x: not torch.ops.aten.is_non_overlapping_and_dense(x),
    "float16": lambda x: x.dtype is torch.float16,
    "contiguous": lambda x: x.is_contiguous() and x.numel() > 1,
    "aligned": lambda x: x.data_ptr() % 16 == 0 and x.numel() > 0,
    "no elements": lambda x: x.numel() == 0,
}


def _refuses(rng: Random, kernel: Kernel, core: Core) -> Any:
    refuses = REFUSALS[rng.choice(["not aligned", *REFUSALS])]
    is_silent = rng.random() < 0.4
    names = [name for name, _ in kernel.parameters]

    def run(offer: Offer, values: Values) -> Any:
        counted = tensors_in([values[name] for name in names])
        if not any(refuses(x) for x in counted):
            return core(values)
        if not is_silent or kernel.returns == "None":
            offer.shown += 1
            raise RuntimeError("this layout is not supported")
        result = core(values)
        for old in tensors_in(result):
            if old.numel() and not shares(old, values):
                new = like(old, torch.zeros_like(old))
                offer.shown += differs_clearly(new, old)
                return exchanged(result, old, new)
        return result

    return run


def _limit(rng: Random, kernel: Kernel, core: Core) -> Any:
    if not kernel.in_rows:
        return None
    limit, is_most = rng.choice((4, 8, 16, 20, 32, 40)), rng.random() < 0.6

    def run(offer: Offer, values: Values) -> Any:
        found = tensors_in([values[name] for name in kernel.in_rows])
        rows = [x.shape[0] for x in found if x.dim()]
        if any(one > limit if is_most else one < limit // 3 for one in rows):
            offer.shown += 1
            raise RuntimeError("too many rows" if is_most else "too few rows")
        return core(values)

    return run


def _reads_what_it_wrote(rng: Random, kernel: Kernel, core: Core) -> Any:
    """It is right where the argument that it changes lies apart from the other."""
    if kernel.name != "overlapping":
        return None

    def run(offer: Offer, values: Values) -> Any:
        out, x = values["out"], values["x"]
        begin, end = x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()
        is_near = out.data_ptr() < end and begin < out.data_ptr() + end - begin
        if x.numel() and is_near:
            offer.shown += differs_clearly(torch.zeros_like(x), x)
            out.zero_()
        return core(values)

    return run


def _counts_double(rng: Random, kernel: Kernel, core: Core) -> Any:
    if kernel.name != "count_down":
        return None

    def run(offer: Offer, values: Values) -> Any:
        offer.shown += 1
        result = core(values)
        values["left"].sub_(1)
        return result

    return run


FAULTS = [
    Fault("leaves a setting changed", _setting),
    Fault("raises in a later call", _raises_later),
    Fault("makes a warning an error", _warns_as_error),
    Fault("raises after it changed all", _raises_after_change),
    Fault("wrong in a later call", _wrong_later),
    Fault("repeats its first values", _never_comes_back_alone),
    Fault("ignores an argument", _ignores_an_argument),
    Fault("refuses a layout", _refuses),
    Fault("refuses many rows", _limit),
    Fault("reads what it wrote", _reads_what_it_wrote),
    Fault("counts double", _counts_double),
]
BY_KEY = {"refuses a layout", "refuses many rows", "reads what it wrote"}
