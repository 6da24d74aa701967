"""A factory for the twin harness: PyTorch's own custom op, accelerated afterwards.

``HOTOP_TWIN_FACTORY=twin_existing:custom_op pytest tests/test_twin_*.py`` runs the twins on it, and
``python -m tools.fuzz`` with the same variable the fuzzer.
"""

from collections.abc import Callable
from typing import Any

import torch

import hotop


def custom_op(name: str, fn: Callable | None = None, /, **options: Any) -> Any:
    made = torch.library.custom_op(name, fn, **options)
    if fn is None:
        return lambda function: _accelerated(made(function))
    return _accelerated(made)


def _accelerated(op: Any) -> Any:
    hotop.accelerate(op)
    return op
