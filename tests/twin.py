"""The twin harness: one kernel defined as two ops, every observable of a call compared."""

import importlib
import itertools
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from hotop import explain
from twin_observe import (
    NAMESPACES,
    Log,
    Names,
    attempt,
    describe,
    describe_error,
    kernel_name,
    normalise,
    pop_log,
    push_log,
    recorded,
    tensors_in,
    thread_state,
)

HOWS = ("object", "packet", "overload")
# Another factory here (torch.library:custom_op) checks the harness itself: all must be equal.
FACTORY = os.environ.get("HOTOP_TWIN_FACTORY", "hotop:custom_op")
_module, _, _attribute = FACTORY.partition(":")
RIGHT_FACTORY: Callable = getattr(importlib.import_module(_module), _attribute)

# For tests of what only hotop does; the harness's own check runs without them.
needs_hotop = pytest.mark.skipif(not FACTORY.startswith("hotop"), reason="twins of PyTorch")

Arguments = tuple[tuple, dict[str, Any]]
MakeArguments = Callable[[], Arguments]
Observation = dict[str, Any]
_numbers = itertools.count()


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """Return a line for each place where two observations differ."""
    if left == right:
        return []
    if isinstance(left, dict) and isinstance(right, dict):
        keys = [*left, *(key for key in right if key not in left)]
        absent = "(absent)"
        return [
            line
            for key in keys
            for line in differences(
                left.get(key, absent), right.get(key, absent), f"{path}.{key}".lstrip(".")
            )
        ]
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        return [
            line
            for index, (one, other) in enumerate(zip(left, right, strict=True))
            for line in differences(one, other, f"{path}[{index}]")
        ]
    return [f"{path}:\n    torch: {left!r}\n    hotop: {right!r}"]


def handle(op: Any, how: str) -> Callable:
    """Return the object, packet or overload of an op."""
    if how == "object":
        return op
    namespace, name = op._qualname.split("::")
    packet = getattr(getattr(torch.ops, namespace), name.partition(".")[0])
    return packet if how == "packet" else getattr(packet, name.partition(".")[2] or "default")


def _backward(result: Any) -> None:
    outputs = [t for t in tensors_in(result) if t.requires_grad and t.grad_fn is not None]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(t) * 2 for t in outputs])


def _describe_events(profiler: Any) -> list[Any]:
    return [
        (
            normalise(event.name),
            str(event.input_shapes),
            str(event.concrete_inputs),
            event.sequence_nr >= 0,
            str(event.scope),
        )
        for event in profiler.function_events
        if not event.name.startswith(("[", "profiler", "Profiler"))
    ]


def observe(
    call: Callable,
    make_args: MakeArguments,
    context: Callable[[], AbstractContextManager] = nullcontext,
    *,
    backward: bool = True,
    profile: bool = False,
    direct: list[Any] | None = None,
) -> Observation:
    """Make one call and return all that can be observed of it.

    Into `direct` go what `hotop.explain` says of the same call and whether the kernel was
    entered straight from here.
    """
    args, kwargs = make_args()
    again = make_args() if direct is not None else ((), {})
    names = Names()
    names.add("args", args)
    names.add("kwargs", kwargs)
    seen: Observation = {"before": describe([args, kwargs], names)}
    outside = thread_state()
    log = Log(names)
    push_log(log)
    profiler = torch.autograd.profiler.profile(record_shapes=True) if profile else nullcontext()
    result: Any = None
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with profiler, context() as entered:
                inside = torch._C._dispatch_tls_local_exclude_set()
                try:
                    result = call(*args, **kwargs)
                    seen["error"] = None
                except BaseException as error:
                    seen["error"] = describe_error(error, log.raised)
                seen["state after"] = thread_state()
                seen["result"] = describe(result, names)
                seen["after"] = describe([args, kwargs], names)
                if backward and seen["error"] is None:
                    try:
                        _backward(result)
                    except BaseException as error:
                        seen["backward error"] = describe_error(error, log.raised)
                    seen["grads"] = [
                        attempt(lambda t=t: None if t.grad is None else describe(t.grad, names))
                        for t in tensors_in([args, kwargs])
                        if attempt(lambda t=t: t.requires_grad and t.is_leaf) is True
                    ]
                logged = list(getattr(entered, "log", ()))
                # A call that failed inside PyTorch may have left other keys excluded.
                if direct is not None and inside == torch._C._dispatch_tls_local_exclude_set():
                    direct[:] = [attempt(lambda: explain(call, *again[0], **again[1])), log.direct]
    finally:
        pop_log()
    seen["mode log"] = [describe(item, names) for item in logged]
    seen["kernel"] = log.entries
    seen["warnings"] = [(w.category.__name__, normalise(str(w.message))) for w in caught]
    seen["state left"] = differences(outside, thread_state(), "state")
    if profile:
        seen["events"] = _describe_events(profiler)
    return seen


