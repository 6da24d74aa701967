"""The look-up in Python: the slow twin of the core's Tunable, and its stand-in without a core."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hotop.tuner._key import Description

MAX_TACTICS = 64
_tuning = False
_thread = threading.local()


def set_tuning(active: bool) -> None:
    """Send every call to ``_tune``, as ``set_tuning`` of the core does."""
    global _tuning
    _tuning = active


def set_timing_tactics(active: bool) -> None:
    """Let this thread's calls be served as outside a session, as the core's function does."""
    _thread.times_tactics = active


class PythonTunable:
    """The methods that the core's Tunable has. Subclasses bring ``_describe`` and the rest."""

    def __init__(
        self, parameters: list[Any], choice_parameter: int, default: Callable[..., Any], /
    ) -> None:
        self._functions = [default]
        self._choices: dict[bytes, int] = {}
        self._to_ask: set[bytes] = set()
        self._remembered: dict[bytes, int] = {}
        self._loaded: set[str] = set()
        self.hits = 0
        self.misses = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _tuning and not getattr(_thread, "times_tactics", False):
            return self._tune(args, kwargs)
        words = self._key_words(args, kwargs)
        if words is None or words not in self._choices:
            tactic = self._miss(words, args, kwargs)
        else:
            tactic = self._hit(words, args, kwargs)
        return self._functions[tactic](*args, **kwargs)

    def _hit(self, words: bytes, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        choice = self._choices[words]
        tactic = self._asked(choice, args, kwargs) if words in self._to_ask else choice
        if tactic == choice:
            self.hits += 1
        else:
            self.misses += 1
        return tactic

    def _miss(self, words: bytes | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        if words is not None and words in self._remembered:
            self.misses += 1
            return self._remembered[words]
        tactic: int = self._missed(args, kwargs)
        if words is not None and words in self._choices:
            return self._hit(words, args, kwargs)
        if words is not None and self._loaded:
            self._remembered[words] = tactic
        self.misses += 1
        return tactic

    def _key_words(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes | None:
        found = self._describe(args, kwargs)
        return None if found is None else self._encode(found[0], found[1].index)

    def _encode(self, description: Description, device_index: int | None) -> bytes:
        return f"{device_index}{json.dumps(description)}".encode()

    def _add_tactic(self, function: Callable[..., Any], /) -> None:
        if len(self._functions) == MAX_TACTICS:
            raise ValueError(f"at most {MAX_TACTICS} tactics")
        self._functions.append(function)

    def _set_choice(self, words: bytes, tactic: int, ask: bool = False, /) -> None:
        self._choices[words] = tactic
        (self._to_ask.add if ask else self._to_ask.discard)(words)

    def _choice_count(self) -> int:
        return len(self._choices)

    def _clear_choices(self) -> None:
        self._choices.clear()
        self._remembered.clear()
        self._loaded.clear()
        self.hits = self.misses = 0

    def _mark_loaded(self, device: torch.device, /) -> None:
        self._loaded.add(device.type)

    def _describe(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Description, torch.device] | None:
        raise NotImplementedError

    def _asked(self, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], /) -> int:
        raise NotImplementedError

    def _missed(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], /) -> int:
        raise NotImplementedError

    def _tune(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], /) -> Any:
        raise NotImplementedError
