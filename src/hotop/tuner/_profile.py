"""Measure the tactics of one call: check each against the default, then time them in turn."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hotop.tuner import _key, _process
from hotop.tuner._call import Refused, synchronize
from hotop.tuner._say import words_of
from hotop.tuner._stand_in import representative
from hotop.tuner._trial import Trial

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
    """The outcome for one key: median microseconds by tactic, and why others were rejected.

    Attributes:
        winner: None: no tactic is proven to be the op.
        unproven: Why nothing is proven, in words.
    """

    winner: str | None = None
    medians: dict[str, float] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    unproven: str | None = None


def measure(
    tunable: Tunable,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    effort: Effort,
    on_tactic: Callable[[str], None],
) -> Measured:
    """Return which tactic is fastest on the sizes that stand for the call's bucket.

    The caller's data, the settings of the process and the random generators stay as they are.

    Raises:
        NotKeyable: An argument cannot be copied.
        Refused: The default or the reference changes what it must not.
        Exception: What the reference or a bucket rule raises.
    """
    devices = _accelerators(args, kwargs)
    with _process.kept(devices) as before:
        return _measure(tunable, args, kwargs, effort, on_tactic, (devices, before))


def _measure(
    tunable: Tunable,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    effort: Effort,
    on_tactic: Callable[[str], None],
    process: tuple[Sequence[int], tuple[_process.Settings, _process.RandomState]],
) -> Measured:
    outcome = Measured()
    calls = _calls(tunable, args, kwargs)
    names = _candidates(tunable, calls, outcome)
    for call in calls:
        if call.is_asked_only:
            continue
        is_last = call is calls[-1]
        try:
            trial = Trial(tunable, call.args, call.kwargs, *process, is_thorough=is_last)
        except (Exception, Refused):
            if not call.is_made_up:
                raise
            continue
        serving = trial.candidates()
        for name in list(names):
            on_tactic(name)
            problem = trial.problem(name)
            if name not in serving:
                problem = "applies depends on what the key does not hold"
            if problem is not None:
                outcome.rejected[name] = problem
                names.remove(name)
    default = next(iter(tunable.tactics))
    if trial.unproven is not None:
        known = [name for name in names if trial.is_the_default(name)]
        if known in ([], [default]):
            outcome.unproven = trial.unproven
            return outcome
        outcome.rejected |= {name: trial.unproven for name in names if name not in known}
        names = known
    _time(trial, names, effort, outcome)
    if outcome.medians:
        best = min(outcome.medians, key=outcome.medians.__getitem__)
        usual = outcome.medians.get(default, math.inf)
        outcome.winner = best if outcome.medians[best] < _MARGIN * usual else default
    return outcome


@dataclass(frozen=True)
class _Call:
    """Arguments on which tactics are checked.

    Attributes:
        is_made_up: Of sizes that need not make sense to the op.
        is_asked_only: Only for ``applies`` to see.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_made_up: bool = False
    is_asked_only: bool = False


def _calls(tunable: Tunable, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[_Call]:
    """Return the call, and with the bucket's smallest sizes and, last, its own: the timed one."""
    parameters = tunable._parameters
    values = _key.bind(parameters, args, kwargs)
    given = _Call(args, kwargs)
    if not tunable._has_buckets:
        return [given]
    calls = [given]
    for smallest in (True, False):
        resized = representative(parameters, values, smallest=smallest)
        if all(new is old for new, old in zip(resized, values, strict=True)):
            call = given
        else:
            by_name = {p.name: v for p, v in zip(parameters, resized, strict=True)}
            call = _Call(
                tuple(resized[: len(args)]),
                {name: by_name[name] for name in kwargs},
                is_made_up=smallest,
                is_asked_only=smallest and not all(map(_is_no_index, values)),
            )
        calls = [*(one for one in calls if one is not call), call]
    return calls


def _is_no_index(value: Any) -> bool:
    """Return whether a value cannot lead beyond the end of Tensors that were made smaller."""
    if type(value) in (list, tuple):
        return all(map(_is_no_index, value))
    if _key.is_tensor(value):
        return value.dtype is torch.bool or value.is_floating_point() or value.is_complex()
    return value is None or type(value) in (bool, float, str, torch.dtype, torch.device)


def _candidates(tunable: Tunable, calls: Sequence[_Call], outcome: Measured) -> list[str]:
    """Return the tactics that serve all of the calls, and reject those that serve some."""
    serving = [set(tunable.candidates(call.args, call.kwargs).values()) for call in calls]
    for name in set().union(*serving) - serving[0].intersection(*serving):
        # Its test looks at what the key does not hold, so no choice may name it.
        outcome.rejected[name] = "applies to some sizes of the bucket only"
    return [name for name in tunable.tactics if all(name in names for names in serving)]


def _time(trial: Trial, names: Sequence[str], effort: Effort, outcome: Measured) -> None:
    """Time tactics in turn; one that fails is out, and the others go on."""
    batches: dict[str, Callable[[], float]] = {}
    samples: dict[str, list[float]] = {name: [] for name in names}

    def attempt(name: str, step: Callable[[], Any]) -> Any:
        if name in outcome.rejected:
            return None
        try:
            return trial.watched(step)
        except KeyboardInterrupt:
            raise
        except Refused as refusal:
            outcome.rejected[name] = str(refusal)
        except BaseException as error:
            outcome.rejected[name] = f"raises {words_of(error)}"
        return None

    for name in names:
        batches[name] = attempt(name, functools.partial(_batch, trial, name, effort))
    for _ in range(effort.rounds):
        for name in names:
            sample = attempt(name, batches[name])
            if sample is not None:
                samples[name].append(sample)
    for name in names:
        if name not in outcome.rejected:
            problem = trial.problem_after_all(name)
            if problem is not None:
                outcome.rejected[name] = problem
    outcome.medians = {
        name: statistics.median(times)
        for name, times in samples.items()
        if times and name not in outcome.rejected
    }


def _batch(trial: Trial, name: str, effort: Effort) -> Callable[[], float]:
    """Return a function that runs one batch and returns microseconds a call."""
    function = trial.function(name)
    workspace = trial.workspace
    devices = trial.devices

    def on_new_arguments(calls: int) -> float:
        spent = 0
        for _ in range(calls):
            call = workspace.fresh()
            synchronize(devices)
            start = time.perf_counter_ns()
            function(*call.args, **call.kwargs)
            synchronize(devices)
            spent += time.perf_counter_ns() - start
        return spent / 1e3 / calls

    def on_the_same(calls: int) -> float:
        call = workspace.fresh()
        positional, keywords = call.args, call.kwargs
        synchronize(devices)
        start = time.perf_counter_ns()
        for _ in range(calls):
            function(*positional, **keywords)
        synchronize(devices)
        return (time.perf_counter_ns() - start) / 1e3 / calls

    batch = on_new_arguments if workspace.is_consumed else on_the_same
    once = min(batch(1) for _ in range(max(1, effort.warmup)))
    calls = max(1, min(1000, round(effort.batch_us / max(once, 1e-3))))
    return lambda: batch(calls)


def _accelerators(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[int]:
    """Return the CUDA devices of the call's Tensors."""
    found = set()
    for value in (*args, *kwargs.values()):
        for one in value if type(value) in (list, tuple) else (value,):
            if _key.is_tensor(one) and one.is_cuda:
                found.add(one.get_device())
    return sorted(found)
