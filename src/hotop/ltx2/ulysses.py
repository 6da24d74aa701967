"""`torchrun --nproc-per-node 2 -m hotop ltx2 --ulysses`: the tax when ranks share the video."""

from __future__ import annotations

import json
import random
import statistics
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from hotop.bench import machine
from hotop.bench.report import make_console
from hotop.bench.timing import gc_paused
from hotop.demo.progress import Progress
from hotop.ltx2 import kernels as kernel_sets
from hotop.ltx2.denoise import Track
from hotop.ltx2.kernels import GEMM, QUANTIZE, REAL
from hotop.ltx2.measure import Workload, single_thread, timed_step, warm_up
from hotop.ltx2.model import build_model, make_conditions, make_noise
from hotop.ltx2.programs import Switchboard, eager_program, recording_program
from hotop.ltx2.report import say
from hotop.ltx2.sequence_parallel import Spread, collectives, gather_tokens
from hotop.ltx2.session import SEED, Options, prepare
from hotop.ltx2.variants import CUSTOM_OP, DEFINE_IMPL, HOTOP, PLAIN, variants
from hotop.ltx2.widths import BLOCKS, WIDTHS

_COMPARED = (PLAIN, CUSTOM_OP, DEFINE_IMPL, HOTOP)
# Of the float32 model, before conversion. BLAS sums in another order for another number of rows;
# with NVFP4 such a last bit moves elements over the border between two codes, a step of up to a
# third of the element, so there the distance is only reported, beside NVFP4's own from float32.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class RankReport:
    """What one rank did and took with its part of the video; times in ms of thread CPU time.

    Attributes:
        ranks: Ranks that shared the video.
        rank: Which of them this is.
        video_tokens: Tokens it held.
        calls: Op calls a step.
        gemm_mflop: Millions of floating-point operations in its NVFP4 products, a step.
        collectives_ms: Median of what the collectives took of a step of plain functions.
        step_ms: Median step by variant.
        tax_ms: Median of the paired differences from the plain functions.
    """

    ranks: int
    rank: int
    video_tokens: int
    calls: dict[str, int]
    gemm_mflop: float
    collectives_ms: float
    step_ms: dict[str, float]
    tax_ms: dict[str, float]

    def share(self, name: str) -> float:
        """The part that is op tax of a variant's step without its collectives.

        A GPU's collectives run beside the host; gloo's are host time, and would hide what shrinks.
        """
        return self.tax_ms[name] / (self.step_ms[name] - self.collectives_ms)


@dataclass(frozen=True)
class Found:
    """What all ranks found.

    Attributes:
        options: What was asked for.
        reports: One rank alone, then each of the ranks that shared.
        float_distances: Relative distance of shared from alone, float32 model.
        distances: The same with NVFP4.
        relative_error: How far NVFP4's video latents are from float32's on one rank.
    """

    options: Options
    reports: list[RankReport]
    float_distances: dict[str, float]
    distances: dict[str, float]
    relative_error: float

    @property
    def equal(self) -> bool:
        """Whether the ranks' latents are those of one rank, up to the order of sums."""
        return max(self.float_distances.values()) <= TOLERANCE


def run(
    width_name: str,
    blocks: int | None,
    steps: int | None,
    rounds: int | None,
    quick: bool,
    json_path: Path | None,
) -> int:
    """Run on this rank of a torchrun; rank 0 prints.

    Returns:
        0, or 1 when the ranks' latents are not those of one rank.
    """
    threads = single_thread()
    dist.init_process_group("gloo")
    try:
        with torch.no_grad():
            options = Options(
                WIDTHS[width_name],
                blocks or (4 if quick else BLOCKS),
                steps or (3 if quick else 6),
                rounds or 2,
                (),
            )
            return _run(options, json_path)
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)


def _run(options: Options, json_path: Path | None) -> int:
    spread = Spread(dist.get_world_size(), dist.get_rank())
    console = make_console()
    console.quiet = spread.rank != 0
    progress = Progress(console)
    check = _float_distances(options, spread)
    work, result = prepare(options, progress)
    use = spread.install(work.board.model.transformer_blocks)

    alone, whole = _measure(work, progress, Spread(1, 0))
    use(True)
    shared, part = _measure(_shared_work(work, spread), progress, spread)
    use(False)

    reports: list[Any] = [None] * spread.ranks
    dist.all_gather_object(reports, shared)
    found = Found(
        options, [alone, *reports], check, _distances(part, whole, spread), result.relative_error
    )
    if spread.rank == 0:
        _print(console, found)
        if json_path:
            json_path.write_text(json.dumps(_to_json(found), indent=2) + "\n", encoding="utf-8")
    return 0 if found.equal else 1


def _shared_work(work: Workload, spread: Spread) -> Workload:
    video, audio = work.noise
    return replace(
        work,
        conditions=spread.conditions(work.board.model, work.conditions),
        noise=(spread.part(video, dim=1), audio),
    )


def _float_distances(options: Options, spread: Spread) -> dict[str, float]:
    """Denoise with the float32 model alone and shared, and compare."""
    model = build_model(options.width, options.blocks, SEED)
    conditions = make_conditions(options.width, SEED + 1)
    board = Switchboard(model)
    noise = make_noise(options.width, SEED + 2)
    work = Workload(board, conditions, noise, options.steps, 1)
    whole = _denoise(work)
    use = spread.install(board.model.transformer_blocks)
    use(True)
    return _distances(_denoise(_shared_work(work, spread)), whole, spread)


