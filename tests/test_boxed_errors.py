"""Wrong and strange values at accelerated ATen overloads: the answer or the error is PyTorch's."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import hotop
from twin import needs_hotop
from twin_observe import normalise
from twin_values import VALUES

ops = torch.ops.aten
# PyTorch's entry, taken before anything is accelerated.
BY_PYTORCH = torch._ops.OpOverload.__call__
# Consumed by the first call that reads them, or too large to print.
VALUE_NAMES = sorted(set(VALUES) - {"iterator", "generator_of_tensors", "list_long"})


def x() -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3)


# PyTorch takes ints for these, and crashes on one that is no member.
ENUMS = ("ScalarType", "Layout", "MemoryFormat")
NO_MEMBERS = {"-1", "257", "2**31", "2**53+1", "2**63-1", "-2**63", "np_int8", "np_int64"}
NO_MEMBERS |= {"int_sub", "int_enum", "has_index", "np_array_0d", "np_array_1", "np_uint64_big"}
NO_MEMBERS |= {name for name in VALUES if name.startswith("tensor_")}


# On meta: PyTorch's kernels for the CPU read wild memory for wild sizes of windows and steps.
def image() -> torch.Tensor:
    return torch.empty(1, 2, 4, 4, device="meta")


# A good call of each: overload, arguments, keywords.
GOOD: dict[str, tuple[Any, Callable[[], tuple[Any, ...]], dict[str, Any]]] = {
    "Tensor, number": (ops.add.Tensor, lambda: (x(), x()), {"alpha": 2}),
    "Scalar": (ops.mul.Scalar, lambda: (x(), 2.5), {}),
    "in place": (ops.add_.Tensor, lambda: (x(), x()), {"alpha": 1}),
    "out": (ops.add.out, lambda: (x(), x()), {"out": x()}),
    "Tensor list": (ops.cat.default, lambda: ([x(), x()], 1), {}),
    "optional Tensors": (ops.index.Tensor, lambda: (x(), [None, torch.tensor([0, 2])]), {}),
    "int lists": (
        ops.convolution.default,
        lambda: (image(), image(), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        {},
    ),
    "int[2] of one int": (ops.avg_pool2d.default, lambda: (image(), 2), {}),
    "SymInts": (ops.view.default, lambda: (x(), [3, 2]), {}),
    "optional int list": (ops.sum.dim_IntList, lambda: (x(), [0], True), {"dtype": torch.float64}),
    "one dimension": (ops.softmax.int, lambda: (x(), 1, torch.float64), {}),
    "factory": (
        ops.zeros.default,
        lambda: ([2, 3],),
        {"dtype": torch.int64, "device": "cpu", "layout": torch.strided, "pin_memory": False},
    ),
    "Generator": (ops.rand.generator, lambda: ([2],), {"generator": torch.Generator()}),
    "Scalars": (ops.clamp.default, lambda: (x(), 1, 4.0), {}),
    "str": (ops.div.Tensor_mode, lambda: (x(), x() + 1), {"rounding_mode": "floor"}),
    "floats": (ops.layer_norm.default, lambda: (x(), [3], None, None, 1e-5, False), {}),
    "dtype, memory format": (
        ops._to_copy.default,
        lambda: (image(),),
        {"dtype": torch.float64, "memory_format": torch.channels_last},
    ),
    "several results": (ops.max.dim, lambda: (x(), 1, False), {}),
    "list of results": (ops.split.Tensor, lambda: (x(), 1, 0), {}),
    "a number back": (ops.dim.default, lambda: (x(),), {}),
    "a Scalar back": (ops._local_scalar_dense.default, lambda: (torch.tensor(2.5),), {}),
    "bools": (ops.any.dims, lambda: (x() > 2, [1], True), {}),
}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """What a test accelerates is PyTorch's again behind it; memory never written is filled."""
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    yield
    torch._C._set_deterministic_algorithms(False, warn_only=False)
    if hasattr(hotop, "restore"):
        hotop.restore()


def look(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        meta = (str(value.dtype), str(value.device), tuple(value.shape), str(value.layout))
        plain = value.layout is torch.strided and not value.is_meta
        data = None if value.is_meta else repr(value.detach().tolist() if plain else value)
        return ("Tensor", type(value).__name__, *meta, data, value.requires_grad)
    if isinstance(value, list | tuple):
        return (type(value).__name__, [look(element) for element in value])
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    return (type(value).__name__, repr(value))


def answer(call: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    for generator in tree_leaves((args, kwargs)):
        if isinstance(generator, torch.Generator):
            generator.manual_seed(0)
    try:
        result = call(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error), type(error.__cause__).__name__
    return look(result), [look(value) for value in [*args, *kwargs.values()]]


def normalised(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [normalised(element) for element in value]
    return normalise(value) if isinstance(value, str) else value


def both(op: Any, make: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]) -> Any:
    """Return PyTorch's answer; the accelerated overload's must be equal."""
    args, kwargs = make()
    expected = answer(lambda *a, **k: BY_PYTORCH(op, *a, **k), args, kwargs)
    args, kwargs = make()
    given = answer(op, args, kwargs)
    if given != expected:  # addresses differ, and the frames that pybind11 tells of
        assert normalised(given) == normalised(expected), str(op)
    return expected


def fresh(name: str) -> tuple[Any, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]]:
    op, positional, keywords = GOOD[name]

    def make() -> tuple[tuple[Any, ...], dict[str, Any]]:
        copies = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in keywords.items()}
        return positional(), copies

    return op, make


