"""Times every op of the real population and describes the distribution of the tax."""

import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from hotop.bench.contenders import (
    CUSTOM_OP,
    DEFINE_IMPL,
    HOTOP,
    PLAIN,
    explain,
    make_loops,
    register,
)
from hotop.bench.population import (
    Record,
    load,
    make_arguments,
    make_kernel,
    make_keyword_arguments,
    mutated_names,
)
from hotop.bench.suite import tax_us
from hotop.bench.timing import Loop, Timing, gc_paused, quieter, time_calls, time_interleaved

__all__ = ["CONTENDERS", "OpResult", "PopulationFailure", "PopulationResult", "run_population"]

CONTENDERS = (CUSTOM_OP, DEFINE_IMPL, HOTOP)
QUICK_SAMPLE = 200

_LOOP_NS = 100_000
_POINTS = {"p10": 0.10, "median": 0.50, "p90": 0.90, "p99": 0.99}
# Below this a tax is not told apart from the timer's noise, so ratios count it as this much.
_SMALLEST_TAX_US = 0.005


@dataclass(frozen=True)
class OpResult:
    """The times of one op of the population."""

    name: str
    package: str
    op: str
    arguments: int
    direct: bool
    reason: str
    timings: dict[str, Timing]


@dataclass(frozen=True)
class PopulationFailure:
    """An op that could not be defined or called."""

    package: str
    op: str
    schema: str
    error: str


@dataclass
class PopulationResult:
    """The times of all ops, and the ops that failed."""

    ops: list[OpResult] = field(default_factory=list)
    failures: list[PopulationFailure] = field(default_factory=list)

    def taxes(self, contender: str) -> list[float]:
        """Returns each op's tax in microseconds, in the order of the ops."""
        return [tax_us(op.timings, contender) for op in self.ops]

    def distribution(self, contender: str) -> dict[str, float]:
        """Returns minimum, quantiles and maximum of the tax in microseconds."""
        taxes = sorted(self.taxes(contender))
        last = len(taxes) - 1
        quantiles = {name: taxes[round(part * last)] for name, part in _POINTS.items()}
        return {"min": taxes[0], **quantiles, "max": taxes[-1]}

    def geometric_mean_ratio(self, contender: str) -> float:
        """Returns the geometric mean over the ops of `contender`'s tax by hotop's."""
        pairs = zip(self.taxes(contender), self.taxes(HOTOP), strict=True)
        logarithms = [
            math.log(max(tax, _SMALLEST_TAX_US) / max(hot, _SMALLEST_TAX_US)) for tax, hot in pairs
        ]
        return math.exp(sum(logarithms) / len(logarithms))

    def worst(self, count: int = 8) -> list[OpResult]:
        """Returns the ops with the highest tax of hotop."""
        return sorted(self.ops, key=lambda op: tax_us(op.timings, HOTOP), reverse=True)[:count]

    def as_json(self) -> dict[str, object]:
        """Returns plain data, raw minima and medians included."""
        measured = bool(self.ops)
        return {
            "ops": [
                asdict(op)
                | {"tax_us": {contender: tax_us(op.timings, contender) for contender in CONTENDERS}}
                for op in self.ops
            ],
            "tax_us": {name: self.distribution(name) for name in CONTENDERS if measured},
            "geometric_mean_ratio": {
                name: self.geometric_mean_ratio(name)
                for name in (CUSTOM_OP, DEFINE_IMPL)
                if measured
            },
            "direct": sum(op.direct for op in self.ops),
            "failures": [asdict(failure) for failure in self.failures],
        }


def run_population(
    *,
    quick: bool = False,
    on_step: Callable[[str, int, int], None] = lambda title, step, steps: None,
) -> PopulationResult:
    """Registers all ops, then times them one by one, in passes over the whole population.

    Each statistic of an op comes from its quietest pass, for every contender alike: an op's turn
    is short, and on a shared machine it may fall into a slow moment.

    Args:
        quick: A fixed sample of 200 ops and fewer rounds.
        on_step: Called with a title, the step's number and the number of steps.
    """
    records = load()
    if quick:
        records = random.Random(0).sample(records, QUICK_SAMPLE)
    passes, rounds = (2, 15) if quick else (3, 30)
    steps = len(records) * passes
    failures: list[PopulationFailure] = []
    prepared: list[_Prepared] = []
    for record in records:
        try:
            prepared.append(_prepare(record))
        except Exception as error:
            failures.append(_failure(record, error))
    # Thousands of ops stay alive: a collection per op would take longer than its timing.
    with gc_paused():
        for number in range(passes):
            for place, op in enumerate(prepared):
                on_step(op.record.op, number * len(records) + place, steps)
                run = time_interleaved(op.loops, rounds=rounds, loop_ns=_LOOP_NS)
                for contender, timing in run.items():
                    kept = op.timings.setdefault(contender, timing)
                    op.timings[contender] = quieter(kept, timing)
    return PopulationResult([op.result() for op in prepared], failures)


@dataclass
class _Prepared:
    """An op that is registered and has been called once in every way."""

    record: Record
    arguments: int
    direct: bool
    reason: str
    loops: dict[str, Loop]
    timings: dict[str, Timing] = field(default_factory=dict)

    def result(self) -> OpResult:
        return OpResult(
            self.record.identifier,
            self.record.package,
            self.record.op,
            self.arguments,
            self.direct,
            self.reason,
            self.timings,
        )


def _prepare(record: Record) -> _Prepared:
    ops = register(
        make_kernel(record),
        mutated_names(record.schema),
        schema=record.schema,
        name=record.identifier,
    )
    positional, keywords = make_arguments(record), make_keyword_arguments(record)
    loops = make_loops(ops, positional, keywords, contenders=(PLAIN, *CONTENDERS))
    direct, reason = explain(ops, positional, keywords)
    for loop in loops.values():
        time_calls(loop, 1)
    return _Prepared(record, len(positional) + len(keywords), direct, reason, loops)


def _failure(record: Record, error: Exception) -> PopulationFailure:
    text = f"{type(error).__name__}: {error}"
    return PopulationFailure(record.package, record.op, record.schema, text)
