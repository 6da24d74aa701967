"""One packet per name: overloads come and go, the packet that somebody holds stays the object."""

import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

import hotop
from hotop import _core

pytestmark = pytest.mark.usefixtures("nothing_stays")

NUMBERS = count()
X = torch.ones(2)


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    made = torch.library.Library("packets", "FRAGMENT")
    yield made
    made._destroy()


@pytest.fixture
def name() -> str:
    return f"f{next(NUMBERS)}"


def packet_of(name: str) -> Any:
    return getattr(torch.ops.packets, name)


def plus_two(x: Tensor, y: int) -> Tensor:
    return x + y + 1


def by_library(library: torch.library.Library, name: str) -> None:
    more = ", int y" if "." in name else ""
    library.define(f"{name}(Tensor x{more}) -> Tensor")
    library.impl(name, lambda x, y=0: x + 1 + y, "CPU")


def by_hotop(name: str) -> Any:
    if "." in name:
        return hotop.custom_op(f"packets::{name}", plus_two, mutates_args=())

    def plus_one(x: Tensor) -> Tensor:
        return x + 1

    return hotop.custom_op(f"packets::{name}", plus_one, mutates_args=())


def by_custom_op(name: str) -> Any:
    return torch.library.custom_op(f"packets::{name}", plus_two, mutates_args=())


def check(packet: Any) -> None:
    """Two overloads: x + 1 and x + y + 1, by every handle."""
    assert packet(X)[0].item() == 2
    assert packet(X, 3)[0].item() == 5
    assert packet(x=X, y=3)[0].item() == 5
    assert packet.default(X)[0].item() == 2
    assert packet.two(X, 3)[0].item() == 5
    assert packet.default.overloadpacket is packet
    assert packet.two.overloadpacket is packet
    assert packet.overloads() == ["default", "two"]
    with pytest.raises(RuntimeError, match="Overloaded"):
        packet(X, "a", 3)


BEFORE: dict[str, Callable[[], object]] = {
    "plain": lambda: None,
    "accelerated": lambda: hotop.accelerate("packets"),
    "installed": hotop.install,
}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("looked_up", [False, True])
def test_an_overload_of_hotop_joins_a_packet(
    before: str, looked_up: bool, library: torch.library.Library, name: str
) -> None:
    by_library(library, name)
    held = packet_of(name)
    if looked_up:
        held(X)
    default = held.default if looked_up else None
    BEFORE[before]()
    table = {held: "held"}
    number = hash(held)
    two = by_hotop(f"{name}.two")
    assert packet_of(name) is held
    assert hash(held) == number
    assert table[packet_of(name)] == "held"
    assert held.two is two._opoverload
    assert default is None or held.default is default
    assert hotop.explain(held.two, X, 3).direct
    check(held)
    assert pickle.loads(pickle.dumps(held)) is held
    assert str(held) == f"packets.{name}"
    # A third one is seen too.
    by_library(library, f"{name}.three")
    library_three = held.three
    assert library_three(X, 1)[0].item() == 3
    assert packet_of(name) is held
    assert hash(held) == number
    hotop.restore()
    assert packet_of(name) is held
    assert (hash(held), table[held]) == (number, "held")
    assert hotop.explain(held.two, X, 3).direct, "what hotop made stays hotop's"
    assert type(held.default) is OpOverload
    assert held(X, 3)[0].item() == 5
    assert held(X)[0].item() == 2


@pytest.mark.parametrize("before", BEFORE)
def test_an_overload_of_a_library_joins_a_packet_of_hotop(
    before: str, library: torch.library.Library, name: str
) -> None:
    BEFORE[before]()
    op = by_hotop(name)
    held, number = packet_of(name), hash(packet_of(name))
    table = {held: "held"}
    by_library(library, f"{name}.two")
    assert packet_of(name) is held
    assert hash(held) == number
    assert table[packet_of(name)] == "held"
    check(held)
    assert hotop.explain(op, X).direct
    hotop.restore()
    assert hash(held) == number
    check(held)


def test_two_overloads_of_hotop(name: str) -> None:
    by_hotop(name)
    held, number = packet_of(name), hash(packet_of(name))
    by_hotop(f"{name}.two")
    assert packet_of(name) is held
    assert hash(held) == number
    check(held)


def test_roads_of_a_mixed_packet(library: torch.library.Library, name: str) -> None:
    """In PyTorch's order: accelerated overloads, hotop's, and PyTorch's again when given back."""
    by_library(library, name)
    held = packet_of(name)
    by_hotop(f"{name}.two")
    assert hotop.explain(held, X, 3).road == "pytorch"
    hotop.accelerate("packets")
    for _ in range(2):
        check(held)
        assert hotop.explain(held, X).direct
        assert hotop.explain(held, X, 3).direct
    counts = {op.name: op.direct for op in hotop.report().ops}
    assert counts[f"packets::{name}"] > 0
    hotop.restore(held)
    check(held)
    assert type(held.default) is OpOverload
    with pytest.raises(ValueError, match="is not accelerated"):
        hotop.restore(held)
    hotop.accelerate(held)
    assert hotop.explain(held, X).direct
    check(held)


def test_an_overload_of_custom_op_joins_a_packet_of_hotop(name: str) -> None:
    by_hotop(name)
    held = packet_of(name)
    two = by_custom_op(f"{name}.two")
    for _ in range(2):
        hotop.accelerate(two)
        check(held)
        assert hotop.explain(two, X, 3).direct
        hotop.restore(two)
        check(held)


