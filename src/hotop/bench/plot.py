"""The pictures: bars of the tax by contender, and the tax over the real population."""

from pathlib import Path
from typing import TYPE_CHECKING

from hotop.bench.contenders import CUSTOM_OP, DEFINE_IMPL, HOTOP, HOTOP_PACKET, LABELS
from hotop.bench.population_bench import CONTENDERS, PopulationResult
from hotop.bench.suite import SuiteResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_population", "plot_suite"]

_COLORS = {
    CUSTOM_OP: "#8d99ae",
    DEFINE_IMPL: "#4a6fa5",
    HOTOP_PACKET: "#f4a261",
    HOTOP: "#d62828",
}
_BAR_HEIGHT = 0.8 / len(_COLORS)
_INCHES_PER_CASE = 0.52
_SHORTEST_BAR_US = 0.01
_DPI = 150


def plot_suite(result: SuiteResult, machine: dict[str, object], path: Path) -> None:
    """Draws one group of bars per case, the tax on a logarithmic axis.

    Raises:
        ValueError: No case was measured.
    """
    rows = [(case.title, case.taxes_us()) for case in result.cases]
    rows += [(row.title, row.taxes_us()) for row in result.compiled]
    if not rows:
        raise ValueError("--plot needs at least one measured case")
    figure, axes = _figure(9.5, 1.7 + _INCHES_PER_CASE * len(rows))
    for place, contender in enumerate(_COLORS):
        present = [
            (index, taxes[contender]) for index, (_, taxes) in enumerate(rows) if contender in taxes
        ]
        heights = [index + (place - (len(_COLORS) - 1) / 2) * _BAR_HEIGHT for index, _ in present]
        axes.barh(
            heights,
            [max(tax, _SHORTEST_BAR_US) for _, tax in present],
            height=_BAR_HEIGHT * 0.92,
            color=_COLORS[contender],
            label=LABELS[contender],
            zorder=2,
        )
        for height, (_, tax) in zip(heights, present, strict=True):
            axes.annotate(
                f"{tax:.2f}" if tax < 9.95 else f"{tax:.1f}",
                (max(tax, _SHORTEST_BAR_US), height),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=6.5,
                color="#333333",
            )
    axes.set_yticks(range(len(rows)), [title for title, _ in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    _finish(figure, axes, machine, "tax per call in us: call minus the plain function's call", path)


def plot_population(result: PopulationResult, machine: dict[str, object], path: Path) -> None:
    """Draws each contender's taxes over the population, sorted, on a logarithmic axis.

    Raises:
        ValueError: No op was measured.
    """
    if not result.ops:
        raise ValueError("--plot needs at least one measured op")
    figure, axes = _figure(9.5, 5.0)
    count = len(result.ops)
    shares = [100 * (index + 0.5) / count for index in range(count)]
    for contender in CONTENDERS:
        taxes = [max(tax, _SHORTEST_BAR_US) for tax in sorted(result.taxes(contender))]
        median = result.distribution(contender)["median"]
        label = f"{LABELS[contender]}: median {median:.2f} us"
        axes.plot(taxes, shares, color=_COLORS[contender], label=label, linewidth=2, zorder=2)
    axes.set_ylim(0, 100)
    axes.set_ylabel(f"share of {count:,} real ops, %", fontsize=9)
    axes.grid(axis="y", color="#e6e6e6", zorder=0)
    _finish(figure, axes, machine, "tax per call in us, at most", path)


def _figure(width: float, height: float) -> "tuple[Figure, Axes]":
    # Matplotlib is only needed for pictures, and only its file backend.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _finish(
    figure: "Figure", axes: "Axes", machine: dict[str, object], label: str, path: Path
) -> None:
    from matplotlib.ticker import FuncFormatter
    from matplotlib.transforms import ScaledTranslation

    axes.set_xscale("log")
    axes.margins(x=0.06)
    axes.set_xlim(left=_SHORTEST_BAR_US)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel(label, fontsize=9)
    axes.grid(axis="x", which="major", color="#d9d9d9", zorder=0)
    axes.grid(axis="x", which="minor", color="#f0f0f0", zorder=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_title(
        f"What a custom op adds to a Python call, PyTorch {machine['torch']}\n",
        loc="left",
        fontsize=13,
        fontweight="bold",
    )
    axes.text(
        0,
        1,
        f"{machine['cpu']}, {machine['python']}",
        transform=axes.transAxes + ScaledTranslation(0, 6 / 72, figure.dpi_scale_trans),
        fontsize=9,
        color="#666666",
    )
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        fontsize=8,
        frameon=False,
    )
    figure.savefig(path, dpi=_DPI)
