"""The command line of the fuzzer: a long run, a replay of one seed, or a worker of a run."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __package__ in (None, ""):  # `python tools/fuzz`
    sys.path.insert(0, str(ROOT))

from tools.fuzz import campaign  # noqa: E402

STORE = ROOT / "build" / "fuzz-failures.txt"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("--calls", type=int, default=1_000_000, help="calls to compare")
    parser.add_argument("--seed", type=int, help="seed of the run; a fresh one by default")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--failures", type=Path, default=STORE, help="file that keeps failures")
    parser.add_argument("--replay", metavar="SEED[:STEP]", help="run one case again, in words")
    parser.add_argument("--spoil", default="", help="break hotop's side on purpose (self-test)")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    return parser


def _quiet() -> None:
    import logging

    import torch

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)


def _replay(words: str, spoil: str) -> int:
    from tools.fuzz.case import run_case

    seed, _, step = words.partition(":")
    report = run_case(
        int(seed), only=int(step) if step else None, spoil=spoil, say=lambda text: print(text)
    )
    for number, title, lines in report.findings:
        print(f"\n--- {seed}:{number} {title}")
        print("\n".join(lines))
    print(f"\n{report.calls} calls, {len(report.findings)} unexplained; {dict(report.counts)}")
    return bool(report.findings)


def _keep(path: Path, failure: campaign.Failure) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"{failure.replay}\t{failure.title}\n")
        file.writelines(f"    {line[:2000]}\n" for line in failure.lines)


def _run(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    seed = random.SystemRandom().randrange(10**9) if arguments.seed is None else arguments.seed
    console = Console()
    console.print(f"seed {seed}; failures go to {arguments.failures}")
    started = time.monotonic()
    columns = (
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} calls"),
        BarColumn(),
        TextColumn("{task.fields[rate]:.0f} calls/s, {task.fields[found]} differences"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=arguments.calls, rate=0.0, found=0)

        said_at = started

        def progress(totals: campaign.Totals) -> None:
            nonlocal said_at
            rate = totals.calls / (time.monotonic() - started)
            if not console.is_terminal and time.monotonic() - said_at > 30:
                said_at = time.monotonic()
                console.print(f"{totals.calls:,} calls, {rate:.0f}/s, {len(totals.failures)} found")
            bar.update(task, completed=totals.calls, rate=rate, found=len(totals.failures))

        def on_failure(failure: campaign.Failure) -> None:
            _keep(arguments.failures, failure)
            bar.console.print(f"{failure.replay} {failure.title[:300]}", markup=False)

        try:
            totals = campaign.run_campaign(
                arguments.calls,
                seed,
                arguments.jobs,
                arguments.spoil,
                progress=progress,
                on_failure=on_failure,
            )
        except KeyboardInterrupt:
            console.print("stopped; what was found is kept")
            return 130
    seconds = time.monotonic() - started
    console.print(
        f"{totals.calls:,} calls on {totals.cases:,} ops in {seconds:.0f} s "
        f"({totals.calls / seconds:.0f}/s), seed {seed}: {len(totals.failures)} unexplained"
    )
    for name, count in totals.counts.most_common():
        console.print(f"  {name}: {count:,}")
    for failure in totals.failures[:20]:
        console.print(f"replay: python -m tools.fuzz --replay {failure.replay}")
    return bool(totals.failures)


def main() -> int:
    """Run the command."""
    arguments = _parser().parse_args()
    if arguments.work:
        _quiet()
        campaign.work(json.loads(arguments.work), arguments.spoil)
        return 0
    if arguments.replay:
        _quiet()
        return _replay(arguments.replay, arguments.spoil)
    return _run(arguments)


if __name__ == "__main__":
    sys.exit(main())
