"""Timed denoising: all programs step by step in turn, equal in their outputs or reported."""

from __future__ import annotations

import gc
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter_ns, thread_time_ns

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from hotop.ltx2.denoise import Track, start
from hotop.ltx2.model import Conditions
from hotop.ltx2.programs import Program, Switchboard, same
from hotop.ltx2.tuned import HOTOP_TUNER, PYTHON_TUNER
from hotop.ltx2.variants import CUSTOM_OP, HOTOP

CPU = "cpu"
WALL = "wall"
CLOCKS = (CPU, WALL)

# CPython keeps a thread's frames in chunks of 16 KiB and frees a chunk when its last frame
# returns. A call that happens to start at a chunk's end pays for a new one every time. Steps
# run at these depths in turn, about 2 KiB apart, so that no variant is unlucky in all of them.
_DEPTHS = 8
_FRAMES_PER_DEPTH = 20


@dataclass(frozen=True)
class Setting:
    """Under what a phase runs.

    Attributes:
        kernel: ``"trivial"`` or ``"real"``.
        grad_mode: ``"no_grad"`` or ``"inference_mode"``.
        compiled: Whether the blocks are compiled.
        tuner: Whether the ops have a tuner in their body.
    """

    kernel: str
    grad_mode: str
    compiled: bool
    tuner: bool = False

    @property
    def before(self) -> str:
        """The program that hotop's is compared with."""
        return PYTHON_TUNER if self.tuner else CUSTOM_OP

    @property
    def after(self) -> str:
        """Hotop's program."""
        return HOTOP_TUNER if self.tuner else HOTOP

    @property
    def title(self) -> str:
        """What tables call it."""
        return (
            f"{'compiled' if self.compiled else 'eager'}, {self.grad_mode}, {self.kernel} kernel"
            + (", tuner" if self.tuner else "")
        )


@dataclass
class Phase:
    """What was measured under one setting.

    Attributes:
        setting: The setting.
        base: The program without any registration: plain functions, compiled bare kernels.
        samples_ns: Step times by clock and program; the same place is the same step.
        differences: Where outputs were not equal.
        compile_s: Seconds to compile, by program; the mean of its copies.
        copies: How often each program was compiled.
        graphs: Graphs that were compiled for all programs together.
        recompiles: Graphs that were compiled after the first step of each program.
        misses: Look-ups of the tuners that found no choice.
    """

    setting: Setting
    base: str
    samples_ns: dict[str, dict[str, list[int]]]
    differences: list[str] = field(default_factory=list)
    compile_s: dict[str, float] = field(default_factory=dict)
    copies: int = 1
    graphs: int = 0
    recompiles: int = 0
    misses: int = 0

    @property
    def names(self) -> list[str]:
        """The programs."""
        return list(self.samples_ns[CPU])

    def median_ms(self, name: str, clock: str = CPU) -> float:
        """The median step of a program."""
        return statistics.median(self.samples_ns[clock][name]) / 1e6

    def minimum_ms(self, name: str, clock: str = CPU) -> float:
        """The shortest step of a program."""
        return min(self.samples_ns[clock][name]) / 1e6

    def paired_ms(self, name: str, base: str, clock: str = CPU) -> float:
        """The median over the steps of what `name` took more than `base` in the same step."""
        samples = self.samples_ns[clock]
        return (
            statistics.median(
                one - other for one, other in zip(samples[name], samples[base], strict=True)
            )
            / 1e6
        )

    def noise(self) -> float:
        """By what part of itself a step of the base differs from its next one, median, CPU time."""
        samples = self.samples_ns[CPU][self.base]
        changes = [abs(after / before - 1) for before, after in pairwise(samples)]
        return statistics.median(changes) if changes else math.inf

    def ratio(self, name: str, base: str, clock: str = CPU) -> float:
        """The median over the steps of how many times as long `name` took as `base`."""
        samples = self.samples_ns[clock]
        return statistics.median(
            one / other for one, other in zip(samples[name], samples[base], strict=True)
        )


