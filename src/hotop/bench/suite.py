"""Runs the cases and gathers what was measured, ready for the tables, the plot and JSON."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

from hotop.bench import compiled as compiled_programs
from hotop.bench import registration as registration_batches
from hotop.bench.cases import CASES, Case, mode_context
from hotop.bench.contenders import (
    CUSTOM_OP,
    DEFINE_IMPL,
    HOTOP,
    HOTOP_OVERLOAD,
    HOTOP_PACKET,
    LOOKUPS,
    PLAIN,
    explain,
    make_loops,
    register,
)
from hotop.bench.timing import Timing, time_interleaved

__all__ = ["CaseResult", "Failure", "SuiteResult", "case_names", "run_suite", "tax_us"]

COMPILED = "compiled"
REGISTRATION = "registration"
_CONTENDERS = (CUSTOM_OP, DEFINE_IMPL, HOTOP, HOTOP_PACKET, HOTOP_OVERLOAD)
_SLOPE_SPANS = ((10, 30), (30, 51))


def tax_us(timings: Mapping[str, Timing], contender: str, *, median: bool = False) -> float:
    """Returns what a call costs above the plain function's call, in microseconds."""
    call, plain = timings[contender], timings[PLAIN]
    if median:
        return (call.median_ns - plain.median_ns) / 1e3
    return (call.minimum_ns - plain.minimum_ns) / 1e3


@dataclass(frozen=True)
class CaseResult:
    """The times of one case, and which way hotop's call went."""

    name: str
    title: str
    mode: str
    tensors: int | None
    noop: bool
    direct: bool
    reason: str
    timings: dict[str, Timing]

    def taxes_us(self, *, median: bool = False) -> dict[str, float]:
        """Returns each contender's tax in microseconds."""
        return {
            contender: tax_us(self.timings, contender, median=median)
            for contender in self.timings
            if contender not in (PLAIN, LOOKUPS)
        }


@dataclass(frozen=True)
class Failure:
    """A case that could not be measured."""

    name: str
    error: str
    trace: str


@dataclass
class SuiteResult:
    """Everything one run of the suite measured."""

    cases: list[CaseResult] = field(default_factory=list)
    compiled: list[compiled_programs.CompiledResult] = field(default_factory=list)
    registration: registration_batches.RegistrationResult | None = None
    failures: list[Failure] = field(default_factory=list)

    def case(self, name: str) -> CaseResult | None:
        """Returns the result of the case called `name`, if it was run."""
        return next((case for case in self.cases if case.name == name), None)

    def slopes_ns(self) -> dict[str, dict[str, float]]:
        """Returns nanoseconds of tax per further Tensor, by span of counts and contender.

        The spans stand apart because CPython passes more than 30 arguments another way.
        """
        by_count = {case.tensors: case.timings for case in self.cases}
        return {
            f"{low} to {high}": {
                contender: (tax_us(by_count[high], contender) - tax_us(by_count[low], contender))
                * 1e3
                / (high - low)
                for contender in _CONTENDERS
            }
            for low, high in _SLOPE_SPANS
            if low in by_count and high in by_count
        }

    def as_json(self) -> dict[str, object]:
        """Returns plain data: raw minima and medians, taxes, ratios and slopes."""
        return {
            "cases": [_case_as_json(case) for case in self.cases],
            "compiled": [
                asdict(row) | {"tax_us": row.taxes_us(), "tax_median_us": row.taxes_us(median=True)}
                for row in self.compiled
            ],
            "ns_per_further_tensor": self.slopes_ns(),
            "registration": asdict(self.registration) if self.registration else None,
            "failures": [asdict(failure) for failure in self.failures],
        }


def _case_as_json(case: CaseResult) -> dict[str, object]:
    return asdict(case) | {
        "tax_us": case.taxes_us(),
        "tax_median_us": case.taxes_us(median=True),
    }


def case_names() -> list[str]:
    """Returns every name that ``--only`` takes."""
    return [*(case.name for case in CASES), COMPILED, REGISTRATION]


def run_suite(
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    on_step: Callable[[str, int, int], None] = lambda title, step, steps: None,
) -> SuiteResult:
    """Measures the chosen cases; a case that fails is recorded and the others go on.

    Args:
        quick: Fewer rounds, and compiled cases only where `only` names them.
        only: The names of the cases to run; all when empty.
        on_step: Called with a title, the step's number and the number of steps.
    """
    result = SuiteResult()
    rounds = 100 if quick else 1000
    steps: list[tuple[str, str, Callable[[], None]]] = [
        (case.name, case.title, partial(_add_case, result, case, rounds))
        for case in CASES
        if not only or case.name in only
    ]
    if COMPILED in only or not (only or quick):
        steps += [
            (
                f"{COMPILED}-{count}",
                f"compiled, {count} Tensors",
                partial(_add_compiled, result, count, rounds),
            )
            for count in compiled_programs.COUNTS
        ]
    if REGISTRATION in only or not only:
        batches = (10, 10) if quick else (10, 40)
        steps.append((REGISTRATION, "registration", partial(_add_registration, result, *batches)))
    for number, (name, title, step) in enumerate(steps):
        on_step(title, number, len(steps))
        try:
            step()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            result.failures.append(Failure(name, failure, traceback.format_exc()))
    return result


def _add_registration(result: SuiteResult, ops_per_batch: int, batches: int) -> None:
    result.registration = registration_batches.measure(ops_per_batch=ops_per_batch, batches=batches)


def _add_compiled(result: SuiteResult, tensors: int, rounds: int) -> None:
    result.compiled.append(compiled_programs.measure(tensors, rounds=rounds))


def _add_case(result: SuiteResult, case: Case, rounds: int) -> None:
    ops = register(case.make_kernel(), case.mutates_args, name=case.name.replace("-", "_"))
    with mode_context(case.mode):
        positional, keywords = case.make_positional(), case.make_keywords()
        direct, reason = explain(ops, positional, keywords)
    contenders = [PLAIN, *_CONTENDERS]
    if case.name == "tensors-1":
        contenders.append(LOOKUPS)
    loops = make_loops(ops, positional, keywords, contenders=contenders)
    timings = time_interleaved(loops, rounds=rounds, context=lambda: mode_context(case.mode))
    result.cases.append(
        CaseResult(
            case.name, case.title, case.mode, case.tensors, case.noop, direct, reason, timings
        )
    )
