"""The tables that ``bench --existing`` prints."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from hotop.bench.contenders import PLAIN
from hotop.bench.existing import ExistingResult
from hotop.bench.existing_aten import FUNCTION, MODES, AtenRow
from hotop.bench.existing_import import INSTALLED, PLAIN_IMPORT, ImportRow
from hotop.bench.existing_models import MODULE, ModelRow
from hotop.bench.existing_ops import ACCELERATED, TODAY, OpRow
from hotop.bench.report import make_table, print_table
from hotop.bench.timing import Timing

__all__ = ["print_existing"]

_CONTENDERS = (FUNCTION, TODAY, ACCELERATED)
_SMALLEST_TAX_US = 0.005


def print_existing(console: Console, result: ExistingResult) -> None:
    """Prints the registered ops, PyTorch's operators, the models and the imports."""
    _print_ops(console, result.ops)
    for mode in MODES:
        _print_aten(console, result, mode)
    _print_models(console, result)
    _print_imports(console, result.imports)
    console.print(
        "Left out: other machines and devices (CPU kernels only, one thread), calls that autograd "
        "records (bench --states),\nmodels whose kernels and not the host are the limit, compiled "
        "programs (bench), dynamic shapes, and Tensors larger\nthan 4 x 4 in the ATen table: the "
        "time saved per call stays the same there, the ratio falls.",
        style="dim",
        highlight=False,
    )


def _us(timing: Timing) -> str:
    return f"{timing.minimum_ns / 1e3:.2f}"


def _ms(timing: Timing) -> str:
    return f"{timing.minimum_ns / 1e6:.2f}"


def _print_ops(console: Console, rows: Sequence[OpRow]) -> None:
    table = make_table()
    for header in ("registered by", "inputs", "called by"):
        table.add_column(header, no_wrap=True)
    for header, style in (
        ("plain\ncall", "dim"),
        ("tax\ntoday", ""),
        ("tax\naccelerated", "bold"),
        ("today /\naccelerated", "cyan"),
    ):
        table.add_column(header, justify="right", style=style, no_wrap=True)
    table.add_column("road", no_wrap=True)
    for row in rows:
        for way in row.ways:
            today, fast = row.tax_us(way, TODAY), row.tax_us(way, ACCELERATED)
            table.add_row(
                row.registration,
                row.inputs,
                way,
                f"{row.timings[PLAIN].minimum_ns / 1e3:.3f}",
                f"{today:.2f}",
                f"{fast:.3f}",
                f"{today / fast:.1f}x" if fast >= _SMALLEST_TAX_US else "-",
                row.roads.get(way, ""),
            )
        table.add_section()
    print_table(console, "Tax per call of an op that exists, in us", table)
    console.print(
        "Tax: call minus the plain function's call, no-op kernel, minima of interleaved rounds; "
        "the same op made twice, one\nof them accelerated. torch.ops.ns.op: with both look-ups, "
        "which hotop has made cheaper for either.\n"
        "14 inputs: 8 Tensors, None for 2 Tensors, 2 ints, 2 floats.",
        style="dim",
        highlight=False,
    )


def _print_aten(console: Console, result: ExistingResult, mode: str) -> None:
    rows = [row for row in result.aten if row.mode == mode]
    table = make_table()
    table.add_column("operator", no_wrap=True)
    for header, style in (
        ("torch\nfunction", ""),
        ("overload\ntoday", ""),
        ("overload\naccelerated", "bold"),
        ("accelerated\n/ function", "cyan"),
        ("today /\naccelerated", "cyan"),
    ):
        table.add_column(header, justify="right", style=style, no_wrap=True)
    table.add_column("road", no_wrap=True)
    for row in rows:
        table.add_row(*_aten_cells(row))
    table.add_section()
    table.add_row(
        f"geometric mean of {len(rows)}",
        *[""] * len(_CONTENDERS),
        f"{result.aten_ratio(mode, ACCELERATED, FUNCTION):.2f}x",
        f"{result.aten_ratio(mode, TODAY, ACCELERATED):.2f}x",
        "",
    )
    print_table(console, f"PyTorch's operators, {mode}: us per call, kernel included", table)
    console.print(
        "Minima of interleaved rounds, 4 x 4 float32. Function: the same operator's C++ function "
        "or method, no Python wrapper\naround it; slice and index: x[...].",
        style="dim",
        highlight=False,
    )


