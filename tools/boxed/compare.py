"""One call, by PyTorch's own entry and by the accelerated overload, and where the two differ."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import sys
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch
from tools.boxed.copies import copied
from tools.boxed.edits import EDITS
from tools.boxed.overloads import name_of
from tools.boxed.states import State
from tools.fuzz.compare import SPOILS as FUZZER_SPOILS

import hotop
from twin import Observation, differences, observe
from twin_contexts import FunctionSub
from twin_observe import normalise

# PyTorch's entries, taken before anything is accelerated.
_OVERLOAD_CALL = torch._ops.OpOverload.__call__
_PACKET_CALL = torch._ops.OpOverloadPacket.__call__
HAS_API = hasattr(hotop, "accelerate")


# PyTorch prints the warnings of its C++ code where no Python entry has its handler on.
_STAMP = re.compile(r"\[W\d+ [\d:.]+ ")


class Printed:
    """What C++ code writes to the standard error of this process."""

    def __init__(self) -> None:
        """Take the place of standard error; faulthandler keeps the old one."""
        self._old = os.dup(2)
        sys.stderr = os.fdopen(self._old, "w")
        faulthandler.enable(sys.stderr)
        self._file = os.memfd_create("stderr")
        os.dup2(self._file, 2)

    def taken(self) -> str:
        """Return what was written since the last look."""
        size = os.lseek(self._file, 0, os.SEEK_CUR)
        if not size:
            return ""
        text = os.pread(self._file, size, 0).decode(errors="replace")
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        return normalise(_STAMP.sub("[W ", text))


PRINTED: list[Printed] = []  # empty where the process keeps its standard error


def by_pytorch(op: Any) -> Callable:
    """Return PyTorch's own entry of an overload or a packet."""
    entry = _OVERLOAD_CALL if isinstance(op, torch._ops.OpOverload) else _PACKET_CALL

    def slow(*args: Any, **kwargs: Any) -> Any:
        return entry(op, *args, **kwargs)

    return slow


@contextlib.contextmanager
def accelerated(op: Any, what: str) -> Iterator[dict[str, int]]:
    """Accelerate an overload and its packet; at the end, how many calls took which road.

    Args:
        op: The overload.
        what: "PyTorch" leaves it as it is.
    """
    roads: dict[str, int] = {}
    if not HAS_API or what == "PyTorch":
        yield roads
        return
    packet = op.overloadpacket
    hotop.accelerate(op)
    with contextlib.suppress(ValueError):  # overloads of a packet that cannot be accelerated
        hotop.accelerate(packet)
    try:
        yield roads
    finally:
        roads.update(counted(op))
        hotop.restore()


def counted(op: Any) -> dict[str, int]:
    """Return the calls of an accelerated overload by road."""
    name = name_of(op)
    for one in hotop.report().ops:
        if one.name in (name, f"{name}.default"):
            return {"direct": one.direct, "boxed": one.boxed, "pytorch": one.pytorch}
    return {}


class Case:
    """A call: the overload, its arguments, the changes of their form and the state."""

    def __init__(
        self, op: Any, arguments: Any, edits: tuple[str, ...], state: State, seed: str
    ) -> None:
        """Keep all that both sides need."""
        self.op, self.arguments, self.edits = op, arguments, edits
        self.state, self.seed = state, seed

    def make(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return fresh arguments, in the same state of the random numbers."""
        torch.default_generator.manual_seed(5)
        args, kwargs = copied(*self.arguments)
        changed = (list(args), kwargs)
        random = Random(self.seed)
        for edit in self.edits:
            changed = EDITS[edit](self.op, changed, random)
        return tuple(changed[0]), changed[1]

    def is_printable(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the arguments have a `repr` in this state.

        PyTorch's packet asks for it, for each overload that it rejects, and fails where it raises.
        """
        try:
            with self.state.enter():
                for value in [*args, *kwargs.values()]:
                    repr(value)
        except Exception:
            return False
        return True

    def __str__(self) -> str:
        """Return the case in words."""
        form = ", ".join(self.edits) or "as recorded"
        return f"{name_of(self.op)}: {form}; {self.state}"

    def side(self, call: Callable) -> Observation:
        """Make the call and return all that can be observed."""
        FunctionSub.seen.clear()
        for printed in PRINTED:
            printed.taken()
        grad_mode = torch.is_grad_enabled()
        keys = (
            torch._C._dispatch_tls_local_include_set(),
            torch._C._dispatch_tls_local_exclude_set(),
        )
        with torch._C._ForceDispatchKeyGuard(*keys):
            seen = observe(
                self.state.transformed(call),
                self.make,
                self.state.enter,
                profile=self.state.profile,
            )
        torch.set_grad_enabled(grad_mode)
        if seen["error"]:  # some operators tell the C++ frames that they were called from
            text = seen["error"]["text"]
            seen["error"]["text"] = text.partition("\nframe #0: ")[0]
        seen["seen by the subclass"] = list(FunctionSub.seen)
        seen["printed"] = [printed.taken() for printed in PRINTED]
        seen["random numbers"] = str(torch.get_rng_state().sum())
        return seen

    def sides(self, spoil: str) -> tuple[Observation, Observation]:
        """Return what PyTorch's side and the fast side show."""
        target = self.op.overloadpacket if self.state.packet else self.op
        slow = self.side(by_pytorch(target))
        if spoil == "PyTorch":
            return slow, self.side(by_pytorch(target))
        call = SPOILS[spoil](target) if spoil else target
        return slow, self.side(call)


def _path(line: str) -> str:
    return line.partition("\n")[0]


def compare(case: Case, spoil: str = "") -> tuple[list[str], Observation, bool]:
    """Return the lines that differ, PyTorch's side, and whether PyTorch differs from itself.

    A difference counts when it is seen twice and PyTorch shows none there against itself.
    """
    left, right = case.sides(spoil)
    lines = differences(left, right)
    if not lines:
        return [], left, False
    wavering: set[str] = set()
    for _ in range(3):
        wavering |= {_path(line) for line in differences(*case.sides("PyTorch"))}
    again = {_path(line) for line in differences(*case.sides(spoil))}
    kept = [line for line in lines if _path(line) in again - wavering]
    return kept, left, bool(wavering)


# Broken fast sides.


def _without_keywords(call: Callable) -> Callable:
    def spoiled(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **dict(list(kwargs.items())[:-1]))

    return spoiled


def _without_function_modes(call: Callable) -> Callable:
    def spoiled(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return call(*args, **kwargs)

    return spoiled


def _in_no_grad(call: Callable) -> Callable:
    def spoiled(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return call(*args, **kwargs)

    return spoiled


def _lists_of_tuples(call: Callable) -> Callable:
    def spoiled(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        return tuple(result) if isinstance(result, list) else result

    return spoiled


def _copies_its_input(call: Callable) -> Callable:
    def spoiled(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        same = any(result is value for value in [*args, *kwargs.values()])
        return result.alias() if same and isinstance(result, torch.Tensor) else result

    return spoiled


SPOILS: dict[str, Callable[[Callable], Callable]] = {
    **FUZZER_SPOILS,
    "last keyword ignored": _without_keywords,
    "no function modes": _without_function_modes,
    "no grad": _in_no_grad,
    "tuples for lists": _lists_of_tuples,
    "not the input itself": _copies_its_input,
}
