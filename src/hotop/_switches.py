"""The public switches: ``install``, ``uninstall``, ``accelerate``, ``restore``."""

from __future__ import annotations

import warnings
from typing import Any

from hotop import _load


def _is_off(name: str) -> bool:
    """Say in one sentence that nothing happens; PyTorch goes on as it is."""
    if _load.CORE is not None:
        return False
    warnings.warn(f"hotop.{name} does nothing: {_load.PROBLEM}", RuntimeWarning, stacklevel=3)
    return True


class Installation:
    """What :func:`install` returns; leaving it as a context manager undoes what that call did."""

    def __init__(self, owns: bool) -> None:
        self._owns = owns

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._owns:
            uninstall()


def install() -> Installation:
    """Make every operator that is defined from Python fast, in this process, from here on.

    ``torch.library.custom_op`` and ``triton_op`` make hotop's ops; operators of a
    ``torch.library.Library``, and so of every helper built on one, are accelerated when they are
    first looked up (:func:`hotop.accelerate`). Operators that exist already are accelerated now.
    Operators of C++ and PyTorch's own are left; give their namespaces to ``accelerate``. A second
    call does nothing.

    Returns:
        A context manager that uninstalls on leaving, unless hotop was installed already.
    """
    if _is_off("install"):
        return Installation(False)
    from hotop import _install

    return Installation(_install.install())


def uninstall() -> None:
    """Undo :func:`install`; ops that ``custom_op`` made meanwhile stay hotop's."""
    if _load.CORE is not None:
        from hotop import _install

        _install.uninstall()


def accelerate(what: Any) -> None:
    """Let calls of operators that exist already go through hotop's C++ routine.

    The objects stay what and where they are: ``torch.ops.ns.name.overload`` that somebody holds
    becomes fast too, and its hash does not change. What the routine cannot prove or does not know
    goes to PyTorch's own entry, so the answers are PyTorch's.

    Args:
        what: A ``CustomOpDef``, an ``OpOverload``, an ``OpOverloadPacket``, the name of an
            operator (``"aten::add"``) or of a namespace (``"aten"``, also ``torch.ops.aten``), or a
            predicate that is asked about overloads. A namespace and a predicate also cover
            overloads that are first looked up later. The same request a second time is a warning
            of the logger ``hotop``.

    Raises:
        ValueError: There is no such operator or namespace.
        TypeError: ``what`` is none of these.
    """
    if not _is_off("accelerate"):
        from hotop import _existing

        _existing.accelerate(what)


def restore(what: Any = None) -> None:
    """Give operators back to PyTorch: undo :func:`accelerate`.

    Args:
        what: A namespace or predicate that ``accelerate`` took: what another request covers stays
            covered. An operator: it is given back whatever covers it. None: everything, and
            :func:`hotop.install` is undone too (ops that ``custom_op`` made meanwhile stay
            hotop's).

    Raises:
        ValueError: It is not accelerated, or does not exist.
        TypeError: ``what`` is none of the things that ``accelerate`` takes.
    """
    if not _is_off("restore"):
        from hotop import _existing

        _existing.restore(what)
