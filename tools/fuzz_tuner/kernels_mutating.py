"""The drawn ops that change arguments: bare, in lists, views of one base, overlapping, counters."""

from __future__ import annotations

import torch
from tools.fuzz_tuner import memory
from tools.fuzz_tuner.arguments import Holder
from tools.fuzz_tuner.kernels import Builder, Kernel, Values, fresh
from tools.fuzz_tuner.memory import Spot
from torch import Tensor


def _changed(builder: Builder) -> Values:
    return {"x": builder.tensor(builder.style.choice(memory.EXACT), mutated=True)}


def _nothing(_: object) -> None:
    return None


def _list(builder: Builder) -> Values:
    dtypes = [builder.style.choice(memory.EXACT) for _ in range(1 + builder.style.randrange(3))]
    parts = [builder.tensor(dtype, mutated=True) for dtype in dtypes]
    return {"xs": Holder("list", tuple(parts))}


def _views(builder: Builder) -> Values:
    """Draw ``k = kv[0], v = kv[1]``, or their columns in turn, and x of the same shape."""
    dtype = builder.style.choice(memory.FLOATS)
    rows, columns = builder.rows, 4
    interleaved = builder.lay.random() < 0.5
    size = rows * columns
    room = builder.room(dtype, 2 * size + 8)
    offset = builder.lay.choice((0, 0, 0, 1, 3))
    wrap = builder.wrap()
    shape = (rows, columns)
    strides = (2 * columns, 1) if interleaved else (columns, 1)
    second = columns if interleaved else size
    return {
        "k": Spot(room, offset, shape, strides, wrap),
        "v": Spot(room, offset + second, shape, strides, wrap),
        "x": builder.tensor(dtype, shape),
    }


def _fill_views(values: Values, *, by_out: bool) -> None:
    x = values["x"]
    values["k"].copy_(x)
    if by_out:
        values["v"].copy_(x).mul_(2)
    else:
        values["v"].copy_(x * 2)


def _overlapping(builder: Builder) -> Values:
    """`out` and x in one room, a few elements apart."""
    dtype = builder.style.choice(memory.FLOATS)
    size, distance = builder.rows * 3, builder.lay.randrange(-4, 5)
    room = builder.room(dtype, 2 * size + 32)
    # Sometimes beside one another.
    far = distance if builder.lay.random() < 0.7 else size + 8
    shape, strides = (builder.rows, 3), (3, 1)
    wrap = builder.wrap()
    return {
        "out": Spot(room, 4 + far, shape, strides, wrap),
        "x": Spot(room, 4, shape, strides, wrap),
    }


def _counter(builder: Builder) -> Values:
    low = builder.style.choice((0, 1, 1, 1))
    return {
        "x": builder.tensor(builder.style.choice(memory.EXACT)),
        "left": Spot(builder.room(torch.int64, 3, (low, 5)), 1, (), ()),
    }


def _count_down(values: Values, *, by_add: bool) -> Tensor:
    left = values["left"]
    if left.item() <= 0:
        raise RuntimeError("the counter ran out")
    left.sub_(1)
    x = values["x"]
    return torch.add(x, x, out=fresh(x)) if by_add else torch.mul(x, 2, out=fresh(x))


def _pair(builder: Builder) -> Values:
    dtype = builder.style.choice(memory.EXACT)
    return {"y": builder.tensor(dtype, mutated=True), "x": builder.tensor(dtype)}


def _accumulate(values: Values, *, by_copy: bool) -> Tensor:
    y, x = values["y"], values["x"]
    if by_copy:
        y.copy_(y + x)
    else:
        y.add_(x)
    return torch.mul(x, 2, out=fresh(x))


def _caches(builder: Builder) -> Values:
    """A cache of which one slot is written, of a list of them."""
    dtype = builder.style.choice(memory.FLOATS)
    shape = (builder.rows, 2)
    caches = tuple(builder.tensor(dtype, shape, mutated=True) for _ in range(2))
    return {"caches": Holder("tuple", caches), "x": builder.tensor(dtype, shape)}


def _write_caches(values: Values, *, first: int) -> None:
    order = (0, 1) if first == 0 else (1, 0)
    for i in order:
        values["caches"][i].copy_(values["x"] * (i + 1))


X = (("x", "Tensor"),)
MUTATING = [
    Kernel(
        "double_",
        X,
        _changed,
        (
            lambda v: _nothing(v["x"].mul_(2)),
            lambda v: _nothing(v["x"].add_(v["x"])),
            lambda v: _nothing(v["x"].copy_(v["x"] * 2)),
        ),
        returns="None",
        mutates=("x",),
        essential=("x",),
        in_rows=("x",),
    ),
    Kernel(
        "double_and_return",
        X,
        _changed,
        (lambda v: v["x"].mul_(2), lambda v: v["x"].copy_(v["x"] * 2)),
        mutates=("x",),
        essential=("x",),
        in_rows=("x",),
        is_op=False,
    ),
    Kernel(
        "double_list_",
        (("xs", "list[Tensor]"),),
        _list,
        (
            lambda v: _nothing([x.mul_(2) for x in v["xs"]]),
            lambda v: _nothing([x.add_(x) for x in reversed(v["xs"])]),
        ),
        returns="None",
        mutates=("xs",),
        in_rows=("xs",),
    ),
    Kernel(
        "fill_views",
        (("k", "Tensor"), ("v", "Tensor"), ("x", "Tensor")),
        _views,
        (lambda v: _fill_views(v, by_out=False), lambda v: _fill_views(v, by_out=True)),
        returns="None",
        mutates=("k", "v"),
        essential=("x",),
        in_rows=("k", "v", "x"),
    ),
    Kernel(
        "overlapping",
        (("out", "Tensor"), ("x", "Tensor")),
        _overlapping,
        (
            lambda v: _nothing(v["out"].copy_(v["x"] * 2)),
            lambda v: _nothing(v["out"].copy_(torch.add(v["x"], v["x"], out=fresh(v["x"])))),
        ),
        returns="None",
        mutates=("out",),
        essential=("x",),
        in_rows=("out", "x"),
    ),
    Kernel(
        "count_down",
        (*X, ("left", "Tensor")),
        _counter,
        (lambda v: _count_down(v, by_add=False), lambda v: _count_down(v, by_add=True)),
        mutates=("left",),
        essential=("x",),
        in_rows=("x",),
    ),
    Kernel(
        "accumulate",
        (("y", "Tensor"), ("x", "Tensor")),
        _pair,
        (lambda v: _accumulate(v, by_copy=False), lambda v: _accumulate(v, by_copy=True)),
        mutates=("y",),
        essential=("x",),
        in_rows=("y", "x"),
    ),
    Kernel(
        "write_caches",
        (("caches", "list[Tensor]"), ("x", "Tensor")),
        _caches,
        (lambda v: _write_caches(v, first=0), lambda v: _write_caches(v, first=1)),
        returns="None",
        mutates=("caches",),
        essential=("x",),
        in_rows=("caches", "x"),
    ),
]
