"""One case: a drawn tunable, its calls while it is tuned and after, with files and threads."""

from __future__ import annotations

import collections
import contextlib
import gc
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from tools.fuzz_tuner import judge
from tools.fuzz_tuner.arguments import Holder, Recipe, entered
from tools.fuzz_tuner.observe import Observed, differences, observe
from tools.fuzz_tuner.tactics import Offer
from tools.fuzz_tuner.tunables import Drawn, draw

import hotop
from hotop.tuner._profile import _is_no_index

_ROWS = (0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 9, 12, 16, 17, 20, 24, 25, 33)


@dataclass
class Report:
    """What a case did, and each difference as (title, lines)."""

    keys: int = 0
    calls: int = 0
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    findings: list[tuple[str, list[str]]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Call:
    """A call that was tuned, and how it was drawn."""

    style: int
    lay: int
    rows: int
    recipe: Recipe


class Case:
    """A case that is running."""

    def __init__(self, seed: int, say: Callable[[str], None]) -> None:
        self.rng = Random(seed)
        self.report = Report()
        self.say = say
        self.among_threads = self.rng.random() < 0.08
        self.drawn = draw(self.rng, among_threads=self.among_threads, name=f"fuzz_tuner::c{seed}")
        self.is_op = self.drawn.kernel.is_op and not self.drawn.has_meta and self.rng.random() < 0.3
        if "dict" in self.drawn.kernel.returns:
            self.is_op = False
        self.tuned, self.usual = self._roads(self.drawn)
        self.keys: list[Call] = []
        # Wrong tactics that were accepted before their fault showed; and above the last bucket?
        self.unmet: set[tuple[str, bool]] = set()
        # Calls whose key has a choice that serves it whatever is asked.
        self.settled: set[Call] = set()

    def _roads(self, drawn: Drawn) -> tuple[Any, Any]:
        if not self.is_op:
            return drawn.tunable, drawn.usual
        changed = drawn.kernel.mutates
        tuned = hotop.custom_op(drawn.name, drawn.tunable, mutates_args=changed)
        return tuned, hotop.custom_op(drawn.name + "_usual", drawn.usual, mutates_args=changed)

    def found(self, title: str, lines: list[str], recipe: Recipe) -> None:
        """Keep a difference."""
        kernel = self.drawn.kernel.name
        context = [f"op {kernel}, {'op' if self.is_op else 'call'}, {recipe.context}"]
        context += [f"{name}={value}" for name, value in recipe.values.items()]
        context += [f"room {room}" for room in recipe.rooms]
        offers = {name: offer.fault or "right" for name, offer in self.drawn.offers.items()}
        dims = {p.name: dict(p.buckets) for p in self.drawn.tunable._parameters if p.buckets}
        context += [f"offers {offers}", f"dims {dims}"]
        self.report.findings.append((title, [*lines, *context]))
        self.say(f"DIFFERENCE {title}: {lines[:1]}")

    def compare(self, tuned: Any, recipe: Recipe, title: str, *, alone: bool = True) -> Observed:
        """Make a call on both sides; return what the op does."""
        seed = self.rng.getrandbits(32)
        offers = self.drawn.offers.values()
        calls = {offer.name: (offer.calls, offer.strayed) for offer in offers}
        theirs = observe(self.usual, recipe, seed, alone=alone)
        ours = observe(tuned, recipe, seed, alone=alone)
        self.report.calls += 1
        lines = differences(ours, theirs, exact=self.drawn.kernel.exact)
        served = [o for o in offers if o.calls > calls[o.name][0]]
        if any(o.strayed > calls[o.name][1] for o in offers):
            lines.append("a tactic served a call for which its applies says no")
        is_later = title != "in tuning"
        if lines and is_later and any(self._is_limit(offer, recipe) for offer in served):
            self.report.counts["limit: shows only after tuning"] += 1
        elif lines and self.drawn.allowed and ours.error == theirs.error != "":
            # What a call that raises has changed by then is the tactic's, and the default is not
            # allowed here.
            self.report.counts["limit: raises on another way"] += 1
        elif lines:
            by = f" ({', '.join(o.name + ' ' + o.fault for o in served)})" if served else ""
            self.found(f"{title}{by}", lines, recipe)
        return theirs

    def _is_limit(self, offer: Offer, recipe: Recipe) -> bool:
        """Return whether tuning never met what is wrong with a tactic; docs/tuner.md says so."""
        is_above = self._is_above(recipe)
        by_key = offer.by_key
        if offer.fault == "refuses many rows":
            # Above the last bucket any size may come; whole numbers may be indices, so that no
            # smaller sizes are run.
            by_key = not is_above and all(map(_is_no_index, recipe.make().values.values()))
        # Among threads nobody sees what the one that measures met.
        is_unmet = self.among_threads or (offer.name, is_above) in self.unmet
        return is_unmet and not by_key

    def _is_above(self, recipe: Recipe) -> bool:
        """Return whether a call has more rows than the last bucket."""
        spots = [recipe.values[name] for name in self.drawn.kernel.in_rows]
        spots = [s for one in spots for s in (one.parts if isinstance(one, Holder) else (one,))]
        rows = [spot.shape[0] for spot in spots if spot is not None and spot.shape]
        return 0 <= self.drawn.last < max(rows, default=0)

    # In tuning.

    def tune(self, call: Call, recipe: Recipe, said: list[str]) -> None:
        """Make a call inside the block, and judge what the tuner found."""
        made = recipe.make()
        if self.is_op:  # its kernel gets lists for tuples
            made.args = tuple(list(v) if type(v) is tuple else v for v in made.args)
            made.kwargs = {k: list(v) if type(v) is tuple else v for k, v in made.kwargs.items()}
        with entered(recipe.context):
            before = judge.known_choice(self.drawn, made.args, made.kwargs)
            shown = {name: offer.shown for name, offer in self.drawn.offers.items()}
            del said[:]
        usual = self.compare(self.tuned, recipe, "in tuning")
        with entered(recipe.context):
            after = judge.known_choice(self.drawn, made.args, made.kwargs)
        if after is not None and after.tactic != "asked":
            self.settled.add(call)
        found = judge.verdict(before, after, said)
        shown = {name: o.shown - shown[name] for name, o in self.drawn.offers.items()}
        self._count(found, shown, self._is_above(recipe))
        for line in judge.problems(self.drawn, found, shown, usual, recipe):
            self.found(line, [str(found)], recipe)

    def _count(self, found: judge.Verdict, shown: dict[str, int], is_above: bool) -> None:
        counts = self.report.counts
        if found.choice is not None:
            self.report.keys += 1
            for name, offer in self.drawn.offers.items():
                if name in found.choice.tried:
                    what = f"accepted before it showed: {offer.fault}" if offer.fault else "right"
                    counts[what] += 1
                    if offer.fault and not shown[name]:
                        self.unmet.add((name, is_above))
            counts[f"winner: {found.choice.tactic[:5]}"] += 1
        for name in found.refused.keys() & self.drawn.offers.keys():
            offer = self.drawn.offers[name]
            counts[f"refused: {offer.fault}" if offer.fault else "refused in part"] += 1
        if found.unproven:
            counts["nothing proven"] += 1
        if found.not_tuned:
            counts["not tuned"] += 1

    def draw_call(self) -> Call:
        """Draw a new call."""
        style, lay = self.rng.getrandbits(32), self.rng.getrandbits(32)
        rows = self.rng.choice(_ROWS)
        return Call(style, lay, rows, self._recipe(style, lay, rows))

    def _recipe(self, style: int, lay: int, rows: int) -> Recipe:
        return self.drawn.recipe(style, lay, rows, self.rng.getrandbits(32), is_op=self.is_op)

    # After tuning.

    def after(self, tuned: Any, title: str) -> None:
        """Call the tuned keys with other data, other sizes of their buckets, other layouts."""
        for call in self.keys:
            hits = self.drawn.tunable.hits
            self.compare(tuned, call.recipe, title)
            if call in self.settled and self.drawn.tunable.hits == hits:
                self.found(f"{title} a tuned key is missed", [], call.recipe)
            self.compare(tuned, call.recipe.with_other_data(self.rng), title)
            rows = self.rng.choice(_ROWS)
            if self.drawn.has_bucket and self.rng.random() < 0.5:
                rows = max(0, call.rows + self.rng.randrange(-3, 4))
            lay = self.rng.getrandbits(32)
            self.compare(tuned, self._recipe(call.style, call.lay, rows), title)
            self.compare(tuned, self._recipe(call.style, lay, call.rows), title)


class _Ear(logging.Handler):
    """Hears what the tuner logs."""

    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextlib.contextmanager
def hearing(action: str) -> Iterator[list[str]]:
    """Collect what is warned and logged, while warnings are shown or errors."""
    said: list[str] = []
    ear = _Ear(said)
    logger = logging.getLogger("hotop")
    logger.addHandler(ear)
    propagate, logger.propagate = logger.propagate, False
    with warnings.catch_warnings():
        warnings.simplefilter(action)  # type: ignore[arg-type]
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=UserWarning)
        warnings.showwarning = lambda message, *_, **__: said.append(str(message))
        try:
            yield said
        finally:
            logger.removeHandler(ear)
            logger.propagate = propagate


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Leave the process as it was, whatever tactics that won have left behind."""
    interval, limit = sys.getswitchinterval(), sys.getrecursionlimit()
    directory = os.environ.get("HOTOP_TUNER_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HOTOP_TUNER_DIR"] = folder
        hotop.tuner.clear()
        try:
            yield
        finally:
            hotop.tuner.clear()
            if directory is None:
                del os.environ["HOTOP_TUNER_DIR"]
            else:
                os.environ["HOTOP_TUNER_DIR"] = directory
            put_back()
            sys.setswitchinterval(interval)
            sys.setrecursionlimit(limit)


def put_back() -> None:
    """Set the settings that faults change."""
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    torch.set_autocast_enabled("cpu", False)
    torch.autograd.set_detect_anomaly(False)
    torch.set_flush_denormal(False)
    torch.set_float32_matmul_precision("highest")
    gc.enable()


def run_case(seed: int, say: Callable[[str], None] = lambda text: None) -> Report:
    """Run the case of a seed."""
    from tools.fuzz_tuner import phases

    put_back()
    case = Case(seed, say)
    action = "error" if case.rng.random() < 0.15 else "always"
    with restored(), hearing(action) as said:
        path = None if case.rng.random() < 0.5 else Path(tempfile.mkdtemp()) / "choices.json"
        try:
            phases.run(case, path, said)
        finally:
            if path is not None:
                for file in path.parent.iterdir():
                    file.unlink()
                path.parent.rmdir()
    return case.report