@pytest.mark.parametrize("make", [by_hotop, by_custom_op])
def test_installed_custom_ops_join_a_packet(
    make: Callable[[str], Any], library: torch.library.Library, name: str
) -> None:
    by_library(library, name)
    held, number = packet_of(name), hash(packet_of(name))
    with hotop.install():
        two = make(f"{name}.two")
        assert isinstance(two._opoverload, _core.CallSlot)
        assert packet_of(name) is held
        check(held)
        assert hotop.explain(held, X, 3).direct
    assert hash(held) == number
    check(held)


def test_compiled(library: torch.library.Library, name: str) -> None:
    by_library(library, name)
    torch.library.register_fake(f"packets::{name}", torch.empty_like, lib=library)
    held = packet_of(name)

    def program(x: Tensor) -> Tensor:
        return held(x) + held(x, 3) + packet_of(name).two(x, 2)

    compiled_before = torch.compile(lambda x: held(x), fullgraph=True)
    assert compiled_before(X)[0].item() == 2
    two = by_hotop(f"{name}.two")
    two.register_fake(lambda x, y: torch.empty_like(x))
    assert compiled_before(X)[0].item() == 2
    for accelerate in (False, True):
        if accelerate:
            hotop.accelerate("packets")
        for backend in ("eager", "aot_eager", "inductor"):
            torch._dynamo.reset()
            compiled = torch.compile(program, backend=backend, fullgraph=True)
            assert compiled(X)[0].item() == 2 + 5 + 4


def test_flop_formulas_of_ones_own(library: torch.library.Library, name: str) -> None:
    by_library(library, name)
    held = packet_of(name)
    register_flop_formula(held)(lambda shape, out_shape=None, **kwargs: 7)

    def flops() -> int:
        with FlopCounterMode(display=False) as counter:
            held.default(X)
        return counter.get_total_flops()

    assert flops() == 7
    by_hotop(f"{name}.two")
    assert flops() == 7
    hotop.accelerate("packets")
    by_library(library, f"{name}.three")
    assert flops() == 7
    hotop.restore()
    assert flops() == 7
    flop_registry.pop(held)


def test_one_overload_goes(library: torch.library.Library, name: str) -> None:
    by_library(library, name)
    held = packet_of(name)
    two = by_hotop(f"{name}.two")
    check(held)
    two._lib._destroy()
    for packet in (held, packet_of(name)):
        assert packet(X)[0].item() == 2
        with pytest.raises(RuntimeError):
            packet(X, 3)
    # Defined again: the handle of the first definition reaches the second.
    stale = two._opoverload
    again = by_hotop(f"{name}.two")
    check(packet_of(name))
    assert stale(X, 3)[0].item() == held(X, 3)[0].item() == again(X, 3)[0].item() == 5
    hotop.accelerate("packets")
    hotop.restore()
    assert held(X, 3)[0].item() == 5


def test_the_other_overload_goes(library: torch.library.Library, name: str) -> None:
    other = torch.library.Library("packets", "FRAGMENT")
    by_library(other, name)
    held = packet_of(name)
    two = by_hotop(f"{name}.two")
    hotop.accelerate("packets")
    check(held)
    other._destroy()
    del other
    gc.collect()
    assert packet_of(name)(X, 3)[0].item() == 5
    assert two(X, 3)[0].item() == 5


def test_a_failed_definition_leaves_the_packet(library: torch.library.Library, name: str) -> None:
    by_library(library, name)
    held, number = packet_of(name), hash(packet_of(name))
    with pytest.raises(RuntimeError):
        hotop.custom_op(
            f"packets::{name}", lambda x: x.clone(), mutates_args=(), schema="(Tensor x) -> Tensor"
        )
    assert type(held) is OpOverloadPacket
    assert hash(held) == number
    assert held(X)[0].item() == 2


def test_a_new_name_stays_as_fast(name: str) -> None:
    op = by_hotop(name)
    assert isinstance(packet_of(name), _core.CallSlot)
    assert hotop.explain(packet_of(name), X).direct
    assert hotop.explain(op, X).direct


def test_packets_are_given_back_to_the_class_unless_their_hash_needs_one(
    library: torch.library.Library, name: str
) -> None:
    by_library(library, name)
    held, number = packet_of(name), hash(packet_of(name))
    for _ in range(2):
        hotop.accelerate("packets")
        held(X)
        hotop.restore()
        assert type(held) is OpOverloadPacket
        assert hash(held) == number
    hotop.accelerate("packets")
    by_library(library, f"{name}.two")
    hotop.restore()
    assert _core.SLOT_NAME not in vars(held)
    assert type(held).__call__ is OpOverloadPacket.__call__
    assert hash(held) == number != hash(held._op)
    check(held)
    hotop.accelerate("packets")
    assert hash(held) == number
    check(held)
    assert hotop.explain(held, X, 3).direct


def test_threads_call_and_look_up_while_overloads_come(
    library: torch.library.Library, name: str
) -> None:
    by_library(library, name)
    held, number = packet_of(name), hash(packet_of(name))
    table, errors, done = {held: "held"}, [], threading.Event()

    def call() -> None:
        try:
            while not done.is_set():
                assert held(X)[0].item() == 2
                assert table[packet_of(name)] == "held"
                assert hash(held) == number
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    ops = []
    for step in range(20):
        ops.append(by_hotop(f"{name}.n{step}"))
        if step % 5 == 1:
            hotop.accelerate("packets")
        if step % 5 == 3:
            hotop.restore()
    done.set()
    for thread in threads:
        thread.join()
    assert not errors
