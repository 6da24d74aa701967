"""Drawn schemas, arguments and contexts, twin against twin."""

import functools
import os
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from torch import Tensor

import seeds
from twin import HOWS, Arguments, Twin
from twin_contexts import CONTEXTS, TENSORS
from twin_ops import constant_gradients
from twin_values import VALUES

EXAMPLES = int(os.environ.get("HOTOP_HYPOTHESIS_EXAMPLES", "150"))
# An example defines two ops the first time that its schema is drawn; the pool keeps them.
POOL_SIZE = 400

PROFILE = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=not seeds.FRESH,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@dataclass(frozen=True)
class Kind:
    """An argument type: how a schema writes it, its defaults, and the values that it takes."""

    written: str
    defaults: tuple[tuple[str, Any], ...]
    good: tuple[str, ...]
    mutable: bool = False

    def __repr__(self) -> str:
        """Return what tells the kinds apart."""
        return self.written


# Tensor values are drawn from VALUES as well, so that many kinds of them meet many schemas.
_TENSORS = ("tensor_1", "tensor_floats", "tensor_2d", "tensor_strided", "parameter_frozen")
_GRADS = ("tensor_grad_1d", "parameter")
KINDS = [
    Kind("Tensor", (), (*_TENSORS, *_GRADS, "tensor_ints", "tensor_meta", "tensor_conj"), True),
    Kind("Tensor?", (("None", None),), (*_TENSORS, *_GRADS, "None"), True),
    Kind(
        "Tensor[]", (), ("list_tensors", "tuple_tensors", "list_empty", "list_tensors_grad"), True
    ),
    Kind("Tensor?[]", (), ("list_tensor_None", "list_tensors", "list_None", "list_empty")),
    Kind("SymInt", (("3", 3), ("-1", -1)), ("1", "257", "True", "np_int64", "tensor_int")),
    Kind("int", (("7", 7),), ("0", "1", "2**31", "int_enum", "has_index")),
    Kind("SymInt?", (("None", None), ("4", 4)), ("None", "1", "int_sub")),
    Kind("float", (("0.5", 0.5), ("1e-06", 1e-06)), ("1.5", "1", "nan", "np_float32", "has_float")),
    Kind("float?", (("None", None),), ("None", "1.0", "inf")),
    Kind("bool", (("True", True), ("False", False)), ("True", "False", "1", "tensor_bool", "None")),
    Kind("bool?", (("None", None),), ("None", "True", "0")),
    Kind("str", (('"d"', "d"), ('""', "")), ("str", "str_empty", "str_accents", "np_str", "bytes")),
    Kind("str?", (("None", None),), ("None", "str", "str_enum")),
    Kind("Scalar", (("2", 2), ("0.5", 0.5)), ("1", "1.5", "1j", "True")),
    Kind("ScalarType", (), ("dtype", "dtype_int")),
    Kind("ScalarType?", (("None", None),), ("None", "dtype")),
    Kind("Device", (), ("device_cpu", "str_cpu", "device_cuda_1")),
    Kind("Device?", (("None", None),), ("None", "device_cpu", "str_cuda_0")),
    Kind("Layout?", (("None", None),), ("None", "layout")),
    Kind("SymInt[]", (), ("list_ints", "tuple_ints", "size", "range", "tensor_ints", "list_empty")),
    Kind("int[2]", (("1", None),), ("1", "list_ints", "tuple_ints", "257")),
    Kind("SymInt[]?", (("None", None),), ("None", "list_ints")),
    Kind("float[]", (), ("list_floats", "list_int_float", "np_array_floats", "list_empty")),
    Kind("bool[]", (), ("list_bools", "list_int_bool")),
    Kind("Scalar[]", (), ("list_ints", "list_int_float", "list_complex")),
]
RETURNS: dict[str, Callable[[Tensor], Any]] = {
    "()": lambda x: None,
    "Tensor": lambda x: x * 2,
    "(Tensor, Tensor)": lambda x: (x + 1, x + 2),
    "Tensor[]": lambda x: [x + 1, x + 2],
    "SymInt": lambda x: 3,
    "float": lambda x: 3,
    "bool": lambda x: True,
    "(Tensor, SymInt, Tensor[])": lambda x: [x + 1, True, (x + 2,)],
    # wrong ones
    "(Tensor, float)": lambda x: (x + 1, "no float"),
    "Tensor ": lambda x: x,
    "Tensor[] ": lambda x: [x, x[:0]],
    "SymInt ": lambda x: 1.5,
}


