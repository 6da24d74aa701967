"""What the demo prints and writes: tables, sentences computed from the times, JSON."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hotop.demo.model import Shape
from hotop.demo.ops import CUSTOM_OP, HOTOP, PLAIN
from hotop.demo.phases import PLAIN_AGAIN, PhaseResult

TEXT_SHOWN = 60


@dataclass(frozen=True)
class Report:
    """Everything one run found."""

    shape: Shape
    grad_mode: str
    new_tokens: int
    calls_per_step: Mapping[str, int]
    native: bool
    off_direct: Mapping[str, str]
    phases: Mapping[str, PhaseResult]

    @property
    def calls(self) -> int:
        """Op calls in one step."""
        return sum(self.calls_per_step.values())

    @property
    def failures(self) -> list[str]:
        """What makes the run a failure: outputs that differ, graphs compiled again."""
        failures = [line for phase in self.phases.values() for line in phase.differences]
        for title, phase in self.phases.items():
            if phase.recompiles:
                failures.append(f"{title}: {phase.recompiles} graphs were compiled again")
        return failures


def machine() -> dict[str, Any]:
    """The facts that a time depends on."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "threads": torch.get_num_threads(),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def print_head(console: Console, shape: Shape, calls: int, grad_mode: str) -> None:
    """Print what is going to run, and on what."""
    facts = machine()
    _say(
        console,
        f"PyTorch {facts['torch']}, Python {facts['python']}, {facts['cpu']}, "
        f"{facts['threads']} thread (set so, for steady host times)",
    )
    _say(
        console,
        f"Model: Llama-like decoder in the sizes of {shape.model}: layers {shape.layers}, "
        f"dim {shape.dim}, {shape.heads} heads over {shape.kv_heads} key/value heads, "
        f"hidden {shape.hidden}; float32, batch 1, one token per byte. "
        f"Its weights are random, so its text is noise.",
    )
    _say(console, f"Each step makes {calls} op calls, under torch.{grad_mode}().\n")


def eager_table(report: Report) -> Table:
    """The eager times, with what each kind of registration costs above the plain functions."""
    phase = report.phases["eager"]
    table = _table(
        "Eager (tokens/s: of the median step)", "vs plain,\nus/step", "vs plain,\nus/op call"
    )
    for name in phase.step_ns:
        tax = _tax(phase, name)
        above = ("", "") if name == PLAIN else (f"{tax:+.1f}", f"{tax / report.calls:+.2f}")
        table.add_row(name, *_times(phase, name), *above)
    return table


def compiled_table(report: Report) -> Table:
    """The compiled times, against those of torch's custom_op."""
    phase = report.phases["compiled"]
    table = _table("torch.compile (one graph per variant)", "vs hotop,\nus/step", "compiling,\ns")
    for name in phase.step_ns:
        above = phase.min_us(name) - phase.min_us(HOTOP)
        shown = "" if name == HOTOP else f"{above:+.1f}"
        label = f"{name} *" if name == PLAIN else name
        table.add_row(label, *_times(phase, name), shown, f"{phase.compile_s[name]:.1f}")
    return table


