"""The command line: a long run, a replay of one case, checks that are broken on purpose."""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __package__ in (None, ""):  # `python tools/fuzz_tuner`
    sys.path.insert(0, str(ROOT))

from tools.fuzz_tuner import campaign  # noqa: E402

STORE = ROOT / "build" / "fuzz-tuner-failures.txt"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz_tuner", description=__doc__)
    parser.add_argument("--keys", type=int, default=50_000, help="keys to tune")
    parser.add_argument("--seed", type=int, help="seed of the run; a fresh one by default")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--failures", type=Path, default=STORE, help="file that keeps failures")
    parser.add_argument("--replay", metavar="SEED:CASE", help="run one case again, in words")
    parser.add_argument(
        "--breaks",
        nargs="*",
        metavar="NAME",
        help="break the tuner's checks on purpose, each in turn, until a difference is found",
    )
    parser.add_argument("--limit", type=int, default=3000, help="keys for each break")
    parser.add_argument("--broken", default="", help="with --replay: the break to replay")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    return parser


def _quiet() -> None:
    import torch

    torch.set_num_threads(1)
    logging.raiseExceptions = False


def _replay(words: str, broken: str) -> int:
    from tools.fuzz_tuner.breaks import BREAKS
    from tools.fuzz_tuner.case import run_case

    if broken:
        BREAKS[broken]()
    seed, _, number = words.partition(":")
    report = run_case(campaign.case_seed(int(seed), int(number)))
    for title, lines in report.findings:
        print(f"\n--- {words} {title}")
        print("\n".join(lines))
    print(f"\n{report.keys} keys, {report.calls} calls, {len(report.findings)} differences")
    return bool(report.findings)


def _breaks(names: list[str], seed: int, limit: int) -> int:
    """Print a line per break; return how many were not found."""
    from tools.fuzz_tuner.breaks import BREAKS

    missed = 0

    def is_of_the_break(failure: campaign.Failure) -> bool:
        return failure.title not in campaign.titles_of(failure.replay)

    for name in names or list(BREAKS):
        started = time.monotonic()
        totals = campaign.run_campaign(
            limit, seed, broken=name, batch=400, most_failures=1, counts=is_of_the_break
        )
        seconds = time.monotonic() - started
        if totals.failures:
            first = totals.failures[0]
            how = f"found after {totals.keys} keys ({first.replay} {first.title[:100]})"
        else:
            missed += 1
            how = f"NOT FOUND in {totals.keys} keys"
        print(f"{name}: {how}, {seconds:.0f} s", flush=True)
    return missed


def _keep(path: Path, failure: campaign.Failure) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"{failure.replay}\t{failure.title}\n")
        file.writelines(f"    {line[:2000]}\n" for line in failure.lines)


def _run(arguments: argparse.Namespace, seed: int) -> int:
    started = said_at = time.monotonic()
    print(f"seed {seed}; differences go to {arguments.failures}", flush=True)

    def progress(totals: campaign.Totals) -> None:
        nonlocal said_at
        now = time.monotonic()
        if now - said_at > 30:
            said_at = now
            rate = totals.keys / (now - started)
            found = len(totals.failures)
            print(f"{totals.keys:,} keys, {rate:.0f}/s, {found} differences", flush=True)

    def on_failure(failure: campaign.Failure) -> None:
        _keep(arguments.failures, failure)
        print(f"{failure.replay} {failure.title[:300]}", flush=True)

    try:
        totals = campaign.run_campaign(
            arguments.keys, seed, arguments.jobs, progress=progress, on_failure=on_failure
        )
    except KeyboardInterrupt:
        print("stopped; what was found is kept")
        return 130
    print(
        f"{totals.keys:,} keys of {totals.cases:,} ops, {totals.calls:,} calls compared in "
        f"{time.monotonic() - started:.0f} s, seed {seed}: {len(totals.failures)} differences"
    )
    for name, count in sorted(totals.counts.items()):
        print(f"  {name}: {count:,}")
    for failure in totals.failures[:20]:
        print(f"replay: python -m tools.fuzz_tuner --replay {failure.replay}")
    return int(bool(totals.failures))


def main() -> int:
    """Run the command."""
    arguments = _parser().parse_args()
    if arguments.work:
        _quiet()
        task = json.loads(arguments.work)
        campaign.work(task["master"], task["numbers"], task["broken"])
        return 0
    if arguments.replay:
        _quiet()
        return _replay(arguments.replay, arguments.broken)
    seed = arguments.seed
    if seed is None:
        seed = random.SystemRandom().randrange(10**9)
    if arguments.breaks is not None:
        return int(bool(_breaks(arguments.breaks, seed, arguments.limit)))
    return _run(arguments, seed)


if __name__ == "__main__":
    sys.exit(main())
