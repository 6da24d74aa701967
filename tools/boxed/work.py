"""A worker: the calls of one item (an OpInfo, or an overload's schema), compared one by one."""

from __future__ import annotations

import collections
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from tools.boxed import overloads
from tools.boxed.compare import Case, accelerated, compare
from tools.boxed.edits import ODD_TENSORS, RIGHT, WRONG_FORMS
from tools.boxed.generate import generated
from tools.boxed.record import recorded
from tools.boxed.states import PLAIN, drawn

GENERATED = 10  # calls from a schema


@dataclass
class Report:
    """What came of an item."""

    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    overloads: dict[str, dict[str, int]] = field(default_factory=dict)
    findings: list[tuple[str, str, list[str]]] = field(default_factory=list)  # step, title, lines


def prepare() -> None:
    """Set this process up: one thread, filled memory, every warning every time."""
    torch.set_num_threads(1)
    torch.set_warn_always(True)
    # Memory that an operator leaves unwritten must be the same on both sides.
    # (Not by torch.use_deterministic_algorithms, which imports Inductor.)
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)


def calls_of(item: str, seed: int) -> Iterator[tuple[str, list[Any]]]:
    """Yield the overloads of an item with the calls to make."""
    source, _, name = item.partition("/")
    if source == "op_db":
        yield from recorded(name).items()
        return
    op = overloads.overload(name)
    calls = [generated(op, Random(f"{seed}/{item}/{index}")) for index in range(GENERATED)]
    yield name, calls


def variations(step: str, seed: int, number: int) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the forms and states of a call; the first is the call as it is."""
    yield (), PLAIN
    for index in range(1, number):
        random = Random(f"{seed}/{step}/{index}")
        state = drawn(random)
        names: list[str] = []
        if state == PLAIN or random.random() < 0.6:
            forms = list(WRONG_FORMS if random.random() < 0.25 else RIGHT)
            names.append(random.choice(forms))
            if random.random() < 0.25:
                names.append(random.choice(list(RIGHT)))
        if state.transform and set(names) & ODD_TENSORS:
            names = [name for name in names if name not in ODD_TENSORS]
        yield tuple(names), state


def run_item(
    item: str,
    seed: int,
    *,
    number: int = 4,
    spoil: str = "",
    after: str = "",
    only: str = "",
    say: Callable[[str], None] = lambda step: None,
    most: Callable[[str], bool] = lambda name: False,
) -> Report:
    """Compare the calls of an item.

    Args:
        item: `op_db/NAME` or `schema/OVERLOAD`.
        seed: The seed of the run.
        number: Forms and states of each call.
        spoil: A break of `compare.SPOILS`, or "PyTorch" for PyTorch on both sides.
        after: Begin behind this step.
        only: Make this step alone.
        say: Gets each step before it is made.
        most: Tells that an overload has been compared often enough.
    """
    report = Report()
    reached = not after
    for name, calls in calls_of(item, seed):
        if overloads.skip_reason(name) or most(name):
            continue
        try:
            op = overloads.overload(name)
        except (AttributeError, RuntimeError):
            report.counts["no OpOverload"] += 1
            continue
        tally = collections.Counter[str]()
        with accelerated(op, spoil) as roads:
            for index, arguments in enumerate(calls):
                base = f"{name}/{index}"
                goes_through = True
                drawn_forms = variations(f"{item}/{base}", seed, number)
                for variation, (edits, state) in enumerate(drawn_forms):
                    step = f"{base}/{variation}"
                    if variation > 1 and not goes_through and not only:
                        break  # one more form of a wrong call is enough
                    if not reached:
                        reached = step == after
                        continue
                    if only and step != only:
                        continue
                    case = Case(op, arguments, edits, state, f"{seed}/{step}")
                    say(step)
                    answered = _one(case, step, spoil, report, tally)
                    if variation == 0:
                        goes_through = answered
        tally.update(roads)
        if tally:
            report.overloads[name] = dict(tally)
    return report


def _one(
    case: Case, step: str, spoil: str, report: Report, tally: collections.Counter[str]
) -> bool:
    try:
        with torch.random.fork_rng():
            made = case.make()
            printable = not case.state.packet or case.is_printable(*made)
    except Exception:  # an argument that this change does not fit
        report.counts["form does not fit"] += 1
        return False
    if overloads.is_undefined(case.op, *made):
        report.counts["undefined in PyTorch"] += 1
        return False
    if not printable:
        report.counts["not printable, by packet"] += 1
        return False
    lines, seen, wavers = compare(case, spoil)
    tally["calls"] += 1
    tally["answered" if seen["error"] is None else "refused"] += 1
    report.counts["calls"] += 1
    report.counts["answered" if seen["error"] is None else "refused"] += 1
    report.counts[f"state {case.state.transform or 'context'}"] += bool(str(case.state) != "plain")
    if wavers:
        report.counts["PyTorch differs from itself"] += 1
    if lines:
        report.findings.append((step, str(case), [line[:1500] for line in lines[:12]]))
    return seen["error"] is None
