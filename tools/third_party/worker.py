"""Runs one package's workload in this process, in one mode, and writes the outcome to a file."""

from __future__ import annotations

import argparse
import importlib
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from tools.third_party.step import Step

# plain: no hotop. before: `install()`, then the package is imported. after: the other way round.
# aten: as "before", and PyTorch's own operators are accelerated too.
MODES = ("plain", "before", "after", "aten")


def flatten(value: Any) -> list[tuple[str, Any]]:
    """Gives the leaves of a step's result with their paths.

    Raises:
        TypeError: For a leaf that could not be compared bit for bit.
    """
    leaves, _ = pytree.tree_flatten_with_path(value)
    found = []
    for path, leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
                raise TypeError(f"{pytree.keystr(path)} is a {type(leaf).__name__}")
            leaf = leaf.detach().clone()
        elif not isinstance(leaf, (bool, int, float, str, type(None), torch.dtype)):
            raise TypeError(f"{pytree.keystr(path)} is a {type(leaf).__name__}")
        found.append((pytree.keystr(path), leaf))
    return found


def outcome(step: Step) -> list[tuple[str, Any]]:
    """Runs a step from a known state of the random numbers; an error is an outcome too."""
    torch.manual_seed(0)
    torch.compiler.reset()
    try:
        value = step.run()
    except Exception as error:
        if step.kind != "error":
            raise
        return [("raised", type(error).__name__), ("text", str(error))]
    if step.kind == "error":
        raise AssertionError(f"'{step.name}' did not raise")
    return flatten(value)


def observed(steps: list[Step], namespaces: tuple[str, ...]) -> tuple[dict[str, Any], Counter[str]]:
    """Runs the steps again under PyTorch's profiler and counts the calls that it saw.

    The profiler, not a dispatch mode: a mode would hide calls made inside of a kernel.
    """
    prefixes = tuple(f"{namespace}::" for namespace in namespaces)
    results, calls = {}, Counter[str]()
    for step in steps:
        with torch.autograd.profiler.profile() as profile:
            results[step.name] = outcome(step)
        calls.update(e.name for e in profile.function_events or () if e.name.startswith(prefixes))
    return results, calls


def covered(namespaces: tuple[str, ...]) -> tuple[list[tuple[Any, ...]], dict[str, str]]:
    """What `hotop.report()` says now: a row per op that was called, and what was left."""
    import hotop

    report = hotop.report()
    rows = [(op.name, op.how, op.direct, op.boxed, op.pytorch) for op in report.ops]
    prefixes = tuple(f"{namespace}::" for namespace in namespaces)
    return rows, {name: why for name, why in report.left.items() if name.startswith(prefixes)}


def work(name: str, mode: str) -> dict[str, Any]:
    """Runs a workload in one mode and returns everything that the comparison needs."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    workload = importlib.import_module(f"tools.third_party.{name}")
    if mode in ("before", "aten"):
        import hotop

        hotop.install()
    started = time.perf_counter()
    workload.load()
    loaded = time.perf_counter() - started
    if mode == "after":
        import hotop

        hotop.install()
    if mode == "aten":
        hotop.accelerate("aten")
    steps = list(workload.steps())
    if len({step.name for step in steps}) != len(steps):
        raise AssertionError("two steps have one name")
    last = [step for step in steps if step.kind == "once"]
    steps = [step for step in steps if step.kind != "once"]
    # A tracer calls ops that no profiler sees: what counts calls is told apart by it.
    compiled = [step for step in steps if step.kind == "compiled"]
    eager = [step for step in steps if step.kind != "compiled"]
    results = {step.name: outcome(step) for step in eager}
    found: dict[str, Any] = {"results": results, "loaded": loaded}
    if mode != "plain":
        found["eager report"], _ = covered(workload.NAMESPACES)
    results.update({step.name: outcome(step) for step in compiled})
    if mode != "plain":
        found["report"], found["left"] = covered(workload.NAMESPACES)
    found["again"], found["eager calls"] = observed(eager, workload.NAMESPACES)
    again, calls = observed(compiled, workload.NAMESPACES)
    found["again"].update(again)
    found["calls"] = found["eager calls"] + calls
    results.update({step.name: outcome(step) for step in last})
    return found


def main() -> None:
    """Entry of the process that runs one workload."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workload")
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.save(work(arguments.workload, arguments.mode), arguments.out)


if __name__ == "__main__":
    main()
