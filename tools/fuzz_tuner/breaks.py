"""The tuner's checks, broken on purpose one at a time: the fuzzer must find each."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

# Each breaks this process for good. They import hotop only then: some choose its core first.
Break = Callable[[], None]


def _put(module: str, name: str, new: Any) -> None:
    """Put a function in the place of a part of the tuner, which must be there."""
    import importlib

    owner: Any = importlib.import_module(f"hotop.tuner.{module}")
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    old = getattr(owner, last)
    setattr(owner, last, new(old) if getattr(new, "takes_old", False) else new)


def _around(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Mark a function that gets the old part and returns the new one."""
    function.takes_old = True  # type: ignore[attr-defined]
    return function


def _replaced(module: str, name: str, new: Any) -> Break:
    return lambda: _put(module, name, new)


def _in_the_python_lookup(module: str, name: str, new: Any) -> Break:
    """Break a part of keys, which the core makes in C++; its twin in Python looks them up."""

    def broken() -> None:
        os.environ["HOTOP_DISABLE"] = "1"
        _put(module, name, new)

    return broken


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _field_not_compared(*names: str) -> Break:
    @_around
    def new(old: Any) -> Any:
        def check(ours: Any, theirs: Any, *rest: Any) -> None:
            alike = {name: getattr(theirs, name) for name in names}
            old(dataclasses.replace(ours, **alike), theirs, *rest)

        return check

    return _replaced("_judge", "_check_form", new)


def _on_the_callers_memory() -> None:
    def __post_init__(self: Any) -> None:
        self.copy = self.source

    _put("_workspace", "Block.__post_init__", __post_init__)
    _put("_workspace", "Block.refresh", _nothing)
    _put("_workspace", "Block._guards", _none)


@_around
def _aligned(old: Any) -> Any:
    return lambda size, begin, device: old(size, 0, device)


@_around
def _without_versions(old: Any) -> Any:
    def fresh(self: Any) -> Any:
        made = old(self)
        return dataclasses.replace(made, versions=[None] * len(made.versions))

    return fresh


@_around
def _silent(old: Any) -> Any:
    def put_back(before: Any) -> dict[str, Any]:
        old(before)
        return {}

    return put_back


@_around
def _given_as_smallest(old: Any) -> Any:
    def representative(parameters: Any, values: Any, *, smallest: bool = False) -> Any:
        return list(values) if smallest else old(parameters, values)

    return representative


@_around
def _given_as_largest(old: Any) -> Any:
    def representative(parameters: Any, values: Any, *, smallest: bool = False) -> Any:
        return old(parameters, values, smallest=True) if smallest else list(values)

    return representative


@_around
def _errors_while_timed_pass(old: Any) -> Any:
    def watched(self: Any, step: Any) -> Any:
        try:
            return old(self, step)
        except BaseException:
            return lambda: 1.0

    return watched


@_around
def _only_exceptions(old: Any) -> Any:
    def _caught(self: Any, check: Any) -> Any:
        from hotop.tuner._call import Refused

        try:
            check()
        except (Exception, Refused) as error:
            return str(error)
        return None

    return _caught


@_around
def _failure_ends_the_key(old: Any) -> Any:
    def _caught(self: Any, check: Any) -> Any:
        problem = old(self, check)
        if problem is not None and problem.startswith("raises"):
            raise RuntimeError(problem)
        return problem

    return _caught