@dataclass(frozen=True)
class Workload:
    """What every phase runs: the model, its start, how long, and compiled how often."""

    board: Switchboard
    conditions: Conditions
    noise: tuple[Tensor, Tensor]
    steps: int
    rounds: int
    copies: int = 1

    def start(self) -> Track:
        """Begin a denoising."""
        return start(*self.noise, self.steps, self.conditions.width.video_tokens)


def run_once(work: Workload, program: Program, on_step: Callable[[], None]) -> Track:
    """Denoise to the end with one program."""
    track = work.start()
    work.board.show(program)
    for _ in range(work.steps):
        track.step(work.board.model, work.conditions)
        on_step()
    return track


def warm_up(work: Workload, program: Program) -> float:
    """Run a first step, which compiles what is to be compiled; return its seconds."""
    began = perf_counter_ns()
    work.board.show(program)
    track = work.start()
    _entered(program, lambda: track.step(work.board.model, work.conditions))
    return (perf_counter_ns() - began) / 1e9


def run_phase(
    setting: Setting,
    base: str,
    programs: Mapping[str, Sequence[Program]],
    work: Workload,
    on_step: Callable[[], None],
) -> Phase:
    """Time every program in every step, in an order drawn anew, and compare their latents.

    A fixed order, even one that turns, would give each program the same predecessor every time,
    and a program runs faster after one that shares code with it: a few percent were seen.

    The garbage collector runs as it does in a program: what a registration allocates, it collects
    too.

    Args:
        setting: What the programs were made for; its grad mode is already entered.
        base: The name of the program without registration; all others are compared with it.
        programs: The programs, warm; of several copies each round takes the next one.
        work: What to run.
        on_step: Called after every step of all programs.
    """
    phase = Phase(setting, base, {clock: {name: [] for name in programs} for clock in CLOCKS})
    graphs_before = counters["stats"]["unique_graphs"]
    draw = random.Random(0)
    number = 0
    gc.collect()
    for number_of_round in range(work.rounds):
        tracks = {name: work.start() for name in programs}
        for step in range(work.steps):
            for name in draw.sample(list(programs), len(programs)):
                copies = programs[name]
                program = copies[number_of_round % len(copies)]
                depth = number % _DEPTHS * _FRAMES_PER_DEPTH
                wall, cpu = timed_step(work, program, tracks[name], depth)
                phase.samples_ns[WALL][name].append(wall)
                phase.samples_ns[CPU][name].append(cpu)
            expected = (tracks[base].video, tracks[base].audio)
            phase.differences += [
                f"{setting.title}: step {step + 1}: {name} differs from {base}"
                for name, track in tracks.items()
                if not same(expected, (track.video, track.audio))
            ]
            number += 1
            on_step()
    phase.recompiles = counters["stats"]["unique_graphs"] - graphs_before
    return phase


def timed_step(work: Workload, program: Program, track: Track, depth: int) -> tuple[int, int]:
    """Do one step; return its wall and its thread CPU time in ns.

    Args:
        work: What to run.
        program: As what.
        track: The denoising to advance.
        depth: Frames to put below.
    """
    work.board.show(program)
    times = (0, 0)

    def timed() -> None:
        nonlocal times
        model, conditions = work.board.model, work.conditions
        wall, cpu = perf_counter_ns(), thread_time_ns()
        track.step(model, conditions)
        cpu = thread_time_ns() - cpu
        times = perf_counter_ns() - wall, cpu

    _entered(program, lambda: _at_depth(depth, timed))
    return times


def _entered(program: Program, call: Callable[[], None]) -> None:
    if program.enter is not None:
        program.enter()
    try:
        call()
    finally:
        if program.leave is not None:
            program.leave()


def _at_depth(frames: int, call: Callable[[], None]) -> None:
    if frames:
        _at_depth(frames - 1, call)
    else:
        call()


def single_thread() -> int:
    """Hold PyTorch to one thread, for steady host times; return how many it had."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    return threads
