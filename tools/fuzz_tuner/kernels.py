"""The drawn ops: what they compute, in several ways that agree to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from tools.fuzz_tuner import memory
from tools.fuzz_tuner.arguments import Holder, Recipe
from tools.fuzz_tuner.memory import Room, Spot
from torch import Tensor

Values = dict[str, Any]
Core = Callable[[Values], Any]


class Builder:
    """Draws the arguments of one call: shapes, layouts and values from seeds of their own.

    Calls of one style and one layout share a key, or a bucket where their rows differ.
    """

    def __init__(self, style: int, lay: int, rows: int, data: int, *, is_op: bool) -> None:
        self.style = Random(style)
        self.lay = Random(lay)
        self.data = Random(data)
        self.rows = rows
        self.rooms: list[Room] = []
        contexts = ("plain",) * 6 + ("no_grad",) * 3 + ("inference", "float64", "autocast")
        self.context = self.style.choice(contexts)
        self.shape = self._shape()
        self._is_op = is_op

    def _shape(self) -> tuple[int, ...]:
        kind = self.style.random()
        inner = tuple(self.style.choice((1, 2, 3, 4, 5, 8)) for _ in range(3))
        if kind < 0.05:
            return ()
        if kind < 0.08:
            return (self.rows, 0, inner[0])
        return (self.rows, *inner[: self.style.choice((0, 1, 1, 1, 2, 2, 3))])

    def wrap(self) -> str:
        """Draw who holds a Tensor."""
        kind = self.style.choice(memory.WRAPS) if self.style.random() < 0.4 else "plain"
        if self.context == "inference":
            return kind if kind in ("plain", "view") else "plain"
        if self.context != "no_grad" and not self._is_op and self.style.random() < 0.9:
            return kind if kind in ("plain", "view", "frozen parameter") else "plain"
        return kind

    def room(
        self, dtype: torch.dtype, size: int, between: tuple[int, int] | None = None, data: str = ""
    ) -> int:
        """Add memory, and return its number."""
        kind = data or self.data.choice(memory.DATA)
        self.rooms.append(Room(dtype, size, kind, self.data.getrandbits(32), between))
        return len(self.rooms) - 1

    def tensor(
        self,
        dtype: torch.dtype,
        shape: tuple[int, ...] | None = None,
        *,
        between: tuple[int, int] | None = None,
        mutated: bool = False,
    ) -> Spot:
        """Draw a Tensor in memory of its own; one that is changed has no overlapping elements."""
        shape = self.shape if shape is None else shape
        kind = self.lay.choice(memory.LAYOUTS)
        offset, strides = memory.layout(kind, shape, self.lay)
        if mutated and (kind == "windows" or (kind == "expanded" and self.lay.random() < 0.9)):
            offset, strides = 0, memory.packed(shape)
        room = self.room(dtype, memory.reach(offset, shape, strides), between)
        wrap = self.wrap()
        if not dtype.is_floating_point and not dtype.is_complex and wrap in ("leaf", "non-leaf"):
            wrap = "plain"
        if not dtype.is_floating_point and wrap == "parameter":
            wrap = "frozen parameter"
        return Spot(room, offset, shape, strides, wrap)

    def odd_bool(self) -> Spot:
        """Draw a bool Tensor that views whole bytes."""
        spot = self.tensor(torch.uint8)
        self.rooms[-1] = Room(torch.uint8, self.rooms[-1].size, "random", self.rooms[-1].seed)
        wrap = spot.wrap if spot.wrap in ("plain", "view") else "plain"
        return Spot(spot.room, spot.offset, spot.shape, spot.strides, wrap, torch.bool)

    def recipe(self, values: Values, positional: int) -> Recipe:
        """Return the call."""
        return Recipe(tuple(self.rooms), values, positional, self.context)


@dataclass(frozen=True)
class Kernel:
    """One op.

    Attributes:
        parameters: Names and annotations.
        build: Draws the values of the parameters.
        cores: Ways to compute it, the default first.
        returns: The annotation of what cores return.
        mutates: The parameters that it changes.
        essential: Floating-point parameters that every result depends on.
        in_rows: Parameters whose first dimension has the drawn number of rows.
        is_op: It can be an op: no result lies in an argument.
        exact: The ways agree to the bit, not only within tolerances.
        ignored: Parameters that are no part of a key.
    """

    name: str
    parameters: tuple[tuple[str, str], ...]
    build: Callable[[Builder], Values]
    cores: tuple[Core, ...]
    returns: str = "Tensor"
    mutates: tuple[str, ...] = ()
    essential: tuple[str, ...] = ()
    in_rows: tuple[str, ...] = ()
    is_op: bool = True
    exact: bool = True
    is_random: bool = False
    ignored: tuple[str, ...] = ()


def fresh(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return packed memory for a result like x."""
    return torch.empty(x.shape, dtype=dtype or x.dtype)