@_around
def _lists_are_tuples(old: Any) -> Any:
    def _flatten(value: Any, tensors: Any, others: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple, tuple(_flatten(one, tensors, others) for one in value)
        return old(value, tensors, others)

    return _flatten


@_around
def _any_class(old: Any) -> Any:
    def _flatten(value: Any, tensors: Any, others: Any) -> Any:
        import torch

        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return torch.Tensor
        return old(value, tensors, others)

    return _flatten


@_around
def _any_version(old: Any) -> Any:
    def choices_of(self: Any, name: str, signature: str, versions: Any) -> Any:
        op = self.ops.get(name)
        if op is None or op["signature"] != signature:
            return []
        return list(op["choices"].values())

    return choices_of


@_around
def _any_signature(old: Any) -> Any:
    def choices_of(self: Any, name: str, signature: str, versions: Any) -> Any:
        op = self.ops.get(name)
        return [] if op is None else list(op["choices"].values())

    return choices_of


@_around
def _not_asked_again(old: Any) -> Any:
    def _learn(self: Any, description: Any, device: Any, tactic: str, **_: Any) -> None:
        old(self, description, device, tactic, applies=True)

    return _learn


class _Everybody(dict):  # type: ignore[type-arg]
    """Gives everybody the turn."""

    def setdefault(self, key: Any, value: Any) -> Any:
        self[key] = value
        return value

    def __delitem__(self, key: Any) -> None:
        self.pop(key, None)


def _true(*_: Any, **__: Any) -> bool:
    return True


def _false(*_: Any, **__: Any) -> bool:
    return False


def _none(*_: Any, **__: Any) -> list[Any]:
    return []


def _no_memory(*_: Any) -> Any:
    from hotop.tuner._layout import Memory

    return Memory({}, [])


BREAKS: dict[str, Break] = {
    "no copies": _on_the_callers_memory,
    "copies are aligned": _replaced("_workspace", "aligned_bytes", _aligned),
    "copies share no memory": _replaced("_layout", "share", _false),
    "arguments not compared": _replaced("_call", "_left_in_arguments", _none),
    "memory around not compared": _replaced("_workspace", "Block.is_guarded", _true),
    "undeclared parts not compared": _replaced("_call", "_only_mutated", _true),
    "versions not compared": _replaced("_workspace", "Workspace.fresh", _without_versions),
    "containers not compared": _replaced("_call", "contents", _nothing),
    "settings stay changed": _replaced("_process", "put_back", lambda before: {}),
    "settings not compared": _replaced("_process", "put_back", _silent),
    "generators not set back": _replaced("_process", "RandomState.restore", _nothing),
    "random numbers not compared": _replaced("_process", "RandomState.is_equal", _true),
    "values not compared": _replaced("_judge", "check_values", _nothing),
    "tolerances are absolute": _replaced("_judge", "_magnitude", lambda values: 1.0),
    "effects not compared": _replaced("_judge", "check_effects", _nothing),
    "strides not compared": _field_not_compared("strides"),
    "classes not compared": _replaced("_call", "_flatten", _any_class),
    "requires_grad not compared": _field_not_compared("requires_grad"),
    "lazy views not compared": _field_not_compared("is_conj", "is_neg"),
    "shared memory not compared": _field_not_compared("is_same", "shares"),
    "holders not counted": _replaced("_call", "_is_held", _false),
    "earlier results not compared": _replaced("_judge", "check_kept", _nothing),
    "containers of results alike": _replaced("_call", "_flatten", _lists_are_tuples),
    "no other data": _replaced("_evidence", "draw", _nothing),
    "nothing proven is proof": _replaced("_judge", "unproven", _nothing),
    "smallest sizes not tried": _replaced("_profile", "representative", _given_as_smallest),
    "largest sizes not tried": _replaced("_profile", "representative", _given_as_largest),
    "errors while timed pass": _replaced("_trial", "Trial.watched", _errors_while_timed_pass),
    "no last look": _replaced("_trial", "Trial.problem_after_all", _nothing),
    "only Exceptions caught": _replaced("_trial", "Trial._caught", _only_exceptions),
    "a failure ends the key": _replaced("_trial", "Trial._caught", _failure_ends_the_key),
    "applies not asked": _replaced("_tunable", "Tunable._applies", _true),
    "applies not asked again": _replaced("_tunable", "Tunable._learn", _not_asked_again),
    "choices of any version": _replaced("_store", "Table.choices_of", _any_version),
    "choices of any rules": _replaced("_store", "Table.choices_of", _any_signature),
    "everybody measures": _replaced("_session", "_measuring", _Everybody()),
    "strides not in keys": _in_the_python_lookup("_layout", "stride_classes", _nothing),
    "alignment not in keys": _in_the_python_lookup("_layout", "is_aligned", _true),
    "overlaps not in keys": _in_the_python_lookup("_layout", "memory_of", _no_memory),
    "no bucket above the last": _in_the_python_lookup("_buckets", "Bucket.is_above", _false),
}
