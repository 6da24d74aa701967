"""The tables that the benchmark prints."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hotop.bench import original
from hotop.bench.contenders import (
    CUSTOM_OP,
    DEFINE_IMPL,
    HOTOP,
    HOTOP_OVERLOAD,
    HOTOP_PACKET,
    LABELS,
    PLAIN,
)
from hotop.bench.nvfp4_bench import LINEAR, PYTORCH, NVFP4Result
from hotop.bench.population_bench import CONTENDERS, PopulationResult
from hotop.bench.registration import RegistrationResult
from hotop.bench.suite import SuiteResult, tax_us
from hotop.bench.targets import Target
from hotop.bench.timing import Timing
from hotop.bench.tuner_bench import DIRECT, TunerCase

__all__ = [
    "make_console",
    "make_table",
    "print_machine",
    "print_nvfp4",
    "print_original",
    "print_population",
    "print_suite",
    "print_table",
    "print_targets",
    "print_tuner",
]

_COLUMNS = (CUSTOM_OP, DEFINE_IMPL, HOTOP, HOTOP_PACKET, HOTOP_OVERLOAD)
_HEADERS = {
    CUSTOM_OP: "torch\ncustom_op",
    DEFINE_IMPL: "define\n+ impl",
    HOTOP: "hotop\nobject",
    HOTOP_PACKET: "hotop\npacket",
    HOTOP_OVERLOAD: "hotop\noverload",
}
_SMALLEST_TAX_US = 0.005
_LEAST_WIDTH = 124
_LONGEST_ERROR = 200


def make_console() -> Console:
    """Makes a console that does not fold the tables when the output is a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, _LEAST_WIDTH))


def print_machine(console: Console, machine: Mapping[str, object]) -> None:
    """Prints the software, the CPU and the date."""
    console.print(
        f"[bold]hotop {machine['hotop']} bench[/]  torch {machine['torch']}, {machine['python']}, "
        f"{machine['threads']} of {machine['cpus_usable']} threads, {machine['system']}"
    )
    console.print(f"{escape(str(machine['cpu']))}, {machine['date']}", highlight=False)
    if not machine["core"]:
        console.print("hotop's core is not in use: its numbers are PyTorch's own", style="red")


def print_suite(console: Console, result: SuiteResult) -> None:
    """Prints the cases, the compiled programs, the slope and the registration."""
    if result.cases or result.compiled:
        print_table(console, "Tax per call, in us", _case_table(result))
        console.print(
            "Tax: call minus the plain function's call, minima of interleaved rounds.\n"
            "Packet: torch.ops.ns.op(...), both look-ups included.\n"
            "Compiled: a torch.compile program of 32 op calls minus the same program with a bare "
            "function in the op's place, per op.\n"
            "More than 30 arguments: CPython builds a tuple for every call, the plain one too.",
            style="dim",
            highlight=False,
        )
    _print_reasons(console, [(case.reason, case.title) for case in result.cases if not case.direct])
    if result.registration is not None:
        row = result.registration
        title = f"Registration, ms per op ({row.batches} batches of {row.ops_per_batch} ops)"
        print_table(console, title, _registration_table(row))
    for failure in result.failures:
        console.print(f"{failure.name} failed: {_first_line(failure.error)}", style="bold red")


def print_targets(
    console: Console, targets: Sequence[Target], *, met: str = "ok", missed: str = ""
) -> None:
    """Prints each target with the measured number.

    Args:
        console: Where to.
        targets: What was measured.
        met: The word for a target that was met.
        missed: The word for one that was not; ``over`` or ``under`` when empty.
    """
    if not targets:
        return
    table = make_table()
    table.add_column("what")
    table.add_column("measured", justify="right")
    table.add_column("target", justify="right")
    table.add_column("")
    for target in targets:
        side = "under" if target.relation == "at least" else "over"
        verdict = f"[green]{met}[/]" if target.met else f"[red]{missed or side}[/]"
        table.add_row(
            escape(target.title),
            _quantity(target.measured, target.unit),
            f"{target.relation} {_quantity(target.limit, target.unit)}",
            verdict,
        )
    print_table(console, "Targets", table)


