"""One call on both ops: what each side shows, and where they differ."""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tools.fuzz.calls import Call
from tools.fuzz.grammar import Definition
from tools.fuzz.observers import GARBLED
from tools.fuzz.situations import TRANSFORMS, Situation
from tools.fuzz.stage import STAGE, Behaviour
from torch import Tensor

from twin import Observation, differences, handle, observe
from twin_observe import tensors_in

# An intentionally broken hotop, to see that the fuzzer finds it: wraps the right side's callable.
Spoil = Callable[[Callable], Callable]


@dataclass
class Found:
    """A step whose two sides differ, with all that a predicate needs to explain it."""

    lines: list[str]
    left: Observation
    right: Observation
    definition: Definition
    call: Call
    situation: Situation
    behaviour: Behaviour
    device_list: bool = False  # a kernel was registered for a list of devices
    later_kernel: bool = False  # and another one for some device after it
    removed_override: bool = False  # an override from Python was taken back
    direct: bool | None = None

    @property
    def errors(self) -> tuple[str, str]:
        """The texts of both sides' errors, empty where there is none."""
        return tuple(  # type: ignore[return-value]
            (side.get("error") or {}).get("text", "") for side in (self.left, self.right)
        )


def compare(
    ops: list[Any],
    call: Call,
    situation: Situation,
    behaviour: Behaviour,
    definition: Definition,
    *,
    check_explain: bool,
    spoil: Spoil | None = None,
) -> Found:
    """Make the call on both ops in the same state."""
    sides: list[Observation] = []
    road: list[Any] = []
    STAGE.behaviour = behaviour
    STAGE.ops = ops
    situation.logs.clear()
    # explain is asked after the call, in the state that the kernel or PyTorch left.
    asks = behaviour.act != "leak grad mode"
    for side, op in enumerate(ops):
        STAGE.side, STAGE.depth = side, 0
        grad_mode = torch.is_grad_enabled()
        function = handle(op, situation.how)
        if side == 1 and spoil is not None:
            function = spoil(function)
        elif side == 1 and not situation.transform and check_explain and asks:
            road = [None]
        if situation.transform:
            function = TRANSFORMS[situation.transform](function)
        # PyTorch can leave keys excluded when it raises; neither side shall start with that.
        keys = (
            torch._C._dispatch_tls_local_include_set(),
            torch._C._dispatch_tls_local_exclude_set(),
        )
        with torch._C._ForceDispatchKeyGuard(*keys):
            sides.append(
                observe(
                    function,
                    call.maker,
                    lambda op=op: situation.enter(op),
                    direct=road if side == 1 and road else None,
                )
            )
        torch.set_grad_enabled(grad_mode)
    left, right = sides
    lines = differences(left, right)
    if not any(GARBLED in log for log in situation.logs):
        lines += differences(situation.logs[0], situation.logs[1], "observed")
    direct = None
    if road and road != [None] and not isinstance(road[0], str) and not right["state left"]:
        direct = road[0].direct
        entered = road[1][:1] or [False]
        refused = not road[1] and right["error"] is not None
        if [direct] != entered and not refused:
            lines.append(f"explain says {road[0]}, kernel entered directly: {road[1]}")
    return Found(lines, left, right, definition, call, situation, behaviour, direct=direct)


def in_thread(function: Callable[[], Any]) -> Any:
    """Run in a new thread, whose state is PyTorch's default."""
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(function())
        except BaseException:
            outcome.append(traceback.format_exc())
        # What dies later, in another thread, can damage the heap: see situations.clear_frames.
        gc.collect(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if isinstance(outcome[0], str):
        raise RuntimeError(outcome[0])
    return outcome[0]


# Broken twins.


def _with_result(change: Callable[[Any], Any]) -> Spoil:
    def spoil(call: Callable) -> Callable:
        def observed(*args: Any, **kwargs: Any) -> Any:
            return change(call(*args, **kwargs))

        return observed

    return spoil


def _adds_one(result: Any) -> Any:
    return result + 1 if isinstance(result, Tensor) else result


def _other_text(call: Callable) -> Callable:
    def spoiled(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            raise type(error)(str(error) + ".") from None

    return spoiled


def _other_type(call: Callable) -> Callable:
    def spoiled(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            raise ValueError(str(error)) from None

    return spoiled


def _without_bump(call: Callable) -> Callable:
    def spoiled(*args: Any, **kwargs: Any) -> Any:
        tensors = [t for t in tensors_in([list(args), kwargs]) if type(t) is Tensor]
        tensors = [t for t in tensors if not t.is_inference()]
        before = [t._version for t in tensors]
        result = call(*args, **kwargs)
        changed = [(t, v) for t, v in zip(tensors, before, strict=True) if t._version > v]
        for tensor, _ in changed:
            lower = tensor._version - 1
            torch._C._autograd._unsafe_set_version_counter((tensor,), (lower,))
        return result

    return spoiled


def _leaks_grad_mode(call: Callable) -> Callable:
    def spoiled(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        torch.set_grad_enabled(False)
        return result

    return spoiled


def _without_event(call: Callable) -> Callable:
    def spoiled(*args: Any, **kwargs: Any) -> Any:
        torch.autograd._enable_record_function(False)
        try:
            return call(*args, **kwargs)
        finally:
            torch.autograd._enable_record_function(True)

    return spoiled


def _retries(call: Callable) -> Callable:
    def spoiled(*args: Any, **kwargs: Any) -> Any:
        call(*args, **kwargs)
        return call(*args, **kwargs)

    return spoiled


SPOILS: dict[str, Spoil] = {
    "adds one": _with_result(_adds_one),
    "copies": _with_result(lambda r: list(r) if isinstance(r, tuple) else r),
    "detaches": _with_result(lambda r: r.detach() if isinstance(r, Tensor) else r),
    "other text": _other_text,
    "other type": _other_type,
    "no version bump": _without_bump,
    "leaks grad mode": _leaks_grad_mode,
    "no event": _without_event,
    "runs twice": _retries,
}
