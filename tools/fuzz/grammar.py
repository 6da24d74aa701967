"""Random op definitions over the whole schema grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.types import Number


@dataclass(frozen=True)
class Kind:
    """An argument type: its schema text, annotation, defaults and the values that it takes."""

    written: str
    annotation: Any  # None: only a written schema can say it
    defaults: tuple[tuple[str, Any], ...]
    good: tuple[str, ...]
    mutable: bool = False

    @property
    def has_tensor(self) -> bool:
        """Whether a value of it can hold a Tensor."""
        return "Tensor" in self.written


NONE = ("None", None)
# t: names a tensor of tests/twin_contexts.py, the others are values of tests/twin_values.py.
_PLAIN = ("t:plain", "t:plain", "t:view", "tensor_strided", "tensor_1", "t:double", "t:non_leaf")
_TENSOR = (*_PLAIN, *_PLAIN, "t:leaf", "t:leaf", "t:parameter_frozen", "t:integer", "t:meta")
KINDS = [
    Kind("Tensor", Tensor, (), _TENSOR, True),
    Kind("Tensor?", Tensor | None, (NONE,), (*_TENSOR, "None", "None"), True),
    Kind(
        "Tensor[]",
        list[Tensor],
        (),
        ("list_tensors", "tuple_tensors", "list_same_tensor", "list_empty", "list_tensors_grad"),
        True,
    ),
    Kind(
        "Tensor?[]",
        list[Tensor | None],
        (),
        ("list_tensor_None", "list_tensors", "list_None", "list_empty", "list_None_tensor"),
    ),
    Kind("SymInt", int, (("3", 3), ("-1", -1)), ("1", "257", "True", "np_int64", "2**53+1", "0")),
    Kind("int", None, (("7", 7),), ("0", "1", "2**31", "int_enum", "has_index", "tensor_int")),
    Kind("SymInt?", int | None, (NONE, ("4", 4)), ("None", "1", "int_sub")),
    Kind("float", float, (("0.5", 0.5),), ("1.5", "1", "nan", "np_float32", "has_float", "-0.0")),
    Kind("float?", float | None, (NONE,), ("None", "1.0", "inf")),
    Kind("bool", bool, (("True", True), ("False", False)), ("True", "False", "1", "tensor_bool")),
    Kind("bool?", bool | None, (NONE,), ("None", "True", "0")),
    Kind("str", str, (('"d"', "d"), ('""', "")), ("str", "str_empty", "str_accents", "np_str")),
    Kind("str?", str | None, (NONE,), ("None", "str", "str_enum")),
    Kind("Scalar", Number, (("2", 2), ("0.5", 0.5)), ("1", "1.5", "1j", "True")),
    Kind("Scalar?", Number | None, (NONE,), ("None", "1", "2**31", "-0.0")),
    Kind("ScalarType", torch.dtype, (), ("dtype", "dtype_int")),
    Kind("ScalarType?", torch.dtype | None, (NONE,), ("None", "dtype")),
    Kind("Device", torch.device, (), ("device_cpu", "str_cpu", "device_cuda_1")),
    Kind("Device?", torch.device | None, (NONE,), ("None", "device_cpu", "str_cuda_0")),
    Kind("Layout?", None, (NONE,), ("None", "layout")),
    Kind("SymInt[]", list[int], (), ("list_ints", "tuple_ints", "size", "range", "list_int_bool")),
    Kind("SymInt[] ", Sequence[int], (), ("list_ints", "tuple_ints", "tensor_ints", "list_empty")),
    Kind("int[2]", None, (("1", 1), ("[1, 2]", (1, 2))), ("1", "list_ints", "tuple_ints", "257")),
    Kind("SymInt[]?", list[int] | None, (NONE,), ("None", "list_ints", "list_long")),
    Kind("float[]", list[float], (), ("list_floats", "list_int_float", "np_array_floats")),
    Kind("float[]?", list[float] | None, (NONE,), ("None", "list_floats", "list_empty")),
    Kind("bool[]", list[bool], (), ("list_bools", "list_int_bool")),
    Kind("bool[]?", list[bool] | None, (NONE,), ("None", "list_bools")),
    Kind("Scalar[]", list[Number], (), ("list_ints", "list_int_float", "list_complex")),
    Kind("str[]", None, (), ("list_strs", "list_empty")),
    Kind("Generator?", None, (NONE,), ("None", "generator")),
    Kind("complex", None, (), ("1j", "1.5")),
    Kind("Tensor[]?", None, (NONE,), ("None", "list_tensors")),
]
RETURNS = ("Tensor", "Tensor", "Tensor", "Tensor[]", "SymInt", "float", "bool", "Scalar")
RETURN_TYPES = {
    "Tensor": Tensor,
    "Tensor[]": list[Tensor],
    "SymInt": int,
    "float": float,
    "bool": bool,
    "Scalar": Number,
}
DEVICES = (*(None,) * 24, *("cpu",) * 8, ("cpu", "meta"), ("meta", "cpu"), "cuda", "meta")


@dataclass(frozen=True)
class Parameter:
    """One parameter of a drawn op."""

    name: str
    kind: Kind
    default: int | None = None  # position among the kind's defaults
    keyword_only: bool = False
    mutated: bool = False
    aliased: bool = False

    @property
    def default_value(self) -> Any:
        """The Python default."""
        assert self.default is not None
        return self.kind.defaults[self.default][1]


@dataclass(frozen=True)
class Definition:
    """A drawn op."""

    parameters: tuple[Parameter, ...]
    returns: tuple[str, ...]
    special: str = ""  # "inplace", "out", "view" or nothing
    written: bool = True  # else the schema is inferred from annotations
    device_types: Any = None
    overload: str = ""
    varargs: bool = False
    form: str = "function"  # how the kernel is a callable
    flaw: str = ""  # what is wrong with the definition
    rules: tuple[str, ...] = field(default=())  # registered at once

    def schema(self) -> str:
        """Return the schema string."""
        parts, starred = [], False
        for index, p in enumerate(self.parameters):
            if p.keyword_only and not starred:
                starred = True
                parts.append("*")
            written = p.kind.written.strip()
            if p.mutated or p.aliased:
                mark = f"(a{index}!)" if p.mutated else f"(a{index})"
                written = written.replace("Tensor", f"Tensor{mark}", 1)
            default = "" if p.default is None else "=" + p.kind.defaults[p.default][0]
            parts.append(f"{written} {p.name}{default}")
        returns = list(self.returns)
        if self.special in ("inplace", "out", "view"):
            marked = [
                f"Tensor(a{i}{'!' if p.mutated else ''})"
                for i, p in enumerate(self.parameters)
                if p.mutated or p.aliased
            ]
            returns = marked
        text = returns[0] if len(returns) == 1 else f"({', '.join(returns)})"
        return f"({', '.join(parts)}) -> {text}"

    @property
    def mutates_args(self) -> Any:
        """The `mutates_args` of the definition."""
        if self.flaw == "mutates":
            return ["nonsense"]
        if self.flaw == "bare string":
            return "p0"
        return [p.name for p in self.parameters if p.mutated]

    @property
    def tags(self) -> Any:
        """The tags of the definition."""
        if self.special == "inplace":
            return torch.Tag.inplace
        return torch.Tag.out if self.special == "out" else ()


def draw_parameters(random: Random) -> list[Parameter]:
    """Draw up to seven parameters; mostly the first is a Tensor."""
    kinds = random.choices(KINDS, k=random.choice((0, 1, 1, 2, 2, 3, 4, 6)))
    if random.random() < 0.5:
        kinds = [k if random.random() < 0.5 else random.choice(KINDS[:5]) for k in kinds]
    if random.random() < 0.93:
        kinds.insert(0, KINDS[0] if random.random() < 0.8 else random.choice(KINDS[1:4]))
    keyword_from = random.randint(1, len(kinds) + 3)
    mutating = random.random() < 0.3
    parameters: list[Parameter] = []
    defaulted = False
    for index, kind in enumerate(kinds):
        keyword_only = index >= keyword_from
        if keyword_only and kind.has_tensor:
            continue
        default = None
        if index and kind.defaults and (defaulted or random.random() < 0.4):
            default = random.randrange(len(kind.defaults))
        if defaulted and default is None and not keyword_only:
            continue  # a parameter without default cannot follow one that has one
        defaulted = defaulted or (default is not None and not keyword_only)
        mutated = mutating and kind.mutable and not keyword_only and random.random() < 0.6
        name = "self" if index == 0 and random.random() < 0.03 else f"p{index}"
        parameters.append(Parameter(name, kind, default, keyword_only, mutated))
    return parameters


def draw_special(random: Random) -> tuple[list[Parameter], str]:
    """Draw the parameters of an in-place, an out or a view op."""
    special = random.choice(("inplace", "out", "view"))
    rest = [p for p in draw_parameters(random) if not p.keyword_only]
    rest = [Parameter(f"q{i}", p.kind, p.default) for i, p in enumerate(rest) if p.name != "self"]
    tensor = KINDS[0]
    if special == "out":
        outs = [
            Parameter(f"o{i}", tensor, None, True, True) for i in range(random.choice((1, 1, 2)))
        ]
        return [*rest, *outs], special
    first = Parameter("p0", tensor, None, False, special == "inplace", special == "view")
    return [first, *rest], special


def draw_definition(random: Random) -> Definition:
    """Draw an op."""
    special = ""
    if random.random() < 0.12:
        parameters, special = draw_special(random)
        returns: tuple[str, ...] = ("Tensor",)
    else:
        parameters = draw_parameters(random)
        count = random.choice((0, 1, 1, 1, 1, 1, 2, 2, 3, 4, 5))
        returns = tuple(random.choice(RETURNS) for _ in range(count))
    inferable = (
        not special
        and all(p.kind.annotation is not None for p in parameters)
        and not any(isinstance(p.default_value, tuple) for p in parameters if p.default is not None)
    )
    mutates = any(p.mutated for p in parameters)
    chances = (("fake", 0.6), ("vmap", 0.2), ("autocast", 0.12))
    rules = [rule for rule, chance in chances if random.random() < chance]
    if random.random() < (0.05 if mutates or special else 0.4):
        rules.append("autograd")
    random.shuffle(rules)
    return Definition(
        tuple(parameters),
        returns,
        special,
        not (inferable and random.random() < 0.5),
        random.choice(DEVICES),
        random.choice(("", "", "", "", "", "", "", "", "other")),
        random.random() < 0.15,
        random.choice(("function",) * 12 + ("partial", "method", "object")),
        random.choice(("",) * 40 + ("mutates", "bare string")),
        tuple(rules),
    )
