"""`python -m hotop ltx2`: arguments, files and exit code."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hotop.ltx2.widths import BLOCKS, WIDTHS

if TYPE_CHECKING:
    from rich.console import Console

    from hotop.ltx2.session import Options

DEFAULT_STEPS = 8
DEFAULT_ROUNDS = 3
COPIES = 3
QUICK_STEPS, QUICK_ROUNDS, QUICK_BLOCKS = 4, 2, 12

_NEEDED = ("diffusers", "safetensors", "rich", "numpy", "matplotlib")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to `parser`."""
    parser.add_argument(
        "--steps", type=_positive, help=f"denoising steps (default: {DEFAULT_STEPS})"
    )
    parser.add_argument(
        "--blocks", type=_positive, help=f"transformer blocks (default: {BLOCKS}, as in LTX-2)"
    )
    parser.add_argument(
        "--width",
        choices=sorted(WIDTHS, reverse=True),
        default="small",
        help="sizes of the model (default: %(default)s, which is bound by the host)",
    )
    parser.add_argument(
        "--rounds",
        type=_positive,
        help=f"times to repeat the denoising in each setting (default: {DEFAULT_ROUNDS})",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"less than a minute: {QUICK_BLOCKS} blocks, {QUICK_STEPS} steps, trivial kernels "
        "under no_grad only",
    )
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument(
        "--tuner",
        action="store_true",
        help="measure also the ops with a tuner in their body: one in Python against hotop's",
    )
    parser.add_argument(
        "--ulysses",
        action="store_true",
        help="sequence parallel over the ranks of torchrun, in place of the above",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found to FILE")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the steps into FILE (.png, .svg, .pdf)"
    )
    parser.add_argument(
        "--latents",
        type=Path,
        metavar="FILE",
        default=Path("ltx2_latents.safetensors"),
        help="write the latents to FILE, .safetensors or .npz (default: %(default)s)",
    )
    parser.add_argument(
        "--preview",
        type=Path,
        metavar="FILE",
        default=Path("ltx2_preview.png"),
        help="draw the latents into FILE (default: %(default)s)",
    )


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: The options that `add_arguments` adds.

    Returns:
        0; 1 when outputs that must be equal differ, a graph was compiled again or a call of hotop
        was not direct; 2 when something is missing or an option is wrong.
    """
    problem = _problem(args)
    if problem:
        print(f"hotop ltx2: {problem}", file=sys.stderr)
        return 2
    if args.ulysses:
        from hotop.ltx2 import ulysses

        return ulysses.run(args.width, args.blocks, args.steps, args.rounds, args.quick, args.json)
    return _run(args)


def _problem(args: argparse.Namespace) -> str | None:
    """Find what makes the run impossible before it has cost minutes."""
    for module in _NEEDED:
        if importlib.util.find_spec(module) is None:
            return f"this command needs {module}; install it with: pip install 'hotop[ltx2]'"
    try:
        importlib.import_module("hotop._nvfp4")
    except ImportError as error:
        return f"this command needs hotop's NVFP4 extension (build it with: make build): {error}"
    for option in ("json", "plot", "latents", "preview"):
        path: Path | None = getattr(args, option)
        if path is None:
            continue
        if path.is_dir():
            return f"--{option} must be a file, but {path} is a folder"
        if not path.parent.is_dir():
            return f"--{option}: there is no folder {path.parent}"
    if args.latents.suffix not in (".safetensors", ".npz"):
        return f"--latents must end in .safetensors or .npz, got {args.latents.name}"
    for option in ("plot", "preview"):
        path = getattr(args, option)
        if path is not None and path.suffix not in (".png", ".svg", ".pdf"):
            return f"--{option} must end in .png, .svg or .pdf, got {path.name}"
    if args.ulysses:
        return _ulysses_problem(args)
    return None


def _ulysses_problem(args: argparse.Namespace) -> str | None:
    import os

    for option in ("tuner", "plot", "no_compile"):
        if getattr(args, option):
            return f"--ulysses cannot be combined with --{option.replace('_', '-')}"
    ranks = os.environ.get("WORLD_SIZE")
    if ranks is None:
        return "--ulysses needs torchrun: torchrun --nproc-per-node 2 -m hotop ltx2 --ulysses"
    width = WIDTHS[args.width]
    for name, count in (
        ("video heads", width.heads),
        ("audio heads", width.audio_heads),
        ("video tokens", width.video_tokens),
    ):
        if count % int(ranks):
            return f"--ulysses: {ranks} ranks do not divide the {count} {name} of {width.name}"
    return None


def _run(args: argparse.Namespace) -> int:
    from hotop.bench.report import make_console
    from hotop.ltx2.measure import single_thread

    console = make_console()
    threads = single_thread()
    try:
        return _run_single(args, console)
    finally:
        import torch

        torch.set_num_threads(threads)


def _run_single(args: argparse.Namespace, console: Console) -> int:
    from hotop.bench import machine
    from hotop.demo.progress import Progress
    from hotop.ltx2 import outputs, plot, report, session

    obstacle = None if args.no_compile else _compile_obstacle()
    if obstacle:
        console.print(f"torch.compile left out: {obstacle}", markup=False, soft_wrap=True)
        args.no_compile = True
    options = _options(args)
    result = session.run(options, Progress(console))
    facts = machine.facts()
    grid = options.width.video_grid
    outputs.write_latents(args.latents, result.video, result.audio, grid)
    outputs.plot_preview(args.preview, result.video, result.audio, grid, options.steps)
    files = [f"Latents: {args.latents}", f"Preview: {args.preview}"]
    console.print()
    report.print_head(console, facts, result, files)
    report.print_result(console, result)
    if args.json:
        text = json.dumps(report.to_json(facts, result), indent=2)
        args.json.write_text(text + "\n", encoding="utf-8")
    if args.plot:
        plot.plot_steps(result, facts, args.plot)
    return 1 if result.failures else 0


def _compile_obstacle() -> str | None:
    """Find what keeps Inductor from working here, before minutes have been spent."""
    import torch
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    if " " in torch.__file__:
        return "Inductor cannot link against a torch whose path has a space."
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "Inductor finds no C++ compiler."
    return None


def _options(args: argparse.Namespace) -> Options:
    from hotop.ltx2 import session

    chosen = session.quick_settings if args.quick else session.all_settings
    return session.Options(
        WIDTHS[args.width],
        args.blocks or (QUICK_BLOCKS if args.quick else BLOCKS),
        args.steps or (QUICK_STEPS if args.quick else DEFAULT_STEPS),
        args.rounds or (QUICK_ROUNDS if args.quick else DEFAULT_ROUNDS),
        chosen(compiled=not args.no_compile, tuner=args.tuner),
        1 if args.quick else COPIES,
        is_short=args.quick,
    )
