"""The demo's timed phases, eager and compiled: run and compare all variants, keep times."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._dynamo.utils import counters

from hotop.demo.generate import (
    Forward,
    Track,
    compiled_forward,
    eager_forward,
    first_difference,
    generate,
)
from hotop.demo.model import Decoder, KVCache, Shape
from hotop.demo.ops import CUSTOM_OP, OP_NAMES, PLAIN, OpSet
from hotop.demo.progress import Progress

# A second run of the plain functions: its distance from the first is what the clock cannot tell.
PLAIN_AGAIN = "plain again"
WARMUP_STEPS = 8


@dataclass(frozen=True)
class Workload:
    """What every phase runs: the model, how long, how often, and the seed of the sampling."""

    decoder: Decoder
    shape: Shape
    op_sets: Mapping[str, OpSet]
    positions: int
    rounds: int
    seed: int


@dataclass
class PhaseResult:
    """Times of each variant, and where the outputs that have to be equal were not."""

    step_ns: dict[str, list[int]]
    compared: list[str]
    differences: list[str]
    text: str
    compile_s: dict[str, float] = field(default_factory=dict)
    graphs: int = 0
    recompiles: int = 0

    def min_us(self, name: str) -> float:
        """The shortest step of a variant in microseconds."""
        return min(self.step_ns[name]) / 1e3

    def median_us(self, name: str) -> float:
        """The median step of a variant in microseconds."""
        return statistics.median(self.step_ns[name]) / 1e3


def observe_step(work: Workload) -> tuple[Counter[str], dict[str, tuple[Any, ...]]]:
    """Run one plain step; return how often it calls each op, and the arguments of one such call."""
    calls: Counter[str] = Counter()
    arguments: dict[str, tuple[Any, ...]] = {}

    def recorded(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[name] += 1
            arguments[name] = args
            return op(*args)

        return call

    plain = work.op_sets[PLAIN]
    ops = replace(plain, **{name: recorded(name, getattr(plain, name)) for name in OP_NAMES})
    first = torch.zeros(1, dtype=torch.int64)
    work.decoder(ops, first, first.clone(), KVCache(work.shape, work.positions))
    return calls, arguments


def run_eager(work: Workload, progress: Progress) -> PhaseResult:
    """Generate with every variant in eager mode; all must agree with the plain functions."""
    forwards = {name: eager_forward(work.decoder, ops) for name, ops in work.op_sets.items()}
    compared = list(forwards)
    forwards[PLAIN_AGAIN] = eager_forward(work.decoder, work.op_sets[PLAIN])
    return _run_rounds(work, forwards, compared, progress, "eager")


def run_compiled(work: Workload, progress: Progress) -> PhaseResult:
    """Compile and generate with every variant; those registered as ops must agree.

    Inductor sees through the plain functions, fuses them and so may round otherwise: they are
    timed but not compared.
    """
    forwards: dict[str, Forward] = {}
    compile_s: dict[str, float] = {}
    graphs_before = counters["stats"]["unique_graphs"]
    with progress.phase("compiling", len(work.op_sets), timed=False) as advance:
        for name, ops in work.op_sets.items():
            forwards[name] = compiled_forward(work.decoder, ops)
            began = time.perf_counter()
            # The first call compiles.
            generate({name: forwards[name]}, work.shape, work.positions, 1, work.seed)
            compile_s[name] = time.perf_counter() - began
            advance()
    graphs = counters["stats"]["unique_graphs"] - graphs_before
    compared = [CUSTOM_OP, *(name for name in forwards if name not in (PLAIN, CUSTOM_OP))]
    result = _run_rounds(work, forwards, compared, progress, "compiled")
    result.compile_s, result.graphs = compile_s, graphs
    result.recompiles = counters["stats"]["unique_graphs"] - graphs_before - graphs
    return result


def _run_rounds(
    work: Workload,
    forwards: Mapping[str, Forward],
    compared: list[str],
    progress: Progress,
    title: str,
) -> PhaseResult:
    def run(steps: int, on_step: Callable[[], object] = lambda: None) -> dict[str, Track]:
        return generate(forwards, work.shape, work.positions, steps, work.seed, on_step)

    reference = run(min(WARMUP_STEPS, work.positions))[compared[0]]
    step_ns: dict[str, list[int]] = {name: [] for name in forwards}
    differences = []
    with progress.phase(title, work.rounds * work.positions) as advance:
        for number in range(1, work.rounds + 1):
            tracks = run(work.positions, advance)
            if number == 1:
                reference = tracks[compared[0]]
            for name, track in tracks.items():
                step_ns[name] += track.step_ns
                difference = first_difference(reference, track) if name in compared else None
                if difference:
                    differences.append(f"{title}, round {number}: {name}: {difference}")
    return PhaseResult(step_ns, compared, differences, reference.text)
