"""A run of many cases in worker processes; differences, crashes and hangs belong to their cases."""

from __future__ import annotations

import collections
import functools
import json
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tools.fuzz.campaign import case_seed
from tools.worker import worker_lines

CASES_PER_PROCESS = 100
MOST_FAILURES = 200  # then a run ends early
SILENCE = 120.0  # seconds without a word from a worker: it hangs


@dataclass
class Failure:
    """A difference, a crash or a hang, and the words that replay it."""

    replay: str
    title: str
    lines: list[str]


@dataclass
class Totals:
    """The sum of all reports."""

    keys: int = 0
    calls: int = 0
    cases: int = 0
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[Failure] = field(default_factory=list)


def work(master: int, numbers: list[int], broken: str = "") -> None:
    """Be a worker: run the cases and say on standard output what is found."""
    from tools.fuzz_tuner.breaks import BREAKS
    from tools.fuzz_tuner.case import run_case

    if broken:
        BREAKS[broken]()
    for number in numbers:
        print(json.dumps({"begin": number}), flush=True)
        report = run_case(case_seed(master, number))
        words = {
            "end": number,
            "keys": report.keys,
            "calls": report.calls,
            "counts": report.counts,
            "findings": report.findings,
        }
        print(json.dumps(words), flush=True)


def _run_batch(
    master: int, numbers: list[int], broken: str, say: Callable[[Any], None], stop: threading.Event
) -> None:
    """Run cases; after a crash go on behind the case that crashed."""
    while numbers and not stop.is_set():
        current, done = None, 0
        task = json.dumps({"master": master, "numbers": numbers, "broken": broken})
        for words in worker_lines("tools.fuzz_tuner", "--work", task, silence=SILENCE):
            if stop.is_set():
                return
            if "begin" in words:
                current = words["begin"]
            elif "end" in words:
                done, current = done + 1, None
                say(words)
            elif words["hang"] or words["exit"] != 0:
                kind = "hang" if words["hang"] else f"crash (exit status {words['exit']})"
                number = numbers[done] if current is None else current
                say({"failure": Failure(f"{master}:{number}", kind, words["stderr"][-40:])})
                done += 1
        numbers = numbers[done:] if done else []


@functools.cache
def titles_of(replay: str) -> set[str]:
    """Return what the whole tuner's run of a case finds."""
    master, number = map(int, replay.split(":"))
    said: list[Any] = []
    _run_batch(master, [number], "", said.append, threading.Event())
    return {title for words in said for title, _ in words.get("findings", [])}


def run_campaign(
    keys: int,
    master: int,
    jobs: int = 1,
    broken: str = "",
    batch: int = CASES_PER_PROCESS,
    most_failures: int = MOST_FAILURES,
    counts: Callable[[Failure], bool] = lambda failure: True,
    progress: Callable[[Totals], None] = lambda totals: None,
    on_failure: Callable[[Failure], None] = lambda failure: None,
) -> Totals:
    """Run cases until so many keys were tuned.

    Args:
        keys: How many tuned keys.
        master: All seeds of the run come from it.
        jobs: Worker processes at a time.
        broken: A break of `breaks.BREAKS`, to see that it is found.
        batch: Cases per process.
        most_failures: The run ends when so many were found.
        counts: Whether a failure is one.
        progress: Gets the totals after each case.
        on_failure: Gets each failure when it is found.

    Returns:
        The totals.
    """
    totals = Totals()
    said: queue.Queue[Any] = queue.Queue()
    stop = threading.Event()
    numbers = iter(range(10**9))
    lock = threading.Lock()

    def serve() -> None:
        while not stop.is_set():
            with lock:
                mine = [next(numbers) for _ in range(batch)]
            _run_batch(master, mine, broken, said.put, stop)

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    try:
        while totals.keys < keys and len(totals.failures) < most_failures:
            words = said.get()
            failures = [words["failure"]] if "failure" in words else []
            if "end" in words:
                totals.keys += words["keys"]
                totals.calls += words["calls"]
                totals.cases += 1
                totals.counts.update(words["counts"])
                replay = f"{master}:{words['end']}"
                failures = [Failure(replay, *found) for found in words["findings"]]
            for failure in filter(counts, failures):
                totals.failures.append(failure)
                on_failure(failure)
            progress(totals)
    finally:
        stop.set()
    for thread in threads:
        thread.join(30)
    return totals
