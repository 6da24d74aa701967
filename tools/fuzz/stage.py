"""What the kernels of the fuzzer do: one behaviour for both sides of a step."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from tools.fuzz.grammar import RETURN_TYPES, Definition
from torch import Tensor

from twin import handle
from twin_observe import tensors_in

ERRORS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("from the kernel"),
    "KeyError": lambda: KeyError(3),
    "StopIteration": lambda: StopIteration(4),
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": lambda: SystemExit(3),
    "GeneratorExit": GeneratorExit,
    "NotImplementedError": lambda: NotImplementedError("not here"),
    "RecursionError": lambda: RecursionError("deep"),
    "MemoryError": MemoryError,
    "UnicodeError": lambda: UnicodeDecodeError("utf8", b"x", 0, 1, "odd"),
    "AssertionError": lambda: AssertionError(),
}
# What a kernel does before it returns.
ACTS = (
    *("nothing",) * 20,
    "raise",
    "raise",
    "recurse",
    "recurse",
    "change undeclared",
    "aten error",
    "views",
    "modes",
    "leak grad mode",
    "other op",
    "view in place",
    "set data",
)
# What one return value is.
ODD = (
    "input",
    "view",
    "same twice",
    "none",
    "string",
    "int",
    "bool",
    "float",
    "list",
    "tuple",
    "subclass",
    "parameter",
    "requires grad",
    "empty list",
    "nested list",
    "numpy",
    "big int",
    "kept list",
    "detached input",
    "complex",
    "object",
)


@dataclass
class Behaviour:
    """What the kernel does in one step."""

    act: str = "nothing"
    error: str = "ValueError"
    produce: tuple[str, ...] = ("fresh",) * 5
    container: str = "as declared"
    how: str = "object"  # of a nested call
    count: int = 0  # returns too many or too few by this


@dataclass
class Stage:
    """The state that kernels read: which side runs, and how they shall behave."""

    behaviour: Behaviour = field(default_factory=Behaviour)
    ops: list[Any] = field(default_factory=list)
    others: list[Any] = field(default_factory=list)
    side: int = 0
    depth: int = 0


STAGE = Stage()
_kept: list[Any] = []


def draw_behaviour(random: Random, returns: int) -> Behaviour:
    """Draw what a kernel does."""
    odd = random.random() < 0.12
    produce = tuple(
        random.choice(ODD) if odd and random.random() < 0.6 else "fresh" for _ in range(5)
    )
    return Behaviour(
        random.choice(ACTS),
        random.choice(list(ERRORS)),
        produce,
        random.choice(("as declared",) * 26 + ("other sequence",) * 3 + ("iterator",)),
        random.choice(("object", "packet", "overload")),
        random.choice((-1, 1)) if returns > 1 and random.random() < 0.02 else 0,
    )


def _fresh(kind: str, inputs: list[Tensor], plus: int, index: int) -> Any:
    if kind == "Tensor":
        base = inputs[index % len(inputs)] if inputs else torch.ones(2)
        return base * 2 + (plus + index)
    if kind == "Tensor[]":
        return [t * 3 + plus for t in inputs] or [torch.ones(1) * plus]
    return {"SymInt": 3 + plus, "float": 1.5, "bool": True, "Scalar": 2.5}[kind]


def _odd(name: str, kind: str, inputs: list[Tensor], made: list[Any]) -> Any:
    first = inputs[0] if inputs else torch.ones(2)
    options: dict[str, Callable[[], Any]] = {
        "input": lambda: first,
        "view": lambda: first.view(first.shape),
        "same twice": lambda: made[0] if made else first,
        "none": lambda: None,
        "string": lambda: "words",
        "int": lambda: 3,
        "bool": lambda: False,
        "float": lambda: 2.5,
        "list": lambda: [first + 1, first],
        "tuple": lambda: (first + 1, first + 2),
        "subclass": lambda: (first.detach() + 1).as_subclass(torch.nn.Buffer),
        "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
        "requires grad": lambda: torch.ones(2, requires_grad=True),
        "empty list": lambda: [],
        "nested list": lambda: [[first + 1]],
        "numpy": lambda: torch.ones(2).numpy(),
        "big int": lambda: 2**70,
        "kept list": lambda: _kept[0],
        "detached input": lambda: first.detach(),
        "complex": lambda: 1j,
        "object": lambda: Ellipsis,
    }
    if name == "kept list":
        _kept[:] = [[torch.ones(2) * 5, torch.ones(1)]]
    value = options[name]()
    if kind == "Tensor[]" and isinstance(value, Tensor):
        return [value, first * 2]
    return value


def _act(behaviour: Behaviour, args: dict[str, Any], positional: int, inputs: list[Tensor]) -> None:
    act = behaviour.act
    first = inputs[0] if inputs else None
    values = list(args.values())
    if act == "raise":
        raise ERRORS[behaviour.error]()
    if act == "recurse" and STAGE.depth == 0:
        STAGE.depth += 1
        try:
            call = handle(STAGE.ops[STAGE.side], behaviour.how)
            call(*values[:positional], **dict(list(args.items())[positional:]))
        finally:
            STAGE.depth -= 1
    elif act == "other op":
        handle(STAGE.others[STAGE.side], behaviour.how)(torch.ones(2), 3)
        if first is not None:
            handle(STAGE.others[STAGE.side], "object")(first)
    elif act == "change undeclared" and first is not None:
        first.add_(1)
    elif act == "aten error":
        torch.ones(2) @ torch.ones(3)
    elif act == "views" and first is not None:
        first.view(-1)[0:1].sum()
    elif act == "modes":
        with torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
            _ = torch.ones(2, 2, requires_grad=True) @ torch.ones(2, 2)
    elif act == "leak grad mode":
        torch.set_grad_enabled(not torch.is_grad_enabled())
    elif act == "view in place" and first is not None:
        first.view(-1).mul_(2)
    elif act == "set data" and first is not None:
        first.detach().zero_()


def run(definition: Definition, plus: int, args: dict[str, Any], positional: int) -> Any:
    """Be a kernel: mutate what is declared, act, and return what the step says."""
    behaviour = STAGE.behaviour if STAGE.depth == 0 else Behaviour()
    # Below a dispatch mode or a wrapper PyTorch computes with zero Tensors and crashes.
    inputs = [t for t in tensors_in(list(args.values())) if not t._is_zerotensor()]
    for p in definition.parameters:
        if p.mutated and definition.special != "view":
            for tensor in tensors_in(args[p.name]):
                if not tensor._is_zerotensor():
                    tensor.mul_(2 + plus)
    _act(behaviour, args, positional, inputs)
    special = definition.special
    if special and behaviour.produce[0] == "fresh":
        marked = tuple(args[p.name] for p in definition.parameters if p.mutated or p.aliased)
        if special == "view":
            return marked[0].view(marked[0].shape)
        return marked[0] if len(marked) == 1 else marked
    made: list[Any] = []
    for index, kind in enumerate(definition.returns):
        name = behaviour.produce[index]
        made.append(
            _fresh(kind, inputs, plus, index) if name == "fresh" else _odd(name, kind, inputs, made)
        )
    if behaviour.count > 0:
        made.append(torch.ones(1))
    elif behaviour.count < 0:
        made.pop()
    if not definition.returns:
        return (
            None if behaviour.produce[0] == "fresh" else _odd(behaviour.produce[0], "", inputs, [])
        )
    if len(definition.returns) == 1:
        result = made[0]
        if isinstance(result, list) and behaviour.container != "as declared":
            return tuple(result) if behaviour.container == "other sequence" else iter(result)
        return result
    if behaviour.container == "iterator":
        return iter(made)
    return made if behaviour.container == "other sequence" else tuple(made)


class _Holder:
    """Gives kernels that are no plain functions."""

    def __init__(self, function: Callable) -> None:
        self.function = function
        self.__name__ = "held"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def method(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def make_kernel(definition: Definition, plus: int = 0) -> Callable:
    """Return a kernel with the definition's parameters, as a plain function."""
    head, starred, scope = [], False, {"run": functools.partial(run, definition, plus)}
    for p in definition.parameters:
        if p.keyword_only and not starred:
            starred = True
            head.append("*")
        if p.default is not None:
            scope[f"d_{p.name}"] = p.default_value
            head.append(f"{p.name}=d_{p.name}")
        else:
            head.append(p.name)
    names = ", ".join(f"{p.name!r}: {p.name}" for p in definition.parameters)
    positional = sum(not p.keyword_only for p in definition.parameters)
    source = f"def drawn({', '.join(head)}):\n    return run({{{names}}}, {positional})\n"
    exec(compile(source, "<twin fuzz>", "exec"), scope)
    function = scope["drawn"]
    function.__module__ = __name__
    if not definition.written:
        for p in definition.parameters:
            function.__annotations__[p.name] = p.kind.annotation
        returns = [RETURN_TYPES[r] for r in definition.returns]
        function.__annotations__["return"] = (
            None if not returns else returns[0] if len(returns) == 1 else tuple[tuple(returns)]
        )
    return function


def in_form(definition: Definition, function: Callable) -> Callable:
    """Return the function as another kind of callable."""
    if definition.form == "partial":
        return functools.partial(function)
    if definition.form in ("method", "object"):
        holder = _Holder(function)
        holder.__signature__ = inspect.signature(function)
        return holder.method if definition.form == "method" else holder
    return function
