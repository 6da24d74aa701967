"""Random states of a program in which a call is made: contexts, transforms, threads, observers."""

from __future__ import annotations

import contextlib
import itertools
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any

import torch
import torch.utils.checkpoint
from tools.fuzz.observers import OBSERVERS, UNOBSERVABLE
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from twin_contexts import BARE, CONTEXTS, excluded
from twin_observe import normalise, tensors_in


@contextmanager
def default_dtype() -> Iterator[None]:
    """Make float64 the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def record_function_off() -> Iterator[None]:
    """Switch PyTorch's observers off."""
    torch.autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)


@contextmanager
def forward_level() -> Iterator[None]:
    """Open a level of forward-mode AD."""
    with torch.autograd.forward_ad.dual_level():
        yield


def _fake_mode() -> Any:
    mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False  # else the second side finds what the first left
    return mode


def _functional_mode() -> Any:
    return torch._subclasses.functional_tensor.FunctionalTensorMode()


SITUATIONS: dict[str, Callable[[], Any]] = {
    **CONTEXTS,
    "default_dtype": default_dtype,
    "forward_level": forward_level,
    "record_function_off": record_function_off,
    "record_function": lambda: torch.autograd.profiler.record_function("block"),
    "fake_mode": _fake_mode,
    "functional_mode": _functional_mode,
    "no_forward_grad": lambda: torch.autograd.forward_ad._set_fwd_grad_enabled(False),
    "autocast_excluded": lambda: excluded("AutocastCPU"),
}
# Only with ordinary Tensors: PyTorch itself crashes on others there.
FRAGILE = sorted({*BARE, "below_autograd"} & set(SITUATIONS))
NESTABLE = sorted(set(SITUATIONS) - set(FRAGILE))
_FAMILY = {name: name.removesuffix("_cpu").removesuffix("_meta") for name in SITUATIONS}


# Transforms: of one Tensor argument of the call, the others held.


def _over_first(transform: Callable[[Callable], Callable]) -> Callable:
    def make(call: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            index = next((i for i, value in enumerate(args) if isinstance(value, Tensor)), None)
            if index is None:
                return call(*args, **kwargs)

            def held(x: Any) -> Any:
                return call(*args[:index], x, *args[index + 1 :], **kwargs)

            return transform(held)(args[index])

        return run

    return make


def _summed(call: Callable) -> Callable:
    def run(x: Any) -> Any:
        found = [t.sum() for t in tensors_in(call(x)) if t.is_floating_point()]
        return sum(found[1:], found[0]) if found else x.sum()

    return run


def clear_frames(error: BaseException | None) -> None:
    """Let go of what the frames of an error hold, in the thread that ran them.

    When a Tensor's repr raises, PyTorch's frame keeps a guard that later writes to the thread-local
    memory of its own thread, which may be gone by then: the heap is damaged.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _in_thread(call: Callable) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        outcome: list[Any] = []

        def work() -> None:
            try:
                outcome.append((call(*args, **kwargs), None))
            except BaseException as error:
                clear_frames(error)
                outcome.append((None, error))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        result, error = outcome[0]
        if error is not None:
            raise error
        return result

    return run


def _fake(call: Callable) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _fake_mode() as mode:
            convert = lambda t: mode.from_tensor(t)  # noqa: E731
            new_args, new_kwargs = tree_map_only(Tensor, convert, (args, kwargs))
            return call(*new_args, **new_kwargs)

    return run


def _functional(call: Callable) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        functional = torch._subclasses.functional_tensor
        with functional.FunctionalTensorMode():
            wrap = functional.FunctionalTensor.to_functional
            new_args, new_kwargs = tree_map_only(Tensor, wrap, (args, kwargs))
            result = call(*new_args, **new_kwargs)
        unwrap = lambda t: (  # noqa: E731
            torch._from_functional_tensor(t.elem)
            if isinstance(t, functional.FunctionalTensor)
            else t
        )
        return tree_map(unwrap, result)

    return run


_MOST_RECOMPUTATIONS = 20


def _checkpoint(reentrant: bool) -> Callable:
    def make(call: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls = itertools.count()

            def keep(*a: Any) -> Any:
                # With an input among the outputs, PyTorch's reentrant backward never ends.
                if next(calls) > _MOST_RECOMPUTATIONS:
                    raise RecursionError("the checkpoint is computed again and again")
                return call(*a, **kwargs)

            return torch.utils.checkpoint.checkpoint(keep, *args, use_reentrant=reentrant)

        return run

    return make


def _traced(call: Callable) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        from torch.fx.experimental.proxy_tensor import make_fx

        graph = make_fx(lambda *a: call(*a, **kwargs))(*args)
        return [str(node.target) for node in graph.graph.nodes]

    return run


def _jvp(call: Callable) -> Callable:
    return lambda x: torch.func.jvp(call, (x,), (torch.ones_like(x),))


def _twice(call: Callable) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(Exception):
            call(*args, **kwargs)
        return call(*args, **kwargs)

    return run


def _from_except(call: Callable) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            raise LookupError("before")
        except LookupError:
            return call(*args, **kwargs)

    return run


def _graph(again: bool) -> Callable:
    """Return the graph behind the outputs, and gradients with a graph of their own."""

    def make(call: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            outputs = [t for t in tensors_in(result) if t.requires_grad]
            leaves = [t for t in tensors_in([args, kwargs]) if t.requires_grad]
            nodes = [t.grad_fn for t in outputs if t.grad_fn is not None]
            words = [
                (normalise(n.name()), [m and (normalise(m.name()), i) for m, i in n.next_functions])
                for n in nodes
            ]
            if not outputs or not leaves:
                return result, words
            ones = [torch.ones_like(t) for t in outputs]
            options: Any = {"allow_unused": True, "create_graph": True, "retain_graph": again}
            first = torch.autograd.grad(outputs, leaves, ones, **options)
            second = torch.autograd.grad(outputs, leaves, ones, allow_unused=True)
            return result, words, first, second

        return run

    return make


def _hooked(call: Callable) -> Callable:
    """Return what hooks on the graph's node see in backward."""

    def run(*args: Any, **kwargs: Any) -> Any:
        seen: list[Any] = []
        result = call(*args, **kwargs)
        for tensor in tensors_in(result):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda grads: seen.append(("pre", list(grads))))
                tensor.grad_fn.register_hook(
                    lambda ins, outs: seen.append(("post", list(ins), list(outs)))
                )
                tensor.backward(torch.ones_like(tensor), retain_graph=True)
        return result, seen

    return run