def _table(title: str, *last_columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("ops registered by", no_wrap=True)
    for header in ("tokens/s", "us/step,\nmedian", "us/step,\nmin", *last_columns):
        table.add_column(header, justify="right")
    return table


def _times(phase: PhaseResult, name: str) -> tuple[str, str, str]:
    median = phase.median_us(name)
    return f"{1e6 / median:,.0f}", f"{median:,.0f}", f"{phase.min_us(name):,.0f}"


def summary(report: Report) -> list[str]:
    """What was won, in sentences made from the measured times."""
    if not report.native:
        return [
            "hotop runs without its C++ core here, so its ops are torch.library.custom_op's own "
            "and there is nothing to win."
        ]
    eager = report.phases["eager"]
    noise = abs(_tax(eager, PLAIN_AGAIN))
    return [_won(title, phase) for title, phase in report.phases.items()] + [
        f"Against plain functions, the {report.calls} op calls of an eager step take "
        f"{_tax(eager, HOTOP):+.1f} us with hotop and {_tax(eager, CUSTOM_OP):+.1f} us with "
        f"torch's custom_op (plain functions against themselves: {noise:.1f} us)."
    ]


def _tax(phase: PhaseResult, name: str) -> float:
    return phase.min_us(name) - phase.min_us(PLAIN)


def _won(title: str, phase: PhaseResult) -> str:
    hotop_us, torch_us = phase.median_us(HOTOP), phase.median_us(CUSTOM_OP)
    if hotop_us <= torch_us:
        ratio, comparison = torch_us / hotop_us, "faster"
    else:
        ratio, comparison = hotop_us / torch_us, "slower"
    return (
        f"{title.capitalize()}, hotop generates {1e6 / hotop_us:,.0f} tokens/s and torch's "
        f"custom_op {1e6 / torch_us:,.0f}: hotop is {ratio:.2f}x {comparison}, at "
        f"{hotop_us / 1e3:.2f} against {torch_us / 1e3:.2f} ms per token."
    )


def print_report(console: Console, report: Report) -> None:
    """Print the tables, the checks, the text and what was won."""
    console.print()
    console.print(eager_table(report))
    eager = report.phases["eager"]
    if min(_tax(eager, name) for name in eager.compared) < 0:
        _say(
            console,
            "Below zero is possible: within an op's kernel PyTorch skips its autograd layer, "
            "through which the same code goes in a plain function.",
        )
    console.print()
    if "compiled" in report.phases:
        console.print(compiled_table(report))
        _say(
            console,
            "* Not comparable: Inductor sees through plain functions and fuses their kernels.",
        )
        console.print()
    for title, phase in report.phases.items():
        if not phase.differences:
            _say(
                console,
                f"Outputs ({title}): tokens and logits of every step are equal bit for bit "
                f"among {', '.join(phase.compared)}.",
            )
    for line in report.failures:
        _say(console, f"FAILED: {line}")
    for name, reason in report.off_direct.items():
        _say(console, f"Not on the direct road: {name}: {reason}")
    text = eager.text
    _say(console, f"Text (noise, as the weights are random): {text[:TEXT_SHOWN]!r}")
    for line in summary(report):
        _say(console, line)


def _say(console: Console, line: str) -> None:
    # Soft-wrapped: where this is not a terminal, a sentence stays on one line.
    console.print(line, markup=False, soft_wrap=True)


def to_json(report: Report) -> dict[str, Any]:
    """The report as plain values for a JSON file; times in microseconds."""
    return {
        "machine": machine(),
        "native": report.native,
        "model": asdict(report.shape) | {"weights": "random"},
        "grad_mode": report.grad_mode,
        "new_tokens": report.new_tokens,
        "op_calls_per_step": dict(report.calls_per_step),
        "off_direct": dict(report.off_direct),
        "phases": {
            title: _phase_json(phase, report.calls) for title, phase in report.phases.items()
        },
        "failures": report.failures,
        "summary": summary(report),
    }


def _phase_json(phase: PhaseResult, calls: int) -> dict[str, Any]:
    eager = PLAIN_AGAIN in phase.step_ns
    variants = {}
    for name, times in phase.step_ns.items():
        median = phase.median_us(name)
        row = {
            "steps": len(times),
            "tokens_per_s": 1e6 / median,
            "step_median_us": median,
            "step_min_us": phase.min_us(name),
        }
        if eager:
            tax = _tax(phase, name)
            row |= {"tax_per_step_us": tax, "tax_per_call_us": tax / calls}
        variants[name] = row
    result: dict[str, Any] = {
        "variants": variants,
        "compared": phase.compared,
        "equal": not phase.differences,
        "text": phase.text,
    }
    if not eager:
        result |= {
            "compile_s": phase.compile_s,
            "graphs": phase.graphs,
            "recompiles": phase.recompiles,
        }
    return result
