"""`python -m tools.third_party`: runs every package's workload without and with hotop, compares."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import torch
from tools.third_party.compare import differences
from tools.third_party.environments import make
from tools.third_party.worker import MODES

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "build" / "third-party"
PINS = Path(__file__).with_name("pins.toml")
HEADS = ["package", "run", "steps", "ops called", "calls", "direct", "boxed", "pytorch"]
HEADS += ["eager calls on no road", "equal"]
MEANING = {
    "plain": "without hotop",
    "before": "install(), then import",
    "after": "import, then install()",
    "aten": 'install(), then import, and accelerate("aten")',
}


def run(python: Path, package: str, mode: str) -> dict[str, Any] | str:
    """Runs one workload in a process of its own; returns what it wrote, or its last errors."""
    environment = dict(os.environ, WARP_CACHE_PATH=str(BUILT / "warp-cache"), PYTHONHASHSEED="0")
    environment.pop("PYTHONPATH", None)
    environment.pop("HOTOP", None)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.pt"
        command = [python, "-m", "tools.third_party.worker", package, "--mode", mode, "--out", out]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if not line.startswith("USDT")]
            return f"exit code {done.returncode}\n" + "\n".join(lines[-30:])
        found: dict[str, Any] = torch.load(out, weights_only=False)
        return found


def checked(plain: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """All that a run with hotop has differently from the plain one, the profiler's counts too."""
    found = differences(plain["results"], other["results"])
    found += [f"under a profiler: {line}" for line in differences(plain["again"], other["again"])]
    for name in sorted(plain["calls"].keys() | other["calls"].keys()):
        counts = plain["calls"][name], other["calls"][name]
        if counts[0] != counts[1]:
            found.append(f"the profiler saw {counts[0]} calls of {name} and {counts[1]} with hotop")
    return found


def row(cells: list[Any]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def roads(report: list[tuple[Any, ...]], ops: set[str]) -> tuple[int, int, int]:
    """Calls per road, summed over the package's own ops."""
    counts = [r[2:] for r in report if r[0].partition(".")[0] in ops]
    return tuple(map(sum, zip(*counts, strict=True))) if counts else (0, 0, 0)  # type: ignore[return-value]


def uncounted(found: dict[str, Any]) -> dict[str, int]:
    """Per op, eager calls that PyTorch's profiler saw less those that hotop counted, unless equal.

    Negative where a torch function mode or a subclass of Tensor handles the call and calls again:
    hotop counts both calls, the dispatcher is reached once.
    """
    missing = {}
    for name, calls in found["eager calls"].items():
        counted = sum(roads(found["eager report"], {name}))
        if calls != counted:
            missing[name] = calls - counted
    return missing


def exercise(package: str, pin: dict[str, Any], modes: list[str], details: bool) -> bool:
    """Runs a package in all modes, prints its lines; whether all was equal."""
    title = " ".join(pin["requirements"])
    try:
        python = make(BUILT / package, pin["requirements"])
    except subprocess.CalledProcessError as error:
        print(f"{title}: pip ended with exit code {error.returncode}", file=sys.stderr)
        return False
    plain = run(python, package, "plain")
    if isinstance(plain, str):
        print(f"{title}: the run without hotop failed: {plain}", file=sys.stderr)
        return False
    unstable = differences(
        {k: v for k, v in plain["results"].items() if k in plain["again"]}, plain["again"]
    )
    good = not unstable
    for line in unstable:
        print(f"{title}: not the same twice even without hotop: {line}", file=sys.stderr)
    ops, calls = set(plain["calls"]), sum(plain["calls"].values())
    print(row([title, MEANING["plain"], len(plain["results"]), len(ops), calls, *[""] * 5]))
    for mode in modes:
        other = run(python, package, mode)
        if isinstance(other, str):
            print(row([title, MEANING[mode], *[""] * 7, "failed"]))
            print(f"{title}, {MEANING[mode]}: {other}", file=sys.stderr)
            good = False
            continue
        wrong = checked(plain, other)
        counts = roads(other["report"], ops)
        if not any(counts):
            wrong.append("hotop saw no call: is it disabled?")
        seen, total = len(other["calls"]), sum(other["calls"].values())
        verdict = f"no: {len(wrong)}" if wrong else "yes"
        steps, missing = len(other["results"]), uncounted(other)
        around = sum(max(difference, 0) for difference in missing.values())
        cells = [title, MEANING[mode], steps, seen, total, *counts, around, verdict]
        print(row(cells), flush=True)
        for line in wrong:
            print(f"{title}, {MEANING[mode]}: {line}", file=sys.stderr)
        if details:
            for name, how, direct, boxed, pytorch in sorted(other["report"]):
                print(f"    {name} ({how}): {direct} direct, {boxed} boxed, {pytorch} by PyTorch")
            for name, difference in sorted(missing.items()):
                what = (
                    "eager calls on no road" if difference > 0 else "calls made again by a handler"
                )
                print(f"    {name}: {abs(difference)} {what}")
            for name, why in sorted(other["left"].items()):
                print(f"    left: {name}: {why}")
        good = good and not wrong
    return good


def main() -> int:
    """Entry of `python -m tools.third_party`."""
    pins = tomllib.loads(PINS.read_text())
    packages = pins["packages"]
    parser = argparse.ArgumentParser(prog="python -m tools.third_party", description=__doc__)
    parser.add_argument("package", nargs="*", help=f"of {', '.join(packages)}; default: all")
    parser.add_argument("--list", action="store_true", help="what runs, and what could not and why")
    parser.add_argument("--plain", action="store_true", help="only the runs without hotop")
    parser.add_argument("--mode", choices=MODES[1:], action="append", help="default: all")
    parser.add_argument("--details", action="store_true", help="a line per op, and what was left")
    arguments = parser.parse_args()
    if arguments.list:
        for pin in packages.values():
            print(f"{' '.join(pin['requirements'])}: {pin['how']}")
        for one in pins["unable"]:
            print(f"cannot run: {one['package']}: {one['reason']}")
        return 0
    for package in arguments.package:
        if package not in packages:
            parser.error(f"no package '{package}'; there are {', '.join(packages)}")
    modes = [] if arguments.plain else arguments.mode or list(MODES[1:])
    print(row(HEADS), row(["---"] * len(HEADS)), sep="\n", flush=True)
    chosen = arguments.package or list(packages)
    good = [exercise(package, packages[package], modes, arguments.details) for package in chosen]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
