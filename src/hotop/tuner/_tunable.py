"""The object behind ``hotop.tunable``, and the table of every such object."""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hotop import _load
from hotop.tuner import _devices, _key, _signature, _store, _table, _words
from hotop.tuner._judge import Check
from hotop.tuner._key import Description, NotKeyable, Parameter
from hotop.tuner._say import say, words_of
from hotop.tuner._signature import Tactic

_Base: Any = _table.PythonTunable if _load.CORE is None else _load.CORE.Tunable
# In the order in which they were made. Several may have one name.
_all: weakref.WeakValueDictionary[int, Tunable] = weakref.WeakValueDictionary()
_numbers = itertools.count()


@dataclass(frozen=True)
class Statistics:
    """What one tunable's calls found: tuned choices in its table, hits, misses."""

    choices: int
    hits: int
    misses: int


class Tunable(_Base):  # type: ignore[misc]
    """A callable that picks one of its tactics by the shapes and values of a call.

    Made by :func:`tunable`. The look-up runs in the C++ core: shapes, dtypes and values become a
    key of machine words, one probe of a hash table gives the tactic, the tactic gets the call's
    arguments as they are. Where no choice is known, the default tactic serves, and the call is
    counted as a miss.

    Attributes:
        name: The name in files.
        tactics: By name; the first is the default, the decorated function.
        version: What the author says of the tactics; choices of other versions are not used.
        hits: Calls that a tuned choice served.
        misses: Calls without a tuned choice.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        parameters: list[Parameter],
        choice: str | None,
        default: str,
        default_backends: tuple[str, ...],
        check: Check,
        version: str,
    ) -> None:
        names = [parameter.name for parameter in parameters]
        self._choice_index = -1 if choice is None else names.index(choice)
        super().__init__(_flat(parameters), self._choice_index, function)
        functools.update_wrapper(self, function)
        # infer_schema reads a function's annotations in its module.
        self.__globals__ = getattr(inspect.unwrap(function), "__globals__", {})
        self.name = name
        self.check = check
        self.version = version
        self._parameters = parameters
        self._has_buckets = any(parameter.buckets for parameter in parameters)
        self.tactics: dict[str, Tactic] = {default: Tactic(function, backends=default_backends)}
        self._complained: set[str] = set()
        _all[next(_numbers)] = self

    # An op is a singleton, and so is its kernel.
    def __copy__(self) -> Tunable:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Tunable:
        return self

    def __reduce__(self) -> str:
        return self.__qualname__

    def __repr__(self) -> str:
        return f"<hotop tunable {self.name}: {', '.join(self.tactics)}>"

    def tactic(
        self,
        name: str,
        function: Callable[..., Any] | None = None,
        *,
        applies: Callable[..., bool] | None = None,
        backends: Iterable[str] = (),
        device_types: Iterable[str] = (),
    ) -> Callable[..., Any]:
        """Add a tactic; without ``function``, return a decorator.

        Raises:
            ValueError: A tactic of this name exists, or there are 64.
        """
        if function is None:
            return lambda function: self.tactic(
                name, function, applies=applies, backends=backends, device_types=device_types
            )
        self._add(name, Tactic(function, applies, tuple(backends), tuple(device_types)))
        return function

    def _add(self, name: str, tactic: Tactic) -> None:
        if not isinstance(name, str):
            raise TypeError(f"{self.name}: a tactic's name must be a str, got {name!r}")
        if name in self.tactics:
            raise ValueError(f"{self.name} already has a tactic {name!r}")
        problem = _signature.problem(tactic.function, self._parameters, self.__wrapped__)
        if problem is not None:
            raise ValueError(f"{self.name}: tactic {name!r} {problem}")
        # In this order: the core then forgets what a text allowed before.
        self.tactics[name] = tactic
        try:
            self._add_tactic(tactic.function)
        except ValueError:
            del self.tactics[name]
            raise

    def candidates(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int, str]:
        """Return number and name of the tactics that can serve a call and are allowed in it.

        For a malformed call that is the default, which says what is wrong.

        Raises:
            ValueError: ``allowed_backends`` names something unknown, or leaves no tactic.
        """
        try:
            values = _key.bind(self._parameters, args, kwargs)
        except NotKeyable:
            return {0: next(iter(self.tactics))}
        allowed = -1
        if self._choice_index >= 0:
            allowed = self._parse_allowed(values[self._choice_index])
        device = self._device(values)
        found = {}
        for i, (name, tactic) in enumerate(list(self.tactics.items())):
            if not allowed >> i & 1:
                continue
            if tactic.device_types and device not in tactic.device_types:
                continue
            if self._applies(name, tactic, args, kwargs):
                found[i] = name
        if not found:
            raise ValueError(f"{self.name}: no allowed backend can serve this call")
        return found

    def _applies(
        self, name: str, tactic: Tactic, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> bool:
        if tactic.applies is None:
            return True
        try:
            return bool(tactic.applies(*args, **kwargs))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too
            if name not in self._complained:
                self._complained.add(name)
                say(f"{self.name}: applies of {name!r} raises {words_of(error)}")
            return False

    def _asked(self, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], /) -> int:
        """Return the tactic for a call whose choice has an ``applies``: the choice, if it does."""
        name, tactic = list(self.tactics.items())[number]
        if not self._applies(name, tactic, args, kwargs):
            return next(iter(self.candidates(args, kwargs)))
        words = None if self._has_buckets else self._key_words(args, kwargs)
        if words is not None:  # all that it may look at is in the key
            self._set_choice(words, number)
        return number

    def _device(self, values: list[Any]) -> str | None:
        try:
            device = _key.device_of(values)
        except NotKeyable:
            return None
        return None if device is None else device.type

    def _parse_allowed(self, text: Any) -> int:
        """Return a bit per tactic; called once per str object."""
        if not isinstance(text, str):
            name = self._parameters[self._choice_index].name
            raise TypeError(f"{self.name}: {name} must be a str, got {type(text).__name__}")
        names = {name.strip() for name in text.split(",") if name.strip()}
        mask = 0
        known = set()
        for i, (name, tactic) in enumerate(list(self.tactics.items())):
            backends = set(tactic.backends or (name,))
            known |= backends
            mask |= (backends <= names) << i
        if names - known or not names:
            parameter = self._parameters[self._choice_index].name
            raise ValueError(
                f"{self.name}: {parameter}={text!r} must name some of: {', '.join(sorted(known))}"
            )
        return mask

    def _allowed_mask(self, names: list[str]) -> int:
        order = list(self.tactics)
        return sum(1 << order.index(name) for name in set(names))

    def _describe(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Description, torch.device] | None:
        """Return a call's key as it stands in a file, and its device; None: not to be tuned."""
        try:
            return self._key_of(args, kwargs)
        except NotKeyable:
            return None

    def _key_of(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Description, torch.device]:
        """Return a call's key as it stands in a file, and its device.

        Raises:
            NotKeyable: The call is not to be tuned; the text says why.
        """
        values = _key.bind(self._parameters, args, kwargs)
        parts = _key.describe(self._parameters, values)
        counted = [i for i, parameter in enumerate(self._parameters) if not parameter.ignored]
        if self._choice_index in counted:
            mask = self._parse_allowed(values[self._choice_index])
            names = [name for j, name in enumerate(self.tactics) if mask >> j & 1]
            parts[counted.index(self._choice_index)] = {"allowed": names}
        device = _key.device_of([values[i] for i in counted])
        if device is None:
            raise NotKeyable("it has no Tensor")
        return [len(self._parameters), *parts], device

    if _load.CORE is not None:

        def _encode(self, description: Description, device_index: int | None) -> bytes:
            return _words.encode(
                description,
                -1 if device_index is None else device_index,
                _load.CORE.tensor_word,  # type: ignore[union-attr]
                self._object_number,
                self._allowed_mask,
            )

    def _learn(
        self,
        description: Description,
        device: torch.device,
        tactic: str,
        *,
        applies: bool = False,
    ) -> None:
        """Put a choice into the table, for every device of that name here.

        ``applies``: the tactic's own test was asked for this key's call.

        Raises:
            ValueError: The description or the tactic is not one of this tunable.
        """
        order = list(self.tactics)
        if tactic not in order:
            raise ValueError(f"{self.name} has no tactic {tactic!r}")
        device_types = self.tactics[tactic].device_types
        if device_types and device.type not in device_types:
            raise ValueError(f"{tactic!r} does not work on {device.type}")
        for part in description:
            if isinstance(part, dict) and tactic not in part.get("allowed", (tactic,)):
                raise ValueError(f"{tactic!r} is not among the allowed {part['allowed']}")
        has_test = self.tactics[tactic].applies is not None
        ask = has_test and (self._has_buckets or not applies)
        for index in _devices.alike(device):
            self._set_choice(self._encode(description, index), order.index(tactic), ask)

    def _missed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], /) -> int:
        """Read the device's file, once, and return the tactic for a call without a choice."""
        found = self._describe(args, kwargs)
        if found is not None:
            self._load_table(found[1])
        return next(iter(self.candidates(args, kwargs)))

    def _load_table(self, device: torch.device) -> None:
        self._mark_loaded(device)
        table = _store.read_default(device)
        if table is not None:
            self._learn_all(table, device)

    def _learn_all(self, table: _store.Table, device: torch.device) -> int:
        """Take what fits of a table, and return how many choices that are."""
        taken = 0
        for choice in table.choices_of(self.name, self.signature, self._versions()):
            try:
                self._learn(choice.key, device, choice.tactic)
                taken += 1
            except Exception as error:  # whatever stands in the file
                table.report(f"a choice of {self.name} does not fit this version ({error})")
        return taken

    def _tune(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], /) -> Any:
        from hotop.tuner import _session

        return _session.call(self, args, kwargs)

    def _versions(self) -> dict[str, str]:
        """Return what a choice was measured with; one of another kind is not used."""
        return _store.versions(self.version)

    @property
    def signature(self) -> str:
        """What a file's choices must have been made for: the parameters and their rules."""
        return "; ".join(
            f"{p.name}{' ignored' * p.ignored}{' mutated' * p.mutated}"
            + "".join(f" {d}:{b.kind},{b.cap},{b.sizes}" for d, b in sorted(p.buckets.items()))
            for p in self._parameters
        )


