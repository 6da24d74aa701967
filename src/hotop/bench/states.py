"""What a call costs in the states of a program: recorded by autograd, profiled, autocast, ..."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import (
    _add_batch_dim,
    _func_decrement_nesting,
    _func_increment_nesting,
    _wrap_functional_tensor,
)
from torch._functorch.vmap import vmap_increment_nesting
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

import hotop
from hotop.bench import states_ops
from hotop.bench.contenders import PLAIN
from hotop.bench.states_threads import LatenessRow, ThreadsRow, measure_lateness, measure_threads
from hotop.bench.timing import Loop, Timing, gc_paused, make_loop, time_interleaved

__all__ = [
    "ACTIVATIONS",
    "AUTOCAST",
    "BACKWARD",
    "COUNTS",
    "FAKE",
    "FORWARD",
    "FUNCTIONALIZED",
    "FUNCTIONAL_MODE",
    "PARAMETERS",
    "PROFILED",
    "SPANS",
    "VMAP",
    "StateRow",
    "StatesResult",
    "measure",
]

AUTOCAST = "autocast, with a rule"
PROFILED = "profiled, with shapes"
FORWARD = "recorded: forward"
BACKWARD = "recorded: forward + backward"
VMAP = "vmap, with a rule"
FUNCTIONALIZED = "functionalized, torch.func"
FUNCTIONAL_MODE = "functionalized, FunctionalTensorMode"
FAKE = "fake"

COUNTS = (1, 4, 8, 16)
SPANS = ((1, 4), (4, 8), (8, 16), (1, 16))
# Results of other operators; and leaves, for which autograd makes an AccumulateGrad in every call,
# whoever calls, as long as nothing else holds one.
ACTIVATIONS = "activations"
PARAMETERS = "parameters"

_ROUNDS = 100
# A profiler keeps every event until its end.
_PROFILED_CALLS = 20

_Arguments = Sequence[object]
_Enter = Callable[..., AbstractContextManager[_Arguments]]


@dataclass(frozen=True)
class StateRow:
    """One state: the time of each contender's call, and whether hotop's was direct."""

    state: str
    direct: bool
    reason: str
    timings: dict[str, Timing]

    def tax_us(self, contender: str) -> float:
        """Returns the call above the plain function's, in the same state."""
        return (self.timings[contender].minimum_ns - self.timings[PLAIN].minimum_ns) / 1e3

    def ratio(self, contender: str, other: str) -> float:
        """Returns the whole call of `contender` as a multiple of `other`'s, kernel included."""
        return self.timings[contender].minimum_ns / self.timings[other].minimum_ns

    def as_json(self) -> dict[str, object]:
        """Returns plain data."""
        return asdict(self) | {
            "tax_us": {name: self.tax_us(name) for name in self.timings if name != PLAIN}
        }


@dataclass(frozen=True)
class StatesResult:
    """All that ``bench --states`` measures.

    Attributes:
        rows: The states of one small op, then the list op.
        arguments: Recorded calls, forward only, by the kind and the number of Tensors.
        threads: Calls per second of several threads.
        lateness: How late another thread wakes.
    """

    rows: list[StateRow]
    arguments: dict[str, dict[int, StateRow]]
    threads: list[ThreadsRow]
    lateness: list[LatenessRow]

    def row(self, state: str) -> StateRow:
        """Returns the row of a state."""
        return next(row for row in self.rows if row.state == state)

    def slope_us(self, kind: str, contender: str, low: int, high: int) -> float:
        """Returns microseconds of tax per further Tensor of a kind between two counts."""
        taxes = [self.arguments[kind][count].tax_us(contender) for count in (low, high)]
        return (taxes[1] - taxes[0]) / (high - low)

    def slopes_us(self) -> dict[str, dict[str, float]]:
        """Returns the slopes by kind of Tensor, span of counts, and contender."""
        return {
            f"{kind}, {low} to {high}": {
                name: self.slope_us(kind, name, low, high)
                for name in rows[COUNTS[0]].timings
                if name != PLAIN
            }
            for kind, rows in self.arguments.items()
            for low, high in SPANS
        }

    def all_rows(self) -> list[StateRow]:
        """Returns the states, then the rows by the number of Tensors."""
        return [*self.rows, *(row for rows in self.arguments.values() for row in rows.values())]

    def as_json(self) -> dict[str, object]:
        """Returns plain data."""
        return {
            "states": [row.as_json() for row in self.all_rows()],
            "us_per_further_argument": self.slopes_us(),
            "threads": [row.as_json() for row in self.threads],
            "lateness": [row.as_json() for row in self.lateness],
        }


