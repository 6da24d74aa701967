"""What defining an op costs, per op, for torch.library.custom_op, define + impl and hotop."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns

import torch
from torch import Tensor

import hotop
from hotop.bench.contenders import (
    CUSTOM_OP,
    DEFINE_IMPL,
    HOTOP,
    HOTOP_NAMESPACE,
    TORCH_NAMESPACE,
    new_name,
    register_define_impl,
)
from hotop.bench.timing import gc_paused

__all__ = ["RegistrationResult", "measure"]


@dataclass(frozen=True)
class RegistrationResult:
    """Milliseconds per op: the fastest and the median batch of each contender."""

    ops_per_batch: int
    batches: int
    minimum_ms: dict[str, float]
    median_ms: dict[str, float]


def _kernel(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return torch.empty_like(x)


def measure(*, ops_per_batch: int, batches: int) -> RegistrationResult:
    """Defines the same op under new names, batch by batch, the contenders in turn."""
    definers: dict[str, Callable[[str], object]] = {
        CUSTOM_OP: lambda name: torch.library.custom_op(
            f"{TORCH_NAMESPACE}::{name}", _kernel, mutates_args=()
        ),
        DEFINE_IMPL: lambda name: register_define_impl(name, _kernel),
        HOTOP: lambda name: hotop.custom_op(f"{HOTOP_NAMESPACE}::{name}", _kernel, mutates_args=()),
    }
    order = list(definers)
    samples: dict[str, list[float]] = {contender: [] for contender in order}
    for contender in order:
        definers[contender](new_name("registered"))
    with gc_paused():
        for _ in range(batches):
            for contender in order:
                names = [new_name("registered") for _ in range(ops_per_batch)]
                define = definers[contender]
                start = perf_counter_ns()
                for name in names:
                    define(name)
                samples[contender].append((perf_counter_ns() - start) / 1e6 / ops_per_batch)
            order.append(order.pop(0))
    return RegistrationResult(
        ops_per_batch,
        batches,
        {contender: min(times) for contender, times in samples.items()},
        {contender: statistics.median(times) for contender, times in samples.items()},
    )
