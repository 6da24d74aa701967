"""Resident memory, objects and references over a million calls of the roads of every state."""

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hotop

# The long form, for a machine with time: HOTOP_LEAK_CALLS=1000000.
CALLS = int(os.environ.get("HOTOP_LEAK_CALLS", "0"))
STEP = 1 << 20

X = torch.ones(2)
P = torch.ones(2, requires_grad=True)
BIG = 10**9 + 7  # not a cached int
NS = [BIG, 2, 3]
TEXT = "".join(["te", "xt", str(BIG)])


@hotop.custom_op("leaks_long::many", mutates_args=())
def many(x: Tensor, ns: list[int], ys: list[Tensor], s: str = "a") -> tuple[Tensor, list[Tensor]]:
    return x + 1, [y + 1 for y in ys]


@hotop.custom_op("leaks_long::number", mutates_args=())
def number(x: Tensor, ns: list[int], s: str = "a", *, k: float = 1.0) -> int:
    return 7


@hotop.custom_op("leaks_long::square", mutates_args=())
def square(x: Tensor) -> Tensor:
    return x.detach() * x.detach()


@square.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.text = [TEXT]


square.register_autograd(lambda ctx, grad: grad * 2 * ctx.saved_tensors[0], setup_context=keep)
square.register_vmap(lambda info, dims, x: (square(x), dims[0]))


@hotop.custom_op("leaks_long::fails", mutates_args={"x"})
def fails(x: Tensor, ns: list[int]) -> None:
    raise KeyError(ns)


@hotop.custom_op("leaks_long::cpp_fails", mutates_args=())
def cpp_fails(x: Tensor) -> Tensor:
    return x @ torch.ones(3)


@hotop.tunable("leaks_long::tuned", dims={"x": {0: hotop.tuner.power_of_two()}})
def tuned(x: Tensor, ns: list[int], s: str = "a") -> Tensor:
    return x


@hotop.tunable("leaks_long::tuned_fails")
def tuned_fails(x: Tensor) -> Tensor:
    raise KeyError(x)


tuned_op = hotop.custom_op("leaks_long::tuned_op", lambda x: x + 1, mutates_args=(),
                           schema="(Tensor x) -> Tensor")  # fmt: skip


def quietly(call: Callable[[], Any]) -> None:
    with contextlib.suppress(Exception):
        call()


def trained() -> None:
    square(P).sum().backward()
    P.grad = None


def trained_and_failed() -> None:
    quietly(lambda: square(P).backward(torch.ones(3)))


def redefined() -> None:
    made = hotop.custom_op("leaks_long::again", lambda x: x + 1, mutates_args=(),
                           schema="(Tensor x) -> Tensor")  # fmt: skip
    made(X)


def profiled(call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        with torch.autograd.profiler.profile(record_shapes=True):
            for _ in range(100):
                call()

    return run


def with_device() -> None:
    with torch.device("cpu"):
        number(X, NS)


# By name: the call, and how often; the last are calls of a hundred calls, or slow.
ROADS: dict[str, tuple[Callable[[], Any], int]] = {
    "plain": (lambda: many(X, NS, [X, X], TEXT), 40000),
    "keywords": (lambda: number(ns=NS, x=X, k=2.0, s=TEXT), 100000),
    "conversions": (lambda: number(X, (True, BIG), "\xe4", k=3), 100000),
    "packet": (lambda: torch.ops.leaks_long.number(X, NS), 100000),
    "kernel raises": (lambda: quietly(lambda: fails(X, NS)), 50000),
    "C++ raises": (lambda: quietly(lambda: cpp_fails(X)), 10000),
    "wrong argument": (lambda: quietly(lambda: number(X, ["a"])), 10000),
    "device context": (with_device, 20000),
    "inference": (torch.inference_mode()(lambda: number(X, NS)), 50000),
    "autocast": (torch.autocast("cpu")(lambda: number(X, NS)), 10000),
    "training": (trained, 5000),
    "training, backward raises": (trained_and_failed, 3000),
    "graph dropped": (lambda: square(P), 20000),
    "vmap": (lambda: torch.vmap(square)(X), 2000),
    "tunable": (lambda: tuned(X, NS, TEXT), 100000),
    "tunable raises": (lambda: quietly(lambda: tuned_fails(X)), 50000),
    "tunable, unknown keyword": (lambda: quietly(lambda: tuned(X, NS, z=1)), 20000),
    "profiled": (profiled(lambda: number(X, NS, TEXT)), 100),
    "profiled, kernel raises": (profiled(lambda: quietly(lambda: fails(X, NS))), 60),
    "profiled training": (profiled(trained), 20),
    "redefinition": (redefined, 400),
}


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> Iterator[None]:
    for call, _ in ROADS.values():
        call()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("road", ROADS, ids=lambda road: road.replace(" ", "_"))
def test_nothing_grows(road: str) -> None:
    """The smallest leak, one block or one word a call, is above each limit; caches are below."""
    call, count = ROADS[road]
    count = max(count, CALLS // (100 if "profiled" in road else 1))
    calls = count * (100 if "profiled" in road else 1)
    shared = (X, P, NS, BIG, TEXT)

    def rounds(n: int) -> None:
        for _ in range(n):
            call()
        gc.collect()

    rounds(count // 2)  # every cache is as large as it will be
    references = [sys.getrefcount(value) for value in shared]
    blocks, objects, memory = sys.getallocatedblocks(), len(gc.get_objects()), resident()
    rounds(count)
    grown = [sys.getrefcount(value) - old for value, old in zip(shared, references, strict=True)]
    assert max(grown) <= 3, grown
    assert sys.getallocatedblocks() - blocks < max(1000, calls // 100)
    assert len(gc.get_objects()) - objects < max(50, calls // 100)
    assert resident() - memory < max(4 * STEP, 4 * calls)