@dataclass(frozen=True)
class _State:
    """A state to enter and the calls to time in it.

    Attributes:
        title: The row's title.
        functions: What is called, by contender.
        hot: hotop's op, whose road is asked for.
        arguments: The arguments outside the state.
        enter: Enters the state and gives the arguments as it has them.
        calls: A fixed number of calls per round, or None.
    """

    title: str
    functions: dict[str, Callable[..., Any]]
    hot: Callable[..., Any]
    arguments: _Arguments
    enter: _Enter
    calls: int | None = None


def _inside(make: Callable[[], AbstractContextManager[object]]) -> _Enter:
    """Makes a state of a context that leaves the arguments as they are."""

    @contextmanager
    def enter(*arguments: object) -> Iterator[_Arguments]:
        with make():
            yield arguments

    return enter


_outside = _inside(nullcontext)


def _profiler() -> AbstractContextManager[object]:
    return torch.autograd.profiler.profile(use_kineto=False, record_shapes=True)


# What torch.vmap and torch.func.functionalize do around a call, so that only the call is timed.


@contextmanager
def _vmapped(x: Tensor) -> Iterator[_Arguments]:
    batch = torch.stack([x, x])
    with vmap_increment_nesting(2, "error") as level:
        yield (_add_batch_dim(batch, 0, level),)


@contextmanager
def _functionalized(x: Tensor) -> Iterator[_Arguments]:
    level = _func_increment_nesting(True)
    try:
        yield (_wrap_functional_tensor(x, level),)
    finally:
        _func_decrement_nesting()


@contextmanager
def _in_functional_mode(x: Tensor) -> Iterator[_Arguments]:
    with FunctionalTensorMode():
        yield (FunctionalTensor.to_functional(x),)


@contextmanager
def _faked(x: Tensor) -> Iterator[_Arguments]:
    with FakeTensorMode() as mode:
        yield (mode.from_tensor(x),)


def _with_backward(
    functions: dict[str, Callable[..., Any]], one: Tensor
) -> dict[str, Callable[..., Any]]:
    def both(function: Callable[..., Any]) -> Callable[..., None]:
        return lambda *arguments: torch.autograd.backward([function(*arguments)], [one])

    return {name: both(function) for name, function in functions.items()}


