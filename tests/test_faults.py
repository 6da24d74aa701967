"""Kernels that fail in every way and state: the same error, nothing lost, state restored."""

import ctypes
import gc
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import hotop

FACTORIES = {"torch": torch.library.custom_op, "hotop": hotop.custom_op}


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> Iterator[None]:
    """What is imported is not searched for garbage each time: 0.2 s."""
    for factory in FACTORIES:
        for road in ROADS:
            run(factory, road, "profiled")
    run("torch", "function", "vmap")
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Own(BaseException):
    """Not an Exception, and not one of CPython's."""


def failed_allocation() -> None:
    torch.empty(2**62, dtype=torch.uint8)


def cpp_error() -> None:
    torch.ones(2) @ torch.ones(3)


def cpp_index_error() -> None:
    torch.ones(2)[5]


def raising(make: Callable[..., BaseException], *args: Any) -> Callable[[], None]:
    def fail() -> None:
        raise make(*args)

    return fail


def endless() -> None:
    endless()


FAILURES: dict[str, Callable[[], Any]] = {
    "StopIteration": raising(StopIteration, 3),
    "StopAsyncIteration": raising(StopAsyncIteration),
    "GeneratorExit": raising(GeneratorExit),
    "KeyboardInterrupt": raising(KeyboardInterrupt),
    "SystemExit": raising(SystemExit, 4),
    "MemoryError": raising(MemoryError),
    "NotImplementedError": raising(NotImplementedError, "no"),
    "AttributeError": raising(AttributeError, "op"),
    "ExceptionGroup": raising(ExceptionGroup, "two", [KeyError(1), OSError(2)]),
    "own BaseException": raising(Own, "x"),
    "recursion": endless,
    "C++ error": cpp_error,
    "C++ IndexError": cpp_index_error,
    "failed allocation": failed_allocation,
    "failed assertion": lambda: exec("assert False"),
    "ctypes": lambda: ctypes.pythonapi.PyLong_AsLong(ctypes.py_object("x")),
}


