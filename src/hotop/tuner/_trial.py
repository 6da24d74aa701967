"""The checks that a tactic must pass on one call's data before it may win."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hotop.tuner import _call, _evidence, _judge, _process
from hotop.tuner._call import Refused, Seen
from hotop.tuner._say import words_of
from hotop.tuner._workspace import Workspace

if TYPE_CHECKING:
    from hotop.tuner._tunable import Tunable


# Memory that comes back is met after so many calls whose results are held.
_MORE_CALLS = 3


class Trial:
    """What the default and the reference do with one call, to compare tactics with.

    Attributes:
        workspace: The copies that all of them work on.
        devices: The CUDA devices of the call.
        unproven: Why a tactic that agrees proves nothing, in words, as far as was looked.

    Args:
        is_thorough: Repeat the comparison on drawn data, and look at results of several calls.

    Raises:
        Refused: The default or the reference changes what it must not.
        Exception: What one of them raises for the call's data.
    """

    def __init__(
        self,
        tunable: Tunable,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        devices: Sequence[int],
        before: tuple[_process.Settings, _process.RandomState],
        *,
        is_thorough: bool,
    ) -> None:
        self._tunable = tunable
        self._before = before
        self.devices = devices
        self.workspace = Workspace(tunable._parameters, args, kwargs)
        default = next(iter(tunable.tactics))
        self._default = tunable.tactics[default].function
        self._default_serves = default in tunable.candidates(args, kwargs).values()
        self._reference = tunable.check.reference or self._default
        self._usual, self._expected = self._references()
        self._drawn: list[torch.Tensor] | None = None
        self._refusal = ""
        self._others: Seen | None = None
        self._is_thorough = is_thorough
        self.unproven: str | None = None
        # Without the memory that arguments share here: other calls of the key may not share it.
        self._apart = self.workspace
        if is_thorough:
            self._apart = self.workspace.apart() or self.workspace
            self._draw()
            self.unproven = self._unproven()

    def _references(self) -> tuple[Seen, Seen]:
        """Return what the default does, for the form, and the reference, for the values."""
        expected = self._run(self._reference)
        usual = expected
        if self._reference is not self._default and self._default_serves:
            usual = self._run(self._default)
        for seen, which in ((usual, "default"), (expected, "reference")):
            if seen.left:
                raise Refused(f"the {which} {seen.left[0]}")
        return usual, expected

    def _draw(self) -> None:
        with _process.without_autocast():
            sources = _evidence.draw(self._apart)
            self._constant = _evidence.constant_arguments(self.workspace)
        if sources is None:
            return
        self._drawn = sources
        try:
            with self._other_data():
                self._others = self._run(self._reference, self._apart)
        except (Exception, Refused) as error:
            self._drawn = None
            self._refusal = f", and the op refuses others ({words_of(error)})"

    def _other_data(self) -> _evidence.Sources:
        assert self._drawn is not None
        return _evidence.Sources(self._apart.blocks, self._drawn)

    def _unproven(self) -> str | None:
        rounds = [self._expected] if self._others is None else [self._expected, self._others]
        if self._others is None and self._constant:
            names = ", ".join(self._constant)
            return f"the values of {names} are all alike, which proves nothing{self._refusal}"
        return _judge.unproven(
            rounds,
            all_alike=self._others is None and _evidence.is_all_alike(self.workspace),
            # mutates_args="unknown" promises nothing of a single one.
            all_change=not all(parameter.mutated for parameter in self._tunable._parameters),
        )

    def _run(self, function: Callable[..., Any], workspace: Workspace | None = None) -> Seen:
        return _call.run(workspace or self.workspace, function, self._before, self.devices)

    def function(self, name: str) -> Callable[..., Any]:
        """Return a tactic's function."""
        return self._tunable.tactics[name].function

    def candidates(self) -> set[str]:
        """Return the tactics that say that they serve the copies, as they do for the call."""
        call = self.workspace.fresh()
        return set(self._tunable.candidates(call.args, call.kwargs).values())

    def is_the_default(self, name: str) -> bool:
        """Return whether a tactic is the default's own function, which needs no proof."""
        return self.function(name) is self._default

    def problem(self, name: str) -> str | None:
        """Return why a tactic may not win, None when it may."""
        return self._caught(lambda: self._check(self.function(name)))

    def problem_after_all(self, name: str) -> str | None:
        """Return why a tactic that was timed may not win: a last look at one more call."""
        return self._caught(lambda: self._compare(self._run(self.function(name)), self._expected))

    def _caught(self, check: Callable[[], object]) -> str | None:
        try:
            check()
        except KeyboardInterrupt:
            raise
        except Refused as refusal:
            return str(refusal)
        except BaseException as error:  # whatever a tactic raises, SystemExit too
            return f"raises {words_of(error)}"
        return None

    def _check(self, function: Callable[..., Any]) -> None:
        first = self._run(function)
        self._compare(first, self._expected)
        if not self._is_thorough:
            return
        kept = [first]
        if self._others is not None:
            with self._other_data():
                second = self._run(function, self._apart)
                _judge.check_values(second, self._others, self._tunable.check)
                if second.left:
                    raise Refused(second.left[0])
            _judge.check_kept(kept, second)
            kept.append(second)
        for _ in range(_MORE_CALLS):
            again = self._run(function)
            self._compare(again, self._expected)
            _judge.check_kept(kept, again)
            kept.append(again)
        # A result of its own does not change by later calls.
        _judge.check_values(first, self._expected, self._tunable.check)

    def _compare(self, found: Seen, expected: Seen) -> None:
        _judge.check_effects(found, self._usual, [p.name for p in self.workspace.places])
        _judge.check_values(found, expected, self._tunable.check)

    def watched(self, step: Callable[[], Any]) -> Any:
        """Run a step of the timing, and put right what it leaves behind.

        Raises:
            Refused: It changes settings, or data that it must not.
            BaseException: What the step raises.
        """
        settings, _ = self._before
        try:
            found = step()
        finally:
            changed = _process.put_back(settings)
        for name, value in changed.items():
            raise Refused(f"leaves {name} at {value}")
        for block in self.workspace.blocks:
            if not block.mutated and not block.is_intact():
                raise Refused(
                    "changes an argument that mutates_args does not name, in a later call"
                )
        return found