def _aten_cells(row: AtenRow) -> list[str]:
    return [
        escape(row.name),
        *(_us(row.timings[name]) for name in _CONTENDERS),
        f"{row.ratio(ACCELERATED, FUNCTION):.2f}x",
        f"{row.ratio(TODAY, ACCELERATED):.2f}x",
        escape(row.road if row.road == "boxed" else f"{row.road}: {row.reason}"),
    ]


def _print_models(console: Console, result: ExistingResult) -> None:
    if result.missing:
        console.print(
            f"\nNo exported models: {' and '.join(result.missing)} not installed; install "
            r"'hotop\[models]'",
            style="yellow",
        )
        return
    table = make_table()
    table.add_column("model, mode", no_wrap=True)
    for header, style in (
        ("operator\ncalls", ""),
        ("module\nstep", "dim"),
        ("exported\nstep today", ""),
        ("exported,\naccelerated", "bold"),
        ("today /\naccelerated", "cyan"),
        ("medians'\nratio", "cyan"),
        ("its calls\nalone, today", "dim"),
        ("alone,\naccelerated", "dim"),
    ):
        table.add_column(header, justify="right", style=style, no_wrap=True)
    table.add_column("same\nbits", no_wrap=True)
    for row in result.models:
        table.add_row(*_model_cells(row))
    print_table(console, "Exported models in eager, ms per step, batch 1, random weights", table)
    for row in result.models:
        roads = ", ".join(f"{count:,} {road}" for road, count in row.roads.items() if count)
        console.print(
            f"{row.name}, {row.mode}: roads of a step's calls: {roads or 'none counted'}",
            style="dim",
            highlight=False,
        )
    console.print(
        "Thread CPU time, minima of interleaved rounds; exported, saved, loaded. A step is more "
        "than its operator calls:\nlooking up weights in nested modules, flattening inputs, which "
        "nothing here makes faster.",
        style="dim",
        highlight=False,
    )


def _model_cells(row: ModelRow) -> list[str]:
    return [
        f"{row.name}, {row.mode}",
        f"{row.calls:,}",
        *(_ms(row.step[name]) for name in (MODULE, TODAY, ACCELERATED)),
        f"{row.speedup():.2f}x",
        f"{row.speedup(median=True):.2f}x",
        *(_ms(row.operators[name]) for name in (TODAY, ACCELERATED)),
        "yes" if row.equal else "NO",
    ]


def _print_imports(console: Console, rows: Sequence[ImportRow]) -> None:
    table = make_table()
    table.add_column("package")
    for header, style in (
        ("plain", ""),
        ("after\ninstall()", "bold"),
        ("after /\nplain", "cyan"),
        ("medians:\nplain", "dim"),
        ("after\ninstall()", "dim"),
        ("install()\nitself", ""),
    ):
        table.add_column(header, justify="right", style=style, no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.ops} ops, {row.registration}",
            *(f"{row.minimum_ms(name):.1f}" for name in (PLAIN_IMPORT, INSTALLED)),
            f"{row.ratio():.2f}x",
            *(f"{row.median_ms(name):.1f}" for name in (PLAIN_IMPORT, INSTALLED)),
            f"{min(row.install_ms):.2f}",
        )
    print_table(
        console, "Import of a package in fresh processes, ms of CPU time, without torch's", table
    )
    console.print(
        "Minima; each op with a fake implementation; after a full garbage collection.",
        style="dim",
        highlight=False,
    )
