"""What a process started by ``python -m hotop run`` prints to stderr when it ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections import Counter
from collections.abc import Sequence

import torch

from hotop import _cost_model, _existing
from hotop._report import OpReport, Report, report

_ROADS = ("direct", "boxed", "pytorch")


def begin(namespaces: Sequence[str], *, print_report: bool) -> None:
    """Accelerate namespaces, those that are defined later too, and print when the process ends.

    Args:
        namespaces: Whose operators to accelerate.
        print_report: Whether to print the report.
    """
    pid = os.getpid()
    # Processes that the program starts, a resource tracker or Inductor's workers among them, have
    # nothing to say when they called nothing.
    child = os.environ.get("HOTOP_RUN_PID", str(pid)) != str(pid)

    def end() -> None:
        # A forked child inherits this with its parent's counts.
        if os.getpid() != pid or sys.stderr is None:
            return
        unknown = [name for name in namespaces if not _existing.namespace_exists(name)]
        text = [] if child else [_missing(name) for name in unknown]
        if print_report:
            result = report()
            if not child or result.ops:
                text.append(describe(result, _process()))
        if text:
            with contextlib.suppress(OSError, ValueError):  # stderr is closed
                # In one piece: other processes write to it too.
                sys.stderr.write("\n".join([*text, ""]))
                sys.stderr.flush()

    atexit.register(end)
    # For hotop.accelerate() a namespace without operators is an error; here torch itself is still
    # being imported, and nothing else is.
    for namespace in namespaces:
        _existing.accelerate_namespace(namespace)


def _process() -> str:
    words = " ".join(sys.orig_argv[1:])
    rank = f", rank {os.environ['RANK']}" if "RANK" in os.environ else ""
    return f"process {os.getpid()}{rank}: {words if len(words) <= 200 else words[:197] + '...'}"


def _missing(namespace: str) -> str:
    named = f"the namespace {namespace!r}, which --accelerate or HOTOP_ACCELERATE names"
    if _existing.is_of_torchscript(namespace):
        return (
            f"hotop: process {os.getpid()}: the operators of {named}, are TorchScript's own, which "
            "the dispatcher does not have; their calls are PyTorch's"
        )
    return f"hotop: process {os.getpid()} has no operators of {named}"


def describe(result: Report, process: str) -> str:
    """Return the report's table with the estimate, or only the counts if no operator was called.

    Args:
        result: What ``hotop.report()`` returned.
        process: What to call the process.
    """
    ops: list[OpReport] = result.ops
    total: Counter[str] = Counter()
    low = high = 0.0
    unknown = 0
    rows: list[tuple[str, ...]] = [("operator", "made by", *_ROADS, "ms saved")]
    for op in ops:
        counts = {road: int(getattr(op, road)) for road in _ROADS}
        total.update(counts)
        saved_low, saved_high, without = _saved(op.name, op.how, counts)
        low, high, unknown = low + saved_low, high + saved_high, unknown + without
        saved = "not known" if without and not saved_high else _range(saved_low, saved_high)
        rows.append((op.name, op.how, *(f"{counts[road]:,}" for road in _ROADS), saved))
    calls = sum(total.values())
    lines = [
        f"hotop: {process}",
        f"hotop: operators called: {len(ops):,}; calls: {calls:,} ({total['direct']:,} direct, "
        f"{total['boxed']:,} boxed, {total['pytorch']:,} by PyTorch)",
    ]
    if ops:
        lines += _table(rows)
        lines.append(
            f"hotop: host time saved, estimated: {_range(low, high)} ms. This was not measured "
            f"here: it is calls times what one call saved in {_cost_model.SOURCE}; the lower "
            "number if every call ran in inference_mode, the higher if none did."
        )
        if unknown:
            lines.append(
                f"hotop: calls that are not in the estimate, as nobody measured theirs: {unknown:,}"
            )
    if result.left:
        reasons = Counter(result.left.values())
        lines.append("hotop: left as they were, with the number of operators:")
        lines += [f"  {count:,}: {reason}" for reason, count in reasons.most_common()]
    return "\n".join(lines)


def _saved(name: str, how: str, counts: dict[str, int]) -> tuple[float, float, int]:
    """Return ms saved, low and high, and how many calls the model knows nothing about."""
    low = high = 0.0
    unknown = 0
    arguments = _arguments(name)
    for road, count in counts.items():
        saving = _cost_model.saving(how, road, arguments)
        if saving is None:
            unknown += count
        else:
            low += saving.low * count / 1000
            high += saving.high * count / 1000
    return low, high, unknown


def _arguments(name: str) -> int:
    """Return how many arguments every call of an operator has: those without a default."""
    packet, _, overload = name.partition(".")
    try:
        schema = torch._C._get_schema(packet, "" if overload == "default" else overload)
    except RuntimeError:  # the library that defined it is gone
        return 1
    return sum(not argument.has_default_value() for argument in schema.arguments)


def _range(low: float, high: float) -> str:
    first, last = (f"{value:,.1f}" for value in (low, high))
    return first if first == last else f"{first} to {last}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