@dataclass(frozen=True)
class Parameter:
    """One drawn parameter of a schema."""

    kind: Kind
    default: int | None  # position among the kind's defaults
    keyword_only: bool
    mutated: bool


@dataclass(frozen=True)
class Drawn:
    """A drawn op."""

    parameters: tuple[Parameter, ...]
    returns: str
    formula: bool
    autocast: bool
    device_types: Any

    def schema(self) -> str:
        """Return the schema string."""
        parts, starred = [], False
        for index, p in enumerate(self.parameters):
            if p.keyword_only and not starred:
                starred = True
                parts.append("*")
            written = p.kind.written
            if p.mutated:
                written = written.replace("Tensor", f"Tensor(a{index}!)", 1)
            default = "" if p.default is None else "=" + p.kind.defaults[p.default][0]
            parts.append(f"{written} p{index}{default}")
        return f"({', '.join(parts)}) -> {self.returns.strip()}"


@st.composite
def drawn_ops(draw: Any) -> Drawn:
    """Draw an op with one to six parameters, the first a Tensor."""
    kinds = [KINDS[0], *draw(st.lists(st.sampled_from(KINDS), max_size=5))]
    keyword_from = draw(st.integers(1, len(kinds) + 3))
    mutating = draw(st.integers(0, 2)) == 0
    parameters, defaulted = [], False
    for index, kind in enumerate(kinds):
        keyword_only = index >= keyword_from and "Tensor" not in kind.written
        if keyword_only != (index >= keyword_from):
            break
        default = None
        if index and kind.defaults and (defaulted or draw(st.booleans())):
            default = draw(st.integers(0, len(kind.defaults) - 1))
        if defaulted and default is None and not keyword_only:
            break  # a parameter without default cannot follow one that has one
        defaulted = defaulted or default is not None
        mutated = mutating and kind.mutable and not keyword_only and draw(st.booleans())
        parameters.append(Parameter(kind, default, keyword_only, mutated))
    mutates = any(p.mutated for p in parameters)
    returns = draw(st.sampled_from(list(RETURNS)))
    return Drawn(
        tuple(parameters),
        returns,
        not mutates and returns != "()" and draw(st.booleans()),
        draw(st.integers(0, 5)) == 0 and not any(p.keyword_only for p in parameters),
        draw(st.sampled_from([None, None, "cpu", ("cpu", "meta")])),
    )


@functools.lru_cache(POOL_SIZE)
def define(drawn: Drawn) -> Twin:
    """Return the twin of a drawn op."""
    head, names, starred = [], [], False
    for index, p in enumerate(drawn.parameters):
        if p.keyword_only and not starred:
            starred = True
            head.append("*")
        default = "" if p.default is None else f"={p.kind.defaults[p.default][1]!r}"
        head.append(f"p{index}{default}")
        names.append(f"p{index}")
    mutated = [name for name, p in zip(names, drawn.parameters, strict=True) if p.mutated]
    scope: dict[str, Any] = {"run": functools.partial(_run, drawn.returns), "Tensor": Tensor}
    exec(f"def drawn({', '.join(head)}):\n    return run([{', '.join(mutated)}], p0)", scope)

    def setup(op: Any) -> None:
        if drawn.formula:
            op.register_autograd(_backward, setup_context=_setup_context(drawn))
        if drawn.autocast:
            op.register_autocast("cpu", torch.bfloat16)

    return Twin(
        scope["drawn"],
        mutates_args=mutated,
        schema=drawn.schema(),
        device_types=drawn.device_types,
        setup=setup,
    )


def _run(returns: str, mutated: list[Any], x: Any) -> Any:
    for value in mutated:
        for tensor in value if isinstance(value, list) else [value]:
            if tensor is not None:
                tensor.mul_(2)
    return RETURNS[returns](x)


