"""Refuse a subinterpreter before PyTorch is imported there, which crashes or hangs."""

from __future__ import annotations

import importlib


def in_main_interpreter() -> bool:
    """Return whether this is CPython's main interpreter; True where it has only one."""
    for name in ("_interpreters", "_xxsubinterpreters"):  # CPython 3.13; 3.11 and 3.12
        try:
            interpreters = importlib.import_module(name)
        except ImportError:
            continue
        return bool(interpreters.get_current() == interpreters.get_main())
    return True


if not in_main_interpreter():
    raise ImportError(
        "hotop needs CPython's main interpreter: PyTorch cannot be imported in a subinterpreter"
    )