def _any(builder: Builder) -> torch.dtype:
    return builder.style.choice(memory.EXACT)


def _x(builder: Builder) -> Values:
    return {"x": builder.tensor(_any(builder))}


def _two(builder: Builder) -> Values:
    dtype = builder.style.choice((*memory.FLOATS, *memory.INTS))
    return {"a": builder.tensor(dtype), "b": builder.tensor(dtype)}


def _doubled_out(x: Tensor) -> Tensor:
    return torch.add(x, x, out=fresh(x))


def _row_data(builder: Builder) -> Values:
    dtype = builder.style.choice((torch.float32, torch.float64))
    return {"x": builder.tensor(dtype)}


def _indices(builder: Builder) -> Values:
    table = builder.tensor(builder.style.choice(memory.FLOATS), (5, 3))
    return {"table": table, "idx": builder.tensor(torch.int64, (builder.rows,), between=(0, 5))}


def _optional(builder: Builder) -> Values:
    dtype = _any(builder)
    x = builder.tensor(dtype)
    parts = [
        builder.tensor(dtype, x.shape) if builder.style.random() < 0.7 else None
        for _ in range(builder.style.randrange(4))
    ]
    return {"x": x, "xs": Holder(builder.style.choice(("list", "tuple")), tuple(parts))}


def _summed(v: Values, *, by_out: bool) -> Tensor:
    out = fresh(v["x"]).copy_(v["x"])
    for part in v["xs"]:
        if part is not None:
            out = torch.add(out, part, out=fresh(out)) if by_out else out.add_(part)
    return out


def _tensors(builder: Builder) -> Values:
    count = 1 + builder.style.randrange(3)
    return {"xs": Holder("list", tuple(builder.tensor(_any(builder)) for _ in range(count)))}


def _scalars(builder: Builder) -> Values:
    return {
        "x": builder.tensor(builder.style.choice(memory.FLOATS)),
        "n": builder.style.choice((1, 2, 3)),
        "s": builder.style.choice((0.5, -1.0, 2.0)),
        "flag": builder.style.random() < 0.5,
        "mode": builder.style.choice(("plus", "minus")),
    }


def _scaled(v: Values, *, by_out: bool) -> Tensor:
    factor = v["n"] * v["s"] * (-1 if v["mode"] == "minus" else 1)
    out = fresh(v["x"])
    if by_out:
        torch.mul(v["x"], factor, out=out)
    else:
        out.copy_(v["x"]).mul_(factor)
    return out.neg_() if v["flag"] else out


def _real(builder: Builder) -> Values:
    return {"x": builder.tensor(builder.style.choice(memory.FLOATS))}


def _with_noise(v: Values, *, by_fill: bool) -> Tensor:
    import random

    import numpy

    shape = v["x"].shape
    # ATen and hotop share one generator; so do both ways to draw.
    noise = torch.empty(shape, dtype=torch.float32)
    noise = noise.uniform_() if by_fill else torch.rand(shape, dtype=torch.float32)
    out = fresh(v["x"], torch.float32).copy_(v["x"]).add_(noise)
    return out.add_(random.random()).add_(float(numpy.random.rand()))  # noqa: NPY002


def _generated(builder: Builder) -> Values:
    return {**_real(builder), "generator": Holder("generator", (builder.data.randrange(99),))}


def _with_generated(v: Values, *, by_fill: bool) -> Tensor:
    shape, generator = v["x"].shape, v["generator"]
    noise = torch.empty(shape, dtype=torch.float32)
    if by_fill:
        noise.uniform_(generator=generator)
    else:
        noise = torch.rand(shape, generator=generator, dtype=torch.float32)
    return fresh(v["x"], torch.float32).copy_(v["x"]).add_(noise)


def _sliced(x: Tensor) -> Tensor:
    first = min(1, x.shape[0]) if x.dim() else 0
    return x.narrow(0, first, x.shape[0] - first) if x.dim() else x.view(())


