"""`python -m hotop demo`: arguments, order of the phases and exit code."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from rich.console import Console
from torch._inductor.exc import InductorError, InvalidCxxCompiler

import hotop
from hotop.demo import report as reporting
from hotop.demo.generate import position_count
from hotop.demo.model import SHAPES, build_decoder
from hotop.demo.ops import HOTOP, op_sets
from hotop.demo.phases import Workload, observe_step, run_compiled, run_eager
from hotop.demo.progress import Progress

SEED = 0
DEFAULT_SHAPE = "stories260k"
DEFAULT_TOKENS = 200
DEFAULT_ROUNDS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to `parser`."""
    parser.add_argument(
        "--tokens",
        type=_positive,
        default=DEFAULT_TOKENS,
        help="tokens to generate after the prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=_positive,
        default=DEFAULT_ROUNDS,
        help="times to repeat the generation (default: %(default)s)",
    )
    parser.add_argument(
        "--shape",
        choices=sorted(SHAPES),
        default=DEFAULT_SHAPE,
        help="published model whose sizes to take (default: %(default)s)",
    )
    parser.add_argument(
        "--layers", type=_positive, help="number of layers (default: as many as that model has)"
    )
    parser.add_argument(
        "--inference-mode",
        action="store_true",
        help="run under torch.inference_mode() in place of torch.no_grad()",
    )
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write what was found to FILE"
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def run(args: argparse.Namespace) -> int:
    """Run the demo.

    Args:
        args: The options that `add_arguments` adds.

    Returns:
        0, or 1 when outputs that must be equal differ or a graph was compiled again.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode() if args.inference_mode else torch.no_grad():
            report = _run_phases(args, Console(highlight=False))
            if args.json:
                text = json.dumps(reporting.to_json(report), indent=2)
                args.json.write_text(text + "\n", encoding="utf-8")
    finally:
        torch.set_num_threads(threads)
    return 1 if report.failures else 0


def _run_phases(args: argparse.Namespace, console: Console) -> reporting.Report:
    shape = SHAPES[args.shape].with_layers(args.layers)
    positions = position_count(args.tokens)
    sets = op_sets()
    decoder = build_decoder(shape, positions, SEED)
    work = Workload(decoder, shape, sets, positions, args.rounds, SEED)
    calls, arguments = observe_step(work)
    grad_mode = "inference_mode" if args.inference_mode else "no_grad"
    reporting.print_head(console, shape, calls.total(), grad_mode)

    native = hotop.is_native()
    off_direct = {}
    if native:
        for name, values in arguments.items():
            road = hotop.explain(getattr(sets[HOTOP], name), *values)
            if not road.direct:
                off_direct[name] = road.reason

    progress = Progress(console)
    phases = {"eager": run_eager(work, progress)}
    if not args.no_compile and " " in torch.__file__:
        console.print(
            "torch.compile left out: Inductor cannot link against a torch whose path has a space."
        )
    elif not args.no_compile:
        try:
            phases["compiled"] = run_compiled(work, progress)
        except InductorError as error:
            if not isinstance(error.inner_exception, InvalidCxxCompiler):
                raise
            console.print("torch.compile left out: Inductor finds no C++ compiler.")
    report = reporting.Report(shape, grad_mode, args.tokens, calls, native, off_direct, phases)
    reporting.print_report(console, report)
    return report
