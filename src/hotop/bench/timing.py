"""The only timer: loops compiled per call shape, run in interleaved rounds in one process."""

import gc
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter_ns

import torch

__all__ = [
    "Loop",
    "Timing",
    "gc_paused",
    "make_loop",
    "one_torch_thread",
    "quieter",
    "time_calls",
    "time_interleaved",
]

Loop = Callable[[Iterable[object]], None]

_WARM_UP_CALLS = 16


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one call in nanoseconds, the loop's own cost included.

    Attributes:
        minimum_ns: The fastest round.
        median_ns: The median round.
        mean_ns: The mean of all calls.
        calls: Calls per round.
    """

    minimum_ns: float
    median_ns: float
    mean_ns: float
    calls: int


def quieter(first: Timing, second: Timing) -> Timing:
    """Takes each statistic from the run in which it was lower."""
    return Timing(
        min(first.minimum_ns, second.minimum_ns),
        min(first.median_ns, second.median_ns),
        min(first.mean_ns, second.mean_ns),
        first.calls,
    )


def make_loop(
    function: object,
    positional: Sequence[object],
    keywords: Mapping[str, object] | None = None,
    *,
    path: str = "",
    discarded: tuple[object, str] | None = None,
) -> Loop:
    """Compiles ``for _ in repeat: function(a0, a1, ..., name=k0)``.

    Each loop is a code object of its own, so that CPython specialises it for its one callee, and
    the arguments are locals passed by position or by name, never through ``*args``.

    Args:
        function: What to call, or the object from which `path` leads to it.
        positional: Arguments passed by position.
        keywords: Arguments passed by name.
        path: Attributes looked up in every call, such as ``".ns.name"``.
        discarded: An object and a path on it that is looked up before each call and thrown away,
            which prices the look-ups alone.
    """
    keywords = keywords or {}
    names: dict[str, object] = {"f": function}
    names |= {f"a{index}": value for index, value in enumerate(positional)}
    names |= {f"k{index}": value for index, value in enumerate(keywords.values())}
    passed = [f"a{index}" for index in range(len(positional))]
    passed += [f"{name}=k{index}" for index, name in enumerate(keywords)]
    body = [f"f{path}({', '.join(passed)})"]
    if discarded is not None:
        names["holder"] = discarded[0]
        body.insert(0, f"holder{discarded[1]}")
    parameters = ", ".join(f"{name}={name}" for name in names)
    lines = [f"def loop(repeat, {parameters}):", "    for _ in repeat:"]
    lines += [f"        {line}" for line in body]
    namespace = dict(names)
    exec(compile("\n".join(lines), "<bench loop>", "exec"), namespace)
    return namespace["loop"]  # type: ignore[return-value]


def time_calls(loop: Loop, calls: int) -> int:
    """Runs `loop` for `calls` calls and returns the nanoseconds it took."""
    repeat = itertools.repeat(None, calls)
    start = perf_counter_ns()
    loop(repeat)
    return perf_counter_ns() - start


def time_interleaved(
    loops: Mapping[str, Loop],
    *,
    rounds: int,
    loop_ns: int = 200_000,
    calls: int | None = None,
    context: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> dict[str, Timing]:
    """Times every loop once per round, in an order that rotates from round to round.

    Many short rounds rather than few long ones: on a shared machine the quiet moments are short,
    and every contender's minimum should come out of one.

    The loops run in a thread of their own. CPython keeps a thread's frames in chunks of 16 KiB and
    frees a chunk when its last frame returns; a loop that happens to start at a chunk's end pays
    for a new one in every call. At the bottom of a fresh stack no call is that unlucky.

    Args:
        loops: The contenders by name.
        rounds: How many rounds.
        loop_ns: How long a contender's loop should take in one round; its number of calls is
            chosen for that.
        calls: A fixed number of calls per round instead.
        context: Entered in that thread around everything.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(_time, loops, rounds, loop_ns, calls, context).result()


def _time(
    loops: Mapping[str, Loop],
    rounds: int,
    loop_ns: int,
    calls: int | None,
    context: Callable[[], AbstractContextManager[object]],
) -> dict[str, Timing]:
    samples: dict[str, list[float]] = {name: [] for name in loops}
    order = list(loops)
    with context(), gc_paused():
        for loop in loops.values():
            # Specialises the byte code and fills the dispatcher's caches.
            time_calls(loop, _WARM_UP_CALLS)
        counts = {name: calls or _calibrate(loop, loop_ns) for name, loop in loops.items()}
        for _ in range(rounds):
            for name in order:
                samples[name].append(time_calls(loops[name], counts[name]) / counts[name])
            order.append(order.pop(0))
    return {
        name: Timing(min(times), statistics.median(times), statistics.fmean(times), counts[name])
        for name, times in samples.items()
    }


def _calibrate(loop: Loop, loop_ns: int) -> int:
    elapsed = time_calls(loop, _WARM_UP_CALLS)
    return max(1, loop_ns * _WARM_UP_CALLS // max(elapsed, 1))


@contextmanager
def gc_paused() -> Iterator[None]:
    """Collects once, then keeps the garbage collector off; nothing when it is off already."""
    if not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Keeps PyTorch from waking helper threads, which costs more than these calls."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
