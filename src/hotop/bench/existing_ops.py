"""What a call of an op that exists costs, of `define` + `impl` and `custom_op`: accelerated."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Optional

import torch
from torch import Tensor

import hotop
from hotop.bench.contenders import PLAIN
from hotop.bench.timing import Timing, make_loop, time_interleaved

__all__ = [
    "ACCELERATED",
    "CUSTOM_OP",
    "DEFINE_IMPL",
    "LOOKED_UP",
    "MANY",
    "OBJECT",
    "ONE",
    "OVERLOAD",
    "PACKET",
    "TODAY",
    "OpRow",
    "contender",
    "measure_ops",
]

# Ways to call an op, and whose call it is.
OVERLOAD = "overload"
PACKET = "packet"
LOOKED_UP = "torch.ops.ns.op"
OBJECT = "object"
TODAY = "today"
ACCELERATED = "accelerated"

DEFINE_IMPL = "define + impl"
CUSTOM_OP = "custom_op"

ONE = "1 Tensor"
MANY = "14 inputs"

_NAMESPACE = "hotop_bench_existing"
_ROUNDS = 400
_serial = itertools.count()
_libraries: list[torch.library.Library] = []


def contender(way: str, whose: str) -> str:
    """Returns the name of a contender: a way to call the op, before or after acceleration."""
    return f"{way}, {whose}"


@dataclass(frozen=True)
class OpRow:
    """One way of registration and one signature: every way to call it, before and after.

    Attributes:
        registration: ``define + impl`` or ``custom_op``.
        inputs: The signature in words.
        ways: The ways to call it, in order.
        roads: The road that hotop says each accelerated way takes.
        timings: The time of the plain function's call and of each contender's.
    """

    registration: str
    inputs: str
    ways: tuple[str, ...]
    roads: dict[str, str]
    timings: dict[str, Timing]

    def tax_us(self, way: str, whose: str, *, median: bool = False) -> float:
        """Returns the call above the plain function's."""
        call, plain = self.timings[contender(way, whose)], self.timings[PLAIN]
        if median:
            return (call.median_ns - plain.median_ns) / 1e3
        return (call.minimum_ns - plain.minimum_ns) / 1e3

    def as_json(self) -> dict[str, object]:
        """Returns plain data."""
        both = [(way, whose) for way in self.ways for whose in (TODAY, ACCELERATED)]
        return asdict(self) | {
            "tax_us": {contender(*each): self.tax_us(*each) for each in both},
            "tax_median_us": {contender(*each): self.tax_us(*each, median=True) for each in both},
        }


def _one(x: Tensor) -> None:
    pass


def _many(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lengths: Tensor,
    table: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    bias: Optional[Tensor],  # noqa: UP045  what infer_schema reads
    sinks: Optional[Tensor],  # noqa: UP045
    heads: int,
    block: int,
    scale: float,
    cap: float,
) -> None:
    pass


def _many_arguments() -> list[object]:
    return [*(torch.ones(4) for _ in range(8)), None, None, 8, 16, 0.125, 30.0]


_SIGNATURES: tuple[tuple[str, Callable[..., None], Callable[[], list[object]]], ...] = (
    (ONE, _one, lambda: [torch.ones(4)]),
    (MANY, _many, _many_arguments),
)


def _define_impl(kernel: Callable[..., object], name: str) -> None:
    """Registers `kernel` as the helpers of vLLM and SGLang do; returns nothing to call."""
    library = torch.library.Library(_NAMESPACE, "FRAGMENT")
    _libraries.append(library)
    library.define(name + torch.library.infer_schema(kernel, mutates_args=()))
    library.impl(name, kernel, "CPU")


def _custom_op(kernel: Callable[..., object], name: str) -> object:
    return torch.library.custom_op(f"{_NAMESPACE}::{name}", kernel, mutates_args=())


_REGISTRATIONS: Mapping[str, Callable[[Callable[..., object], str], object]] = {
    DEFINE_IMPL: _define_impl,
    CUSTOM_OP: _custom_op,
}


def measure_ops(*, quick: bool = False) -> list[OpRow]:
    """Times ops whose kernel does nothing, one left as PyTorch made it and one accelerated."""
    rounds = _ROUNDS // 10 if quick else _ROUNDS
    return [
        _measure(registration, inputs, kernel, make_arguments(), rounds)
        for registration in _REGISTRATIONS
        for inputs, kernel, make_arguments in _SIGNATURES
    ]


def _measure(
    registration: str,
    inputs: str,
    kernel: Callable[..., None],
    arguments: Sequence[object],
    rounds: int,
) -> OpRow:
    """Makes the same op twice, accelerates one of them, and times both in the same rounds."""
    register = _REGISTRATIONS[registration]
    loops = {PLAIN: make_loop(kernel, arguments)}
    ways: dict[str, dict[str, Any]] = {}
    for whose in (TODAY, ACCELERATED):
        name = f"op_{next(_serial)}"
        made = register(kernel, name)
        packet = getattr(getattr(torch.ops, _NAMESPACE), name)
        ways[whose] = {OVERLOAD: packet.default, PACKET: packet}
        ways[whose] |= {} if made is None else {OBJECT: made}
        if whose == ACCELERATED:
            hotop.accelerate(f"{_NAMESPACE}::{name}")
        for way, op in ways[whose].items():
            loops[contender(way, whose)] = make_loop(op, arguments)
        loops[contender(LOOKED_UP, whose)] = make_loop(
            torch.ops, arguments, path=f".{_NAMESPACE}.{name}"
        )
    roads = {way: str(hotop.explain(op, *arguments).road) for way, op in ways[ACCELERATED].items()}
    timings = time_interleaved(loops, rounds=rounds)
    return OpRow(registration, inputs, (*ways[TODAY], LOOKED_UP), roads, timings)
