"""Which overloads are to be covered: by namespace, by predicate, one by one, and which are not."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch._ops import OpOverload

Predicate = Callable[[OpOverload], bool]
LEFT: dict[str, str] = {}  # name -> why it was not covered
_RAISED = "a predicate of accelerate raised "


class Rules:
    """What was asked for and not given back; the latest request about an overload counts."""

    def __init__(self) -> None:
        self.namespaces: set[str] = set()
        self.predicates: list[Predicate] = []
        self.objects: weakref.WeakSet[OpOverload] = weakref.WeakSet()
        self.exceptions: weakref.WeakSet[OpOverload] = weakref.WeakSet()

    def __bool__(self) -> bool:
        """Return whether overloads that are made later may be covered."""
        return bool(self.namespaces or self.predicates)

    def cover(self, overload: OpOverload) -> bool:
        """Return whether an overload is to be covered."""
        if overload in self.objects:
            return True
        return overload not in self.exceptions and self._match(overload)

    def _match(self, overload: OpOverload) -> bool:
        return overload.namespace in self.namespaces or any(
            asks(predicate, overload) for predicate in self.predicates
        )

    def add_namespace(self, name: str) -> None:
        """Cover a namespace, and what was given back of it."""
        self.namespaces.add(name)
        self._forget(lambda overload: overload.namespace == name)

    def add_predicate(self, predicate: Predicate) -> None:
        """Cover what a predicate picks, and what was given back of that."""
        if predicate not in self.predicates:
            self.predicates.append(predicate)
        self._forget(lambda overload: asks(predicate, overload))

    def add_object(self, overload: OpOverload) -> None:
        """Cover one overload, whatever becomes of the rules."""
        self.objects.add(overload)
        self.exceptions.discard(overload)

    def remove_namespace(self, name: str) -> None:
        """Take back a namespace."""
        self.namespaces.remove(name)
        _forget_reasons(lambda left, _: left.startswith(f"{name}::"))
        self._forget(lambda overload: not self._match(overload))

    def remove_predicate(self, predicate: Predicate) -> None:
        """Take back a predicate."""
        self.predicates.remove(predicate)
        _forget_reasons(lambda _, reason: reason.startswith(_RAISED))
        self._forget(lambda overload: not self._match(overload))

    def remove_object(self, overload: OpOverload) -> None:
        """Take back one overload, whatever the rules say."""
        self.objects.discard(overload)
        if self._match(overload):
            self.exceptions.add(overload)

    def clear(self) -> None:
        """Take back everything."""
        self.namespaces.clear()
        self.predicates.clear()
        self.objects.clear()
        self.exceptions.clear()
        LEFT.clear()

    def _forget(self, matches: Predicate) -> None:
        for overload in list(self.exceptions):
            if matches(overload):
                self.exceptions.discard(overload)


def asks(predicate: Predicate, overload: OpOverload) -> bool:
    """Return a predicate's answer; an error is a no, and told by ``hotop.report``."""
    try:
        return bool(predicate(overload))
    except Exception as error:
        LEFT[overload._name] = f"{_RAISED}{error!r}"
        return False


def _forget_reasons(matches: Callable[[str, str], bool]) -> None:
    for name, reason in list(LEFT.items()):
        if matches(name, reason):
            del LEFT[name]


RULES = Rules()
