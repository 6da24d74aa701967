"""Measure the tactics of one call: check each against the reference, then time them in turn."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hotop.tuner import _key

if TYPE_CHECKING:
    from hotop.tuner._tunable import Tunable

# A winner must be this much faster than the default, else the default stays.
_MARGIN = 0.98


@dataclass(frozen=True)
class Effort:
    """How long a tactic is measured.

    Attributes:
        warmup: Calls before the first measured one.
        rounds: Measured batches of each tactic, taken in turn; the median counts.
        batch_us: A batch repeats the call until it lasts about this long.
    """

    warmup: int = 3
    rounds: int = 11
    batch_us: float = 200.0


@dataclass
class Measured:
    """The outcome for one key: median microseconds by tactic, and why others were rejected."""

    winner: str | None = None
    medians: dict[str, float] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)


def measure(
    tunable: Tunable,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    effort: Effort,
    on_tactic: Callable[[str], None],
) -> Measured:
    """Return which tactic is fastest on the sizes that stand for the call's bucket.

    The caller's Tensors and the state of the random generators stay as they are.

    Raises:
        ValueError: The reference changes what it must not.
        Exception: What the reference or a bucket rule raises.
    """
    with torch.random.fork_rng(_accelerators(args, kwargs)):
        return _measure(tunable, args, kwargs, effort, on_tactic)


def _measure(
    tunable: Tunable,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    effort: Effort,
    on_tactic: Callable[[str], None],
) -> Measured:
    outcome = Measured()
    positional, keywords = _stand_ins(tunable, args, kwargs)
    names = tunable.candidates(positional, keywords)
    here = tunable.candidates(args, kwargs)
    for number in names.keys() ^ here.keys():
        # Its test looks at what the key does not hold, so no choice may name it.
        name = names.pop(number, None) or here[number]
        outcome.rejected[name] = "applies to some sizes of the bucket only"
    default = next(iter(tunable.tactics))
    reference = tunable.check.reference or tunable.tactics[default].function
    kept = _backups(tunable, positional, keywords)
    expected = _run(tunable, reference, positional, keywords)
    if _restore(kept):
        raise ValueError("the reference changes an argument that mutates_args does not name")
    sound = []
    for name in names.values():
        on_tactic(name)
        problem = _difference(tunable, name, positional, keywords, expected)
        if _restore(kept):
            problem = "changes an argument that mutates_args does not name"
        if problem is None:
            sound.append(name)
        else:
            outcome.rejected[name] = problem
    calls = {
        name: _timer(tunable, tunable.tactics[name].function, positional, keywords, effort)
        for name in sound
    }
    samples: dict[str, list[float]] = {name: [] for name in sound}
    for _ in range(effort.rounds):
        for name, call in calls.items():
            samples[name].append(call())
    outcome.medians = {name: statistics.median(times) for name, times in samples.items()}
    if outcome.medians:
        best = min(outcome.medians, key=outcome.medians.__getitem__)
        usual = outcome.medians.get(default, math.inf)
        outcome.winner = best if outcome.medians[best] < _MARGIN * usual else default
    return outcome


def _stand_ins(
    tunable: Tunable, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the call's arguments with the bucket's sizes."""
    values = _key.bind(tunable._parameters, args, kwargs)
    resized = _key.representative(tunable._parameters, values)
    by_name = {p.name: v for p, v in zip(tunable._parameters, resized, strict=True)}
    return tuple(resized[: len(args)]), {name: by_name[name] for name in kwargs}


def _copies(
    tunable: Tunable, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any], list[Any]]:
    """Return the arguments with copies of those that the function changes, and the copies."""
    names = [parameter.name for parameter in tunable._parameters]
    changed = []

    def copied(name: str, value: Any) -> Any:
        if name in tunable.mutates_args and _key.is_tensor(value):
            value = value.clone()
            changed.append(value)
        return value

    positional = [copied(name, value) for name, value in zip(names, args, strict=False)]
    keywords = {name: copied(name, value) for name, value in kwargs.items()}
    return positional, keywords, changed


def _backups(
    tunable: Tunable, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the Tensors that no tactic may change, which may be the caller's, and copies."""
    names = [parameter.name for parameter in tunable._parameters]
    kept = []
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        if name not in tunable.mutates_args:
            for one in value if type(value) in (list, tuple) else (value,):
                if _key.is_tensor(one) and one.layout is torch.strided:
                    kept.append((one, one.detach().clone()))
    return kept


def _restore(kept: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Undo what was changed, and return whether anything was."""
    changed = False
    for tensor, copy in kept:
        now, before = (
            t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (tensor, copy)
        )
        if tensor.device.type != "meta" and not torch.equal(now, before):
            tensor.detach().copy_(copy)
            changed = True
    return changed


def _run(
    tunable: Tunable, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return the result and what was changed."""
    positional, keywords, changed = _copies(tunable, args, kwargs)
    return function(*positional, **keywords), changed


def _difference(
    tunable: Tunable, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], expected: Any
) -> str | None:
    """Return why a tactic may not win, None when it may."""
    try:
        found = _run(tunable, tunable.tactics[name].function, args, kwargs)
        torch.testing.assert_close(
            _as_sequences(found),
            _as_sequences(expected),
            rtol=tunable.check.rtol,
            atol=tunable.check.atol,
            equal_nan=True,
            check_stride=False,
        )
    except AssertionError as error:
        return f"differs from the reference: {' '.join(str(error).split())}"
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"
    return None


def _as_sequences(value: Any) -> Any:
    # assert_close compares what it knows; None, str and the like are not among it.
    if isinstance(value, list | tuple):
        return [_as_sequences(element) for element in value]
    if isinstance(value, torch.Tensor | int | float | complex):
        return value
    return [hash(value)]


def _timer(
    tunable: Tunable,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    effort: Effort,
) -> Callable[[], float]:
    """Return a function that runs one batch and returns microseconds a call."""
    positional, keywords, _ = _copies(tunable, args, kwargs)
    wait = _synchronize(args, kwargs)

    def batch(calls: int) -> float:
        wait()
        start = time.perf_counter_ns()
        for _ in range(calls):
            function(*positional, **keywords)
        wait()
        return (time.perf_counter_ns() - start) / 1e3 / calls

    once = min(batch(1) for _ in range(max(1, effort.warmup)))
    calls = max(1, min(1000, round(effort.batch_us / max(once, 1e-3))))
    return lambda: batch(calls)


def _accelerators(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int]:
    """Return the CUDA devices of the call's Tensors."""
    values = (*args, *kwargs.values())
    return sorted({v.get_device() for v in values if _key.is_tensor(v) and v.is_cuda})


def _synchronize(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], None]:
    for value in (*args, *kwargs.values()):
        if _key.is_tensor(value) and value.is_cuda:
            return lambda: torch.cuda.synchronize(value.device)
    return lambda: None
