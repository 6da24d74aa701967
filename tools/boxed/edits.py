"""Changes of a call's form: keywords, defaults, other types of values, Tensors of other kinds."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import torch
from tools.boxed.generate import WRONG
from torch import Tensor

from twin_contexts import DisabledSub, FunctionSub, PlainSub, WrapperSub
from twin_values import VALUES

Arguments = tuple[list[Any], dict[str, Any]]
Edit = Callable[[Any, Arguments, Random], Arguments]


def _places(arguments: Arguments) -> list[tuple[Any, Any]]:
    args, kwargs = arguments
    return [*((args, index) for index in range(len(args))), *((kwargs, key) for key in kwargs)]


def _replace(arguments: Arguments, random: Random, change: Callable[[Any], Any]) -> Arguments:
    """Replace some value that the change knows (it gives the same object for others)."""
    changed = [
        (where, key, new)
        for where, key in _places(arguments)
        if (new := change(where[key])) is not where[key]
    ]
    for where, key, new in (
        changed if random.random() < 0.4 else changed and [random.choice(changed)]
    ):
        where[key] = new
    return arguments


def _by_keyword(op: Any, arguments: Arguments, random: Random) -> Arguments:
    args, kwargs = arguments
    positional = [a.name for a in op._schema.arguments if not a.kwarg_only]
    if not args:
        return arguments
    keep = random.randrange(min(len(args), len(positional)))
    named = dict(zip(positional[keep:], args[keep:], strict=False))
    items = [*named.items(), *kwargs.items()]
    random.shuffle(items)
    return args[:keep], dict(items)


def _defaults_given(op: Any, arguments: Arguments, random: Random) -> Arguments:
    args, kwargs = arguments
    for index, argument in enumerate(op._schema.arguments):
        given = index < len(args) and not argument.kwarg_only
        if given or argument.name in kwargs or not argument.has_default_value():
            continue
        if argument.kwarg_only or index > len(args):
            kwargs[argument.name] = argument.default_value
        elif index == len(args):
            args.append(argument.default_value)
    return args, kwargs


def _defaults_left_out(op: Any, arguments: Arguments, random: Random) -> Arguments:
    args = arguments[0]
    while args and len(args) <= len(op._schema.arguments):
        argument = op._schema.arguments[len(args) - 1]
        if not argument.has_default_value() or argument.kwarg_only:
            break
        args.pop()
    return args, {}


def _one_int(value: Any) -> Any:
    ints = isinstance(value, list | tuple) and value and all(type(v) is int for v in value)
    return value[0] if ints and len(set(value)) == 1 else value


def _list_kind(random: Random) -> Callable[[Any], Any]:
    def change(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        if all(type(v) is int for v in value) and random.random() < 0.5:
            return torch.Size(value)
        return tuple(value) if isinstance(value, list) else list(value)

    return change


def _list_elements(value: Any) -> Any:
    if isinstance(value, list) and value and all(type(v) is int for v in value):
        return [np.int64(value[0]), *value[1:]]
    return value


def _numpy(value: Any) -> Any:
    kinds = {bool: np.bool_, int: np.int64, float: np.float64, complex: np.complex128}
    in_range = not isinstance(value, int) or abs(value) < 2**62
    return kinds[type(value)](value) if type(value) in kinds and in_range else value


def _number_as_tensor(value: Any) -> Any:
    in_range = not isinstance(value, int) or abs(value) < 2**62
    return torch.tensor(value) if type(value) in (bool, int, float) and in_range else value


def _other_number(value: Any) -> Any:
    if type(value) is bool:
        return int(value)
    if type(value) is int and abs(value) < 2**30:
        return bool(value) if value in (0, 1) else float(value)
    if type(value) is float and value == value and abs(value) < 1e9:
        return int(value)
    return value


def _tensor_as_number(value: Any) -> Any:
    return value.item() if type(value) is Tensor and value.dim() == 0 and value.numel() else value


def _device(value: Any) -> Any:
    if isinstance(value, torch.device):
        return str(value)
    return torch.device(value) if value in ("cpu", "meta", "cpu:0") else value


def _requires_grad(value: Any) -> Any:
    if isinstance(value, list):
        new = [_requires_grad(v) for v in value]
        return new if any(a is not b for a, b in zip(new, value, strict=True)) else value
    able = type(value) is Tensor and (value.is_floating_point() or value.is_complex())
    able = able and value.is_leaf and not value.requires_grad
    # A view of the argument would keep its version; a flag on the copy keeps its identity.
    return value.detach().requires_grad_() if able else value


def _non_leaf(value: Any) -> Any:
    able = type(value) is Tensor and (value.is_floating_point() or value.is_complex())
    return value.detach().requires_grad_() * 1 if able else value


def _tensor_kind(make: Callable[[Tensor], Any]) -> Edit:
    def change(value: Any) -> Any:
        if isinstance(value, list) and value and all(type(v) is Tensor for v in value):
            return [make(value[0]), *value[1:]]
        return make(value) if type(value) is Tensor else value

    return lambda op, arguments, random: _replace(arguments, random, change)


def _inference(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


def _strided(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous().mT if tensor.dim() >= 2 else tensor


def _leave_one_out(op: Any, arguments: Arguments, random: Random) -> Arguments:
    places = _places(arguments)
    if places:
        where, key = random.choice(places)
        del where[key]
    return arguments


def _wrong_value(op: Any, arguments: Arguments, random: Random) -> Arguments:
    places = _places(arguments)
    if places:
        where, key = random.choice(places)
        where[key] = VALUES[random.choice(WRONG)]()
    return arguments


def _given_twice(op: Any, arguments: Arguments, random: Random) -> Arguments:
    args, kwargs = arguments
    if args and op._schema.arguments:
        index = random.randrange(min(len(args), len(op._schema.arguments)))
        kwargs[op._schema.arguments[index].name] = args[index]
    return args, kwargs


def _simple(change: Callable[[Any], Any]) -> Edit:
    return lambda op, arguments, random: _replace(arguments, random, change)


RIGHT: dict[str, Edit] = {
    "by keyword": _by_keyword,
    "defaults given": _defaults_given,
    "defaults left out": _defaults_left_out,
    "one int for all": _simple(_one_int),
    "other list": lambda op, arguments, random: _replace(arguments, random, _list_kind(random)),
    "numpy in a list": _simple(_list_elements),
    "numpy scalar": _simple(_numpy),
    "number as tensor": _simple(_number_as_tensor),
    "other number": _simple(_other_number),
    "tensor as number": _simple(_tensor_as_number),
    "device": _simple(_device),
    "requires grad": _simple(_requires_grad),
    "non-leaf": _simple(_non_leaf),
    "parameter": _tensor_kind(lambda t: torch.nn.Parameter(t, t.is_floating_point())),
    "strided": _tensor_kind(_strided),
    "function subclass": _tensor_kind(lambda t: t.as_subclass(FunctionSub)),
    "plain subclass": _tensor_kind(lambda t: t.as_subclass(PlainSub)),
    "disabled subclass": _tensor_kind(lambda t: t.as_subclass(DisabledSub)),
    "wrapper subclass": _tensor_kind(WrapperSub),
    "conjugate": _tensor_kind(lambda t: t.to(torch.complex64).conj()),
    "negative view": _tensor_kind(torch._neg_view),
    "zero tensor": _tensor_kind(lambda t: torch._efficientzerotensor(tuple(t.shape))),
    "inference tensor": _tensor_kind(_inference),
    "meta": _tensor_kind(lambda t: t.to("meta")),
    "sparse": _tensor_kind(lambda t: t.to_sparse() if t.dim() else t),
}
WRONG_FORMS: dict[str, Edit] = {
    "one left out": _leave_one_out,
    "wrong value": _wrong_value,
    "no arguments": lambda op, arguments, random: ([], {}),
    "one too many": lambda op, a, random: ([*a[0], *(1 for _ in op._schema.arguments)], a[1]),
    "unknown keyword": lambda op, a, random: (a[0], {**a[1], "nonsense": 1}),
    "given twice": _given_twice,
    "self by its name": lambda op, a, random: (a[0][1:], {**a[1], "self": a[0][0]}) if a[0] else a,
}
EDITS: dict[str, Edit] = {**RIGHT, **WRONG_FORMS}
# Raw memory behind these is not what an operator expects; PyTorch itself may crash.
ODD_TENSORS = {"meta", "sparse", "zero tensor", "wrapper subclass", "conjugate", "negative view"}
