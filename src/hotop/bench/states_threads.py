"""Several threads that call one op: calls per second in all, and how late another thread wakes.

**Throughput.** 1, 2 or 8 threads wait at a barrier, then each runs its share of a fixed number of
calls in a compiled loop. The number is chosen once per contender, so that one thread needs
``_SECONDS``, and is then the same for every number of threads. Time runs from the first thread's
first call to the last one's end. Contenders take turns; the table shows medians of the rounds, the
JSON also the best one. Kernels: a Python function that returns a Tensor made beforehand (it never
lets the GIL go, so all that threads can gain or lose is what lies around it), and one ``torch.mm``
of about 200 us, in which PyTorch releases the GIL.

**Lateness.** One thread calls in a loop without a pause. Another waits on an event that is never
set, with a timeout of 1 ms, and notes how long after its due time it runs again. Kernels: the two
above and ``x * x``. A Python loop that never releases the GIL keeps others waiting for CPython's
switch interval (5 ms unless the program sets it): that is what the plain function shows, and the
row "nobody calls" shows what the timer and the machine alone cost.

PyTorch's own parallelism is off meanwhile (``torch.set_num_threads(1)``, here and in each calling
thread) and is put back.

Left out: calls that autograd records, GIL-free CPython (hotop refuses it), processes, GPUs, thread
priorities, the time until a started thread makes its first call, and more threads at work than
cores beyond what 8 threads show on this machine.
"""

import itertools
import statistics
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from hotop.bench.contenders import CUSTOM_OP, DEFINE_IMPL, HOTOP, PLAIN, register
from hotop.bench.timing import Loop, gc_paused, make_loop, one_torch_thread, time_calls

__all__ = [
    "KERNELS",
    "NOBODY",
    "THREADS",
    "TRIVIAL",
    "Lateness",
    "LatenessRow",
    "ThreadsRow",
    "measure_lateness",
    "measure_threads",
]

THREADS = (1, 2, 8)
TRIVIAL = "trivial Python function"
MULTIPLY = "x * x"
MATRIX = "torch.mm, GIL released"
KERNELS = (TRIVIAL, MULTIPLY, MATRIX)
NOBODY = "nobody calls"

_MATRIX_SIZE = 184
_SECONDS = 0.1
_ROUNDS = 9
_TICK = 1e-3
_WAKES = 100
_WARM_UP_CALLS = 16
_CALIBRATION_CALLS = 100
_FIRST_CALLS = 2
# Between two looks at the flag that stops the caller.
_CALLS_PER_LOOK = 4


