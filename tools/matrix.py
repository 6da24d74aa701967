"""``make matrix``: hotop on each pair of a PyTorch and a CPython, one line per pair at the end.

A pair gets a virtual environment and a build folder of its own, then the suite, 100,000 fuzzed
calls, and every ATen overload compared (`tools.boxed`). What fails is noted, and the rest goes on.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SEED = 13
STEPS = ("build", "suite", "fuzz", "boxed")
# What stands in the table of a step's output: the last match counts.
FIGURES = {
    "suite": r"^(?:=+ )?(\d+ (?:passed|failed|error).*?) in [\d.:]",
    "fuzz": r"^([\d,]+ calls.*)$",
    "boxed": r"^(calls compared: \d+|differences: \d+)$",
}


@dataclass
class Pair:
    """A PyTorch and a CPython, as ``2.14.1:python3.13``.

    Attributes:
        torch: The version of PyTorch.
        python: The interpreter, a name on the PATH or a path.
        results: What each step that ran ended with.
        failed: A step failed, or could not run.
    """

    torch: str
    python: str
    results: dict[str, str] = field(default_factory=dict)
    failed: bool = False

    @classmethod
    def parse(cls, text: str) -> Pair:
        """Read a pair; argparse says what it raises."""
        torch, colon, python = text.partition(":")
        if not (torch and colon and python):
            raise argparse.ArgumentTypeError(
                f"a pair is TORCH:PYTHON, as 2.14.1:python3.13: {text}"
            )
        return cls(torch, python)

    @property
    def name(self) -> str:
        """As a folder is named."""
        return f"{self.torch}-{Path(self.python).name}"

    def line(self) -> str:
        """Return the pair's line."""
        words = "; ".join(f"{step}: {result}" for step, result in self.results.items())
        return f"{'FAILED' if self.failed else 'ok':6}  {self.torch:8}{self.python}  {words}"


def commands(pair: Pair, venv: str, tests: list[str]) -> dict[str, list[str]]:
    """Return the command of each step."""
    python = f"{venv}/bin/python"
    make = ["make", f"VENV={venv}", f"PYTHON={pair.python}", f"TORCH=torch=={pair.torch}"]
    findings = f"build/matrix/{pair.name}"
    fuzz = f"--calls 100000 --seed {SEED} --failures {findings}/fuzz.txt".split()
    boxed = f"--number 2 --cap 8 --seed {SEED} --findings {findings}/boxed.txt".split()
    return {
        "build": [*make, "build"],
        "suite": [python, "-m", "pytest", *tests],
        "fuzz": [python, "-m", "tools.fuzz", *fuzz],
        "boxed": [python, "-m", "tools.boxed", *boxed],
    }


def figures(step: str, code: int, text: str) -> str:
    """Return a step's end in words."""
    found = re.findall(FIGURES[step], text, re.MULTILINE) if step in FIGURES else []
    last = ", ".join(found) if step == "boxed" else "".join(found[-1:])
    if code == 0:
        return last or "done"
    return f"{last}, exit code {code}" if last else f"exit code {code}"


def run(pair: Pair, venv: str, steps: list[str], tests: list[str]) -> None:
    """Run a pair's steps; a pair that cannot be built ends there."""
    folder = ROOT / "build" / "matrix" / pair.name
    folder.mkdir(parents=True, exist_ok=True)
    # A machine may cap torch by pip's configuration.
    environment = {**os.environ, "PIP_CONFIG_FILE": os.devnull}
    for step in steps:
        log = folder / f"{step}.txt"
        print(f"{pair.name}: {step}, into {log.relative_to(ROOT)}", flush=True)
        started = time.monotonic()
        with log.open("w") as file:
            code = subprocess.run(
                commands(pair, venv, tests)[step],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            ).returncode
        minutes = (time.monotonic() - started) / 60
        text = log.read_text(errors="replace")
        pair.results[step] = f"{figures(step, code, text)} ({minutes:.0f} min)"
        if code != 0:
            pair.failed = True
            pair.results[step] += f", see {log.relative_to(ROOT)}"
        if step == "build" and code != 0:
            return


def main() -> int:
    """Run the pairs; 1 when one failed."""
    parser = argparse.ArgumentParser(prog="make matrix", description=__doc__)
    parser.add_argument("pairs", nargs="+", type=Pair.parse, metavar="TORCH:PYTHON")
    parser.add_argument("--venv", default=".venv", help="virtual environments begin with this")
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=STEPS)
    parser.add_argument("--tests", nargs="+", default=["tests"], help="for pytest")
    arguments = parser.parse_args()
    for pair in arguments.pairs:
        run(pair, f"{arguments.venv}-{pair.name}", arguments.steps, arguments.tests)
        print(pair.line(), flush=True)
    print()
    for pair in arguments.pairs:
        print(pair.line())
    return int(any(pair.failed for pair in arguments.pairs))


if __name__ == "__main__":
    sys.exit(main())
