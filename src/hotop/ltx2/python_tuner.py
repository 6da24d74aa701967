"""A tuner whose look-up is Python, of the kind that serving frameworks run in front of their ops.

It does what such a tuner does for a hit: make the runners of the allowed backends, take the shapes
of the inputs, round the dynamic dimensions to their buckets, leave out those that follow from
others, and look a tuple up in a dict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class DynamicDimension:
    """A dimension whose sizes share choices.

    Attributes:
        input: Number of the input.
        dimension: Number of its dimension.
        bucket: From a size to the one that stands for it.
    """

    input: int
    dimension: int
    bucket: Callable[[int], int]


@dataclass(frozen=True)
class TuningSpace:
    """What of an op's shapes belongs to the key.

    Attributes:
        dynamic: The dimensions with buckets.
        derived: Input and dimension of the sizes that follow from others.
    """

    dynamic: tuple[DynamicDimension, ...]
    derived: tuple[tuple[int, int], ...] = ()


class Runner:
    """One backend of an op and its tactics."""

    def __init__(self, backend: str, tactics: Sequence[Callable[..., Any]]) -> None:
        """Take a backend's kernels; the first is the one for shapes that were not tuned."""
        self.backend = backend
        self.tactics = tactics

    def __hash__(self) -> int:
        return hash((type(self).__name__, self.backend))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Runner) and self.backend == other.backend


class PythonTuner:
    """Choices by op, backend and bucketed shapes.

    Attributes:
        hits: Look-ups that found a choice.
        misses: Look-ups that did not.
    """

    def __init__(self) -> None:
        """Begin without choices."""
        self._choices: dict[tuple[Any, ...], int] = {}
        self.hits = 0
        self.misses = 0

    def choose(
        self, op_name: str, runners: Sequence[Runner], space: TuningSpace, inputs: Sequence[Tensor]
    ) -> tuple[Runner, int]:
        """Return the runner and the number of its tactic for a call."""
        profile = _profile(inputs, space)
        for runner in runners:
            tactic = self._choices.get((op_name, runner, profile))
            if tactic is not None:
                self.hits += 1
                return runner, tactic
        self.misses += 1
        return runners[0], 0

    def learn(
        self,
        op_name: str,
        runner: Runner,
        space: TuningSpace,
        inputs: Sequence[Tensor],
        tactic: int,
    ) -> None:
        """Choose a tactic for the shapes of these inputs."""
        self._choices[op_name, runner, _profile(inputs, space)] = tactic


def _profile(inputs: Sequence[Tensor], space: TuningSpace) -> tuple[tuple[int, ...], ...]:
    shapes = [list(tensor.shape) for tensor in inputs]
    for dynamic in space.dynamic:
        shape = shapes[dynamic.input]
        if -dynamic.dimension <= len(shape):
            shape[dynamic.dimension] = dynamic.bucket(shape[dynamic.dimension])
    for number, dimension in space.derived:
        shapes[number][dimension] = -1
    return tuple(tuple(shape) for shape in shapes)