def _spread(call: Callable) -> Callable:
    """Call through functools.partial and map: other ways into the call slot."""
    import functools

    return lambda *args, **kwargs: next(
        map(functools.partial(call, **kwargs), *[[a] for a in args])
    )


TRANSFORMS: dict[str, Callable[[Callable], Callable]] = {
    "vmap": _over_first(torch.vmap),
    "vmap_in_vmap": _over_first(lambda f: torch.vmap(torch.vmap(f))),
    "vmap_chunk": _over_first(lambda f: torch.vmap(f, chunk_size=1)),
    "grad": _over_first(lambda f: torch.func.grad(_summed(f))),
    "vjp": _over_first(lambda f: lambda x: torch.func.vjp(_summed(f), x)[0]),
    "vmap_grad": _over_first(lambda f: torch.vmap(torch.func.grad(_summed(f)))),
    "jvp": _over_first(lambda f: _jvp(_summed(f))),
    "functionalize": _over_first(torch.func.functionalize),
    "beside_vmap": _over_first(lambda f: lambda x: torch.vmap(lambda y: (f(x), y)[1])(x)),
    "fake": _fake,
    "functional": _functional,
    "checkpoint": _checkpoint(False),
    "checkpoint_reentrant": _checkpoint(True),
    "make_fx": _traced,
    "graph": _graph(False),
    "graph kept": _graph(True),
    "hooked": _hooked,
    "thread": _in_thread,
    "twice": _twice,
    "from_except": _from_except,
    "spread": _spread,
}
_CHEAP = ("thread", "twice", "from_except", "spread", "graph", "graph kept", "hooked")
_WEIGHTS = [3 if name in _CHEAP else 1 for name in TRANSFORMS]


class Situation:
    """One drawn state for a call."""

    def __init__(self, random: Random, ordinary: bool, values: list[str]) -> None:
        """Draw contexts, a transform, an observer and the handle that is called."""
        self.how = random.choice(("object", "object", "packet", "overload"))
        self.contexts: list[str] = []
        for _ in range(random.choice((0, 0, 0, 0, 1, 1, 1, 2, 2, 3))):
            name = random.choice(FRAGILE if ordinary and random.random() < 0.06 else NESTABLE)
            if _FAMILY[name] not in {_FAMILY[other] for other in self.contexts}:
                self.contexts.append(name)
        self.transform = ""
        if random.random() < 0.14:
            self.transform = random.choices(list(TRANSFORMS), _WEIGHTS)[0]
        if {*FRAGILE} & {*self.contexts}:  # no wrapped Tensors there either
            self.transform = ""
            self.contexts = [n for n in self.contexts if n not in ("fake_mode", "functional_mode")]
        self.observer = ""
        if random.random() < 0.07:
            self.observer = random.choices(list(OBSERVERS), (6, 4, 1, 1, 3, 3))[0]
        if any(odd in value for odd in UNOBSERVABLE for value in values):
            self.observer = ""
        self.observer_inside = random.random() < 0.5
        self.in_thread = random.random() < 0.02
        self.disabled = random.random() < 0.03  # the cpu kernel, by set_kernel_enabled
        if {"fake_mode", "functional_mode"} & set(self.contexts) and self.observer == "trace":
            self.observer = ""
        if self.transform == "make_fx":  # its caches leave the second side less to record
            self.observer = ""
            self.contexts = [n for n in self.contexts if n not in ("functions", "stacked")]
        self.logs: list[list[Any]] = []

    def enter(self, op: Any) -> Any:
        """Return the context for one side."""
        log: list[Any] = []
        self.logs.append(log)

        @contextmanager
        def entered() -> Iterator[Any]:
            with ExitStack() as stack:
                logging = None
                observer = OBSERVERS[self.observer](log) if self.observer else None
                if observer is not None and not self.observer_inside:
                    stack.enter_context(observer)
                for name in self.contexts:
                    one = stack.enter_context(SITUATIONS[name]())
                    logging = one if hasattr(one, "log") else logging
                if self.disabled:
                    stack.enter_context(op.set_kernel_enabled("cpu", False))
                if observer is not None and self.observer_inside:
                    stack.enter_context(observer)
                yield logging

        return entered()

    @property
    def plain(self) -> bool:
        """Nothing special is on."""
        return not (self.contexts or self.transform or self.observer or self.disabled)

    def __str__(self) -> str:
        """Return the state in words."""
        words = [f"by {self.how}", *self.contexts]
        words += [f"transform {self.transform}"] if self.transform else []
        words += [f"observer {self.observer}"] if self.observer else []
        words += ["in a thread"] if self.in_thread else []
        words += ["cpu kernel disabled"] if self.disabled else []
        return ", ".join(words)