def _setup_context(drawn: Drawn) -> Callable:
    # PyTorch passes keyword_only_inputs only where the schema has keyword-only arguments.
    if any(p.keyword_only for p in drawn.parameters):

        def with_keywords(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
            ctx.inputs = inputs

        return with_keywords

    def positional(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.inputs = inputs

    return positional


def _backward(ctx: Any, *grads: Any) -> Any:
    return tuple(constant_gradients(ctx))


# Values that PyTorch casts to an enumeration without a check, or whose order is not fixed.
_UNSOUND = {"set", "frozenset", "257", "2**31", "2**53+1", "-1", "-2**63", "2**63-1"}
ANY_VALUE = sorted(set(VALUES) - _UNSOUND)


# Where a value comes from, good ones above all.
SOURCES = ["good"] * 16 + ["any value", "tensor kind", "default", "default"]


@st.composite
def drawn_calls(draw: Any, drawn: Drawn) -> Callable[[], Arguments]:
    """Draw a call: mostly good values, sometimes any value, a missing or an extra argument."""
    chosen: list[Callable[[], Any]] = []
    for p in drawn.parameters:
        source = draw(st.sampled_from(SOURCES))
        if source == "any value":
            chosen.append(VALUES[draw(st.sampled_from(ANY_VALUE))])
        elif source == "tensor kind" and p.kind.written == "Tensor":
            chosen.append(TENSORS[draw(st.sampled_from(sorted(TENSORS)))])
        elif source == "default" and p.default is not None:
            default = p.kind.defaults[p.default][1]
            chosen.append(lambda d=default: d)
        else:
            chosen.append(VALUES[draw(st.sampled_from(p.kind.good))])
    positional = [not p.keyword_only for p in drawn.parameters]
    by_position = draw(st.integers(0, sum(positional)))
    names = [f"p{index}" for index in range(len(chosen))]
    keywords = draw(st.permutations(range(by_position, len(chosen))))
    keywords = [k for k in keywords if drawn.parameters[k].default is None or draw(st.booleans())]
    defect = draw(st.sampled_from(["none"] * 16 + ["drop", "extra", "unknown", "twice"]))

    def make() -> Arguments:
        args = [make_value() for make_value in chosen[:by_position]]
        kwargs = {names[k]: chosen[k]() for k in keywords}
        if defect == "drop" and kwargs:
            kwargs.popitem()
        elif defect == "drop" and args:
            args.pop()
        elif defect == "extra":
            args += [1] * (len(chosen) + 1 - len(args))
        elif defect == "unknown":
            kwargs["unknown"] = 1
        elif defect == "twice" and args:
            kwargs["p0"] = args[0]
        return tuple(args), kwargs

    return make


@contextmanager
def nest(names: list[str]) -> Any:
    """Enter several contexts; the innermost with a log gives it."""
    with ExitStack() as stack:
        logging = None
        for name in names:
            entered = stack.enter_context(CONTEXTS[name]())
            logging = entered if hasattr(entered, "log") else logging
        yield logging


# Not below_autograd and the excluded keys: PyTorch crashes in them on tensors that have no memory.
NESTABLE = sorted(
    set(CONTEXTS)
    - {"below_autograd", "no_python_dispatch"}
    - {name for name in CONTEXTS if name.startswith("excluded")}
)


# set_default_device replaces an earlier default, so that two of them do not nest.
def nests(count: int) -> st.SearchStrategy[list[str]]:
    return st.lists(
        st.sampled_from(NESTABLE),
        max_size=count,
        unique_by=lambda name: name.removesuffix("_cpu").removesuffix("_meta"),
    )


@pytest.mark.filterwarnings("ignore")
@PROFILE
@given(st.data())
def test_drawn_calls(data: st.DataObject) -> None:
    drawn = data.draw(drawn_ops(), label="op")
    twin = define(drawn)
    assert twin.schemas[0] == twin.schemas[1]
    make = data.draw(drawn_calls(drawn))
    names = data.draw(nests(3), label="contexts")
    how = data.draw(st.sampled_from(HOWS), label="how")
    profile = data.draw(st.integers(0, 15), label="profile") == 0
    seen = twin.compare(make, lambda: nest(names), how, profile=profile)
    event(f"direct: {twin.direct}")  # shown by --hypothesis-show-statistics
    event("refused" if seen["error"] else "accepted")


@pytest.mark.filterwarnings("ignore")
@PROFILE
@given(st.data())
def test_drawn_sequences_on_one_op(data: st.DataObject) -> None:
    # What one call leaves behind (caches, state) must not change the next.
    drawn = data.draw(drawn_ops(), label="op")
    twin = define(drawn)
    for _ in range(data.draw(st.integers(2, 5), label="calls")):
        make = data.draw(drawn_calls(drawn))
        names = data.draw(nests(1))
        twin.compare(make, lambda n=names: nest(n), data.draw(st.sampled_from(HOWS)))
