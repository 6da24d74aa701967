"""What kernels return: right, convertible, wrong values, aliases, views, twin against twin."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.types import Number

from twin import HOWS, Twin, handle, needs_hotop
from twin_observe import attempt
from twin_values import VALUES

MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


class Two(NamedTuple):
    """A named tuple of two."""

    first: Any
    second: Any


ANNOTATIONS: dict[str, Any] = {
    "None": None,
    "Tensor": Tensor,
    "list[Tensor]": list[Tensor],
    "int": int,
    "float": float,
    "bool": bool,
    "Number": Number,
    "tuple[Tensor]": tuple[Tensor],
    "tuple[Tensor, Tensor]": tuple[Tensor, Tensor],
    "tuple[Tensor, int]": tuple[Tensor, int],
    "tuple[int, float, bool]": tuple[int, float, bool],
    "tuple[Tensor, list[Tensor]]": tuple[Tensor, list[Tensor]],
    "tuple[Tensor, Tensor, Tensor, float]": tuple[Tensor, Tensor, Tensor, float],
}
SCHEMAS = [
    "(Tensor x) -> str",
    "(Tensor x) -> Tensor?",
    "(Tensor x) -> (Tensor, Tensor?)",
    "(Tensor x) -> int[]",
    "(Tensor x) -> float[]",
    "(Tensor x) -> Tensor?[]",
    "(Tensor x) -> ScalarType",
    "(Tensor x) -> Device",
    "(Tensor x) -> SymInt",
    "(Tensor x) -> SymInt[]",
    "(Tensor x) -> int?",
    "(Tensor x) -> Scalar",
    "(Tensor x) -> complex",
    "(Tensor x) -> Any",
    "(Tensor x) -> (Tensor first, Tensor second)",
]


def r(*values: float, **options: Any) -> Tensor:
    return torch.tensor(values or (3.0, 4.0), **options)


STRUCTURES: dict[str, Callable[[], Any]] = {
    "one_tuple": lambda: (r(),),
    "one_list": lambda: [r()],
    "two_tuple": lambda: (r(), r()),
    "two_list": lambda: [r(), r()],
    "three_tuple": lambda: (r(), r(), r()),
    "named": lambda: Two(r(), r()),
    "tensor_int": lambda: (r(), 7),
    "tensor_true": lambda: (r(), True),
    "tensor_float": lambda: (r(), 7.0),
    "int_tensor": lambda: (7, r()),
    "tensor_none": lambda: (r(), None),
    "none_none": lambda: (None, None),
    "scalars": lambda: (1, 2.0, True),
    "scalars_convertible": lambda: (True, 2, 1),
    "scalars_numpy": lambda: (np.int64(1), np.float32(2), np.bool_(True)),
    "scalars_wrong": lambda: ("1", 2.0, True),
    "scalars_list": lambda: [1, 2.0, True],
    "tensor_list": lambda: (r(), [r(), r()]),
    "tensor_tuple": lambda: (r(), (r(), r())),
    "list_list": lambda: [r(), [r()]],
    "tensor_empty_list": lambda: (r(), []),
    "tensor_list_with_none": lambda: (r(), [None]),
    "three_and_float": lambda: (r(), r(), r(), 1),
    "tensor_str": lambda: (r(), "x"),
    "dict": lambda: {"a": r()},
    "iterator": lambda: iter([r(), r()]),
    "nested_tuple": lambda: ((r(),),),
    "integers": lambda: r(1, 2, dtype=torch.int32),
    "requires_grad": lambda: r(requires_grad=True),
    "non_leaf": lambda: r(requires_grad=True) * 2,
    "parameter": lambda: torch.nn.Parameter(r()),
    "meta": lambda: torch.empty(2, device="meta"),
    "view_of_own": lambda: r(1, 2, 3)[1:],
    "same_twice": lambda: (lambda v: (v, v))(r()),
    "two_views": lambda: (lambda v: (v[:1], v[1:]))(r()),
    "list_same_twice": lambda: (lambda v: [v, v])(r()),
    "list_shares": lambda: (lambda v: (v, [v]))(r()),
    "conj": lambda: torch.tensor([1j]).conj(),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "zero": lambda: torch._efficientzerotensor((2,)),
    "no_storage": lambda: torch.empty(0),
}
RESULTS = {**VALUES, **STRUCTURES}
_next: list[Callable[[], Any]] = []


def gives(x: Tensor):
    return _next[-1]()


def returning(annotation: Any = None, schema: str | None = None, **options: Any) -> Twin:
    gives.__annotations__["return"] = annotation
    return Twin(gives, schema=schema, **options)


def wrong_count(twin: Twin, result: Any) -> bool:
    """Whether the result has another number of values than a tuple return.

    PyTorch then reads or writes past its stack: a crash, or an error about some other object.
    """
    count = len(twin.ops[0]._opoverload._schema.returns)
    return (
        count > 1
        and hasattr(result, "__len__")
        and attempt(lambda: len(result) != count) is True
        and attempt(lambda: iter(result) is None) is False
    )


def check_all(twin: Twin, mode: Callable, requires_grad: bool) -> int:
    failures, good = [], 0
    for index, (name, make) in enumerate(RESULTS.items()):
        if wrong_count(twin, make()):
            continue
        _next.append(make)
        try:
            seen = twin.compare(
                lambda: ((torch.ones(2, requires_grad=requires_grad),), {}), mode, HOWS[index % 3]
            )
            good += seen["error"] is None
        except AssertionError as error:
            failures.append(f"--- kernel returns {name}\n{error}")
        finally:
            _next.pop()
    assert not failures, f"{len(failures)} of {len(RESULTS)} differ\n" + "\n".join(failures)
    return good


@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "requires_grad"])
@pytest.mark.parametrize("annotation", ANNOTATIONS)
def test_every_result_for_every_return_type(annotation: str, requires_grad: bool) -> None:
    twin = returning(ANNOTATIONS[annotation])
    assert check_all(twin, torch.enable_grad, requires_grad) > 0


@pytest.mark.parametrize("mode", MODES[1:], ids=lambda mode: mode.__name__)
@pytest.mark.parametrize(
    "annotation", ["Tensor", "list[Tensor]", "tuple[Tensor, Tensor]", "tuple[Tensor, list[Tensor]]"]
)
def test_results_in_other_modes(annotation: str, mode: Callable) -> None:
    assert check_all(returning(ANNOTATIONS[annotation]), mode, True) > 0


@pytest.mark.parametrize("schema", SCHEMAS)
def test_every_result_for_written_schemas(schema: str) -> None:
    assert check_all(returning(schema=schema), torch.enable_grad, False) > 0


WRONG_COUNTS = {
    "none": lambda: (),
    "empty list": lambda: [],
    "one": lambda: (r(),),
    "one in a list": lambda: [r()],
    "three": lambda: (r(), r(), r()),
    "three in a list": lambda: [r(), r(), r()],
    "named three": lambda: NamedTuple("T", [(n, Any) for n in "abc"])(r(), r(), r()),
}


@needs_hotop
@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "requires_grad"])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("result", WRONG_COUNTS)
def test_a_wrong_number_of_results_is_an_error(result: str, how: str, requires_grad: bool) -> None:
    # No twin here, see wrong_count: hotop must raise an error that tells both numbers.
    twin = returning(tuple[Tensor, Tensor])
    _next.append(WRONG_COUNTS[result])
    try:
        with pytest.raises(RuntimeError, match=rf"{len(WRONG_COUNTS[result]())}\D+2"):
            handle(twin.ops[1], how)(torch.ones(2, requires_grad=requires_grad))
    finally:
        _next.pop()


# Outputs that alias inputs or each other.

ALIASING: dict[str, tuple[Any, Callable[..., Any]]] = {
    "input": (Tensor, lambda x, ys, o: x),
    "input_view": (Tensor, lambda x, ys, o: x[:1]),
    "input_detached": (Tensor, lambda x, ys, o: x.detach()),
    "input_reshaped": (Tensor, lambda x, ys, o: x.view(1, -1)),
    "memory_of_input": (Tensor, lambda x, ys, o: torch.from_numpy(x.detach().numpy())),
    "list_element": (Tensor, lambda x, ys, o: ys[0]),
    "last_list_element_view": (Tensor, lambda x, ys, o: ys[-1][1:]),
    "optional": (Tensor, lambda x, ys, o: o),
    "in_list": (list[Tensor], lambda x, ys, o: [x + 1, x]),
    "input_list": (list[Tensor], lambda x, ys, o: ys),
    "list_twice": (list[Tensor], lambda x, ys, o: [x + 1] * 2),
    "outputs_alias": (tuple[Tensor, Tensor], lambda x, ys, o: (lambda v: (v, v[:1]))(x + 1)),
    "second_is_input": (tuple[Tensor, Tensor], lambda x, ys, o: (x + 1, x)),
    "list_and_tensor": (
        tuple[Tensor, list[Tensor]],
        lambda x, ys, o: (lambda v: (v, [v]))(x + 1),
    ),
    "int_and_input": (tuple[int, Tensor], lambda x, ys, o: (1, x)),
    "fresh": (tuple[Tensor, list[Tensor]], lambda x, ys, o: (x + 1, [x + 2, x + 3])),
    "empty_of_input": (Tensor, lambda x, ys, o: x[:0]),
}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("name", ALIASING)
def test_aliases(name: str, mode: Callable) -> None:
    annotation, body = ALIASING[name]

    def aliasing(x: Tensor, ys: list[Tensor], o: Tensor | None = None):
        return body(x, ys, o)

    aliasing.__annotations__["return"] = annotation
    twin = Twin(aliasing)
    for how in HOWS:
        for requires_grad in (False, True):
            seen = twin.compare(
                lambda g=requires_grad: (
                    (torch.ones(2, requires_grad=g), [torch.zeros(2), torch.zeros(3)]),
                    {"o": torch.ones(1)},
                ),
                mode,
                how,
            )
            assert (seen["error"] is None) == (name in ("fresh", "memory_of_input"))


def test_aliases_of_inputs_without_storage() -> None:
    def passes(x: Tensor) -> Tensor:
        return x

    twin = Twin(passes)
    for make in (
        lambda: ((torch.empty(0),), {}),
        lambda: ((torch.empty(2, device="meta"),), {}),
        lambda: ((torch.eye(2).to_sparse(),), {}),
        lambda: ((torch.ones(2).to_mkldnn(),), {}),
    ):
        twin.compare(make)


@pytest.mark.parametrize("mutates", ["(Tensor(a!) x)", "(Tensor(a!) x, Tensor y)"])
def test_mutated_argument_returned_without_tag(mutates: str) -> None:
    def returns_it(x: Tensor, *rest: Tensor) -> Tensor:
        return x.add_(1)

    twin = Twin(returns_it, mutates_args={"x"}, schema=f"{mutates} -> Tensor")
    count = mutates.count("Tensor")
    for mode in MODES:
        twin.compare(lambda: (tuple(torch.ones(2) for _ in range(count)), {}), mode)


VIEWS: dict[str, tuple[str, Callable]] = {
    "identity": ("(Tensor(a) x) -> Tensor(a)", lambda x: x),
    "slice": ("(Tensor(a) x) -> Tensor(a)", lambda x: x[1:]),
    "transpose": ("(Tensor(a) x) -> Tensor(a)", lambda x: x[None].t()),
    "clone": ("(Tensor(a) x) -> Tensor(a)", lambda x: x.clone()),
    "list": ("(Tensor(a) x) -> Tensor(a)[]", lambda x: [x[:1], x[1:]]),
    "two": ("(Tensor(a) x, Tensor y) -> Tensor(a)", lambda x, y: x[1:]),
    "other": ("(Tensor(a) x, Tensor y) -> Tensor(a)", lambda x, y: y),
    "mutable": ("(Tensor(a!) x) -> Tensor(a!)", lambda x: x.add_(1)),
    "mutable_clone": ("(Tensor(a!) x) -> Tensor(a!)", lambda x: x.add_(1).clone()),
    "wildcard": ("(Tensor x) -> Tensor(*)", lambda x: x[1:]),
    "list_in": ("(Tensor(a)[] xs) -> Tensor(a)[]", lambda xs: xs),
}


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("name", VIEWS)
def test_view_schemas(name: str, mode: Callable) -> None:
    schema, body = VIEWS[name]
    mutates = {"x"} if "!" in schema else ()
    try:
        twin = Twin(body, mutates_args=mutates, schema=schema)
    except Exception as error:  # then both refuse it, with the same words
        with pytest.raises(type(error)):
            torch.library.custom_op("twin_torch::v", body, mutates_args=mutates, schema=schema)
        return
    count = len(inspect.signature(body).parameters)
    for how in HOWS:
        for requires_grad in (False, True):

            def make(g: bool = requires_grad) -> Any:
                values = [torch.ones(2, requires_grad=g) * 1 for _ in range(count)]
                return ((values,) if "xs" in schema else tuple(values)), {}

            twin.compare(make, mode, how)


def test_the_callers_list_is_not_the_kernels() -> None:
    kept: list[Any] = []

    def keeps(x: Tensor) -> list[Tensor]:
        kept.append([x + 1, x + 2])
        return kept[-1]

    seen = Twin(keeps).compare(lambda: ((torch.ones(2),), {}))
    assert seen["result"]["is"] is None
    assert seen["result"]["[0]"]["is"] == "returned[0]"


def test_returned_objects_die_with_their_last_user() -> None:
    import gc
    import weakref

    def fresh(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        return x + 1, [x + 2]

    for op in Twin(fresh, record=False).ops:
        gc.disable()
        try:
            result = op(torch.ones(2))
            references = [weakref.ref(result[0]), weakref.ref(result[1][0])]
            del result
            assert [reference() for reference in references] == [None, None]
        finally:
            gc.enable()