def left_factory(*args: Any, **kwargs: Any) -> Any:
    """Make PyTorch's op, on the C++ dispatcher.

    The dispatch of its own that 2.14 has between Python kernels checks neither arguments nor
    returns as the dispatcher does, and records no profiler event. hotop keeps all three on every
    version, so the twin of a hotop op is PyTorch's op without that dispatch.
    """
    op = torch.library.custom_op(*args, **kwargs)
    if hasattr(op._opoverload, "_enable_pyobj_dispatch"):
        op._opoverload._enable_pyobj_dispatch(False)
    return op


class Twin:
    """One kernel as a `torch.library.custom_op` and as an op of hotop.

    Args:
        kernel: The kernel; wrapped so that it records what it receives.
        mutates_args: As for `custom_op`.
        schema: As for `custom_op`.
        device_types: As for `custom_op`.
        tags: As for `custom_op`.
        setup: Called with each op after its definition, to register the rest.
        varargs: Give the recording kernel `*args, **kwargs` parameters.
        record: Record the kernel's entries; without it the kernel is registered as it is.
        overload: The name of the overload, for ops defined as `ns::op.overload`.
        name: The op's name; a fresh one by default.
    """

    def __init__(
        self,
        kernel: Callable,
        mutates_args: str | Sequence[str] = (),
        schema: str | None = None,
        device_types: str | Sequence[str] | None = None,
        tags: Any = None,
        setup: Callable[[Any], object] | None = None,
        *,
        varargs: bool = False,
        record: bool = True,
        overload: str = "",
        name: str | None = None,
    ) -> None:
        """Define both ops."""
        self.name = name or f"{kernel_name(kernel)}_{next(_numbers)}"
        function = recorded(kernel, varargs=varargs) if record else kernel
        self.ops: list[Any] = []
        # Off where the kernel entered is not one that records, or one put under the op by others.
        self.check_explain = record
        self.direct: bool | None = None
        for namespace, factory in zip(NAMESPACES, (left_factory, RIGHT_FACTORY), strict=True):
            op = factory(
                f"{namespace}::{self.name}{overload and '.' + overload}",
                function,
                mutates_args=mutates_args,
                schema=schema,
                device_types=device_types,
                tags=tags,
            )
            if setup is not None:
                setup(op)
            self.ops.append(op)

    @property
    def schemas(self) -> list[str]:
        """The schema strings of both ops, without the namespace."""
        return [normalise(str(op._opoverload._schema)) for op in self.ops]

    def each(self, function: Callable[[Any], Any]) -> list[Any]:
        """Call a function with the torch op and with the hotop op."""
        return [function(op) for op in self.ops]

    def compare(
        self,
        make_args: MakeArguments,
        context: Callable[[], AbstractContextManager] = nullcontext,
        how: str = "object",
        *,
        transform: Callable[[Callable], Callable] | None = None,
        backward: bool = True,
        profile: bool = False,
    ) -> Observation:
        """Make the same call on both ops; everything observable must be equal.

        Args:
            make_args: Makes fresh, equal arguments for each side.
            context: Makes the context that the call runs in; its `log` is compared too.
            how: Whether to call the object, the packet or the overload.
            transform: Makes the function to call from the op's handle; without it,
                `hotop.explain` must tell the road that the call takes.
            backward: Run backward through outputs that require grad.
            profile: Compare profiler events as well.

        Returns:
            What was observed (the same on both).

        Raises:
            AssertionError: With one line per difference.
        """
        warn_always = torch.is_warn_always_enabled()
        torch.set_warn_always(True)  # else a warn-once goes to the first of the two only
        try:
            sides = []
            for op in self.ops:
                call = handle(op, how)
                can_explain = (
                    transform is None and op is self.ops[1] and FACTORY.startswith("hotop")
                )
                road: list[Any] | None = [] if can_explain else None
                call = call if transform is None else transform(call)
                sides.append(
                    observe(
                        call, make_args, context, backward=backward, profile=profile, direct=road
                    )
                )
        finally:
            torch.set_warn_always(warn_always)
        left, right = sides
        found = differences(left, right)
        self.direct = None
        if road and self.check_explain and not isinstance(road[0], str):
            self.direct = road[0].direct
            entered = road[1][:1] or [False]
            refused = not road[1] and right["error"] is not None
            if [self.direct] != entered and not refused:
                found.append(f"explain says {road[0]}, kernel entered directly: {road[1]}")
        if found:
            lines = "\n".join(f"  {line}" for line in found)
            raise AssertionError(f"{self.schemas[0]} called by {how}: twins differ\n{lines}")
        return left
