"""The schemas of 1,885 ops that public packages register from Python, with kernels and arguments.

The package carries the schemas as ``population.jsonl``. Nothing here needs hotop itself, so the
tests use it as well.
"""

import json
import random
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.types import Number

__all__ = [
    "Record",
    "load",
    "make_arguments",
    "make_kernel",
    "make_keyword_arguments",
    "mutated_names",
]

_DATA = Path(__file__).with_name("population.jsonl")

# `real_type` of a schema argument -> the annotation from which PyTorch infers that type.
_ANNOTATIONS = {
    "Tensor": "Tensor",
    "int": "int",
    "float": "float",
    "bool": "bool",
    "str": "str",
    "number": "Number",
    "ScalarType": "torch.dtype",
    "Device": "torch.device",
}
_WRAPPERS = {"Optional": "typing.Optional", "List": "list"}
_TENSOR_LENGTH = 4
_RETURNED_LIST_LENGTH = 2


@dataclass(frozen=True, slots=True)
class Record:
    """One op of the population.

    Attributes:
        index: Position in the population, which tells apart ops of the same name.
        package: The package that registers the op.
        op: The op's name there; it may be a template such as ``f"{uri}_run"``.
        by: How it is registered there (``custom_op``, ``triton_op``, a helper, or switched off).
        schema: Arguments and returns as PyTorch writes them, without the op's name.
        autograd: Whether a backward formula is registered there.
        device_types: The device types as written in the package's source, or None.
    """

    index: int
    package: str
    op: str
    by: str
    schema: str
    autograd: bool
    device_types: str | None

    @property
    def identifier(self) -> str:
        """A unique name that is valid as an op name."""
        return f"p{self.index:04d}_" + re.sub(r"\W+", "_", self.op).strip("_")


@cache
def _records() -> tuple[Record, ...]:
    with _DATA.open(encoding="utf-8") as lines:
        return tuple(Record(index, **json.loads(line)) for index, line in enumerate(lines))


def load() -> list[Record]:
    """Reads the whole population, in the order of the file."""
    return list(_records())


@cache
def _parse(schema: str) -> torch._C.FunctionSchema:
    return torch._C.parse_schema("population::op" + schema)


def mutated_names(schema: str) -> set[str]:
    """Returns the names of the arguments that ``schema`` says the op writes to."""
    return {
        argument.name
        for argument in _parse(schema).arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }


def make_kernel(record: Record) -> Callable[..., object]:
    """Makes a Python kernel that does nothing, with the parameters and returns of the schema.

    Parameter names, order, defaults and annotations are those from which
    ``torch.library.infer_schema`` gives ``record.schema`` back. Returned Tensors are made once
    per kernel, share storage with nothing else, and are the same objects on every call.
    """
    schema = _parse(record.schema)
    names: dict[str, object] = {"torch": torch, "typing": typing, "Tensor": Tensor}
    names["Number"] = Number
    parameters: list[str] = []
    keyword_only = False
    for argument in schema.arguments:
        if argument.kwarg_only and not keyword_only:
            keyword_only = True
            parameters.append("*")
        text = f"{argument.name}: {_annotation(str(argument.real_type))}"
        if argument.has_default_value():
            names[f"_default_{argument.name}"] = _default(record.schema, argument)
            text += f" = _default_{argument.name}"
        parameters.append(text)

    returns = [str(value.type) for value in schema.returns]
    results = [_result(kind, f"_out{position}", names) for position, kind in enumerate(returns)]
    annotations = [_annotation(kind) for kind in returns]
    if not returns:
        annotation, result = "None", "None"
    elif len(returns) == 1:
        annotation, result = annotations[0], results[0]
    else:
        annotation, result = f"tuple[{', '.join(annotations)}]", f"({', '.join(results)})"

    source = (
        f"def {record.identifier}({', '.join(parameters)}) -> {annotation}:\n    return {result}\n"
    )
    exec(compile(source, f"<population {record.identifier}>", "exec"), names)
    kernel = names[record.identifier]
    assert callable(kernel)
    return kernel


def make_arguments(record: Record, seed: int = 0) -> list[object]:
    """Makes ordinary positional arguments: small CPU Tensors, numbers, strings, lists of two.

    An optional argument is None half the time. The same record and seed give the same choice.
    Keyword-only arguments come from `make_keyword_arguments`.
    """
    draw = random.Random(f"{record.index}/{seed}")
    return [
        _value(str(argument.real_type), draw)
        for argument in _parse(record.schema).arguments
        if not argument.kwarg_only
    ]


def make_keyword_arguments(record: Record, seed: int = 0) -> dict[str, object]:
    """Makes the keyword-only arguments of the call; empty for all but a few ops."""
    draw = random.Random(f"{record.index}/{seed}/keywords")
    return {
        argument.name: _value(str(argument.real_type), draw)
        for argument in _parse(record.schema).arguments
        if argument.kwarg_only
    }


def _annotation(kind: str) -> str:
    wrapped = re.fullmatch(r"(Optional|List)\[(.*)\]", kind)
    if wrapped:
        return f"{_WRAPPERS[wrapped[1]]}[{_annotation(wrapped[2])}]"
    return _ANNOTATIONS[kind]


def _default(schema: str, argument: torch._C.Argument) -> object:
    value = argument.default_value
    if value is not None and "ScalarType" in str(argument.real_type):
        # The parsed default of a dtype is its number; the text has its name.
        written = re.search(rf"\b{argument.name}=(\w+)", schema)
        assert written is not None
        return getattr(torch, written[1])
    return value


def _result(kind: str, name: str, names: dict[str, object]) -> str:
    match kind:
        case "Tensor":
            names[name] = torch.zeros(_TENSOR_LENGTH)
            return name
        case "List[Tensor]":
            parts = [f"{name}_{position}" for position in range(_RETURNED_LIST_LENGTH)]
            names.update({part: torch.zeros(_TENSOR_LENGTH) for part in parts})
            return f"[{', '.join(parts)}]"
        case "int":
            return "3"
        case "bool":
            return "True"
        case "float":
            return "0.5"
        case _:
            raise ValueError(f"no value for the return type {kind}")


def _value(kind: str, draw: random.Random) -> object:
    wrapped = re.fullmatch(r"(Optional|List)\[(.*)\]", kind)
    if wrapped and wrapped[1] == "Optional":
        return _value(wrapped[2], draw) if draw.random() < 0.5 else None
    if wrapped:
        return [_value(wrapped[2], draw) for _ in range(2)]
    match kind:
        case "Tensor":
            return torch.full((_TENSOR_LENGTH,), draw.uniform(-1.0, 1.0))
        case "int":
            return draw.randint(2, 300)
        case "float" | "number":
            return draw.uniform(0.1, 2.0)
        case "bool":
            return draw.random() < 0.5
        case "str":
            return draw.choice(("x", "auto", "silu"))
        case "ScalarType":
            return draw.choice((torch.float32, torch.bfloat16, torch.float16))
        case "Device":
            return torch.device("cpu")
        case _:
            raise ValueError(f"no ordinary value for the type {kind}")
