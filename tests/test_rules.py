"""Requests that overlap: what stays accelerated when one of them is undone."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload

import hotop
from hotop import _core

pytestmark = pytest.mark.usefixtures("nothing_stays")


def of_rules(overload: OpOverload) -> bool:
    return overload.namespace == "rules"


@pytest.fixture
def ops() -> Iterator[Any]:
    library = torch.library.Library("rules", "FRAGMENT")
    for name in ("one", "two"):
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, lambda x: x + 1, "CPU")
    yield torch.ops.rules
    library._destroy()


def is_fast(what: Any) -> bool:
    return _core.SLOT_NAME in vars(what)


WAYS: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "install": (hotop.install, hotop.uninstall),
    "namespace": (lambda: hotop.accelerate("rules"), lambda: hotop.restore("rules")),
    "namespace object": (
        lambda: hotop.accelerate(torch.ops.rules),
        lambda: hotop.restore(torch.ops.rules),
    ),
    "predicate": (lambda: hotop.accelerate(of_rules), lambda: hotop.restore(of_rules)),
}


@pytest.mark.parametrize("way", WAYS)
def test_one_by_one_outlives_a_rule(way: str, ops: Any) -> None:
    do, undo = WAYS[way]
    hotop.accelerate(ops.one)
    assert [is_fast(ops.one.default), is_fast(ops.two.default)] == [True, False]
    do()
    assert [is_fast(ops.one.default), is_fast(ops.two.default)] == [True, True]
    undo()
    assert [is_fast(ops.one), is_fast(ops.two)] == [True, False]
    assert [is_fast(ops.one.default), is_fast(ops.two.default)] == [True, False]
    assert hotop.explain(ops.one, torch.ones(1)).direct
    hotop.restore(ops.one)
    assert not is_fast(ops.one)
    assert not is_fast(ops.one.default)


def test_a_custom_op_outlives_a_rule() -> None:
    @torch.library.custom_op("rules::custom", mutates_args=())
    def custom(x: Tensor) -> Tensor:
        return x + 1

    hotop.accelerate(custom)
    with hotop.install():
        pass
    assert is_fast(custom)
    assert hotop.explain(custom, torch.ones(1)).direct


@pytest.mark.parametrize("first", WAYS)
@pytest.mark.parametrize("second", WAYS)
def test_a_rule_outlives_another(first: str, second: str, ops: Any) -> None:
    if first.split()[0] == second.split()[0]:
        return
    WAYS[first][0]()
    WAYS[second][0]()
    WAYS[second][1]()
    assert is_fast(ops.one.default)
    assert is_fast(ops.one)
    WAYS[first][1]()
    assert not is_fast(ops.one.default)
    assert not is_fast(ops.one)


@pytest.mark.parametrize("way", WAYS)
def test_what_was_given_back_is_covered_by_the_next_request(way: str, ops: Any) -> None:
    do, undo = WAYS[way]
    for _ in range(2):
        do()
        assert is_fast(ops.one)
        hotop.restore(ops.one)
        assert not is_fast(ops.one)
        assert not is_fast(ops.one.default)
        assert is_fast(ops.two.default)
        undo()


def test_restore_without_an_argument_gives_back_everything(ops: Any) -> None:
    hotop.install()
    hotop.accelerate("rules")
    hotop.accelerate(of_rules)
    hotop.accelerate(ops.one)
    hotop.restore()
    assert not is_fast(ops.one.default)
    assert hotop.report().left == {}

    @torch.library.custom_op("rules::after", mutates_args=())
    def after(x: Tensor) -> Tensor:
        return x + 1

    assert type(after) is CustomOpDef
    assert not is_fast(after._opoverload)


def test_a_predicate_covers_packets_whose_overloads_nobody_looked_up(ops: Any) -> None:
    early = ops.one
    hotop.accelerate(of_rules)
    for packet in (early, ops.two):
        assert "default" not in packet.__dict__ or is_fast(packet.default)
        packet(torch.ones(1))
        assert hotop.explain(packet, torch.ones(1)).direct
    counts = {o.name: o.direct for o in hotop.report().ops if o.name.startswith("rules::")}
    assert counts == {"rules::one": 1, "rules::two": 1}


def test_a_predicate_may_look_up_operators(ops: Any) -> None:
    asked = []

    def picks(overload: OpOverload) -> bool:
        if overload.namespace != "rules":
            return False
        asked.append(overload)
        return overload.overloadpacket is torch.ops.rules.one

    library = torch.library.Library("rules", "FRAGMENT")
    library.define("fresh(Tensor x) -> Tensor")
    library.impl("fresh", lambda x: x + 1, "CPU")
    hotop.accelerate(picks)
    fresh, one = torch.ops.rules.fresh, ops.one
    assert fresh(torch.ones(1)).item() == 2
    assert one(torch.ones(1)).item() == 2
    assert [is_fast(what) for what in (one, one.default, fresh, fresh.default)] == [
        *(True, True),
        *(False, False),
    ]
    assert len(asked) < 8
    library._destroy()


def test_packets_with_several_overloads() -> None:
    library = torch.library.Library("rules", "FRAGMENT")
    for name in ("several", "several.two"):
        library.define(f"{name}(Tensor x{', int y' * name.endswith('two')}) -> Tensor")
        library.impl(name, lambda x, y=1: x + y, "CPU")
    packet = torch.ops.rules.several
    x = torch.ones(1)

    def counts() -> tuple[float, float, bool, bool]:
        return packet(x).item(), packet(x, 2).item(), is_fast(packet), is_fast(packet.two)

    hotop.accelerate("rules")
    assert counts() == (2, 3, True, True)
    hotop.restore(packet.two)
    assert counts() == (2, 3, True, False)
    hotop.accelerate(packet.two)
    assert counts() == (2, 3, True, True)
    hotop.restore()
    assert counts() == (2, 3, False, False)
    hotop.accelerate("rules::several")
    library.define("several.three(Tensor x, str y) -> Tensor")
    library.impl("several.three", lambda x, y: x - 1, "CPU")
    hotop.accelerate("rules")
    assert packet(x, "a").item() == 0
    hotop.restore("rules")
    assert (packet(x, "a").item(), *counts()) == (0, 2, 3, True, True)
    hotop.restore(packet)
    assert (packet(x, "a").item(), *counts()) == (0, 2, 3, False, False)
    library._destroy()


def test_reasons_go_with_the_request(ops: Any) -> None:
    def raises(overload: OpOverload) -> bool:
        if overload.namespace == "rules":
            raise ValueError("no")
        return False

    assert not is_fast(ops.one.default)
    hotop.accelerate(raises)
    assert "ValueError('no')" in hotop.report().left["rules::one"]
    hotop.restore(raises)
    assert "rules::one" not in hotop.report().left


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (lambda: "rules", "the namespace 'rules'"),
        (lambda: torch.ops.rules, "the namespace 'rules'"),
        (lambda: "rules::one", "rules::one"),
        (lambda: torch.ops.rules.one, "rules.one"),
        (lambda: torch.ops.rules.one.default, "rules.one.default"),
        (lambda: of_rules, "what <function of_rules"),
    ],
)
def test_a_second_request_is_said(
    what: Callable[[], Any], words: str, ops: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hotop"):
        hotop.accelerate(what())
        assert not caplog.records
        hotop.accelerate(what())
    (record,) = caplog.records
    assert record.getMessage().startswith(f"accelerate: {words}")
    assert record.getMessage().endswith("is accelerated already")
    assert is_fast(ops.one.default)