@needs_hotop
@pytest.mark.parametrize("name", GOOD)
def test_good_calls_are_boxed(name: str) -> None:
    """Else the other tests would compare PyTorch with itself."""
    op, make = fresh(name)
    hotop.accelerate(op)
    args, kwargs = make()
    assert hotop.explain(op, *args, **kwargs).road == "boxed"
    expected = both(op, make)
    assert not isinstance(expected[0], str), f"PyTorch refuses it: {expected}"
    calls = {one.name: one for one in hotop.report().ops}
    found = calls.get(str(op._schema.name), calls.get(op._schema.name + "." + op._overloadname))
    assert found is not None
    assert (found.direct, found.boxed, found.pytorch) == (0, 1, 0)


@needs_hotop
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", GOOD)
def test_every_value_in_every_place(name: str) -> None:
    op, make = fresh(name)
    hotop.accelerate(op)
    args, kwargs = make()
    types = [str(argument.real_type) for argument in op._schema.arguments]
    types_by_name = {a.name: str(a.real_type) for a in op._schema.arguments}
    refused = 0
    for place in [*range(len(args)), *kwargs]:
        kind = types[place] if isinstance(place, int) else types_by_name[place]
        is_enum = kind.removeprefix("Optional[").rstrip("]") in ENUMS
        for value in VALUE_NAMES:
            if is_enum and value in NO_MEMBERS:
                continue

            def with_value(place: Any = place, value: str = value) -> Any:
                args, kwargs = make()
                if isinstance(place, int):
                    return (*args[:place], VALUES[value](), *args[place + 1 :]), kwargs
                return args, {**kwargs, place: VALUES[value]()}

            refused += isinstance(both(op, with_value)[0], str)
    assert refused > 10 * (len(args) + len(kwargs)), "hardly a value was refused"


@needs_hotop
@pytest.mark.parametrize("name", GOOD)
def test_wrong_numbers_of_arguments(name: str) -> None:
    op, make = fresh(name)
    hotop.accelerate(op)
    args = make()[0]
    first = op._schema.arguments[0].name
    wrong: list[Callable[[], Any]] = [
        lambda: ((), {}),
        lambda: (make()[0], {**make()[1], "nonsense": 1}),
        lambda: ((*make()[0], *(1 for _ in op._schema.arguments)), {}),
        lambda: (make()[0], {**make()[1], first: make()[0][0]}),
        lambda: (make()[0], {**make()[1], "": 1}),
    ]
    wrong += [lambda n=n: (make()[0][:n], {}) for n in range(len(args))]
    refused = sum(isinstance(both(op, one)[0], str) for one in wrong)
    assert refused >= 4


@needs_hotop
@pytest.mark.parametrize("name", GOOD)
def test_every_split_between_positions_and_keywords(name: str) -> None:
    op, make = fresh(name)
    hotop.accelerate(op)
    names = [argument.name for argument in op._schema.arguments if not argument.kwarg_only]
    for keep in range(len(make()[0]) + 1):

        def split(keep: int = keep) -> Any:
            args, kwargs = make()
            named = dict(zip(names[keep:], args[keep:], strict=False))
            return args[:keep], {**dict(reversed(named.items())), **kwargs}

        assert not isinstance(both(op, split)[0], str)


def test_exceptions_of_cpp() -> None:
    # c10's own, and one of the standard library (std::length_error), which PyTorch 2.13 and 2.15
    # make into different exceptions of Python.
    raising: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.select.int, (x(), 5, 0)),
        (ops.bitwise_not.default, (x(),)),
        (ops.mm.default, (x(), x())),
        (ops.convolution_overrideable.default, (x(), x(), None, [1], [0], [1], False, [0], 1)),
        (
            ops._batch_norm_with_update.default,
            (torch.ones(()), None, None, torch.ones(1), torch.ones(1), 0.1, 1e-5),
        ),
    ]
    before = [answer(op, args, {}) for op, args in raising]
    assert all(isinstance(error, tuple) and len(error) == 3 for error in before), before
    hotop.accelerate("aten")
    for (op, args), expected in zip(raising, before, strict=True):
        assert hotop.explain(op, *args).road == "boxed"
        assert answer(op, args, {}) == expected
