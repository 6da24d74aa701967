"""Where the host time goes: calls times tax, in a tight loop and in the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from hotop.bench.timing import Timing, make_loop, time_interleaved
from hotop.ltx2.kernels import OP_NAMES
from hotop.ltx2.measure import Phase
from hotop.ltx2.variants import PLAIN, Variant


@dataclass(frozen=True)
class TightTax:
    """What a call costs more than the kernel's own call when nothing else runs, in us.

    Attributes:
        minimum_us: By op, then by variant, from the fastest rounds.
        median_us: The same from the median rounds.
    """

    minimum_us: dict[str, dict[str, float]]
    median_us: dict[str, dict[str, float]]

    def step_ms(self, calls: Mapping[str, int], name: str) -> float:
        """What a step's calls cost at this tax."""
        return sum(count * self.median_us[op][name] for op, count in calls.items()) / 1e3


def measure_tight(
    variants: Mapping[str, Variant],
    arguments: Mapping[str, Sequence[Any]],
    context: Callable[[], AbstractContextManager[Any]],
    rounds: int,
) -> TightTax:
    """Call each op in a loop of its own with arguments that the model gave it."""
    minimum: dict[str, dict[str, float]] = {}
    median: dict[str, dict[str, float]] = {}
    for op in OP_NAMES:
        given = arguments[op]
        loops = {
            name: make_loop(variant.ops[op], given)
            for name, variant in variants.items()
            if variant.namespace is None
        }
        for name, variant in variants.items():
            if variant.namespace is not None:
                path = f".{variant.namespace}.{op}"
                loops[name] = make_loop(torch.ops, given, path=path)
        timings = time_interleaved(loops, rounds=rounds, context=context)
        plain: Timing = timings[PLAIN]
        minimum[op] = {
            name: (timing.minimum_ns - plain.minimum_ns) / 1e3 for name, timing in timings.items()
        }
        median[op] = {
            name: (timing.median_ns - plain.median_ns) / 1e3 for name, timing in timings.items()
        }
    return TightTax(minimum, median)


@dataclass(frozen=True)
class Attribution:
    """The account of one setting, in milliseconds of thread CPU time a step.

    Attributes:
        title: The setting.
        calls: Op calls a step.
        step_ms: Median step by program.
        tight_us: Tax of a mean call in a tight loop, by program.
        model_us: Tax of a mean call in the model, by program: what the step took more than the
            step of the base, by the number of calls.
        share: The part of the step that is tax, by program.
        before: The program that hotop is compared with: `custom_op`, with a Python tuner or not.
        after: hotop's.
        estimated_ms: Calls times the difference of the taxes of the two in a tight loop.
        measured_ms: What the steps of the two differ by.
        left_ms: The step that is left with hotop.
    """

    title: str
    calls: int
    step_ms: dict[str, float]
    tight_us: dict[str, float]
    model_us: dict[str, float]
    share: dict[str, float]
    before: str
    after: str
    estimated_ms: float
    measured_ms: float
    left_ms: float


def attribute(phase: Phase, calls: Mapping[str, int], tight: TightTax) -> Attribution:
    """Make the account of `phase`.

    Raises:
        ValueError: `calls` counts no call.
    """
    total = sum(calls.values())
    before, after = phase.setting.before, phase.setting.after
    if not total:
        raise ValueError("attribute() needs at least one op call a step")
    known = tight.median_us[OP_NAMES[0]]
    names = [name for name in phase.names if name in known]
    above = {name: phase.paired_ms(name, phase.base) for name in names}
    step = {name: phase.median_ms(name) for name in phase.names}
    return Attribution(
        phase.setting.title,
        total,
        step,
        {name: tight.step_ms(calls, name) * 1e3 / total for name in names},
        {name: above[name] * 1e3 / total for name in names},
        {name: above[name] / step[name] for name in names},
        before,
        after,
        tight.step_ms(calls, before) - tight.step_ms(calls, after),
        phase.paired_ms(before, after),
        step[after],
    )
