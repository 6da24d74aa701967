"""A tactic, and whether it can be called as the decorated function is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hotop.tuner._key import Parameter


@dataclass(frozen=True)
class Tactic:
    """One way to do what a tunable function does.

    Attributes:
        function: Called with exactly the call's arguments.
        applies: Whether it can serve a call, from the call's arguments; None: every call. Asked
            when a key is measured; for a choice out of a file at the key's first call; and in every
            call while a dimension has a bucket rule. One that raises says no.
        backends: The names that ``allowed_backends`` has to hold; empty: the tactic's own name.
        device_types: Where it works; empty: everywhere.
    """

    function: Callable[..., Any]
    applies: Callable[..., bool] | None = None
    backends: tuple[str, ...] = ()
    device_types: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"a tactic must be callable, got {self.function!r}")
        if self.applies is not None and not callable(self.applies):
            raise TypeError(f"applies must be callable, got {self.applies!r}")
        for name in ("backends", "device_types"):
            object.__setattr__(self, name, names(name, getattr(self, name)))


def names(what: str, given: Iterable[str]) -> tuple[str, ...]:
    """Return names as a tuple.

    Raises:
        TypeError: It is one str, or holds something else.
    """
    if isinstance(given, str) or not all(isinstance(name, str) for name in given):
        raise TypeError(f"{what} must be a sequence of str, got {given!r}")
    return tuple(given)


def problem(
    function: Callable[..., Any], parameters: Sequence[Parameter], usual: Callable[..., Any]
) -> str | None:
    """Return why some calls of these parameters would not reach a tactic as they are meant.

    A call by keyword, or without a parameter that has a default, has the key of the same call with
    all values in place. What has no signature (a C++ function) is believed. ``usual``: the function
    that is tuned.
    """
    try:
        given = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    # By keyword or by position alone: as the function has it.
    own_kinds = {name: one.kind for name, one in inspect.signature(usual).parameters.items()}
    plain = [
        one
        for one in given
        if one.kind is one.POSITIONAL_OR_KEYWORD or one.kind is own_kinds.get(one.name)
    ]
    stars = {one.kind for one in given} & {
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    }
    takes_any = len(stars) == 2
    others = [
        one
        for one in given
        if one not in plain and one.kind not in stars and not _is_spare(one, own_kinds)
    ]
    wanted = [parameter.name for parameter in parameters]
    have = [one.name for one in plain]
    if others or have != wanted[: len(have)] or (len(have) < len(wanted) and not takes_any):
        return f"must have the parameters ({', '.join(wanted)}), and has {_shown(function)}"
    for one, parameter in zip(plain, parameters, strict=False):
        if not parameter.required and not _is_default(one.default, parameter.default):
            return f"must have the default {parameter.default!r} for {one.name}"
    return None


def _is_spare(parameter: inspect.Parameter, own: Container[str]) -> bool:
    """Return whether no call passes it and it has a default, as functools.partial leaves it."""
    is_by_keyword = parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in own
    return is_by_keyword and parameter.default is not parameter.empty


def _shown(function: Callable[..., Any]) -> str:
    return str(inspect.signature(function))


def _is_default(ours: Any, theirs: Any) -> bool:
    return ours is theirs or (type(ours) is type(theirs) and repr(ours) == repr(theirs))
