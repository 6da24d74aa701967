"""The picture of a run: the step of every variant, split into op tax and the rest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hotop.ltx2.measure import Phase
from hotop.ltx2.session import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_REST, _TAX = "#4a6fa5", "#d62828"
_DPI = 150
_INCHES_PER_ROW = 1.75


def plot_steps(result: Result, machine: Mapping[str, object], path: Path) -> None:
    """Draw a panel for each setting, eager ones on the left and compiled ones on the right.

    Raises:
        ValueError: Nothing was measured.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sides = [
        [phase for phase in result.phases if phase.setting.compiled is compiled]
        for compiled in (False, True)
    ]
    sides = [side for side in sides if side]
    if not sides:
        raise ValueError("plot_steps() needs at least one measured setting")
    rows = max(map(len, sides))
    figure = Figure(figsize=(6.0 * len(sides), 1.1 + _INCHES_PER_ROW * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for column, side in enumerate(sides):
        longest = max(phase.median_ms(name) for phase in side for name in phase.names)
        for row, phase in enumerate(side):
            axes = figure.add_subplot(rows, len(sides), row * len(sides) + column + 1)
            _draw(axes, phase)
            axes.set_xlim(0, longest * 1.22)
            if row == len(side) - 1:
                axes.set_xlabel("ms a denoising step (median thread CPU time)", fontsize=8)
            if row == column == 0:
                axes.legend(fontsize=7, loc="lower right")
    figure.suptitle(
        f"LTX-2's transformer, {result.options.blocks} blocks, {sum(result.calls.values())} op "
        f"calls a step, {result.options.width.name} width; PyTorch {machine['torch']}, "
        f"{machine['cpu']}",
        fontsize=9,
    )
    figure.savefig(path, dpi=_DPI)


def _draw(axes: Axes, phase: Phase) -> None:
    steps = [phase.median_ms(name) for name in phase.names]
    taxes = [
        0.0 if name == phase.base else max(0.0, phase.paired_ms(name, phase.base))
        for name in phase.names
    ]
    rest = [step - tax for step, tax in zip(steps, taxes, strict=True)]
    places = range(len(steps))
    axes.barh(places, rest, color=_REST, label="the rest of the step", zorder=2)
    axes.barh(places, taxes, left=rest, color=_TAX, label="op tax", zorder=2)
    for place, step, tax in zip(places, steps, taxes, strict=True):
        axes.annotate(
            f"{step:.0f}" + (f"  ({tax / step:.0%} tax)" if tax else ""),
            (step, place),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=6.5,
        )
    axes.set_yticks(places, phase.names, fontsize=7)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=7)
    axes.grid(axis="x", color="#dddddd", zorder=0)
    axes.set_title(phase.setting.title, fontsize=8, weight="bold", loc="left")
