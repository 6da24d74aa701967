"""An op inside a program compiled by Inductor, against a bare function in the same place.

Each contender's program is ``torch.compile(lambda x0, ..., x31: (op(x0), ..., op(x31)),
fullgraph=True)``, and what is timed is the whole call: guards, runtime wrappers and the generated
code, which calls ``torch.ops.ns.op.default(x)`` 32 times. The reference is the very same compiled
program while the attribute ``default`` of that packet is a bare Python function: the same guards
and look-ups in the same memory, then calls of that function. So the difference divided by 32 is
what the op itself adds to one call there. One call per program would not do: where its objects
happen to lie in memory moves a compiled call by more than hotop costs.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotop.bench.contenders import (
    CUSTOM_OP,
    DEFINE_IMPL,
    DEFINE_NAMESPACE,
    HOTOP,
    HOTOP_NAMESPACE,
    TORCH_NAMESPACE,
    register,
)
from hotop.bench.timing import Loop, Timing, make_loop, time_interleaved

__all__ = ["CALLS", "COUNTS", "CompiledResult", "measure"]

CALLS = 32
COUNTS = (1, 10)

_BARE = "bare in "
_LOOP_NS = 400_000


@dataclass(frozen=True)
class CompiledResult:
    """Times of the compiled programs that call an op with `tensors` Tensors.

    Attributes:
        name: The name of the case.
        title: What the table calls it.
        tensors: The number of Tensors.
        timings: The call of each contender's program of `CALLS` op calls.
        bare: The call of the same program with a bare function in the op's place.
    """

    name: str
    title: str
    tensors: int
    timings: dict[str, Timing]
    bare: dict[str, Timing]

    def taxes_us(self, *, median: bool = False) -> dict[str, float]:
        """Returns what each contender's op adds to one of the calls, in microseconds."""
        if median:
            return {
                name: (timing.median_ns - self.bare[name].median_ns) / (1e3 * CALLS)
                for name, timing in self.timings.items()
            }
        return {
            name: (timing.minimum_ns - self.bare[name].minimum_ns) / (1e3 * CALLS)
            for name, timing in self.timings.items()
        }


def measure(tensors: int, *, rounds: int) -> CompiledResult:
    """Compiles the contenders' programs for an op with `tensors` Tensors and times them."""
    # Each call has a first Tensor of its own, or Inductor would make the equal calls once.
    arguments = [torch.ones(4) for _ in range(CALLS + tensors - 1)]
    kernel, fake = _functions(tensors)
    bare, _ = _functions(tensors)
    ops = register(kernel, name="compiled", fake=fake)
    contenders = {
        CUSTOM_OP: (TORCH_NAMESPACE, ops.custom_op),
        DEFINE_IMPL: (DEFINE_NAMESPACE, ops.define_impl),
        HOTOP: (HOTOP_NAMESPACE, ops.hotop),
    }
    loops: dict[str, Loop] = {}
    originals: list[tuple[Any, object]] = []
    for contender, (namespace, op) in contenders.items():
        program = _compile(op, tensors)
        program(*arguments)
        packet = getattr(getattr(torch.ops, namespace), ops.name)
        originals.append((packet, packet.default))
        loop = make_loop(program, arguments)
        loops[contender] = _with_default(packet, packet.default, loop)
        loops[_BARE + contender] = _with_default(packet, bare, loop)
        _check_exchange(packet, bare, program, arguments)
    try:
        timings = time_interleaved(loops, rounds=rounds, loop_ns=_LOOP_NS)
    finally:
        for packet, overload in originals:
            packet.default = overload
    plural = "s" if tensors > 1 else ""
    return CompiledResult(
        f"compiled-{tensors}",
        f"compiled, per op, {tensors} Tensor{plural}",
        tensors,
        {contender: timings[contender] for contender in contenders},
        {contender: timings[_BARE + contender] for contender in contenders},
    )


def _with_default(packet: Any, default: object, loop: Loop) -> Loop:
    def exchange_and_run(repeat: Iterable[object]) -> None:
        packet.default = default
        loop(repeat)

    return exchange_and_run


def _check_exchange(
    packet: Any,
    bare: Callable[..., Tensor],
    program: Callable[..., list[Tensor]],
    arguments: list[Tensor],
) -> None:
    overload, expected = packet.default, bare.__globals__["out"].data_ptr()
    own = {result.data_ptr() for result in program(*arguments)}
    packet.default = bare
    exchanged = {result.data_ptr() for result in program(*arguments)}
    packet.default = overload
    if expected in own or exchanged != {expected}:
        raise RuntimeError("the compiled program does not call what stands in the op's place")


def _functions(tensors: int) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    names = [f"x{index}" for index in range(tensors)]
    annotated = ", ".join(f"{name}: Tensor" for name in names)
    namespace: dict[str, Any] = {"torch": torch, "Tensor": Tensor, "out": torch.zeros(4)}
    source = (
        f"def kernel({annotated}) -> Tensor:\n    return out\n"
        f"def fake({', '.join(names)}):\n    return torch.empty_like(x0)\n"
    )
    exec(source, namespace)
    return namespace["kernel"], namespace["fake"]


def _compile(op: Callable[..., object], tensors: int) -> Callable[..., list[Tensor]]:
    shared = "".join(f", y{index}" for index in range(tensors - 1))
    first = [f"x{index}" for index in range(CALLS)]
    calls = ", ".join(f"op({name}{shared})" for name in first)
    namespace: dict[str, Any] = {"op": op}
    exec(f"def program({', '.join(first)}{shared}):\n    return [{calls}]\n", namespace)
    program: Callable[..., list[Tensor]] = namespace["program"]
    return torch.compile(program, fullgraph=True, dynamic=False)