def print_tuner(console: Console, cases: Sequence[TunerCase]) -> None:
    """Prints what the tuner's look-up adds to a direct call."""
    table = make_table()
    table.add_column("op")
    names = list(cases[0].timings) if cases else []
    for name in names:
        table.add_column("call, ns\nno tuner" if name == DIRECT else name, justify="right")
    for case in cases:
        added = (f"{case.added_us(name):+.3f}" for name in names if name != DIRECT)
        table.add_row(escape(case.title), f"{case.timings[DIRECT].minimum_ns:.0f}", *added)
    print_table(console, "The tuner's look-up, in us above the direct call", table)


def print_nvfp4(console: Console, result: NVFP4Result) -> None:
    """Prints time, rate and the comparison with PyTorch for every kernel and shape."""
    table = make_table()
    for header in ("op", "kernel", "dtype"):
        table.add_column(header)
    for header in ("threads", "us", "G/s", "times PyTorch"):
        table.add_column(header, justify="right")
    for row in result.rows:
        title = f"{row.op} {'x'.join(map(str, row.shape))}"
        for name, timing in row.timings.items():
            ratio = "" if name in (LINEAR, PYTORCH) else f"{row.ratio(name):.2f}"
            microseconds = f"{timing.minimum_ns / 1e3:.2f}"
            rate = f"{row.rate(name):.2f}"
            table.add_row(title, name, row.dtype, str(row.threads), microseconds, rate, ratio)
            title = ""
    print_table(console, f"NVFP4 kernels; default: {result.isa}", table)
    console.print(
        "G/s: elements quantized, or floating-point operations of the product.\n"
        "PyTorch: hotop.nvfp4.reference, eager operators; F.linear: float32, on the same sizes.",
        style="dim",
        highlight=False,
    )


def print_original(console: Console, result: original.OriginalResult) -> None:
    """Prints the table of the original work and its estimate per step."""
    table = make_table()
    table.add_column("registration")
    for header in ("total ms", "us/call", "tax us", "vs custom_op us"):
        table.add_column(header, justify="right")
    for contender, label in original.LABELS.items():
        plain = contender == PLAIN
        difference = "-"
        if contender not in (PLAIN, CUSTOM_OP):
            difference = f"{-result.saving_us(contender):+.2f}"
        table.add_row(
            label,
            f"{result.total_ms(contender):.1f}",
            f"{result.per_call_us(contender):.3f}",
            "-" if plain else f"{result.tax_us(contender):.3f}",
            difference,
        )
    print_table(console, f"{original.CALLS:,} calls, kernel x.clone()", table)
    estimate = make_table()
    estimate.add_column("registration")
    for op, calls in original.CALLS_PER_STEP.items():
        estimate.add_column(f"{op}\n{calls} calls", justify="right")
    estimate.add_column("together", justify="right")
    for contender in (DEFINE_IMPL, original.HELPER_OPS, original.HELPER_OBJECT):
        savings = result.saving_per_step_ms(contender)
        estimate.add_row(
            original.LABELS[contender],
            *(f"{saving:.1f}" for saving in savings.values()),
            f"{sum(savings.values()):.1f}",
        )
    print_table(console, "Calls per step x saving, in ms", estimate)


def print_population(console: Console, result: PopulationResult) -> None:
    """Prints the distribution of the tax, the worst ops and the ops that failed."""
    if result.ops:
        table = make_table()
        table.add_column("contender")
        points = list(result.distribution(HOTOP))
        for point in points:
            table.add_column(point, justify="right")
        table.add_column("geometric mean\nof tax / hotop's", justify="right")
        for contender in CONTENDERS:
            distribution = result.distribution(contender)
            ratio = result.geometric_mean_ratio(contender)
            table.add_row(
                LABELS[contender],
                *(_us(distribution[point]) for point in points),
                "" if contender == HOTOP else f"{ratio:.1f}x",
            )
        print_table(console, f"Tax over {len(result.ops):,} real ops, in us", table)
        print_table(console, "hotop's worst ops", _worst_table(result))
        _print_directness(console, result)
    for failure in result.failures:
        console.print(
            f"{escape(failure.package)} {escape(failure.op)} failed: {_first_line(failure.error)}\n"
            f"  {escape(failure.schema)}",
            style="red",
            highlight=False,
        )


def _print_directness(console: Console, result: PopulationResult) -> None:
    direct = sum(op.direct for op in result.ops)
    console.print(f"{direct:,} of {len(result.ops):,} ops go the direct road")
    _print_reasons(console, [(op.reason, op.op) for op in result.ops if not op.direct])


