"""A run of many cases in worker processes; failures and crashes belong to their seeds."""

from __future__ import annotations

import collections
import hashlib
import json
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tools.worker import worker_lines

CASES_PER_PROCESS = 150
MOST_FAILURES = 500  # then a run ends early
SILENCE = 180.0  # seconds without a word from a worker: it hangs


def case_seed(master: int, index: int) -> int:
    """Return the seed of the index-th case of a run."""
    digest = hashlib.sha256(f"{master}/{index}".encode()).digest()
    return int.from_bytes(digest[:6], "big")


@dataclass
class Failure:
    """A difference, a crash or a hang, and the words that replay it."""

    seed: int
    step: int | None
    title: str
    lines: list[str]

    @property
    def replay(self) -> str:
        """What `--replay` takes."""
        return str(self.seed) if self.step is None else f"{self.seed}:{self.step}"


@dataclass
class Totals:
    """The sum of all reports."""

    calls: int = 0
    cases: int = 0
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[Failure] = field(default_factory=list)


def work(seeds: list[int], spoil: str) -> None:
    """Be a worker: run the cases and say on standard output what is found."""
    from tools.fuzz.case import run_case

    def tell(**words: Any) -> None:
        print(json.dumps(words), flush=True)

    for seed in seeds:
        tell(begin=seed)
        report = run_case(
            seed, spoil=spoil, say=lambda text: tell(step=text) if text[0] != "d" else None
        )
        tell(end=seed, calls=report.calls, counts=report.counts, findings=report.findings)


def words_of(seeds: list[int], spoil: str) -> Iterator[dict[str, Any]]:
    """Start a worker on these seeds and yield what it says."""
    work = ("--work", json.dumps(seeds), "--spoil", spoil)
    return worker_lines("tools.fuzz", *work, silence=SILENCE)


def _run_batch(
    seeds: list[int], spoil: str, say: Callable[[Any], None], stop: threading.Event
) -> None:
    """Run cases; after a crash go on behind the seed that crashed."""
    while seeds and not stop.is_set():
        current, step, done = None, "", 0
        for words in words_of(seeds, spoil):
            if stop.is_set():
                return
            if "begin" in words:
                current, step = words["begin"], ""
            elif "step" in words:
                step = words["step"]
            elif "end" in words:
                done, current = done + 1, None
                say(words)
            elif current is not None:
                kind = "hang" if words["hang"] else f"crash (exit status {words['exit']})"
                where = words["stderr"]
                number = step.partition(":")[0]
                at = int(number) if number.isdigit() else None
                say({"failure": Failure(current, at, f"{kind} at {step}", where)})
                done += 1
            elif words["exit"] != 0:
                text = words["stderr"][-8:]
                say({"failure": Failure(seeds[-1], None, "worker failed between cases", text)})
        seeds = seeds[done:] if done else []


def run_campaign(
    calls: int,
    master: int,
    jobs: int = 1,
    spoil: str = "",
    batch: int = 0,
    progress: Callable[[Totals], None] = lambda totals: None,
    on_failure: Callable[[Failure], None] = lambda failure: None,
) -> Totals:
    """Run cases until so many calls were compared.

    Args:
        calls: How many calls.
        master: All seeds of the run come from it.
        jobs: Worker processes at a time.
        spoil: A break of `compare.SPOILS` for the hotop side (a self-test).
        batch: Cases per process; by default fewer in short runs.
        progress: Gets the totals after each case.
        on_failure: Gets each failure when it is found.

    Returns:
        The totals.
    """
    totals = Totals()
    said: queue.Queue[Any] = queue.Queue()
    stop = threading.Event()
    numbers = iter(range(10**9))
    size = batch or max(1, min(CASES_PER_PROCESS, calls // 80 // jobs))
    lock = threading.Lock()

    def serve() -> None:
        while not stop.is_set():
            with lock:
                seeds = [case_seed(master, next(numbers)) for _ in range(size)]
            _run_batch(seeds, spoil, said.put, stop)

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    try:
        while totals.calls < calls:
            words = said.get()
            failures = [words["failure"]] if "failure" in words else []
            if "end" in words:
                totals.calls += words["calls"]
                totals.cases += 1
                totals.counts.update(words["counts"])
                failures = [Failure(words["end"], *found) for found in words["findings"]]
            for failure in failures:
                totals.failures.append(failure)
                on_failure(failure)
            progress(totals)
            if len(totals.failures) >= MOST_FAILURES:
                break
    finally:
        stop.set()
    for thread in threads:
        thread.join(30)
    return totals
