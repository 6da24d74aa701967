"""One case: an op drawn from a seed, and many drawn steps on it."""

from __future__ import annotations

import collections
import gc
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from tools.fuzz import faster
from tools.fuzz.calls import Call
from tools.fuzz.compare import SPOILS, Found, compare, in_thread
from tools.fuzz.explained import explanation
from tools.fuzz.grammar import Definition, draw_definition
from tools.fuzz.registrations import Registrations
from tools.fuzz.situations import Situation
from tools.fuzz.stage import STAGE, Behaviour, draw_behaviour, in_form, make_kernel

from twin import FACTORY, RIGHT_FACTORY, Twin, differences, left_factory
from twin_existing import switch
from twin_observe import NAMESPACES, describe_error, normalise, recorded

STEPS = 120
# hotop's side is an op of PyTorch's that is accelerated, given back, accelerated again.
IS_ACCELERATED = FACTORY == "twin_existing:custom_op"
_MANY = "the kernel returned "


@dataclass
class Report:
    """What a case found.

    Attributes:
        calls: Calls compared (each made on both ops).
        counts: How many calls were direct, refused, explained (by name) and so on.
        findings: Unexplained differences: (step, title, lines).
    """

    seed: int
    calls: int = 0
    counts: collections.Counter = field(default_factory=collections.Counter)
    findings: list[tuple[int, str, list[str]]] = field(default_factory=list)


def _other(x: torch.Tensor, n: int = 2) -> torch.Tensor:
    return x * n


def companion() -> list[Any]:
    """Return the op that kernels call beside their own, defined once in a process."""
    if not STAGE.others:
        STAGE.others = Twin(_other, record=False, name="fuzz_companion").ops
    return STAGE.others


