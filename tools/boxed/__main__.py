"""The command line: a run over all overloads, a replay of one call, or a worker of a run."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __package__ in (None, ""):  # `python tools/boxed`
    sys.path.insert(0, str(ROOT))

from tools.boxed import campaign  # noqa: E402

STORE = ROOT / "build" / "boxed-findings.txt"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.boxed", description=__doc__)
    parser.add_argument("--seed", type=int, help="seed of the run; a fresh one by default")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--number", type=int, default=4, help="forms and states of each call")
    parser.add_argument("--cap", type=int, default=60, help="calls of an overload per worker")
    parser.add_argument("--every", type=int, default=1, help="take every so-manieth item only")
    parser.add_argument("--only", default="", help="take items whose name has this in it")
    parser.add_argument("--findings", type=Path, default=STORE, help="file that keeps differences")
    parser.add_argument("--json", type=Path, help="file for the figures of the run")
    parser.add_argument("--replay", metavar="ITEM:STEP", help="make one call again, in words")
    parser.add_argument("--spoil", default="", help="break the fast side on purpose (self-test)")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    return parser


def all_items() -> list[str]:
    """Return every OpInfo, every overload of the dispatcher, and those of TorchScript alone."""
    from tools.boxed import overloads, record

    schemas = [*overloads.dispatcher_names(), *overloads.script_names()]
    return [*(f"op_db/{n}" for n in record.infos()), *(f"schema/{n}" for n in schemas)]


def _replay(arguments: argparse.Namespace, seed: int) -> int:
    item, _, step = arguments.replay.partition(":")
    # An overload's name has colons too.
    head, found, rest = arguments.replay.partition(":aten::")
    if found and head.startswith("op_db/"):
        item, step = head, f"aten::{rest}"
    elif item == "schema/aten":
        item, _, step = arguments.replay.rpartition(":aten::")
        step = f"aten::{step}"
    job = {
        **{"items": [item], "only": step, "seed": seed, "number": arguments.number},
        **{"spoil": arguments.spoil, "after": "", "cap": 0},
    }
    bad = False
    for words in campaign.words_of(job):
        for _, title, lines in words.get("findings", ()):
            print(f"{title}\n" + "\n".join(f"  {line}" for line in lines))
            bad = True
        if "end" in words:
            print(words["counts"], words["overloads"])
        if words.get("exit"):
            print(f"ended with {words['exit']}", *words["stderr"], sep="\n")
            bad = True
    return int(bad)


def figures(totals: campaign.Totals) -> dict[str, object]:
    """Return the numbers that the run publishes."""
    from tools.boxed import overloads

    dispatcher = set(overloads.dispatcher_names())
    script = set(overloads.script_names())
    tried = {name for name, tally in totals.overloads.items() if tally["calls"]}
    answered = {name for name, tally in totals.overloads.items() if tally["answered"]}
    boxed = {name for name, tally in totals.overloads.items() if tally["boxed"]}
    roads = {
        road: sum(tally[road] for tally in totals.overloads.values())
        for road in ("direct", "boxed", "pytorch")
    }
    return {
        "dispatcher overloads": len(dispatcher),
        "tried": len(tried & dispatcher),
        "answered at least once": len(answered & dispatcher),
        "boxed at least once": len(boxed & dispatcher),
        "TorchScript overloads": len(script),
        "TorchScript tried": len(tried & script),
        "calls compared": totals.counts["calls"],
        "answered": totals.counts["answered"],
        "refused": totals.counts["refused"],
        "PyTorch differs from itself": totals.counts["PyTorch differs from itself"],
        "roads": roads,
        "differences": len(totals.findings),
        "notes (crashes of PyTorch, what is not seen again)": len(totals.notes),
        "not tried": sorted(dispatcher - tried),
        "states": {k: v for k, v in totals.counts.most_common() if k.startswith("state")},
    }


def _run(arguments: argparse.Namespace, seed: int) -> int:
    items = [item for item in all_items() if arguments.only in item][:: arguments.every]
    started = time.monotonic()
    said_at = started
    print(f"seed {seed}, {len(items):,} items; differences go to {arguments.findings}", flush=True)

    def progress(totals: campaign.Totals) -> None:
        nonlocal said_at
        if time.monotonic() - said_at > 30:
            said_at = time.monotonic()
            calls = totals.counts["calls"]
            print(
                f"{totals.items:,} of {len(items):,} items, {calls:,} calls, "
                f"{calls / (said_at - started):.0f}/s, {len(totals.findings)} differences",
                flush=True,
            )

    def on_finding(finding: campaign.Finding) -> None:
        arguments.findings.parent.mkdir(parents=True, exist_ok=True)
        with arguments.findings.open("a") as file:
            file.write(f"--seed {seed} --replay '{finding.replay}'\t{finding.title}\n")
            file.writelines(f"    {line}\n" for line in finding.lines)

    totals = campaign.run_campaign(
        items,
        seed=seed,
        jobs=arguments.jobs,
        number=arguments.number,
        cap=arguments.cap,
        spoil=arguments.spoil,
        progress=progress,
        on_finding=on_finding,
    )
    published = figures(totals)
    for name, value in published.items():
        print(f"{name}: {value}")
    for note in totals.notes:
        print(note)
    for finding in totals.findings[:40]:
        print(f"--seed {seed} --replay '{finding.replay}'  {finding.title}")
    if arguments.json:
        tallies = {name: dict(tally) for name, tally in sorted(totals.overloads.items())}
        arguments.json.write_text(
            json.dumps({**published, "notes": totals.notes, "overloads": tallies}, indent=1)
        )
    return bool(totals.findings)


def main() -> int:
    """Run the command."""
    arguments = _parser().parse_args()
    if arguments.work:
        campaign.work(json.loads(arguments.work))
        return 0
    given = arguments.seed
    seed = random.SystemRandom().randrange(10**6) if given is None else given
    return _replay(arguments, seed) if arguments.replay else _run(arguments, seed)


if __name__ == "__main__":
    sys.exit(main())