if _load.CORE is not None:
    _load.CORE.use_vectorcall(Tunable)


def _flat(parameters: list[Parameter]) -> list[Any]:
    return [
        (
            parameter.name,
            parameter.required,
            None if parameter.required else parameter.default,
            parameter.ignored,
            parameter.mutated,
            # The last rule wins: of two for one dimension, that which counts from the front.
            [(d, b.kind, b.cap, b.sizes) for d, b in sorted(parameter.buckets.items())],
        )
        for parameter in parameters
    ]


def living() -> list[Tunable]:
    """Return every tunable of this process, in the order in which they were made."""
    return list(_all.values())


def stats() -> dict[str, Statistics]:
    """Return what each tunable's calls found, by name; of two of one name, the newer one's."""
    return {
        tunable.name: Statistics(tunable._choice_count(), tunable.hits, tunable.misses)
        for tunable in living()
    }


def clear() -> None:
    """Forget all choices and counts of this process; files stay, and are read again when needed."""
    _store.forget()
    for tunable in living():
        tunable._clear_choices()


def load(path: str | Path) -> int:
    """Take the choices of a file into this process.

    Returns:
        The number of choices that were taken.

    Raises:
        BrokenTable: The file is broken, or was made for another device.
    """
    table = _store.read(Path(path))
    device = table.check_device()
    return sum({one.name: one._learn_all(table, device) for one in living()}.values())