class Case:
    """Runs the steps of one seed.

    Args:
        seed: All that is drawn comes from it; each step has a stream of its own.
        steps: How many steps.
        only: Make the calls of this step only; registrations before it stay.
        spoil: Name of a break of `compare.SPOILS` for the hotop side.
        say: Gets each step in words before it is made.
    """

    def __init__(
        self,
        seed: int,
        steps: int = STEPS,
        only: int | None = None,
        spoil: str = "",
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Draw the definition."""
        self.seed, self.steps, self.only = seed, steps, only
        self.spoil = SPOILS[spoil] if spoil else None
        self.say = say or (lambda text: None)
        self.report = Report(seed)
        self.name = f"fuzz_{seed}"
        self.definition = draw_definition(Random(f"{seed}/definition"))
        self.registrations = Registrations(self.definition, self.name)
        self.ops: list[Any] = []
        self.check_explain = False

    def run(self) -> Report:
        """Define the ops and make every step."""
        companion()
        warn_always = torch.is_warn_always_enabled()
        torch.set_warn_always(True)  # else a warn-once goes to the first of the two only
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if not self._define(self.definition):
                    return self.report
                for step in range(self.steps if self.only is None else self.only + 1):
                    self._guarded(step)
        finally:
            self.registrations.undo()
            for op in self.ops:
                op._lib._destroy()
            STAGE.ops = []
            torch.set_warn_always(warn_always)
            if self.seed % 16 == 0:
                gc.collect()
        return self.report

    def _guarded(self, step: int) -> None:
        try:
            self._step(step)
        except BaseException:  # a kernel's KeyboardInterrupt too, where a context lets it out
            self._find(step, "the step itself raised", traceback.format_exc().splitlines())

    def _both(self, step: int, words: str, change: Callable[[int], object]) -> bool:
        """Do something to both ops; errors must be equal. True if there was none."""
        outcomes: list[Any] = []
        for side in (0, 1):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    change(side)
                    error = None
                except Exception as raised:
                    error = describe_error(raised, [])
                    error.pop("frames")
            said = [(w.category.__name__, normalise(str(w.message))) for w in caught]
            outcomes.append({"error": error, "warnings": said})
        self.report.calls += 1
        lines = differences(outcomes[0], outcomes[1])
        if lines:
            self._find(step, f"{words}: registration differs", lines)
        return outcomes[1]["error"] is None

    def _find(self, step: int, title: str, lines: list[str]) -> None:
        self.report.findings.append((step, f"{self.definition.schema()} {title}", lines))

    def _define(self, definition: Definition) -> bool:
        function = make_kernel(definition)
        self.check_explain = definition.form == "function"
        if definition.form == "function":
            function = recorded(function, varargs=definition.varargs)
        else:
            function = in_form(definition, function)
        overload = definition.overload and f".{definition.overload}"
        made: list[Any] = [None, None]

        def define(side: int) -> None:
            factory = (left_factory, RIGHT_FACTORY)[side]
            made[side] = factory(
                f"{NAMESPACES[side]}::{self.name}{overload}",
                function,
                mutates_args=definition.mutates_args,
                schema=definition.schema() if definition.written else None,
                device_types=definition.device_types,
                tags=definition.tags,
            )

        self.say(f"define {definition}")
        if not self._both(-1, "definition", define) or None in made:
            self.report.counts["definition refused"] += 1
            return False
        self.ops = made
        schemas = [normalise(str(op._opoverload._schema)) for op in made]
        if schemas[0] != schemas[1]:
            self._find(-1, "schemas differ", schemas)
        for op in made:
            self.registrations.first(Random(f"{self.seed}/rules"), op)
        return True

    def _step(self, step: int) -> None:
        if IS_ACCELERATED and Random(f"{self.seed}/{step}/switch").random() < 0.08:
            switch(self.ops[1])
            self.say(f"{step}: accelerated or given back")
            self.report.counts["switches"] += 1
        random = Random(f"{self.seed}/{step}")
        if random.random() < 0.06:
            words, change = self.registrations.draw(random)
            self.say(f"{step}: register {words}")
            self._both(step, words, lambda side: change(side, self.ops[side]))
            self.report.counts["registrations"] += 1
            return
        if random.random() < 0.004:
            self.say(f"{step}: redefine")
            self.registrations.undo()
            old = self.ops
            self._define(self.definition)
            del old
            return
        if self.only is not None and step != self.only:
            return
        call = Call(random, self.definition)
        situation = Situation(random, call.ordinary, call.names)
        behaviour = draw_behaviour(random, len(self.definition.returns))
        self.say(f"{step}: {call}; {situation}; {behaviour}")
        if behaviour.count:
            # Fakes, vmap rules and overrides with a wrong count crash on both: only kernels here.
            plain = situation.plain and not self.definition.special and not call.defect
            if plain and call.ordinary and not self.registrations.ever_overridden:
                self._miscount(step, call, behaviour)
            return
        check_explain = self.check_explain and not self.registrations.ever_overridden

        def observed() -> Found:
            return compare(
                self.ops,
                call,
                situation,
                behaviour,
                self.definition,
                check_explain=check_explain,
                spoil=self.spoil,
            )

        found = in_thread(observed) if situation.in_thread else observed()
        self.report.calls += 1
        self._count(found)
        if not found.lines:
            return
        found.device_list = self.registrations.device_list
        found.later_kernel = self.registrations.later_kernel
        found.removed_override = self.registrations.removed
        name = explanation(found)
        if name:
            self.report.counts[f"explained: {name}"] += 1
        else:
            self._find(step, f"{call}; {situation}; {behaviour}", found.lines)

    def _count(self, found: Found) -> None:
        counts = self.report.counts
        counts[
            "direct" if found.direct else "by PyTorch" if found.direct is False else "road?"
        ] += 1
        if found.left["error"] is not None:
            counts["raised"] += 1
        if found.situation.observer:
            counts["observed"] += 1
            counts["observed and direct"] += bool(found.direct)

    def _miscount(self, step: int, call: Call, behaviour: Behaviour) -> None:
        """A wrong number of returns corrupts PyTorch's stack: hotop alone must refuse it."""
        if IS_ACCELERATED:
            return  # an accelerated custom_op has PyTorch's own kernels, on all roads but one
        STAGE.behaviour, STAGE.side, STAGE.depth, STAGE.ops = behaviour, 1, 0, self.ops
        behaviour.act, behaviour.produce = "nothing", ("fresh",) * 5
        behaviour.container = "as declared"
        args, kwargs = call.make()
        declared = len(self.definition.returns)
        expected = f"{_MANY}{declared + behaviour.count} values"
        text = "no error"
        try:
            self.ops[1](*args, **kwargs)
        except Exception as error:
            text = str(error)
        self.report.calls += 1
        self.report.counts["wrong number of returns"] += 1
        if text == "no error":
            self._find(step, f"{call}; returns {declared + behaviour.count}", [expected, text])


def run_case(seed: int, **options: Any) -> Report:
    """Run the case of one seed and return its report."""
    faster.install()
    return Case(seed, **options).run()