def _states() -> list[_State]:
    square = states_ops.make_square()
    plain, recorded, hot = square.without_function(), square.with_function(), square.hotop
    x, leaf, one = torch.ones(3), torch.ones(3, requires_grad=True), torch.ones(3)
    both = _with_backward(recorded, one)
    cpu = torch.device("cpu")
    autocast = states_ops.make_square_autocast()
    transformed = states_ops.make_square_transformed()
    changed = transformed.without_function()
    lists = states_ops.make_list()
    listed = lists.with_function()
    pair = ([_leaf(), _leaf()], _leaf())

    def bfloat16() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16)

    return [
        _State("no grad required", plain, hot, [x], _outside),
        _State("no_grad, input requires grad", plain, hot, [leaf], _inside(torch.no_grad)),
        _State("inference_mode", plain, hot, [x], _inside(torch.inference_mode)),
        _State("autocast, no rule", plain, hot, [x], _inside(bfloat16)),
        _State(AUTOCAST, autocast.without_function(), autocast.hotop, [x], _inside(bfloat16)),
        _State("device context", plain, hot, [x], _inside(lambda: cpu)),
        _State(PROFILED, plain, hot, [x], _inside(_profiler), _PROFILED_CALLS),
        _State(FORWARD, recorded, hot, [leaf], _outside),
        _State(BACKWARD, both, hot, [leaf], _outside),
        _State(VMAP, changed, transformed.hotop, [x], _vmapped),
        _State(FUNCTIONALIZED, changed, transformed.hotop, [x], _functionalized),
        _State(FUNCTIONAL_MODE, changed, transformed.hotop, [x], _in_functional_mode),
        _State(FAKE, changed, transformed.hotop, [x], _faked),
        _State("Tensor[], Tensor: forward", listed, lists.hotop, pair, _outside),
        _State(
            "Tensor[], Tensor: forward + backward",
            _with_backward(listed, one),
            lists.hotop,
            pair,
            _outside,
        ),
    ]


def _leaf() -> Tensor:
    return torch.ones(3, requires_grad=True)


def _activation() -> Tensor:
    return _leaf().clone()


def _measure_counts(kind: str, rounds: int) -> dict[int, StateRow]:
    """Times all counts in one interleaved run: the slopes are differences between them."""
    make_tensor = _activation if kind == ACTIVATIONS else _leaf
    made = {count: states_ops.make_many(count) for count in COUNTS}
    loops, answers = {}, {}
    for count, contenders in made.items():
        tensors = [make_tensor() for _ in range(count)]
        answers[count] = hotop.explain(contenders.hotop, *tensors)
        for name, function in contenders.with_function().items():
            loops[f"{count} {name}"] = make_loop(function, tensors)
    timings = time_interleaved(loops, rounds=rounds)
    return {
        count: StateRow(
            f"{FORWARD}, {count} {kind if count > 1 else kind[:-1]}",
            answers[count].direct,
            answers[count].reason,
            {name: timings[f"{count} {name}"] for name in contenders.with_function()},
        )
        for count, contenders in made.items()
    }


def _measure(state: _State, rounds: int) -> StateRow:
    seen: list[object] = []

    @contextmanager
    def context() -> Iterator[None]:
        with state.enter(*state.arguments) as arguments:
            seen[:] = arguments
            yield

    def late(function: Callable[..., Any]) -> Loop:
        # The arguments are known once the timer has entered the state in its own thread.
        made: list[Loop] = []

        def loop(repeat: Any) -> None:
            if not made:
                made.append(make_loop(function, seen))
            made[0](repeat)

        return loop

    with state.enter(*state.arguments) as arguments:
        answer = hotop.explain(state.hot, *arguments)
    loops = {name: late(function) for name, function in state.functions.items()}
    timings = time_interleaved(loops, rounds=rounds, calls=state.calls, context=context)
    return StateRow(state.title, answer.direct, answer.reason, timings)


def measure(
    *,
    quick: bool = False,
    on_step: Callable[[str, int, int], None] = lambda title, step, steps: None,
) -> StatesResult:
    """Times ops with a formula on float32 Tensors of 3 elements in each state, then threads."""
    rounds = _ROUNDS // 10 if quick else _ROUNDS
    states = _states()
    steps = len(states) + 3

    def at(step: int, title: str) -> None:
        on_step(title, step, steps)

    rows = []
    with gc_paused():
        for step, state in enumerate(states):
            at(step, state.title)
            rows.append(_measure(state, rounds))
        at(steps - 3, "number of arguments")
        arguments = {kind: _measure_counts(kind, rounds) for kind in (ACTIVATIONS, PARAMETERS)}
        at(steps - 2, "threads")
        threads = measure_threads(quick=quick)
        at(steps - 1, "lateness of another thread")
        lateness = measure_lateness(quick=quick)
    return StatesResult(rows, arguments, threads, lateness)
