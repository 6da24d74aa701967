"""Ops x calls x handles, good, convertible and wrong: arguments, keywords, defaults, mutation."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from twin import HOWS, Arguments, Twin
from twin_ops import OPS, TYPES, op_named, op_taking
from twin_values import VALUES


def collect(checks: list[tuple[str, Callable[[], Any]]]) -> None:
    """Run all checks and report every one that fails, not the first only."""
    failures = []
    for name, check in checks:
        try:
            check()
        except AssertionError as error:
            failures.append(f"--- {name}\n{error}")
    if failures:
        raise AssertionError(f"{len(failures)} of {len(checks)} differ\n" + "\n".join(failures))


@pytest.mark.parametrize("type_name", TYPES)
def test_every_value_for_every_type(type_name: str) -> None:
    twin = op_taking(type_name)
    assert twin.schemas[0] == twin.schemas[1]
    checks = []
    for index, (name, make) in enumerate(VALUES.items()):
        how = HOWS[index % 3]
        checks.append(
            (
                f"{name} by position",
                lambda m=make, h=how: twin.compare(lambda: ((torch.ones(2), m()), {}), how=h),
            )
        )
        checks.append(
            (
                f"{name} by keyword",
                lambda m=make, h=how: twin.compare(lambda: ((torch.ones(2),), {"v": m()}), how=h),
            )
        )
    collect(checks)


@pytest.mark.parametrize("type_name", ["int", "float?", "Tensor", "Tensor[]", "str", "dtype"])
def test_every_value_under_no_grad(type_name: str) -> None:
    twin = op_taking(type_name)
    collect(
        [
            (
                name,
                lambda m=make: twin.compare(lambda: ((torch.ones(2), m()), {}), torch.no_grad),
            )
            for name, make in VALUES.items()
        ]
    )


def x() -> Tensor:
    return torch.ones(2)


# name of the op in OPS -> calls; those marked True are good ones
CALLS: dict[str, list[tuple[bool, Callable[[], Arguments]]]] = {
    "many_kinds": [
        (True, lambda: ((x(), 2), {"k": 1})),
        (True, lambda: ((x(), 2, 1.5, True, "s", x()), {"k": 1, "m": "n"})),
        (True, lambda: ((x(), 2, 0.5, False, "none", None), {"k": 1, "m": "kw"})),
        (True, lambda: ((), {"x": x(), "a": 2, "k": 1})),
        (True, lambda: ((), {"m": "n", "k": 1, "y": x(), "s": "t", "a": 3, "x": x()})),
        (True, lambda: ((x(),), {"k": 1, "c": True, "a": 2})),
        (True, lambda: ((x(), 2, 0.5), {"y": x(), "k": 1})),
        (True, lambda: ((x(), True, 1), {"k": False})),
        (True, lambda: ((x(), 2), {"k": 1, "b": 0.5})),
        (True, lambda: ((x(), 2, 0.5, 0), {"k": 1})),
        (False, lambda: ((x(), 2), {})),
        (False, lambda: ((), {})),
        (False, lambda: ((x(),), {"k": 1})),
        (False, lambda: ((), {"k": 1})),
        (False, lambda: ((x(), 2, 0.5, False, "s", None, 1), {})),
        (False, lambda: ((x(), 2, 0.5, False, "s", None, 1), {"k": 1})),
        (False, lambda: ((x(), 2, 0.5, False, "s", None, 1, "m", 9), {})),
        (False, lambda: ((x(), 2), {"k": 1, "zzz": 1})),
        (False, lambda: ((x(), 2), {"k": 1, "zzz": 1, "yyy": 2})),
        (False, lambda: ((x(), 2), {"zzz": 1})),
        (False, lambda: ((x(), 2), {"k": 1, "a": 2})),
        (False, lambda: ((x(), 2), {"k": 1, "x": x()})),
        (False, lambda: ((x(), 2), {"k": 1, "a": 2, "zzz": 3})),
        (False, lambda: ((x(), 2), {"k": "1"})),
        (False, lambda: ((x(), "2"), {"k": "1"})),
        (False, lambda: ((x(), 2), {"k": 1, "": 2})),
        (False, lambda: ((x(), 2), {"k": 1, "this": 2})),
        (False, lambda: ((x(), 2), {"k": 1, "\ud800": 2})),
        (False, lambda: ((x(), 2), {"k": 1, "é": 2})),
    ],
    "only_defaults": [
        (True, lambda: ((x(),), {})),
        (True, lambda: ((x(), 3), {})),
        (True, lambda: ((x(), True), {})),
        (True, lambda: ((x(), 3, 0.5, True, "d", None, 4, None, torch.float32), {})),
        (True, lambda: ((x(), 3, 0.5, True, "d", None, 4), {})),
        (True, lambda: ((x(), 3, 0.5, True, "other"), {})),
        (True, lambda: ((x(), 3, 0.5, 1, "d"), {})),
        (True, lambda: ((x(),), {"i": 3, "s": "d"})),
        (True, lambda: ((x(),), {"i": 3, "s": "e"})),
        (True, lambda: ((x(),), {"n": 1})),
        (True, lambda: ((x(),), {"o": None})),
        (True, lambda: ((x(),), {"o": 4, "n": None})),
        (True, lambda: ((x(),), {"t": x()})),
        (True, lambda: ((x(),), {"d": torch.float16})),
        (True, lambda: ((x(),), {"d": torch.float32, "b": False})),
        (True, lambda: ((x(), torch.tensor(3)), {"f": torch.tensor(0.5)})),
        (True, lambda: ((x(), 3, 0.5000000000000001), {})),
        (False, lambda: ((x(), None), {})),
        (False, lambda: ((x(), 3, None), {})),
        (True, lambda: ((x(), 3, 0.5, None), {})),
        (False, lambda: ((x(), 3, 0.5, True, None), {})),
    ],
    "list_defaults": [
        (True, lambda: ((x(),), {})),
        (True, lambda: ((x(), [1, 2]), {})),
        (True, lambda: ((x(), (1, 2)), {})),
        (True, lambda: ((x(), [True, 2]), {})),
        (True, lambda: ((x(), [1, 3]), {})),
        (True, lambda: ((x(), [1, 2, 3]), {})),
        (True, lambda: ((x(), []), {})),
        (True, lambda: ((x(), [1, 2], 1.5), {})),
        (True, lambda: ((x(), [1, 2], [1.5, 1.5]), {})),
        (True, lambda: ((x(), [1, 2], [1.5]), {})),
        (True, lambda: ((x(),), {"floats": [1.5, 1.5]})),
        (True, lambda: ((x(),), {"floats": 2.5})),
        (False, lambda: ((x(), None), {})),
    ],
    "other_defaults": [
        (True, lambda: ((x(),), {})),
        (True, lambda: ((x(), 3), {})),
        (True, lambda: ((x(), 30), {})),
        (True, lambda: ((x(), 3, 0.5), {})),
        (True, lambda: ((x(), 3, 0.5, "schema"), {})),
        (True, lambda: ((x(), 30, 5.0, "function"), {})),
        (True, lambda: ((x(), 3, 5.0, "schema"), {})),
        (True, lambda: ((x(),), {"s": "schema"})),
        (True, lambda: ((x(),), {"s": "function"})),
        (True, lambda: ((x(),), {"f": 1.0})),
        (False, lambda: ((x(),), {"f": "1"})),
    ],
    "keyword_only": [
        (True, lambda: ((x(),), {})),
        (True, lambda: ((x(),), {"i": 1})),
        (True, lambda: ((x(),), {"i": 5, "s": "z"})),
        (True, lambda: ((x(),), {"dt": torch.float16, "s": "y", "i": True})),
        (True, lambda: ((), {"dt": None, "x": x()})),
        (False, lambda: ((x(), 1), {})),
        (False, lambda: ((x(),), {"i": None})),
        (False, lambda: ((x(),), {"j": 1})),
    ],
    "wide_64": [
        (True, lambda: (tuple(x() if i % 2 == 0 else i for i in range(64)), {})),
        (True, lambda: ((), {f"a{i}": x() if i % 2 == 0 else i for i in reversed(range(64))})),
        (True, lambda: ((x(),), {f"a{i}": x() if i % 2 == 0 else i for i in range(1, 64)})),
        (False, lambda: (tuple(x() if i % 2 == 0 else i for i in range(63)), {})),
        (False, lambda: (tuple(x() if i % 2 == 0 else i for i in range(65)), {})),
        (False, lambda: (tuple(x() for i in range(64)), {})),
        (False, lambda: ((), {f"a{i}": x() if i % 2 == 0 else i for i in range(65)})),
        (False, lambda: ((x(), 1), {f"a{i}": 1 for i in range(2, 64)})),
    ],
}
CALLS["wide_63"] = [
    (True, lambda: (tuple(x() if i % 2 == 0 else i for i in range(63)), {})),
    (False, lambda: (tuple(x() if i % 2 == 0 else i for i in range(64)), {})),
]


def calls_of(op_name: str) -> list[tuple[bool, Callable[[], Arguments]]]:
    stem = op_name.removesuffix("_counted").removesuffix("_unrecorded")
    return CALLS["other_defaults" if stem == "no_defaults" else stem]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("op_name", OPS)
def test_calls(op_name: str, how: str) -> None:
    twin = op_named(op_name)
    assert twin.schemas[0] == twin.schemas[1]

    def check(good: bool, make: Callable[[], Arguments]) -> None:
        seen = twin.compare(make, how=how)
        if not op_name.startswith("no_defaults"):
            assert (seen["error"] is None) == good, seen["error"]

    collect(
        [
            (f"call {index}", lambda g=good, m=make: check(g, m))
            for index, (good, make) in enumerate(calls_of(op_name))
        ]
    )


@pytest.mark.parametrize("how", HOWS)
def test_keywords_in_any_order(how: str) -> None:
    twin = op_named("many_kinds")
    values = {"a": 4, "b": 2.5, "c": True, "k": 9}
    for order in itertools.permutations(values):
        seen = twin.compare(lambda o=order: ((x(),), {n: values[n] for n in o}), how=how)
        assert seen["error"] is None


@pytest.mark.parametrize("how", HOWS)
def test_keyword_names_that_are_not_interned(how: str) -> None:
    # Keyword names made at run time are other objects than those of the schema.
    twin = op_named("many_kinds")
    for name in ("a", "k"):
        other = {"a": "k", "k": "a"}[name]
        seen = twin.compare(
            lambda n=name, o=other: ((x(),), {"".join([n, ""]): 1, f"{o}": 2}), how=how
        )
        assert seen["error"] is None


@pytest.mark.parametrize("how", HOWS)
def test_str_subclass_as_keyword(how: str) -> None:
    class Name(str):
        __slots__ = ()

    op_named("many_kinds").compare(lambda: ((x(), 2), {Name("k"): 1}), how=how)
    op_named("many_kinds").compare(lambda: ((x(), 2), {Name("q"): 1}), how=how)


@pytest.mark.parametrize("how", HOWS)
def test_keyword_that_is_no_string(how: str) -> None:
    op_named("many_kinds").compare(lambda: ((x(), 2), {5: 1}), how=how)


@pytest.mark.parametrize("how", ["packet", "overload"])
def test_keyword_named_self(how: str) -> None:
    # By object, torch's method has its own `self`; hotop gives the overload's answer.
    op_named("many_kinds").compare(lambda: ((x(), 2), {"k": 1, "self": 1}), how=how)


@pytest.mark.parametrize("how", HOWS)
def test_one_tensor_in_several_places(how: str) -> None:
    def same() -> Arguments:
        tensor = x()
        return (tensor, 2), {"k": 1, "y": tensor}

    seen = op_named("many_kinds").compare(same, how=how)
    assert seen["kernel"][0]["args"][5]["is"] == "args[0]"


class Clears:
    """Empties the list that it stands in while it is converted."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __index__(self) -> int:
        self.values.clear()
        return 5

    def __float__(self) -> float:
        self.values.clear()
        return 5.0

    def __repr__(self) -> str:
        return "Clears()"