def _denoise(work: Workload) -> Track:
    track = work.start()
    for _ in range(work.steps):
        track.step(work.board.model, work.conditions)
    return track


def _distances(part: Track, whole: Track, spread: Spread) -> dict[str, float]:
    video = gather_tokens(part.video, spread.ranks, dim=1)
    pairs = {"video": (video, whole.video), "audio": (part.audio, whole.audio)}
    return {name: float((a - b).norm() / b.norm()) for name, (a, b) in pairs.items()}


def _measure(work: Workload, progress: Progress, spread: Spread) -> tuple[RankReport, Track]:
    programs = {name: eager_program(variants(REAL)[name]) for name in _COMPARED}
    calls: Counter[str] = Counter()
    arguments: dict[str, list[tuple[Any, ...]]] = {}
    warm_up(work, recording_program(kernel_sets.load(REAL), calls, arguments))
    for program in programs.values():
        warm_up(work, program)
    samples: dict[str, list[float]] = {name: [] for name in programs}
    waited: list[float] = []
    draw = random.Random(0)
    title = "one rank" if spread.ranks == 1 else f"{spread.ranks} ranks"
    with progress.phase(title, work.rounds * work.steps) as advance:
        for _ in range(work.rounds):
            tracks = {name: work.start() for name in programs}
            for _ in range(work.steps):
                with gc_paused():
                    # Every rank in the same order: their collectives must meet.
                    for name in draw.sample(list(programs), len(programs)):
                        before = collectives.ns
                        _, cpu = timed_step(work, programs[name], tracks[name], 0)
                        samples[name].append(cpu / 1e6)
                        if name == PLAIN:
                            waited.append((collectives.ns - before) / 1e6)
                advance()
    taxes = {
        name: statistics.median(
            one - plain for one, plain in zip(samples[name], samples[PLAIN], strict=True)
        )
        for name in programs
    }
    report = RankReport(
        spread.ranks,
        spread.rank,
        tracks[PLAIN].video.shape[1],
        {name: calls[name] for name in (QUANTIZE, GEMM)},
        sum(map(_flop, arguments[GEMM])) / 1e6,
        statistics.median(waited),
        {name: statistics.median(times) for name, times in samples.items()},
        taxes,
    )
    return report, tracks[HOTOP]


def _flop(arguments: tuple[Any, ...]) -> float:
    act, weight = arguments[0], arguments[1]
    # Two elements a byte, a multiplication and an addition each.
    return 4.0 * act.numel() * weight.shape[0]


def _print(console: Console, found: Found) -> None:
    table = Table(
        title="Sequence parallel (Ulysses, gloo), eager, no_grad, real kernels; ms of CPU a step",
        title_justify="left",
    )
    table.add_column("rank", no_wrap=True)
    headers = ("video\ntokens", "NVFP4\nMFLOP", "op\ncalls", "collec-\ntives", *_COMPARED)
    for header in (*headers, "tax share\ncustom_op", "tax share\nhotop"):
        table.add_column(header, justify="right")
    for report in found.reports:
        table.add_row(
            "alone" if report.ranks == 1 else f"{report.rank} of {report.ranks}",
            str(report.video_tokens),
            f"{report.gemm_mflop:.1f}",
            str(sum(report.calls.values())),
            f"{report.collectives_ms:.1f}",
            *(f"{report.step_ms[name]:.1f}" for name in _COMPARED),
            f"{report.share(CUSTOM_OP):.1%}",
            f"{report.share(HOTOP):.1%}",
        )
    options, facts = found.options, machine.facts()
    console.print()
    say(console, f"PyTorch {facts['torch']}, {facts['cpu']}, one thread a rank, {facts['date']}")
    say(
        console,
        f"LTX-2's transformer, {options.blocks} blocks, {options.width.name} width, "
        "random weights.",
    )
    console.print(table)
    say(
        console,
        "Each rank holds a part of the video tokens and all of audio and text; each still makes "
        "every op call, so its work shrinks with the ranks and its tax does not. Shares are of the "
        "step without the collectives, which are host time on gloo only. CPU time leaves out the "
        "waiting for other ranks.",
    )
    say(
        console,
        f"Float32 latents of all ranks against one rank: "
        f"{'equal within' if found.equal else 'FAILED: not within'} {TOLERANCE:g} (relative "
        f"distance: {_listed(found.float_distances)}). NVFP4 latents: "
        f"{_listed(found.distances)}; NVFP4 itself is {found.relative_error:.1e} from float32.",
    )


def _listed(distances: dict[str, float]) -> str:
    return ", ".join(f"{name} {distance:.1e}" for name, distance in distances.items())


def _to_json(found: Found) -> dict[str, Any]:
    options = found.options
    return {
        "machine": machine.facts(),
        "width": asdict(options.width),
        "blocks": options.blocks,
        "steps": options.steps,
        "rounds": options.rounds,
        "ranks": [
            asdict(report) | {"tax_share": {name: report.share(name) for name in report.step_ms}}
            for report in found.reports
        ],
        "relative_distance_float32": found.float_distances,
        "relative_distance_nvfp4": found.distances,
        "nvfp4_relative_error": found.relative_error,
        "tolerance_float32": TOLERANCE,
        "equal": found.equal,
    }
