"""Ops for the twin tests: one per argument type, and those with telling signatures."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.types import Number

from twin import Twin

# type name -> the annotation that infer_schema turns into it
ANNOTATIONS: dict[str, Any] = {
    "Tensor": Tensor,
    "Tensor?": Tensor | None,
    "Tensor[]": list[Tensor],
    "Tensor[] (Sequence)": Sequence[Tensor],
    "Tensor?[]": list[Tensor | None],
    "int": int,
    "int?": int | None,
    "float": float,
    "float?": float | None,
    "bool": bool,
    "bool?": bool | None,
    "str": str,
    "str?": str | None,
    "Scalar": Number,
    "Scalar?": Number | None,
    "dtype": torch.dtype,
    "dtype?": torch.dtype | None,
    "device": torch.device,
    "device?": torch.device | None,
    "int[]": list[int],
    "int[] (Sequence)": Sequence[int],
    "int[]?": list[int] | None,
    "float[]": list[float],
    "float[]?": list[float] | None,
    "bool[]": list[bool],
    "bool[]?": list[bool] | None,
    "Scalar[]": list[Number],
}
# types that need schema=; PyTorch casts any number to memory_format or to a dtype inside a list
# and crashes on some, so those two stay out
WRITTEN: list[str] = [
    "int",
    "int?",
    "int[]",
    "int[]?",
    "int[2]",
    "int[2]?",
    "int[1]",
    "SymInt[2]",
    "float[2]",
    "bool[3]",
    "Scalar[]?",
    "str[]",
    "complex",
    "complex?",
    "Layout",
    "Layout?",
    "Generator",
    "Generator?",
    "Device[]",
    "Tensor[]?",
    "Tensor?[]?",
    "Tensor[2]",
    "int[][]",
    "Dict(str, int)",
    "Any",
]
TYPES = [*ANNOTATIONS, *(f"schema {written}" for written in WRITTEN)]


@functools.cache
def op_taking(type_name: str) -> Twin:
    """Return the twin of an op `f(Tensor x, TYPE v) -> Tensor`."""

    def takes(x: Tensor, v: Any) -> Tensor:
        return x + 1

    schema = None
    if type_name.startswith("schema "):
        schema = f"(Tensor x, {type_name.removeprefix('schema ')} v) -> Tensor"
    else:
        takes.__annotations__["v"] = ANNOTATIONS[type_name]
    return Twin(takes, schema=schema)


def many_kinds(
    x: Tensor,
    a: int,
    b: float = 0.5,
    c: bool = False,
    s: str = "none",
    y: Tensor | None = None,
    *,
    k: int,
    m: str = "kw",
) -> Tensor:
    """Every way of passing an argument: required, default, keyword-only."""
    return x * a + b


def only_defaults(
    x: Tensor,
    i: int = 3,
    f: float = 0.5,
    b: bool = True,
    s: str = "d",
    n: int | None = None,
    o: int | None = 4,
    t: Tensor | None = None,
    d: torch.dtype = torch.float32,
) -> Tensor:
    """A default of each kind."""
    return x.clone()


def list_defaults(x: Tensor, ints: Any = "function's", floats: Any = "function's") -> Tensor:
    """List parameters whose defaults the written schema can give, annotations cannot."""
    return x.clone()


def other_defaults(x: Tensor, i: int = 30, f: float = 5.0, s: str = "function") -> Tensor:
    """Defaults that differ from those of its written schema."""
    return x * i


def no_defaults(x: Tensor, i: int, f: float, s: str) -> Tensor:
    """No defaults, while the written schema has some."""
    return x * i


def keyword_only(x: Tensor, *, i: int = 1, s: str = "z", dt: torch.dtype | None = None) -> Tensor:
    """Keyword-only parameters with defaults."""
    return x * i


def _wide(count: int) -> Callable:
    names = [f"a{index}" for index in range(count)]
    scope: dict[str, Any] = {"Tensor": Tensor}
    parameters = ", ".join(
        f"{n}: Tensor" if i % 2 == 0 else f"{n}: int" for i, n in enumerate(names)
    )
    exec(f"def wide({parameters}) -> Tensor:\n    return a0 + a{count - 1}", scope)
    return scope["wide"]


WITH_DEFAULTS = '(Tensor x, SymInt i=3, float f=0.5, str s="schema") -> Tensor'

OPS: dict[str, Callable[[], Twin]] = {
    "many_kinds": lambda: Twin(many_kinds),
    "many_kinds_counted": lambda: Twin(many_kinds, varargs=True),
    "only_defaults": lambda: Twin(only_defaults),
    "only_defaults_counted": lambda: Twin(only_defaults, varargs=True),
    "only_defaults_unrecorded": lambda: Twin(only_defaults, record=False),
    "list_defaults": lambda: Twin(
        list_defaults,
        varargs=True,
        schema="(Tensor x, int[] ints=[1, 2], float[2] floats=1.5) -> Tensor",
    ),
    "other_defaults": lambda: Twin(other_defaults, schema=WITH_DEFAULTS),
    "other_defaults_counted": lambda: Twin(other_defaults, schema=WITH_DEFAULTS, varargs=True),
    "no_defaults": lambda: Twin(no_defaults, schema=WITH_DEFAULTS),
    "no_defaults_unrecorded": lambda: Twin(no_defaults, schema=WITH_DEFAULTS, record=False),
    "keyword_only": lambda: Twin(keyword_only),
    "keyword_only_counted": lambda: Twin(keyword_only, varargs=True),
    "wide_64": lambda: Twin(_wide(64)),
    "wide_63": lambda: Twin(_wide(63)),
}


@functools.cache
def op_named(name: str) -> Twin:
    """Return a twin of OPS, defined once."""
    return OPS[name]()


def constant_gradients(ctx: Any) -> list[Any]:
    """Return a gradient of constants for every input that the formula kept in ``ctx.inputs``."""
    found: list[Any] = []
    for value, needed in zip(ctx.inputs, ctx.needs_input_grad, strict=True):
        if isinstance(value, Tensor):
            found.append(torch.full_like(value, 7) if needed else None)
        elif isinstance(value, list) and value and all(isinstance(v, Tensor) for v in value):
            found.append([torch.full_like(v, 5) for v in value])
        else:
            found.append(None)
    return found
