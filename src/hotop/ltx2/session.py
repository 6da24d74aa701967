"""One run: the model made and converted, a denoising, every setting measured and accounted for."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

import hotop
from hotop.demo.progress import Progress
from hotop.ltx2 import kernels as kernel_sets
from hotop.ltx2.attribution import Attribution, TightTax, attribute, measure_tight
from hotop.ltx2.kernels import KERNEL_NAMES, OP_NAMES, REAL, TRIVIAL
from hotop.ltx2.measure import Phase, Setting, Workload, run_once, run_phase, warm_up
from hotop.ltx2.model import build_model, make_conditions, make_noise
from hotop.ltx2.programs import (
    GRAD_MODES,
    Program,
    Switchboard,
    bare_program,
    compiled_program,
    eager_program,
    recording_program,
)
from hotop.ltx2.tuned import tuned_variants
from hotop.ltx2.variants import (
    HOTOP,
    PLAIN,
    PLAIN_AGAIN,
    Variant,
    hotop_namespace,
    variants,
)
from hotop.ltx2.widths import LINEARS_PER_BLOCK, Width
from hotop.nvfp4 import record_amax

BARE = "bare kernels"
TIGHT_ROUNDS = 60
SEED = 0


@dataclass(frozen=True)
class Options:
    """What a run is asked for.

    Attributes:
        width: Sizes of the model.
        blocks: Transformer blocks.
        steps: Denoising steps.
        rounds: Repetitions of the denoising in each setting.
        settings: The phases to measure.
        copies: How often each program is compiled. Where its objects happen to lie in memory moves
            a compiled step by some percent, and every round takes the next copy.
        is_short: So few steps that noise may be larger than a goal; then the verdict says so.
    """

    width: Width
    blocks: int
    steps: int
    rounds: int
    settings: Sequence[Setting]
    copies: int = 1
    is_short: bool = False


@dataclass
class Result:
    """Everything one run found.

    Attributes:
        options: What was asked for.
        converted: Linears that were converted.
        calls: Op calls a step, by op.
        video: Latents at the end, hotop and real kernels, [1, tokens, channels].
        audio: The audio's.
        relative_error: How far these video latents are from those of the float32 model.
        off_direct: Calls of hotop's that would not be direct, with the reason.
        phases: The measured settings.
        tight: The tax in tight loops, by kernel, grad mode and whether there is a tuner.
        accounts: The attribution of each phase.
    """

    options: Options
    converted: int
    calls: dict[str, int]
    video: Tensor
    audio: Tensor
    relative_error: float
    off_direct: list[str] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    tight: dict[tuple[str, str, bool], TightTax] = field(default_factory=dict)
    accounts: list[Attribution] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        """What makes the run a failure: outputs that differ, graphs compiled again."""
        found = [line for phase in self.phases for line in phase.differences]
        expected = self.options.blocks * LINEARS_PER_BLOCK
        if {self.converted, *self.calls.values()} != {expected}:
            found.append(
                f"{self.converted} linears and {self.calls} calls, expected {expected} of each"
            )
        for phase in self.phases:
            title = phase.setting.title
            if phase.recompiles:
                found.append(f"{title}: {phase.recompiles} graphs were compiled again")
            if phase.misses:
                found.append(f"{title}: {phase.misses} look-ups of a tuner found no choice")
            programs = len(phase.compile_s) * phase.copies
            if phase.compile_s and phase.graphs != programs:
                found.append(f"{title}: {phase.graphs} graphs for {programs} programs")
        return found + [f"not direct: {line}" for line in self.off_direct]


def all_settings(*, compiled: bool, tuner: bool = False) -> list[Setting]:
    """Every combination of kernel, grad mode and, if asked for, compilation and tuner.

    The tuner's look-up is measured with the trivial kernel alone.
    """
    found = [
        Setting(kernel, grad_mode, is_compiled)
        for is_compiled in ((False, True) if compiled else (False,))
        for kernel in KERNEL_NAMES
        for grad_mode in GRAD_MODES
    ]
    if tuner:
        found += [replace(s, tuner=True) for s in found if s.kernel == TRIVIAL]
    return found


def quick_settings(*, compiled: bool, tuner: bool = False) -> list[Setting]:
    """The settings that say most: trivial kernels under no_grad, eager and compiled."""
    chosen = all_settings(compiled=compiled, tuner=tuner)
    return [s for s in chosen if s.kernel == TRIVIAL and s.grad_mode == "no_grad"]


def prepare(options: Options, progress: Progress) -> tuple[Workload, Result]:
    """Build, calibrate and convert the model, denoise with hotop and the real kernels."""
    width = options.width
    model = build_model(width, options.blocks, SEED)
    conditions, noise = make_conditions(width, SEED + 1), make_noise(width, SEED + 2)
    with torch.no_grad():
        board = Switchboard(model)
        work = Workload(board, conditions, noise, options.steps, options.rounds, options.copies)
        reference = work.start()
        with (
            record_amax(model.transformer_blocks) as amax,
            progress.phase("calibrating", options.steps, timed=False) as advance,
        ):
            for _ in range(options.steps):
                reference.step(model, conditions)
                advance()
        board.convert(amax)
        with progress.phase("denoising", options.steps, timed=False) as advance:
            hot = variants(REAL)[HOTOP]
            track = run_once(work, eager_program(hot), advance)
        distance = (track.video - reference.video).norm() / reference.video.norm()
        calls = count_calls(work)
    result = Result(options, len(board.converted), calls, track.video, track.audio, float(distance))
    return work, result


def count_calls(work: Workload) -> dict[str, int]:
    """Count the op calls of one step."""
    calls: Counter[str] = Counter()
    warm_up(work, recording_program(kernel_sets.load(TRIVIAL), calls, {}))
    return {name: calls[name] for name in OP_NAMES}


def record_arguments(work: Workload, kernel_name: str) -> dict[str, list[tuple[Any, ...]]]:
    """Keep the arguments of every op call of one step."""
    arguments: dict[str, list[tuple[Any, ...]]] = {}
    warm_up(work, recording_program(kernel_sets.load(kernel_name), Counter(), arguments))
    return arguments


def run(options: Options, progress: Progress) -> Result:
    """Do everything.

    Raises:
        ImportError: ``hotop._nvfp4`` is not built.
    """
    work, result = prepare(options, progress)
    for setting in options.settings:
        with GRAD_MODES[setting.grad_mode]():
            arguments = record_arguments(work, setting.kernel)
            made = variants_of(setting)
            if setting.tuner:
                tuned_variants(setting.kernel).tune(arguments)
            phase = _measure(setting, made, work, progress)
            result.off_direct += indirect_calls(setting, made, arguments)
            key = (setting.kernel, setting.grad_mode, setting.tuner)
            if key not in result.tight:
                given = {name: calls[0] for name, calls in arguments.items()}
                context = GRAD_MODES[setting.grad_mode]
                result.tight[key] = measure_tight(made, given, context, TIGHT_ROUNDS)
        result.phases.append(phase)
        result.accounts.append(attribute(phase, result.calls, result.tight[key]))
    return result


def variants_of(setting: Setting) -> dict[str, Variant]:
    """The variants that a setting compares, the plain functions among them."""
    made = variants(setting.kernel)
    if setting.tuner:
        return {
            PLAIN: made[PLAIN],
            HOTOP: made[HOTOP],
            **tuned_variants(setting.kernel).variants,
        }
    return made


def indirect_calls(
    setting: Setting,
    made: Mapping[str, Variant],
    arguments: Mapping[str, Sequence[tuple[Any, ...]]],
) -> list[str]:
    """List the calls, of all those of a step, that hotop would not make directly, and why."""
    if not hotop.is_native():
        return []
    found = []
    for name, op in made[setting.after].ops.items():
        for given in arguments[name]:
            road = hotop.explain(op, *given)
            if not road.direct:
                found.append(f"{name} ({setting.title}): {road.reason}")
    return sorted(set(found))


def _measure(
    setting: Setting, made: Mapping[str, Variant], work: Workload, progress: Progress
) -> Phase:
    compile_s: dict[str, float] = {}
    graphs = counters["stats"]["unique_graphs"]
    if setting.compiled:
        # Inductor would see through plain functions; bare kernels stand for them.
        base, copies = BARE, work.copies
        names = [name for name in made if name != PLAIN]
        programs: dict[str, list[Program]] = {name: [] for name in names}
        title = f"compiling, {setting.grad_mode}, {setting.kernel}" + ", tuner" * setting.tuner
        draw = random.Random(0)
        with progress.phase(title, len(names) * copies, timed=False) as advance:
            for _ in range(copies):
                for name in draw.sample(names, len(names)):
                    program = compiled_program(made[name])
                    seconds = warm_up(work, program)
                    compile_s[name] = compile_s.get(name, 0.0) + seconds / copies
                    programs[name].append(program)
                    advance()
        kernels = kernel_sets.load(setting.kernel)
        namespace = hotop_namespace(setting.kernel)
        programs[BARE] = [bare_program(one, namespace, kernels) for one in programs[HOTOP]]
    else:
        base, copies = PLAIN, 1
        programs = {name: [eager_program(variant)] for name, variant in made.items()}
        programs[PLAIN_AGAIN] = programs[PLAIN]
    graphs = counters["stats"]["unique_graphs"] - graphs
    for each in programs.values():
        for program in each:
            warm_up(work, program)
    misses = tuned_variants(setting.kernel).misses() if setting.tuner else 0
    with progress.phase(setting.title, work.rounds * work.steps) as advance:
        phase = run_phase(setting, base, programs, work, advance)
    phase.compile_s, phase.copies, phase.graphs = compile_s, copies, graphs
    if setting.tuner:
        phase.misses = tuned_variants(setting.kernel).misses() - misses
    return phase
