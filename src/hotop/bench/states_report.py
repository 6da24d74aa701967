"""The tables that ``bench --states`` prints."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from hotop.bench.contenders import CUSTOM_OP, DEFINE_IMPL, HOTOP, PLAIN
from hotop.bench.report import make_table, print_table
from hotop.bench.states import StateRow, StatesResult
from hotop.bench.states_ops import ATEN, FUNCTION
from hotop.bench.states_threads import NOBODY, LatenessRow, ThreadsRow

__all__ = ["print_states"]

_HEADERS = {
    PLAIN: "plain\nfunction",
    CUSTOM_OP: "torch\ncustom_op",
    DEFINE_IMPL: "define\n+ impl",
    HOTOP: "hotop\nobject",
    FUNCTION: "autograd.\nFunction",
    ATEN: "aten op",
    NOBODY: "nobody\ncalls",
}
_TAXED = (CUSTOM_OP, DEFINE_IMPL, HOTOP, FUNCTION, ATEN)
_CALLING = (PLAIN, CUSTOM_OP, DEFINE_IMPL, HOTOP)


def print_states(console: Console, result: StatesResult) -> None:
    """Prints the tax in each state, the slope, the threads and the lateness."""
    _print_rows(console, result)
    _print_threads(console, result.threads)
    _print_lateness(console, result.lateness)


def _print_rows(console: Console, result: StatesResult) -> None:
    table = make_table()
    table.add_column("state", no_wrap=True)
    table.add_column("plain\ncall", justify="right", style="dim", no_wrap=True)
    for name in _TAXED:
        style = "bold" if name == HOTOP else ""
        table.add_column(_HEADERS[name], justify="right", style=style, no_wrap=True)
    table.add_column("custom_op\n/ hotop", justify="right", style="cyan", no_wrap=True)
    table.add_column("hotop's\nroad", no_wrap=True)
    for row in result.rows:
        table.add_row(*_row_cells(row))
    table.add_section()
    for rows in result.arguments.values():
        for row in rows.values():
            table.add_row(*_row_cells(row))
        table.add_section()
    for span, slopes in result.slopes_us().items():
        cells = [f"{slopes[name]:.3f}" if name in slopes else "" for name in _TAXED]
        table.add_row(f"us per further of {span}", "", *cells, "", "")
    print_table(console, "Tax per call of an op with a formula, in us", table)
    console.print(
        "Tax: call minus the plain function's call in the same state; x * x on 3 float32 elements, "
        "minima of\ninterleaved rounds. custom_op / hotop: of whole calls, the kernel included.\n"
        "Autocast with a rule: to bfloat16; the plain function casts by hand. vmap: over a batch "
        "of 2, the rule calls\nthe op once. vmap and functionalized: entered before the timing, so "
        "only the call is in it.\n"
        "Parameters: leaves whose AccumulateGrad nothing else holds, so that autograd makes and "
        "frees one per leaf\nand call, whoever calls; activations: results of other operators.\n"
        "Profiled, aten op: torch.square, two events as an op whose kernel is x * x has.",
        style="dim",
        highlight=False,
    )


def _row_cells(row: StateRow) -> list[str]:
    taxes = [f"{row.tax_us(name):.2f}" if name in row.timings else "" for name in _TAXED]
    plain = f"{row.timings[PLAIN].minimum_ns / 1e3:.2f}"
    road = "direct" if row.direct else "PyTorch's"
    return [escape(row.state), plain, *taxes, f"{row.ratio(CUSTOM_OP, HOTOP):.2f}x", road]


def _print_threads(console: Console, rows: Sequence[ThreadsRow]) -> None:
    table = make_table()
    table.add_column("kernel")
    table.add_column("threads", justify="right")
    for name in _CALLING:
        table.add_column(_HEADERS[name], justify="right", style="bold" if name == HOTOP else "")
    table.add_column("hotop\n/ custom_op", justify="right", style="cyan")
    title = ""
    for row in rows:
        first = "" if row.kernel == title else row.kernel
        title = row.kernel
        rates = [f"{row.median[name]:,.0f}" for name in _CALLING]
        ratio = row.median[HOTOP] / row.median[CUSTOM_OP]
        table.add_row(first, str(row.threads), *rates, f"{ratio:.2f}x")
    print_table(console, "Calls per second, all threads together; medians of rounds", table)


def _print_lateness(console: Console, rows: Sequence[LatenessRow]) -> None:
    table = make_table()
    names = (NOBODY, *_CALLING)
    table.add_column("kernel")
    for name in names:
        table.add_column(_HEADERS[name], justify="right", style="bold" if name == HOTOP else "")
    for row in rows:
        found = [row.contenders[name] for name in names]
        table.add_row(
            row.kernel, *(f"{each.median_us:,.0f} / {each.percentile_99_us:,.0f}" for each in found)
        )
    title = "How late another thread wakes from 1 ms while one thread calls, us: median / 99 %"
    print_table(console, title, table)
    console.print(
        "A Python loop that never releases the GIL keeps it for CPython's switch interval, 5 ms.",
        style="dim",
        highlight=False,
    )