@dataclass(frozen=True)
class ThreadsRow:
    """Calls per second of all threads together, by contender.

    Attributes:
        kernel: What the op runs.
        threads: How many threads call.
        calls: Calls of all threads in a round.
        median: Calls per second in the median round.
        best: Calls per second in the best round.
    """

    kernel: str
    threads: int
    calls: dict[str, int]
    median: dict[str, float]
    best: dict[str, float]

    def as_json(self) -> dict[str, object]:
        """Returns plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Lateness:
    """How many microseconds after its due time a thread woke: median, 99 %, and how often."""

    median_us: float
    percentile_99_us: float
    wakes: int


@dataclass(frozen=True)
class LatenessRow:
    """The lateness of another thread while one thread calls, by contender."""

    kernel: str
    contenders: dict[str, Lateness]

    def as_json(self) -> dict[str, object]:
        """Returns plain data."""
        return asdict(self)


def measure_threads(*, quick: bool = False) -> list[ThreadsRow]:
    """Measures the calls per second of 1, 2 and 8 threads."""
    seconds, rounds = (_SECONDS / 10, 2) if quick else (_SECONDS, _ROUNDS)
    with one_torch_thread():
        return [
            row for kernel in (TRIVIAL, MATRIX) for row in _measure_kernel(kernel, seconds, rounds)
        ]


def measure_lateness(*, quick: bool = False) -> list[LatenessRow]:
    """Measures how late a thread wakes while another calls."""
    wakes, rounds = (_WAKES // 10, 2) if quick else (_WAKES, _ROUNDS)
    with one_torch_thread(), gc_paused():
        return [LatenessRow(kernel, _latenesses(kernel, wakes, rounds)) for kernel in KERNELS]


def _make_loops(kernel: str) -> dict[str, Loop]:
    result = torch.ones(3)

    def trivial(x: Tensor) -> Tensor:
        return result

    def multiply(x: Tensor) -> Tensor:
        return x * x

    def matrix(x: Tensor) -> Tensor:
        return torch.mm(x, x)

    functions: dict[str, Callable[[Tensor], Tensor]]
    functions = {TRIVIAL: trivial, MULTIPLY: multiply, MATRIX: matrix}
    argument = torch.ones(_MATRIX_SIZE, _MATRIX_SIZE) if kernel == MATRIX else torch.ones(3)
    ops = register(functions[kernel], name="threads")
    contenders: dict[str, Any] = {
        PLAIN: ops.kernel,
        CUSTOM_OP: ops.custom_op,
        DEFINE_IMPL: ops.define_impl,
        HOTOP: ops.hotop,
    }
    return {name: make_loop(function, [argument]) for name, function in contenders.items()}


def _measure_kernel(kernel: str, seconds: float, rounds: int) -> list[ThreadsRow]:
    loops = _make_loops(kernel)
    rates: dict[int, dict[str, list[float]]]
    rates = {threads: {name: [] for name in loops} for threads in THREADS}
    with gc_paused():
        calls = {name: _calibrate(loop, seconds) for name, loop in loops.items()}
        order = list(loops)
        for _ in range(rounds):
            for threads, name in itertools.product(THREADS, order):
                took = _run(loops[name], threads, calls[name] // threads)
                rates[threads][name].append(calls[name] / took)
            order.append(order.pop(0))
    return [
        ThreadsRow(
            kernel,
            threads,
            calls,
            {name: statistics.median(found) for name, found in by_name.items()},
            {name: max(found) for name, found in by_name.items()},
        )
        for threads, by_name in rates.items()
    ]


def _calibrate(loop: Loop, seconds: float) -> int:
    """Chooses the calls of a round, a multiple of every number of threads."""
    time_calls(loop, _WARM_UP_CALLS)
    each = time_calls(loop, _CALIBRATION_CALLS) / _CALIBRATION_CALLS / 1e9
    most = max(THREADS)
    return max(1, round(seconds / each / most)) * most


def _begin(loop: Loop) -> None:
    """Does in this thread what a thread does once, which is not in the measurement."""
    # OpenMP and MKL keep the number per thread: a new one would start helpers for every product.
    torch.set_num_threads(1)
    loop(itertools.repeat(None, _FIRST_CALLS))


def _run(loop: Loop, threads: int, calls: int) -> float:
    """Returns the seconds from the first thread's first call to the last thread's end."""
    barrier = threading.Barrier(threads)
    spans: list[tuple[float, float]] = []

    def work() -> None:
        _begin(loop)
        repeat = itertools.repeat(None, calls)
        barrier.wait()
        start = perf_counter()
        loop(repeat)
        spans.append((start, perf_counter()))

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return max(end for _, end in spans) - min(start for start, _ in spans)


def _latenesses(kernel: str, wakes: int, rounds: int) -> dict[str, Lateness]:
    callers: dict[str, Loop | None] = {NOBODY: None, **_make_loops(kernel)}
    found: dict[str, list[float]] = {name: [] for name in callers}
    order = list(callers)
    for _ in range(rounds):
        for name in order:
            found[name] += _wake_beside(callers[name], wakes)
        order.append(order.pop(0))
    return {
        name: Lateness(
            statistics.median(late) * 1e6,
            statistics.quantiles(late, n=100, method="inclusive")[98] * 1e6,
            len(late),
        )
        for name, late in found.items()
    }


def _wake_beside(loop: Loop | None, wakes: int) -> list[float]:
    """Returns how many seconds late each wake was while a thread ran `loop` over and over."""
    stopped, started = threading.Event(), threading.Event()

    def call(loop: Loop) -> None:
        _begin(loop)
        started.set()
        while not stopped.is_set():
            loop(itertools.repeat(None, _CALLS_PER_LOOK))

    caller = None if loop is None else threading.Thread(target=call, args=(loop,))
    if caller is not None:
        caller.start()
        started.wait()
    try:
        return [_sleep_late(threading.Event()) for _ in range(wakes)]
    finally:
        stopped.set()
        if caller is not None:
            caller.join()


def _sleep_late(never: threading.Event) -> float:
    due = perf_counter() + _TICK
    never.wait(_TICK)
    return perf_counter() - due
