"""The states that a call is made in: contexts, transforms, tracing, observers, the packet."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from tools.fuzz.situations import SITUATIONS, TRANSFORMS
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

CONTEXTS = (
    *("no_grad", "inference_mode", "left_inference", "autocast", "autocast_half"),
    *("device_meta", "default_device_meta", "default_dtype", "functions", "dispatches", "stacked"),
    *("no_functions", "no_subclass_functions", "saved_tensors_hooks", "anomaly", "view_tracking"),
    *("fake_mode", "functional_mode", "forward_level", "record_function_off"),
)
PLAIN_TRANSFORMS = (
    *("vmap", "vmap_in_vmap", "grad", "vjp", "vmap_grad", "jvp", "functionalize", "beside_vmap"),
    *("fake", "functional", "make_fx", "graph", "thread", "twice", "from_except"),
)


def _traced(mode: str, **options: Any) -> Callable[[Callable], Callable]:
    """Return the program that make_fx writes; in symbolic mode ints become SymInts."""

    def make(call: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            from torch.fx.experimental.proxy_tensor import make_fx

            graph = make_fx(lambda *a: call(*a, **kwargs), tracing_mode=mode, **options)(*args)
            guards = getattr(getattr(graph, "shape_env", None), "guards", ())
            return graph.code, [str(guard.expr) for guard in guards]

        return run

    return make


def _sizes_as_symints(call: Callable) -> Callable:
    """Trace with the ints that are sizes of the first Tensor taken from its symbolic shape."""

    def run(*args: Any, **kwargs: Any) -> Any:
        from torch.fx.experimental.proxy_tensor import make_fx

        leaves, spec = tree_flatten((args, kwargs))
        first = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
        if first is None:
            return call(*args, **kwargs)
        sizes = list(first.shape)

        def traced(x: Tensor) -> Any:
            new = [
                x
                if leaf is first
                else x.size(sizes.index(leaf))
                if type(leaf) is int and leaf in sizes
                else leaf
                for leaf in leaves
            ]
            new_args, new_kwargs = tree_unflatten(new, spec)
            return call(*new_args, **new_kwargs)

        graph = make_fx(traced, tracing_mode="symbolic", _allow_non_fake_inputs=True)(first)
        return graph.code

    return run


def _script_trace(call: Callable) -> Callable:
    """Return the graph that torch.jit.trace records, without the places in the source."""

    def run(*args: Any, **kwargs: Any) -> Any:
        index = next((i for i, value in enumerate(args) if isinstance(value, Tensor)), None)
        if index is None:
            return call(*args, **kwargs)

        def traced(x: Tensor) -> Any:
            return call(*args[:index], x, *args[index + 1 :], **kwargs)

        graph = torch.jit.trace(traced, (args[index],), check_trace=False).graph
        return re.sub(r" *#.*", "", str(graph))

    return run


OWN_TRANSFORMS: dict[str, Callable[[Callable], Callable]] = {
    "traced": _traced("real"),
    "traced fake": _traced("fake", _allow_non_fake_inputs=True),
    "traced symbolic": _traced("symbolic", _allow_non_fake_inputs=True),
    "traced before dispatch": _traced("real", pre_dispatch=True),
    "sizes as SymInts": _sizes_as_symints,
    "script trace": _script_trace,
}


@dataclass(frozen=True)
class State:
    """One drawn state."""

    contexts: tuple[str, ...] = ()
    transform: str = ""
    profile: bool = False
    packet: bool = False

    def enter(self) -> Any:
        """Return the context of one side."""

        @contextlib.contextmanager
        def entered() -> Any:
            with contextlib.ExitStack() as stack:
                logging = None
                for name in self.contexts:
                    one = stack.enter_context(SITUATIONS[name]())
                    logging = one if hasattr(one, "log") else logging
                yield logging

        return entered()

    def transformed(self, call: Callable) -> Callable:
        """Return the callable that is observed."""
        if not self.transform:
            return call
        return {**TRANSFORMS, **OWN_TRANSFORMS}[self.transform](call)

    def __str__(self) -> str:
        """Return the state in words."""
        words = [*self.contexts, self.transform]
        words += ["profiled"] * self.profile + ["packet"] * self.packet
        return ", ".join(word for word in words if word) or "plain"


PLAIN = State()


def drawn(random: Random) -> State:
    """Draw a state; often the plain one, sometimes the packet."""
    # PyTorch's packet prints the arguments for each overload that it rejects: in a trace and in a
    # profile that shows.
    packet = random.random() < 0.15
    kind = random.random()
    if kind < 0.3:
        return State(packet=packet)
    if kind < 0.65:
        names = random.sample(CONTEXTS, random.choice((1, 1, 1, 2)))
        return State(tuple(names), packet=packet)
    if kind < 0.67:  # a profiler takes a quarter of a second
        return State(profile=True)
    names = [*PLAIN_TRANSFORMS, *OWN_TRANSFORMS]
    transform = random.choice(names)
    return State(transform=transform, packet=packet and transform != "script trace")
