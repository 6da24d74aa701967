"""Accelerated ops for tests: which road a call takes, and a factory for the twin harness.

``HOTOP_TWIN_FACTORY=twin_existing:custom_op pytest tests/test_twin_*.py`` runs the twins on it, and
``python -m tools.fuzz`` with the same variable the fuzzer.
"""

from collections.abc import Callable
from typing import Any

from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload

import hotop


def custom_op(name: str, fn: Callable | None = None, /, **options: Any) -> Any:
    from twin import left_factory  # which may be importing this module

    if fn is None:
        return lambda function: custom_op(name, function, **options)
    op = left_factory(name, fn, **options)
    hotop.accelerate(op)
    return op


def switch(op: CustomOpDef) -> None:
    """Accelerate an op, or give it back."""
    if type(op) is CustomOpDef:
        hotop.accelerate(op)
    else:
        hotop.restore(op)


def roads(op: Callable, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """Return what explain says, and which count a call raises."""
    overload = op if isinstance(op, OpOverload) else op.default
    told = hotop.explain(op, *args, **kwargs).road
    plan = overload.__dict__["_hotop_plan"]
    names = ("direct", "boxed", "pytorch")
    before = [getattr(plan, f"{name}_calls") for name in names]
    op(*args, **kwargs)
    after = [getattr(plan, f"{name}_calls") for name in names]
    (taken,) = [n for n, a, b in zip(names, before, after, strict=True) if b > a]
    return told, taken
