"""The arguments and exit codes of ``python -m hotop bench``."""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from hotop.bench.suite import case_names

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's arguments to `parser`."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--original",
        action="store_true",
        help="the table of the original helper: 20,000 calls of x.clone(), five registrations",
    )
    which.add_argument(
        "--population",
        action="store_true",
        help="the 1,885 ops of the census: the distribution of the tax",
    )
    which.add_argument(
        "--tuner", action="store_true", help="what the tuner's look-up adds to a direct call"
    )
    which.add_argument(
        "--states",
        action="store_true",
        help="calls that autograd records, profiled calls, other states of a program, threads",
    )
    which.add_argument(
        "--existing",
        action="store_true",
        help="ops that exist, accelerated: define + impl, custom_op, ATen, exported models",
    )
    which.add_argument(
        "--nvfp4", action="store_true", help="the NVFP4 kernels against PyTorch's own operators"
    )
    which.add_argument(
        "--only",
        metavar="CASE[,CASE]",
        help=f"run these cases only: {', '.join(case_names())}",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="fewer rounds, no compiled cases; with --population a sample of 200 ops",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every number to FILE")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="draw the taxes into FILE")


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark and returns the exit code.

    Returns:
        0 when everything ran, whether or not it reached its target; 1 when a case failed to run;
        2 when the arguments make no sense.
    """
    only = [name.strip() for name in (args.only or "").split(",") if name.strip()]
    if problem := _find_problem(args, only):
        print(f"hotop bench: {problem}", file=sys.stderr)
        return 2
    # Imported late: rich and matplotlib belong to the optional tools.
    from hotop.bench.runs import run_and_report

    return 1 if run_and_report(args, only) else 0


def _find_problem(args: argparse.Namespace, only: list[str]) -> str | None:
    missing = [package for package in ("rich", "matplotlib") if find_spec(package) is None]
    if missing:
        return f"{' and '.join(missing)} not installed; install 'hotop[tools]'"
    if args.only is not None and not only:
        return "--only needs at least one case"
    unknown = [name for name in only if name not in case_names()]
    if unknown:
        noun = "case" if len(unknown) == 1 else "cases"
        return f"no such {noun}: {', '.join(unknown)}; the cases are {', '.join(case_names())}"
    if args.plot is not None:
        if args.original or args.tuner or args.nvfp4 or args.states or args.existing:
            return "--plot draws the cases or the population, nothing else"
        if only == ["registration"]:
            return "--plot has nothing to draw for --only registration"
        if args.plot.suffix.lower() != ".png":
            return f"--plot writes a PNG, so FILE must end in .png, not {args.plot.name!r}"
    for path in (args.json, args.plot):
        if path is not None and not path.absolute().parent.is_dir():
            return f"the folder of {path} does not exist"
    return None
