"""One thread at a time changes what is accelerated; calls do not ask."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

LOCK = threading.RLock()


def _fresh_lock() -> None:
    global LOCK
    LOCK = threading.RLock()


os.register_at_fork(after_in_child=_fresh_lock)


def locked(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Run a function while no other thread changes what is accelerated."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with LOCK:
            return function(*args, **kwargs)

    return run