X = (("x", "Tensor"),)
PURE = [
    Kernel(
        "double",
        X,
        _x,
        (lambda v: v["x"] * 2, lambda v: torch.mul(v["x"], 2), lambda v: 2 * v["x"]),
        essential=("x",),
        in_rows=("x",),
    ),
    Kernel(
        "double_packed",
        X,
        _x,
        (
            lambda v: torch.mul(v["x"], 2, out=fresh(v["x"])),
            lambda v: _doubled_out(v["x"]),
            lambda v: fresh(v["x"]).copy_(v["x"]).mul_(2),
        ),
        essential=("x",),
        in_rows=("x",),
    ),
    Kernel(
        "multiply_add",
        (("a", "Tensor"), ("b", "Tensor")),
        _two,
        (
            lambda v: torch.mul(v["a"], v["b"], out=fresh(v["a"])).add_(v["a"]),
            lambda v: fresh(v["a"]).copy_(v["b"]).mul_(v["a"]).add_(v["a"]),
        ),
        essential=("a", "b"),
        in_rows=("a", "b"),
    ),
    Kernel(
        "truth",
        X,
        lambda builder: {"x": builder.odd_bool()},
        (
            lambda v: fresh(v["x"]).copy_(v["x"].view(torch.uint8) != 0),
            lambda v: torch.ne(v["x"].view(torch.uint8), 0, out=fresh(v["x"])),
        ),
        in_rows=("x",),
    ),
    Kernel(
        "row_sums",
        X,
        _row_data,
        (
            lambda v: v["x"].abs().reshape(v["x"].shape).sum(-1),
            lambda v: v["x"].abs().double().sum(-1).to(v["x"].dtype),
        ),
        in_rows=("x",),
        exact=False,
    ),
    Kernel(
        "gather",
        (("table", "Tensor"), ("idx", "Tensor")),
        _indices,
        (
            lambda v: torch.empty(len(v["idx"]), 3, dtype=v["table"].dtype).copy_(
                v["table"][v["idx"]]
            ),
            lambda v: torch.empty(len(v["idx"]), 3, dtype=v["table"].dtype).copy_(
                v["table"].index_select(0, v["idx"])
            ),
        ),
        in_rows=("idx",),
    ),
    Kernel(
        "conjugate",
        X,
        lambda builder: {"x": builder.tensor(torch.complex64)},
        (
            lambda v: fresh(v["x"]).copy_(torch.conj_physical(v["x"])),
            lambda v: fresh(v["x"]).copy_(v["x"].conj()),
        ),
        essential=("x",),
        in_rows=("x",),
    ),
    Kernel(
        "sum_of_optional",
        (("x", "Tensor"), ("xs", "list[Optional[Tensor]]")),
        _optional,
        (lambda v: _summed(v, by_out=False), lambda v: _summed(v, by_out=True)),
        essential=("x",),
        in_rows=("x", "xs"),
    ),
    Kernel(
        "double_all",
        (("xs", "list[Tensor]"),),
        _tensors,
        (
            lambda v: [torch.mul(x, 2, out=fresh(x)) for x in v["xs"]],
            lambda v: [_doubled_out(x) for x in v["xs"]],
        ),
        returns="list[Tensor]",
        in_rows=("xs",),
    ),
    Kernel(
        "scalars",
        (*X, ("n", "int"), ("s", "float"), ("flag", "bool"), ("mode", "str")),
        _scalars,
        (lambda v: _scaled(v, by_out=True), lambda v: _scaled(v, by_out=False)),
        essential=("x",),
        in_rows=("x",),
    ),
    Kernel(
        "noise",
        X,
        _real,
        (lambda v: _with_noise(v, by_fill=False), lambda v: _with_noise(v, by_fill=True)),
        in_rows=("x",),
        is_random=True,
    ),
    Kernel(
        "generated",
        (*X, ("generator", "object")),
        _generated,
        (lambda v: _with_generated(v, by_fill=False), lambda v: _with_generated(v, by_fill=True)),
        in_rows=("x",),
        is_op=False,
        ignored=("generator",),
    ),
    Kernel(
        "view",
        X,
        _x,
        (lambda v: _sliced(v["x"]), lambda v: v["x"][1:] if v["x"].dim() else v["x"].view(())),
        essential=("x",),
        in_rows=("x",),
        is_op=False,
    ),
]
