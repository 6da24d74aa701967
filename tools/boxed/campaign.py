"""A run over all items in worker processes; a crash is put down to its call, and tried again."""

from __future__ import annotations

import collections
import json
import os
import queue
import random
import resource
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tools.worker import worker_lines

SILENCE = 60.0  # seconds without a word from a worker: its call hangs
MEMORY = 8 << 30  # bytes of address space of a worker: wild sizes must not take the machine
TRIES = 2  # of a call that crashed
MORE_TRIES = 8  # of PyTorch's own call, before a crash is put down to hotop
ALONE = 3  # findings of an item that are made again, each in a process of its own
CRASHES = 2  # of an item; then the rest of it is left


@dataclass
class Finding:
    """A difference or a crash, and the words that replay it."""

    item: str
    step: str
    title: str
    lines: list[str]

    @property
    def replay(self) -> str:
        """What `--replay` takes."""
        return f"{self.item}:{self.step}"


@dataclass
class Totals:
    """The sum of all reports."""

    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    overloads: dict[str, collections.Counter[str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # crashes and hangs of PyTorch itself
    items: int = 0


def work(job: dict[str, Any]) -> None:
    """Be a worker: compare the items of a job and say on standard output what is found."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from tools.boxed.compare import PRINTED, Printed
    from tools.boxed.work import prepare, run_item

    out = os.fdopen(os.dup(1), "w")  # what operators print goes elsewhere
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    def tell(**words: Any) -> None:
        out.write(json.dumps(words) + "\n")
        out.flush()

    prepare()
    PRINTED.append(Printed())
    seen = collections.Counter[str]()
    cap = job["cap"]
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)  # some operators write files
        for item in job["items"]:
            tell(begin=item)
            options = {key: job[key] for key in ("number", "spoil", "only")}
            options["after"] = job["after"] if item == job["items"][0] else ""
            report = run_item(
                item,
                job["seed"],
                **options,
                say=lambda step: tell(step=step),
                most=lambda name: bool(cap) and seen[name] >= cap,
            )
            seen.update({name: tally["calls"] for name, tally in report.overloads.items()})
            tell(
                end=item,
                counts=report.counts,
                overloads=report.overloads,
                findings=report.findings,
            )
        os.chdir("/")


def words_of(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Start a worker on this job and yield what it says."""
    return worker_lines("tools.boxed", "--work", json.dumps(job), silence=SILENCE)


def _ends_badly(job: dict[str, Any]) -> str:
    for words in words_of(job):
        if "exit" in words:
            return "hang" if words["hang"] else f"exit {words['exit']}" if words["exit"] else ""
    return ""


def _judged(job: dict[str, Any], item: str, step: str, words: dict[str, Any]) -> dict[str, Any]:
    """Say whether a call that crashed does so on PyTorch's side alone."""
    what = "hangs" if words["hang"] else f"crashes (exit status {words['exit']})"
    alone = {**job, "items": [item], "only": step, "after": ""}
    of_pytorch = {**alone, "spoil": "PyTorch"}
    also = {"note": f"{item}:{step} {what}, and so does PyTorch's own call"}
    if any(_ends_badly(of_pytorch) for _ in range(TRIES)):
        return also
    if job["spoil"] == "PyTorch" or not any(_ends_badly(alone) for _ in range(TRIES)):
        return {"note": f"{item}:{step} {what} once, not when made alone"}
    if any(_ends_badly(of_pytorch) for _ in range(MORE_TRIES)):  # a damaged heap shows by chance
        return also
    return {"finding": Finding(item, step, f"{what} only when accelerated", words["stderr"])}


def _seen_alone(item: str, step: str, job: dict[str, Any]) -> bool:
    """Tell whether a difference is there too when its call is made alone, in a new process."""
    alone = {**job, "items": [item], "only": step, "after": "", "cap": 0}
    for words in words_of(alone):
        if "end" in words:
            return bool(words["findings"])
    return True  # it crashed


def _confirmed(words: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """Make an item's first findings notes where they came from what ran before (a bad heap)."""
    kept, notes = [], []
    for index, (step, title, lines) in enumerate(words["findings"]):
        if index < ALONE and not _seen_alone(words["end"], step, job):
            notes.append(f"{words['end']}:{step} differs once, not when made alone: {title}")
        else:
            kept.append((step, title, lines))
    return {**words, "findings": kept, "notes": notes}


def _run_batch(
    job: dict[str, Any], say: Callable[[dict[str, Any]], None], stop: threading.Event
) -> None:
    """Compare items; after a crash go on behind the call that crashed."""
    items, after = list(job["items"]), ""
    crashes = collections.Counter[str]()
    starts = 0  # of workers that ended without a call
    while items and not stop.is_set():
        current, step = items[0], ""
        for words in words_of({**job, "items": items, "after": after}):
            if stop.is_set():
                return
            if "begin" in words:
                current, step = words["begin"], ""
            elif "step" in words:
                step = words["step"]
            elif "end" in words:
                items, after = items[1:], ""
                say(_confirmed(words, job))
            elif items:
                if not step:
                    tail = "; ".join(words["stderr"][-3:])
                    ended = "hang" if words["hang"] else f"exit status {words['exit']}"
                    say({"note": f"{current}: {ended} before a call: {tail}"})
                    starts += 1
                    if starts > 2:
                        items, after, starts = items[1:], "", 0
                    continue
                say(_judged(job, current, step, words))
                crashes[current] += 1
                after = step
                if crashes[current] >= CRASHES:
                    say({"note": f"{current}: {CRASHES} crashes, the rest of it is left"})
                    items, after = items[1:], ""


def batched(items: list[str], batch: int, seed: int) -> list[list[str]]:
    """Return the items in batches of one source (`op_db` takes seconds to import), mixed up."""
    mixed = random.Random(seed)
    batches = []
    for source in sorted({item.partition("/")[0] for item in items}):
        some = [item for item in items if item.partition("/")[0] == source]
        mixed.shuffle(some)
        batches += [some[start : start + batch] for start in range(0, len(some), batch)]
    mixed.shuffle(batches)
    return batches


def run_campaign(
    items: list[str],
    *,
    seed: int,
    jobs: int = 1,
    number: int = 4,
    cap: int = 0,
    batch: int = 80,
    spoil: str = "",
    progress: Callable[[Totals], None] = lambda totals: None,
    on_finding: Callable[[Finding], None] = lambda finding: None,
) -> Totals:
    """Compare all items.

    Args:
        items: What `work.run_item` takes.
        seed: All draws come from it.
        jobs: Worker processes at a time.
        number: Forms and states of each call.
        cap: Calls of one overload per worker; 0 for no limit.
        batch: Items per worker.
        spoil: A break of `compare.SPOILS` (a self-test), or "PyTorch" on both sides.
        progress: Gets the totals after each item.
        on_finding: Gets each finding.

    Returns:
        The totals.
    """
    job = {"seed": seed, "number": number, "spoil": spoil, "only": "", "after": "", "cap": cap}
    totals = Totals()
    batches: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    for some in batched(items, batch, seed):
        batches.put(some)
    said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            try:
                some = batches.get_nowait()
            except queue.Empty:
                break
            _run_batch({**job, "items": some}, said.put, stop)
        said.put({"served": True})

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    serving = jobs
    try:
        while serving:
            words = said.get()
            findings: list[Finding] = []
            if "served" in words:
                serving -= 1
            elif "note" in words:
                totals.notes.append(words["note"])
            elif "finding" in words:
                findings = [words["finding"]]
            else:
                totals.items += 1
                totals.notes += words["notes"]
                totals.counts.update(words["counts"])
                for name, tally in words["overloads"].items():
                    totals.overloads.setdefault(name, collections.Counter()).update(tally)
                findings = [Finding(words["end"], *found) for found in words["findings"]]
            for finding in findings:
                totals.findings.append(finding)
                on_finding(finding)
            progress(totals)
    finally:
        stop.set()
    for thread in threads:
        thread.join(30)
    return totals
