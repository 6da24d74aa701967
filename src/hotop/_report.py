"""``hotop.report``: what is covered, which roads its calls took, and what was left and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch._library import custom_ops

from hotop import _load


@dataclass(frozen=True)
class OpReport:
    """The calls of one overload since it was covered.

    Attributes:
        name: For instance ``"aten::add.Tensor"``.
        how: How it was registered: ``"custom_op"``, ``"Library"`` or ``"C++"``.
        direct: Calls that went straight to a Python kernel.
        boxed: Calls whose arguments were converted in C++ for one call of the dispatcher.
        pytorch: Calls by PyTorch's own entry. Of a packet with several overloads they are counted
            for the first that can take so many arguments, whichever PyTorch then finds.
        arguments: How many arguments its schema has.
    """

    name: str
    how: str
    direct: int
    boxed: int
    pytorch: int
    arguments: int

    @property
    def calls(self) -> int:
        """All of its calls."""
        return self.direct + self.boxed + self.pytorch


@dataclass(frozen=True)
class Report:
    """What hotop covers in this process.

    Attributes:
        ops: The overloads that were called, most calls first.
        covered: How many overloads are covered, called or not.
        left: Names of what was asked for and left to PyTorch, with the reason.
    """

    ops: list[OpReport] = field(default_factory=list)
    covered: int = 0
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"hotop: {self.covered} operators covered, {len(self.ops)} of them called"]
        if self.ops:
            width = max(len(op.name) for op in self.ops)
            lines.append(
                f"{'':{width}}  {'made by':9} {'direct':>10} {'boxed':>10} {'PyTorch':>10}"
            )
            for op in self.ops:
                lines.append(
                    f"{op.name:{width}}  {op.how:9} {op.direct:10,} {op.boxed:10,} {op.pytorch:10,}"
                )
        if self.left:
            lines.append("left to PyTorch:")
            lines += [f"  {name}: {reason}" for name, reason in sorted(self.left.items())]
        return "\n".join(lines)


def report() -> Report:
    """Tell what hotop covers in this process, and which roads the calls took.

    Covered are the operators of :func:`hotop.custom_op`, and those of :func:`hotop.install` and
    :func:`hotop.accelerate`. Counts begin when an operator is covered.

    Returns:
        The report; ``str()`` of it is a table.
    """
    if _load.CORE is None:
        return Report(left={"everything": _load.PROBLEM})
    from hotop import _existing, _lock, _rules
    from hotop._op import OpDef

    found: dict[Any, tuple[Any, str]] = {}
    # The weak references are copied in one step: another thread may define an op meanwhile.
    for op in [reference() for reference in custom_ops.OPDEFS.valuerefs()]:
        if isinstance(op, OpDef) and op._plan is not None:
            found[op._opoverload] = (op._plan, "custom_op")
    with _lock.LOCK:
        accelerated, left = list(_existing.ACCELERATED), dict(_rules.LEFT)
    for overload in accelerated:
        plan = overload.__dict__.get("_hotop_plan")  # None: not called
        if overload._name in custom_ops.OPDEFS:
            how = "custom_op"
        else:
            how = "Library" if overload._defined_in_python else "C++"
        found[overload] = (plan, how)
    ops = []
    for overload, (plan, how) in found.items():
        counts = (0, 0, 0)
        if plan is not None:
            counts = (plan.direct_calls, plan.boxed_calls, plan.pytorch_calls)
        ops.append(OpReport(overload._name, how, *counts, len(overload._schema.arguments)))
    called = sorted((op for op in ops if op.calls), key=lambda op: (-op.calls, op.name))
    return Report(called, len(ops), left)