def _print_reasons(console: Console, indirect: Sequence[tuple[str, str]]) -> None:
    names: dict[str, list[str]] = {}
    for reason, name in indirect:
        names.setdefault(reason, []).append(name)
    for reason, those in names.items():
        shown = "; ".join(those[:3]) + ("; ..." if len(those) > 3 else "")
        console.print(
            f"* {len(those)} not direct: {escape(reason)} ({escape(shown)})", style="yellow"
        )


def _worst_table(result: PopulationResult) -> Table:
    table = make_table()
    table.add_column("op")
    table.add_column("package")
    for header in ("arguments", "hotop us", "custom_op us", "define + impl us"):
        table.add_column(header, justify="right")
    for op in result.worst():
        table.add_row(
            escape(op.op),
            escape(op.package),
            str(op.arguments),
            *(_us(tax_us(op.timings, name)) for name in (HOTOP, CUSTOM_OP, DEFINE_IMPL)),
        )
    return table


def _case_table(result: SuiteResult) -> Table:
    table = make_table()
    table.add_column("case", no_wrap=True)
    table.add_column("plain\ncall", justify="right", style="dim")
    for contender in _COLUMNS:
        style = "bold" if contender == HOTOP else ""
        table.add_column(_HEADERS[contender], justify="right", style=style, no_wrap=True)
    for header in ("custom_op\n/ hotop", "define\n/ hotop"):
        table.add_column(header, justify="right", style="cyan", no_wrap=True)
    for case in result.cases:
        title = escape(case.title) + ("" if case.direct else " *")
        table.add_row(title, *_tax_cells(case.timings[PLAIN], case.taxes_us(), ratios=case.noop))
    for row in result.compiled:
        table.add_row(escape(row.title), *_tax_cells(None, row.taxes_us(), ratios=True))
    if slopes := result.slopes_ns():
        table.add_section()
        for span, slope in slopes.items():
            cells = [f"{slope[contender]:.1f}" for contender in _COLUMNS]
            table.add_row(f"ns per further Tensor, {span}", "", *cells, "", "")
    return table


def _tax_cells(plain: Timing | None, taxes: Mapping[str, float], *, ratios: bool) -> list[str]:
    cells = [_us(plain.minimum_ns / 1e3) if plain else ""]
    cells += [_us(taxes[name]) if name in taxes else "" for name in _COLUMNS]
    for name in (CUSTOM_OP, DEFINE_IMPL):
        # A kernel that does work hides the tax, and a tax of nothing gives no ratio.
        told = ratios and taxes[HOTOP] >= _SMALLEST_TAX_US
        cells.append(_ratio(taxes[name] / taxes[HOTOP]) if told else "-")
    return cells


def _registration_table(row: RegistrationResult) -> Table:
    table = make_table()
    table.add_column("contender")
    table.add_column("minimum", justify="right")
    table.add_column("median", justify="right")
    for contender in (CUSTOM_OP, DEFINE_IMPL, HOTOP):
        label = "hotop.custom_op" if contender == HOTOP else LABELS[contender]
        table.add_row(label, f"{row.minimum_ms[contender]:.3f}", f"{row.median_ms[contender]:.3f}")
    return table


def make_table() -> Table:
    """Makes a table without columns in the style of all tables."""
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))


def print_table(console: Console, title: str, table: Table) -> None:
    """Prints `table` under a title."""
    # A table's own title folds at the table's width.
    console.print(f"\n[bold]{escape(title)}[/]", highlight=False)
    console.print(table)


def _us(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}"


def _first_line(text: str) -> str:
    line = text.splitlines()[0] if text else ""
    return escape(line if len(line) <= _LONGEST_ERROR else line[:_LONGEST_ERROR] + " ...")


def _ratio(value: float) -> str:
    return f"{value:.0f}x" if value >= 10 else f"{value:.1f}x"


def _quantity(value: float, unit: str) -> str:
    match unit:
        case "us" | "ms":
            return f"{_us(value)} {unit}"
        case "x":
            return _ratio(value)
        case "times":
            return f"{value:.2f}x"
        case "ops":
            return f"{value:,.0f} ops"
        case _:
            return f"{value:.1f} {unit}"
