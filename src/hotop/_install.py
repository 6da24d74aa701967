"""PyTorch's ways to define an operator from Python, made to give fast ones."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from torch._library import custom_ops
from torch._ops import OpOverload

from hotop import _existing
from hotop._existing import logger
from hotop._lock import locked
from hotop._op import OpDef
from hotop._rules import LEFT


def _defined_in_python(overload: OpOverload) -> bool:
    return overload._defined_in_python


def is_installed() -> bool:
    """Return whether :func:`install` is in force."""
    return bool(_existing.INSTALLED)


def _new(cls: type, *args: Any, **kwargs: Any) -> Any:
    # Without arguments it is copy.copy's.
    if is_installed() and cls is custom_ops.CustomOpDef and (args or kwargs):
        namespace = args[0] if args else kwargs.get("namespace")
        if namespace not in _existing.EXACT_CLASS:
            return OpDef.__new__(OpDef)
    return super(custom_ops.CustomOpDef, cls).__new__(cls)  # type: ignore[misc]


@locked
def install() -> bool:
    """See :func:`hotop.install`; return whether anything changed."""
    if is_installed():
        logger.info("installed already")
        return False
    # type.__call__ then runs __init__ of what came back. It stays in place, asking the switch:
    # CPython does not forget that a class once had a __new__.
    custom_ops.CustomOpDef.__new__ = _new  # type: ignore[method-assign]
    _existing.INSTALLED.append(_defined_in_python)
    before = set(_existing.ACCELERATED)
    _existing.cover_by_predicate(_defined_in_python)
    covered = set(_existing.ACCELERATED) - before
    counts = Counter(overload.namespace for overload in covered)
    logger.info(
        "installed: custom_op, triton_op and Library make fast ops; existing ones accelerated: %s",
        ", ".join(f"{count} of {name}" for name, count in sorted(counts.items())) or "none",
    )
    for name, reason in sorted(LEFT.items()):
        logger.info("left %s: %s", name, reason)
    if logger.isEnabledFor(logging.DEBUG):
        for overload in sorted(covered, key=str):
            logger.debug("accelerated %s", overload)
    return True


@locked
def uninstall() -> None:
    """See :func:`hotop.uninstall`."""
    if not is_installed():
        logger.info("not installed")
        return
    _existing.INSTALLED.clear()
    _existing.restore(_defined_in_python)
    logger.info("uninstalled")
