"""What a run prints and writes: tables of steps, the account of the host time, goals, JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

import hotop
from hotop.ltx2.attribution import Attribution
from hotop.ltx2.goals import Goal, goals
from hotop.ltx2.kernels import QUANTIZE
from hotop.ltx2.measure import CLOCKS, CPU, WALL, Phase
from hotop.ltx2.session import Result
from hotop.ltx2.variants import HOTOP, PLAIN


def print_head(
    console: Console, machine: Mapping[str, object], result: Result, files: Sequence[str]
) -> None:
    """Print what ran, and on what."""
    options, width = result.options, result.options.width
    say(
        console,
        f"PyTorch {machine['torch']}, {machine['python']}, {machine['cpu']}, 1 thread (set so, "
        f"for steady host times), {machine['date']}",
    )
    say(
        console,
        f"Model: LTX-2's transformer (diffusers), {options.blocks} blocks, video "
        f"{width.heads}x{width.head_dim}, audio {width.audio_heads}x{width.audio_head_dim}; "
        f"{width.video_tokens} video, {width.audio_tokens} audio, {width.text_tokens} text tokens; "
        f"float32, as CPUs emulate bfloat16. {result.converted} linears in NVFP4: "
        + ", ".join(f"{count} calls of {name}" for name, count in result.calls.items())
        + " a step.",
    )
    say(
        console,
        f"Denoised in {options.steps} steps with hotop and the real kernels; random weights, so "
        f"the latents are noise. Relative distance of the video latents from the float32 model's: "
        f"{result.relative_error:.3f}.",
    )
    for line in files:
        say(console, line)
    if not hotop.is_native():
        say(
            console,
            "hotop runs without its C++ core here: its ops are torch.library.custom_op's own, and "
            "there is nothing to win.",
        )


def phase_table(phase: Phase) -> Table:
    """The steps of every program: medians, minima, and what each took above the base."""
    table = Table(title=f"{phase.setting.title} (ms a step)", title_justify="left")
    table.add_column("ops registered by", no_wrap=True)
    for header in (
        "CPU\nmedian",
        "CPU\nmin",
        "wall\nmedian",
        "wall\nmin",
        f"paired, above\n{phase.base}",
        "paired,\nx hotop",
    ):
        table.add_column(header, justify="right")
    if phase.compile_s:
        table.add_column("compiling,\ns", justify="right")
    for name in phase.names:
        row = [
            name,
            f"{phase.median_ms(name):.1f}",
            f"{phase.minimum_ms(name):.1f}",
            f"{phase.median_ms(name, WALL):.1f}",
            f"{phase.minimum_ms(name, WALL):.1f}",
            "" if name == phase.base else f"{phase.paired_ms(name, phase.base):+.2f}",
            "" if name == HOTOP else f"{phase.ratio(name, HOTOP):.2f}",
        ]
        if phase.compile_s:
            row.append(f"{phase.compile_s[name]:.1f}" if name in phase.compile_s else "")
        table.add_row(*row)
    return table


def account_table(accounts: Sequence[Attribution]) -> Table:
    """The account: the tax of a call, tight and in the model, and what its going saves."""
    table = Table(title="Where the host time goes (thread CPU time)", title_justify="left")
    table.add_column("setting", no_wrap=True)
    table.add_column("ops registered by", no_wrap=True)
    for header in (
        "us a call,\ntight loop",
        "us a call,\nin model",
        "ms a\nstep",
        "of it\nop tax",
        "saved, ms:\ncalls x tax",
        "saved, ms:\nmeasured",
    ):
        table.add_column(header, justify="right")
    for account in accounts:
        for name in (account.before, account.after):
            table.add_row(
                account.title if name == account.before else "",
                name,
                f"{account.tight_us[name]:.2f}",
                f"{account.model_us[name]:.2f}",
                f"{account.step_ms[name]:.1f}",
                f"{account.share[name]:.1%}",
                f"{account.estimated_ms:.1f}" if name == account.after else "",
                f"{account.measured_ms:.1f}" if name == account.after else "",
            )
    return table


def tight_table(result: Result) -> Table:
    """The tax of each op in a loop of its own, by variant."""
    names = list(dict.fromkeys(n for t in result.tight.values() for n in t.median_us[QUANTIZE]))
    names = [name for name in names if name != PLAIN]
    table = Table(
        title="Tax of a call in a tight loop, us (medians; plain functions: 0)",
        title_justify="left",
    )
    table.add_column("setting", no_wrap=True)
    table.add_column("op", no_wrap=True)
    table.add_column("calls\na step", justify="right")
    for name in names:
        table.add_column(name.replace(", ", ",\n").replace(" ", "\n", 1), justify="right")
    for (kernel, grad_mode, tuner), tight in result.tight.items():
        for op, taxes in tight.median_us.items():
            table.add_row(
                f"{grad_mode}, {kernel}{', tuner' * tuner}" if op == QUANTIZE else "",
                op,
                f"{result.calls[op]:,}",
                *(f"{taxes[name]:.2f}" if name in taxes else "" for name in names),
            )
    return table


def goal_table(found: Sequence[Goal], *, is_short: bool) -> Table:
    """The goals, met or not; of a short run, or that it cannot tell."""
    table = Table(title="Goals (thread CPU time)", title_justify="left")
    table.add_column("what", no_wrap=True)
    table.add_column("median of\npaired steps", justify="right")
    table.add_column("by\nminima", justify="right")
    table.add_column("goal", justify="right")
    table.add_column("")
    for goal in found:
        table.add_row(
            goal.title,
            f"{goal.measured:.2f} {goal.unit}",
            f"{goal.by_minima:.2f} {goal.unit}",
            f"{goal.relation} {goal.limit:g} {goal.unit}",
            goal.verdict(is_short=is_short),
        )
    return table


def print_result(console: Console, result: Result) -> None:
    """Print the tables, the account, the checks and the goals."""
    for phase in result.phases:
        console.print()
        console.print(phase_table(phase))
    console.print()
    console.print(tight_table(result))
    console.print()
    console.print(account_table(result.accounts))
    say(
        console,
        "Tight: each op in a loop of its own, warm; in model: what the step took more than with "
        "plain functions or bare kernels, by the number of calls (colder code, and noise).",
    )
    for phase in result.phases:
        if not phase.differences:
            graphs = (
                f"; {phase.graphs} graphs for {len(phase.compile_s)} programs, each compiled "
                f"{phase.copies}x, of {result.options.blocks} blocks; none compiled again"
                if phase.compile_s
                else ""
            )
            say(
                console,
                f"Equal bit for bit after every step ({phase.setting.title}): "
                f"{', '.join(phase.names)}{graphs}.",
            )
    for line in result.failures:
        say(console, f"FAILED: {line}")
    console.print()
    found = goals(result.phases)
    is_short = result.options.is_short
    console.print(goal_table(found, is_short=is_short))
    if any(goal.verdict(is_short=is_short) == "too short to tell" for goal in found):
        noise = max(phase.noise() for phase in result.phases)
        say(
            console,
            f"Too short to tell: a program differed from itself by up to {noise:.1%} from one step "
            "to the next, more than the goal asks for. The full form is `python -m hotop ltx2`.",
        )


def say(console: Console, line: str) -> None:
    """Print a sentence; where this is not a terminal it stays on one line."""
    console.print(line, markup=False, soft_wrap=True)


def to_json(machine: Mapping[str, object], result: Result) -> dict[str, Any]:
    """The run as plain values; times in milliseconds unless a name says otherwise."""
    options = result.options
    return {
        "machine": dict(machine),
        "model": {
            "width": asdict(options.width),
            "blocks": options.blocks,
            "linears": result.converted,
            "dtype": "float32",
            "weights": "random",
        },
        "steps": options.steps,
        "rounds": options.rounds,
        "calls_per_step": result.calls,
        "relative_error": result.relative_error,
        "phases": [_phase_json(phase) for phase in result.phases],
        "tight_tax_us": [
            {"kernel": kernel, "grad_mode": mode, "tuner": tuner, **asdict(tight)}
            for (kernel, mode, tuner), tight in result.tight.items()
        ],
        "attribution": [asdict(account) for account in result.accounts],
        "goals": [goal.as_json() for goal in goals(result.phases)],
        "failures": result.failures,
    }


def _phase_json(phase: Phase) -> dict[str, Any]:
    programs = {}
    for name in phase.names:
        programs[name] = {
            clock: {
                "median_ms": phase.median_ms(name, clock),
                "minimum_ms": phase.minimum_ms(name, clock),
                "paired_above_base_ms": phase.paired_ms(name, phase.base, clock),
                "paired_times_hotop": phase.ratio(name, HOTOP, clock),
            }
            for clock in CLOCKS
        }
    return asdict(phase.setting) | {
        "base": phase.base,
        "samples": len(phase.samples_ns[CPU][phase.base]),
        "programs": programs,
        "equal": not phase.differences,
        "compile_s": phase.compile_s,
        "copies": phase.copies,
        "graphs": phase.graphs,
        "recompiles": phase.recompiles,
    }