@pytest.mark.parametrize("type_name", ["int[]", "float[]", "schema int[]", "schema int[2]"])
@pytest.mark.parametrize("position", range(3))
def test_a_list_that_changes_while_it_is_read(type_name: str, position: int) -> None:
    def make() -> Arguments:
        values: list[Any] = [1, 2, 3]
        values[position] = Clears(values)
        return (x(), values), {}

    for how in HOWS:
        op_taking(type_name).compare(make, how=how)


def test_a_kernel_that_drops_the_callers_tensors() -> None:
    held: list[Tensor] = []

    def drops(xs: list[Tensor], n: int) -> Tensor:
        held.clear()
        result = xs[0] * n
        xs.clear()
        return result

    def make() -> Arguments:
        held[:] = [torch.ones(2), torch.zeros(3)]
        return (held, 3), {}

    twin = Twin(drops, mutates_args={"xs"}, record=False)
    for how in HOWS:
        assert twin.compare(make, how=how)["result"]["data"] == "[3.0, 3.0]"


@pytest.mark.parametrize("how", HOWS)
def test_errors_inside_an_except_block(how: str) -> None:
    def within(call: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                raise KeyError("outer")
            except KeyError:
                return call(*args, **kwargs)

        return run

    def raises(x: Tensor, n: int) -> Tensor:
        raise ValueError(n)

    twin = Twin(raises)
    for second in (1, "wrong"):
        seen = twin.compare(lambda s=second: ((x(), s), {}), how=how, transform=within)
        assert seen["error"]["context"] == "KeyError"


@pytest.mark.parametrize("how", HOWS)
def test_profiler_events(how: str) -> None:
    def calls() -> list[Callable[[], Arguments]]:
        return [make for _, make in CALLS["many_kinds"]]

    collect(
        [
            (f"call {i}", lambda m=make: op_named("many_kinds").compare(m, how=how, profile=True))
            for i, make in enumerate(calls()[:12])
        ]
    )
