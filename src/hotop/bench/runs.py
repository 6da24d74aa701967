"""The runs of the benchmark command: measured, printed, written."""

import argparse
import json

from rich.console import Console

from hotop.bench import (
    existing,
    existing_report,
    existing_targets,
    machine,
    nvfp4_bench,
    original,
    plot,
    report,
    states,
    states_report,
    states_targets,
    targets,
    tuner_bench,
)
from hotop.bench.population_bench import run_population
from hotop.bench.progress import show_progress
from hotop.bench.suite import run_suite

__all__ = ["run_and_report"]


def run_and_report(args: argparse.Namespace, only: list[str]) -> bool:
    """Does the run that `args` asks for.

    Returns:
        Whether something failed to run.
    """
    console = report.make_console()
    facts = machine.facts()
    report.print_machine(console, facts)
    document: dict[str, object] = {"machine": facts, "quick": args.quick}
    if args.original:
        failed = _run_original(args, console, document)
    elif args.tuner:
        failed = _run_tuner(args, console, document)
    elif args.states:
        failed = _run_states(args, console, document)
    elif args.existing:
        failed = _run_existing(args, console, document)
    elif args.nvfp4:
        failed = _run_nvfp4(args, console, document)
    elif args.population:
        failed = _run_population(args, console, facts, document)
    else:
        failed = _run_suite(args, only, console, facts, document)
    if args.json is not None:
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return failed


def _run_suite(
    args: argparse.Namespace,
    only: list[str],
    console: Console,
    facts: dict[str, object],
    document: dict[str, object],
) -> bool:
    with show_progress() as on_step:
        result = run_suite(quick=args.quick, only=only, on_step=on_step)
    found = targets.suite_targets(result)
    report.print_suite(console, result)
    report.print_targets(console, found)
    document |= result.as_json() | {"targets": [target.as_json() for target in found]}
    if args.plot is not None and (result.cases or result.compiled):
        plot.plot_suite(result, facts, args.plot)
    return bool(result.failures)


def _run_population(
    args: argparse.Namespace,
    console: Console,
    facts: dict[str, object],
    document: dict[str, object],
) -> bool:
    with show_progress() as on_step:
        result = run_population(quick=args.quick, on_step=on_step)
    found = targets.population_targets(result)
    report.print_population(console, result)
    report.print_targets(console, found)
    document |= result.as_json() | {"targets": [target.as_json() for target in found]}
    if args.plot is not None and result.ops:
        plot.plot_population(result, facts, args.plot)
    return bool(result.failures)


def _run_original(args: argparse.Namespace, console: Console, document: dict[str, object]) -> bool:
    result = original.measure(quick=args.quick)
    report.print_original(console, result)
    document |= result.as_json()
    return False


def _run_tuner(args: argparse.Namespace, console: Console, document: dict[str, object]) -> bool:
    cases = tuner_bench.measure(quick=args.quick)
    found = targets.tuner_targets(cases)
    report.print_tuner(console, cases)
    report.print_targets(console, found)
    document["tuner"] = [case.as_json() for case in cases]
    document["targets"] = [target.as_json() for target in found]
    return False


def _run_states(args: argparse.Namespace, console: Console, document: dict[str, object]) -> bool:
    with show_progress() as on_step:
        result = states.measure(quick=args.quick, on_step=on_step)
    found = states_targets.states_targets(result)
    states_report.print_states(console, result)
    report.print_targets(console, found, met="met", missed="missed")
    document |= result.as_json() | {"targets": [target.as_json() for target in found]}
    return False


def _run_existing(args: argparse.Namespace, console: Console, document: dict[str, object]) -> bool:
    with show_progress() as on_step:
        result = existing.measure(quick=args.quick, on_step=on_step)
    found = existing_targets.existing_targets(result)
    existing_report.print_existing(console, result)
    report.print_targets(console, found, met="met", missed="missed")
    for failure in result.failures():
        console.print(failure, style="red", highlight=False)
    document |= result.as_json() | {"targets": [target.as_json() for target in found]}
    return bool(result.failures())


def _run_nvfp4(args: argparse.Namespace, console: Console, document: dict[str, object]) -> bool:
    result = nvfp4_bench.measure(quick=args.quick)
    found = targets.nvfp4_targets(result)
    report.print_nvfp4(console, result)
    report.print_targets(console, found)
    document["nvfp4"] = {"isa": result.isa, "rows": [row.as_json() for row in result.rows]}
    document["targets"] = [target.as_json() for target in found]
    return False
