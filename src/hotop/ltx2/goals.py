"""What the end-to-end run sets out to show, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from hotop.ltx2.kernels import TRIVIAL
from hotop.ltx2.measure import Phase
from hotop.ltx2.tuned import HOTOP_PYTHON_TUNER, HOTOP_TUNER
from hotop.ltx2.variants import CPP_OP, CUSTOM_OP, DEFINE_IMPL, HOTOP, PLAIN

_EAGER_PERCENT = 1.0
_OVER_CUSTOM_OP = {"no_grad": 2.8, "inference_mode": 1.6}
_OVER_DEFINE_IMPL = 1.3
_OVER_CPP_OP = 1.0
_TUNER_PERCENT = 90.0


@dataclass(frozen=True)
class Goal:
    """A number that was measured in two ways, and its limit.

    Attributes:
        title: What it is.
        measured: From the medians of paired steps; this one decides.
        by_minima: From the shortest steps, which other work on the machine disturbs least.
        relation: ``"at most"`` or ``"at least"``.
        limit: The goal.
        unit: ``"x"`` or ``"%"``.
        noise: What the program that all are compared with differs from itself by, in this unit.
    """

    title: str
    measured: float
    by_minima: float
    relation: str
    limit: float
    unit: str
    noise: float

    @property
    def met(self) -> bool:
        """Whether the measured number keeps the limit."""
        if self.relation == "at most":
            return self.measured <= self.limit
        return self.measured >= self.limit

    def verdict(self, *, is_short: bool) -> str:
        """Say in words whether the goal is met; a short run may not be able to tell."""
        if is_short and self._is_within_noise():
            return "too short to tell"
        return "met" if self.met else "NOT MET"

    def _is_within_noise(self) -> bool:
        too_fine = self.relation == "at most" and self.noise > self.limit
        return too_fine or abs(self.measured - self.limit) < self.noise

    def as_json(self) -> dict[str, object]:
        """Return plain data, the verdict included."""
        return asdict(self) | {"met": self.met}


def goals(phases: Iterable[Phase]) -> list[Goal]:
    """List the goals for which there are numbers, in thread CPU time.

    The ratios to `custom_op` and to define + impl are goals for the trivial kernel, whose step is
    all host time; a real kernel's own time comes on top of both sides.
    """
    found = []
    for phase in phases:
        if phase.setting.tuner:
            found.append(_tuner_goal(phase))
        elif phase.setting.compiled:
            found += _compiled_goals(phase)
        else:
            found.append(
                Goal(
                    f"{phase.setting.title}: hotop over plain functions",
                    (phase.ratio(HOTOP, PLAIN) - 1) * 100,
                    (phase.minimum_ms(HOTOP) / phase.minimum_ms(PLAIN) - 1) * 100,
                    "at most",
                    _EAGER_PERCENT,
                    "%",
                    phase.noise() * 100,
                )
            )
    return found


def _compiled_goals(phase: Phase) -> list[Goal]:
    setting = phase.setting
    limits = [(CPP_OP, _OVER_CPP_OP)]
    if setting.kernel == TRIVIAL:
        limits = [
            (CUSTOM_OP, _OVER_CUSTOM_OP[setting.grad_mode]),
            (DEFINE_IMPL, _OVER_DEFINE_IMPL),
            *limits,
        ]
    return [
        Goal(
            f"{setting.title}: {name} / hotop",
            phase.ratio(name, HOTOP),
            phase.minimum_ms(name) / phase.minimum_ms(HOTOP),
            "at least",
            limit,
            "x",
            phase.noise() * limit,
        )
        for name, limit in limits
    ]


def _tuner_goal(phase: Phase) -> Goal:
    """How much of what a Python tuner's hits cost in the model is gone."""
    python, own = phase.paired_ms(HOTOP_PYTHON_TUNER, HOTOP), phase.paired_ms(HOTOP_TUNER, HOTOP)
    bare = phase.minimum_ms(HOTOP)
    minima = [phase.minimum_ms(name) - bare for name in (HOTOP_PYTHON_TUNER, HOTOP_TUNER)]
    return Goal(
        f"{phase.setting.title}: of the Python tuner's cost gone",
        100 * (1 - own / python),
        100 * (1 - minima[1] / minima[0]),
        "at least",
        _TUNER_PERCENT,
        "%",
        100 * phase.noise() * phase.median_ms(phase.base) / abs(python),
    )