def state() -> tuple[object, ...]:
    """All that a call could leave behind in its thread."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._is_fwd_grad_enabled(),
        torch._C._dispatch_tls_local_exclude_set().raw_repr(),
        torch._C._dispatch_tls_local_include_set().raw_repr(),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        torch._C._is_torch_function_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch._C._functorch.peek_interpreter_stack(),
        torch.autograd._profiler_enabled(),
        torch.get_default_device(),
        sys.exc_info(),
    )


def profiled(call: Callable[[], Any]) -> Any:
    with torch.autograd.profiler.profile(record_shapes=True):
        before = state()
        try:
            return call()
        finally:
            assert state()[:-1] == before[:-1]


def with_device(call: Callable[[], Any]) -> Any:
    with torch.device("cpu"):
        return call()


def in_inference(call: Callable[[], Any]) -> Any:
    with torch.inference_mode():
        return call()


CONTEXTS: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "plain": lambda call: call(),
    "profiled": profiled,
    "device context": with_device,
    "inference": in_inference,
    "no_grad": lambda call: torch.no_grad()(call)(),
    "autocast": lambda call: torch.autocast("cpu")(call)(),
    "vmap": lambda call: torch.vmap(lambda _: call())(torch.ones(2)),
}

ROADS = ["function", "keywords", "lists", "mutating", "tunable", "requires_grad"]
made: dict[tuple[str, str], Any] = {}
failure: list[Callable[[], Any]] = [lambda: None]
seen: list[BaseException] = []


def body(x: Tensor, ns: list[int], ys: list[Tensor], *, k: float = 1.0) -> Tensor:
    try:
        failure[0]()
    except BaseException as error:
        seen.append(error)
        raise
    return x.detach() + len(ns) + len(ys) + k


def plain_body(x: Tensor, k: float = 1.0) -> Tensor:
    return body(x, [1], [], k=k)


def op_for(factory: str, road: str) -> Any:
    key = (factory, road)
    if key not in made:
        name = f"faults_{factory}::{road}"
        if road == "tunable":
            tuned = hotop.tunable(f"{name}_tuned")(plain_body)
            made[key] = FACTORIES[factory](name, tuned, mutates_args=())
        else:
            mutates = {"x"} if road == "mutating" else ()
            made[key] = FACTORIES[factory](name, body, mutates_args=mutates)
    return made[key]


def run(factory: str, road: str, context: str) -> tuple[Any, ...]:
    """What the caller sees, with the versions of the arguments."""
    op = op_for(factory, road)
    x = torch.ones(2, requires_grad=road == "requires_grad")
    y = torch.ones(2)
    calls: dict[str, Callable[[], Any]] = {
        "function": lambda: op(x, [1, 2], [y]),
        "keywords": lambda: op(x=x, ys=(y,), ns=[1, 2], k=3.0),
        "lists": lambda: op._opoverload.overloadpacket(x, [1] * 70, [y] * 70),
        "mutating": lambda: op(x, [1, 2], [y]),
        "tunable": lambda: op(x, 2.0),
        "requires_grad": lambda: op(x, [1, 2], [y]),
    }
    before = state()
    references = sys.getrefcount(x), sys.getrefcount(y)
    seen.clear()
    try:
        result = CONTEXTS[context](calls[road])
    except BaseException as error:
        frames = traceback.walk_tb(error.__traceback__)
        names = {frame.f_code.co_name for frame, _ in frames}
        own = [error is known for known in seen]
        # A context that retries or wraps would show here.
        outcome: Any = (type(error), str(error), own, error.__cause__, "body" in names)
        del error
    else:
        outcome = result.tolist() if result is not None else None
        del result
    seen.clear()
    assert state() == before
    gc.collect()
    assert (sys.getrefcount(x), sys.getrefcount(y)) == references
    return (outcome, x._version, y._version)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("road", ROADS)
def test_every_failure_is_the_kernels_own(road: str, context: str) -> None:
    for name, fail in FAILURES.items():
        answers = {}
        for factory in FACTORIES:
            failure[0] = fail
            try:
                answers[factory] = run(factory, road, context)
            finally:
                failure[0] = lambda: None
            # Nothing of the failure shows in the next call.
            assert run(factory, road, context)[0] != answers[factory][0]
        assert answers["hotop"] == answers["torch"], name


@pytest.mark.parametrize("context", ["plain", "profiled"])
def test_what_is_being_handled_is_chained_and_kept(context: str) -> None:
    op = op_for("hotop", "function")
    failure[0] = raising(KeyError, "inner")
    try:
        with pytest.raises(KeyError) as caught:  # noqa: PT012
            try:
                raise OSError("outer")
            except OSError as error:
                outer = error
                try:
                    CONTEXTS[context](lambda: op(torch.ones(2), [1], []))
                finally:
                    assert sys.exc_info()[1] is not None
                    failure[0] = lambda: None
                    CONTEXTS[context](lambda: op(torch.ones(2), [1], []))
        assert outer.__context__ is None
        assert isinstance(caught.value.__context__, OSError)
    finally:
        failure[0] = lambda: None


@pytest.mark.parametrize("context", ["plain", "profiled"])
@pytest.mark.parametrize("fault", ["return_null_without_error", "return_result_with_error"])
def test_kernels_in_c_that_break_the_rules_of_c(fault: str, context: str) -> None:
    testcapi = pytest.importorskip("_testcapi")
    kernel = getattr(testcapi, fault)
    op = hotop.custom_op(
        f"faults_c::{fault}_x", lambda x: kernel(), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    before = state()
    with pytest.raises(SystemError):
        CONTEXTS[context](lambda: op(torch.ones(1)))
    assert state() == before


class Interrupted(Exception):
    pass


@pytest.fixture
def alarm() -> Iterator[None]:
    def handler(number: int, frame: Any) -> None:
        raise Interrupted

    old = signal.signal(signal.SIGALRM, handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, old)


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="needs POSIX signals")
@pytest.mark.usefixtures("alarm")
class TestSignals:
    @pytest.mark.parametrize("context", ["plain", "profiled", "device context"])
    @pytest.mark.parametrize("road", ["function", "keywords", "mutating", "tunable"])
    def test_handler_raises_inside_a_kernel(self, road: str, context: str) -> None:
        answers = {}
        for factory in FACTORIES:
            failure[0] = lambda: signal.raise_signal(signal.SIGALRM)
            try:
                answers[factory] = run(factory, road, context)
            finally:
                failure[0] = lambda: None
        assert answers["hotop"] == answers["torch"]
        assert answers["hotop"][0][0] is Interrupted

    @pytest.mark.parametrize("context", ["plain", "profiled"])
    @pytest.mark.parametrize("road", ["function", "keywords", "tunable"])
    def test_handler_raises_at_any_moment(self, road: str, context: str) -> None:
        """Each time the timer hits another place: before, in or after a kernel, in a check."""
        op = op_for("hotop", road)
        x, y = torch.ones(2), torch.ones(2)
        calls: dict[str, Callable[[], Any]] = {
            "function": lambda: op(x, [1, 2], [y]),
            "keywords": lambda: op(x=x, ys=(y,), ns=[1, 2], k=True),
            "tunable": lambda: op(x, 2.0),
        }
        call = calls[road]
        expected = call().tolist()
        before = state()

        def interrupt(delay: float) -> None:
            signal.setitimer(signal.ITIMER_REAL, delay)
            while True:
                call()

        def storm() -> None:
            within = state()
            for round_ in range(150):
                with pytest.raises(Interrupted):
                    interrupt(1e-5 + 7.3e-6 * (round_ % 50))
                assert state() == within
                assert call().tolist() == expected

        CONTEXTS[context](storm)
        assert state() == before

    def test_exception_sent_from_another_thread(self) -> None:
        op = op_for("hotop", "function")
        x = torch.ones(2)
        before, ended = [], []

        def loop() -> None:
            before.append(state())
            try:
                while True:
                    op(x, [1, 2], [x])
            except Interrupted:
                pass
            ended.append(state())

        for _ in range(20):
            thread = threading.Thread(target=loop)
            thread.start()
            while not before:
                pass
            identity = ctypes.c_ulong(thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, ctypes.py_object(Interrupted))
            thread.join(60)
            assert not thread.is_alive()
        assert ended == [before[0]] * 20


@pytest.mark.parametrize("context", ["plain", "profiled"])
@pytest.mark.parametrize("road", ["op", "tunable"])
def test_ops_and_tunables_that_call_each_other_without_end(road: str, context: str) -> None:
    def forth(x: Tensor) -> Tensor:
        return back(x)

    op = hotop.custom_op(f"faults_depth::{road}_{context}", forth, mutates_args=())

    def backward(x: Tensor) -> Tensor:
        return op(x)

    back: Any = hotop.tunable(f"faults_depth::back_{context}")(backward)
    back = back if road == "tunable" else op
    before = state()
    with pytest.raises(RecursionError):
        CONTEXTS[context](lambda: op(torch.ones(1)))
    assert state() == before


@pytest.mark.parametrize("context", ["plain", "profiled"])
def test_calls_from_finalizers_and_weakref_callbacks(context: str) -> None:
    """The collector runs inside a call's own allocations, and what it frees calls ops again."""
    import weakref

    op = op_for("hotop", "function")
    x, y = torch.ones(2), torch.ones(2)
    answers: list[Any] = []

    class Cycle:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            answers.append(op(x, list(range(5)), [y] * 5).tolist())

    def callback(_: Any) -> None:
        answers.append(op(x, list(range(5)), [y] * 5).tolist())

    def storm() -> None:
        threshold = gc.get_threshold()
        for size in range(60):
            gc.collect()
            gc.disable()
            cycle = Cycle()
            watch = weakref.ref(cycle, callback)
            del cycle
            gc.set_threshold(1, 1, 1)
            gc.enable()
            assert op(x, list(range(size)), [y] * size).tolist() == [2.0 + 2 * size] * 2
            gc.set_threshold(*threshold)
            del watch

    CONTEXTS[context](storm)
    gc.collect()
    assert len(answers) >= 60
    assert set(map(tuple, answers)) == {(12.0, 12.0)}
