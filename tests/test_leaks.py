"""No object, reference or memory stays behind: every road, good and raising."""

import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import hotop


@hotop.custom_op("leaks::mixed", mutates_args=())
def mixed(
    x: Tensor, ns: list[int], fs: list[float], ys: list[Tensor], s: str = "a", k: float = 1.0
) -> tuple[Tensor, list[Tensor]]:
    return x + 1, [y + 1 for y in ys]


@hotop.custom_op("leaks::uncommon", mutates_args=())
def uncommon(x: Tensor) -> list[Tensor]:
    return (x + 1, x + 2)  # type: ignore[return-value]


@hotop.custom_op("leaks::aliasing", mutates_args=())
def aliasing(x: Tensor) -> Tensor:
    return x


@hotop.custom_op("leaks::raising", mutates_args={"x"})
def raising(x: Tensor) -> None:
    raise KeyError(1)


@hotop.custom_op("leaks::keyword_only", mutates_args=())
def keyword_only(x: Tensor, n: int = 3, *, text: str = "b", flag: bool = False) -> Tensor:
    return x * n


BIG = 10**9 + 7  # not a cached int
X, P = torch.ones(2), torch.ones(2, requires_grad=True)
NS, FS, TEXT = [BIG, 2], [1, 2.5], "".join(["te", "xt", str(BIG)])


def refused(call: Callable[[], object], error: type[BaseException] = RuntimeError) -> None:
    with pytest.raises(error):
        call()


ROADS: dict[str, Callable[[], object]] = {
    "positional": lambda: mixed(X, NS, FS, [X, X]),
    "keywords": lambda: mixed(x=X, ys=(X,), fs=FS, ns=NS, k=2.0, s=TEXT),
    "keyword only": lambda: keyword_only(X, flag=True, text=TEXT),
    "default in the middle": lambda: mixed(X, NS, FS, [], k=2.0),
    "conversion": lambda: mixed(X, (BIG, True), [True], (X,), TEXT, 3),
    "half converted": lambda: refused(lambda: mixed(X, [BIG, "a"], FS, [X])),
    "wrong type": lambda: refused(lambda: mixed(X, NS, FS, 3)),
    "too few": lambda: refused(lambda: mixed(X)),
    "unknown keyword": lambda: refused(lambda: mixed(X, NS, FS, [X], z=3)),
    "kernel raises": lambda: refused(lambda: raising(X), KeyError),
    "alias": lambda: refused(lambda: aliasing(X)),
    "uncommon result": lambda: uncommon(X),
    "grad": lambda: mixed(P, NS, FS, [P]),
    "explain": lambda: hotop.explain(mixed, X, NS, FS, ys=[X], s=TEXT),
    "packet": lambda: torch.ops.leaks.mixed(X, NS, FS, [X]),
}


@pytest.mark.parametrize("road", ROADS, ids=lambda road: road.replace(" ", "_"))
def test_road(road: str) -> None:
    call = ROADS[road]
    shared = (BIG, X, P, NS, FS, TEXT)
    for _ in range(20):
        call()
    gc.collect()
    gc.disable()
    try:
        references = [sys.getrefcount(value) for value in shared]
        blocks = sys.getallocatedblocks()
        for _ in range(500):
            call()
        gc.collect()
        grown = [
            sys.getrefcount(value) - old for value, old in zip(shared, references, strict=True)
        ]
        # pytest.raises keeps its last exception.
        assert max(grown) < 50, grown
        assert sys.getallocatedblocks() - blocks < 1000
    finally:
        gc.enable()


def test_results_die_at_once() -> None:
    first, rest = mixed(X, NS, FS, [X])
    watched = [weakref.ref(first), weakref.ref(rest[0])]
    del first, rest
    assert [watch() for watch in watched] == [None, None]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_resident_memory() -> None:
    def rounds(count: int) -> None:
        for _ in range(count):
            mixed(X, NS, FS, [X, X], s=TEXT)
            keyword_only(X, text=TEXT)

    rounds(3000)
    before = resident()
    rounds(30000)
    assert resident() - before < 8 << 20


def test_redefined_ops_are_freed() -> None:
    """As with torch's op, a replaced definition goes, and its function with it."""
    watched = []
    for value in range(5):

        def body(x: Tensor, value: int = value) -> Tensor:
            return x + value

        watched.append(weakref.ref(body))
        op = hotop.custom_op("leaks::redefined", body, mutates_args=())
        assert op(torch.zeros(1)).item() == value
        del op, body
    gc.collect()
    assert [watch() is None for watch in watched[:-1]] == [True] * 4
