"""The readable form of a tuning key: what of a call's arguments decides."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import DispatchKey

from hotop.tuner import _layout
from hotop.tuner._buckets import Bucket

# A key as it stands in a file: the number of parameters, one part per argument that counts, and
# one of arguments in one memory. JSON keeps it as it is.
Description = list[Any]

# Tensors whose meaning or memory is not what sizes and dtype say, and what they are to a user;
# kOpaque in the core.
_OPAQUE = {
    DispatchKey.Conjugate: "a lazily conjugated view",
    DispatchKey.Negative: "a lazily negated view",
    DispatchKey.ZeroTensor: "a zero of autograd without memory",
    DispatchKey.NestedTensor: "a nested Tensor",
    DispatchKey.Quantized: "a quantized Tensor",  # type: ignore[attr-defined]
    DispatchKey.Python: "a Tensor with a __torch_dispatch__",
    DispatchKey.Functionalize: "a Tensor under functionalization",
    DispatchKey.FuncTorchGradWrapper: "a Tensor under torch.func.grad",
    DispatchKey.FuncTorchBatched: "a Tensor under torch.vmap",
}
_ALL_OPAQUE = 0
for _key in _OPAQUE:
    _ALL_OPAQUE |= torch._C.DispatchKeySet(_key).raw_repr()
_CLASSES = (torch.Tensor, torch.nn.Parameter)
_LONGEST_DIMENSIONS = 64


@dataclass(frozen=True)
class Parameter:
    """One parameter of a tuned function."""

    name: str
    default: Any = inspect.Parameter.empty
    ignored: bool = False
    mutated: bool = False
    buckets: Mapping[int, Bucket] = field(default_factory=dict)

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    def bucket_of(self, dimension: int, dimensions: int) -> Bucket | None:
        """Return the rule of one dimension; both ways of counting are looked at."""
        found = self.buckets.get(dimension)
        return found if found is not None else self.buckets.get(dimension - dimensions)


class NotKeyable(Exception):
    """A value of this call has no place in a key; the text says which and why."""


class Malformed(NotKeyable):
    """The call itself is wrong: the default says how."""


def bind(
    parameters: Sequence[Parameter], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Any]:
    """Return the value of every parameter.

    Raises:
        Malformed: Too many values, one is missing, or a keyword is unknown or given twice.
    """
    if len(args) > len(parameters):
        raise Malformed("the call has too many arguments")
    if kwargs and not kwargs.keys() <= {parameter.name for parameter in parameters[len(args) :]}:
        raise Malformed("a keyword is unknown or given twice")
    values = []
    for i, parameter in enumerate(parameters):
        value = args[i] if i < len(args) else kwargs.get(parameter.name, parameter.default)
        if value is inspect.Parameter.empty:
            raise Malformed(f"{parameter.name} is missing")
        values.append(value)
    return values


def is_tensor(value: Any) -> bool:
    """Return whether this is a Tensor, whatever ``__class__`` says."""
    return issubclass(type(value), torch.Tensor)


def describe(parameters: Sequence[Parameter], values: Sequence[Any]) -> Description:
    """Return the parts of a description that need no tactic's name: one per argument, then memory.

    Raises:
        NotKeyable: A value has no place in a key.
    """
    counted = [(p, v) for p, v in zip(parameters, values, strict=True) if not p.ignored]
    parts: Description = [describe_value(value, parameter) for parameter, value in counted]
    if any(parameter.mutated for parameter in parameters):
        tensors = [(tensor, p.mutated) for p, value in counted for tensor in _tensors(value)]
        memory = _layout.memory_of(tensors).to_part()
        if memory is not None:
            parts.append(memory)
    return parts


def _tensors(value: Any) -> list[torch.Tensor]:
    elements = value if type(value) in (list, tuple, torch.Size) else (value,)
    return [element for element in elements if is_tensor(element)]


def describe_value(value: Any, parameter: Parameter, nested: bool = False) -> Any:
    """Return one value's part of a description.

    Raises:
        NotKeyable: It has none.
    """
    if is_tensor(value):
        return _describe_tensor(value, parameter)
    if value is None or value is True or value is False:
        return str(value)
    if type(value) is int:
        if not -(1 << 63) <= value < 1 << 63:
            raise NotKeyable(f"{parameter.name} does not fit 64 bits")
        return f"int {value}"
    if type(value) is float:
        return f"float {value.hex()}"
    if type(value) is str:
        return f"str {json.dumps(value)}"
    if type(value) in (torch.dtype, torch.layout, torch.memory_format):
        return str(value)
    if type(value) is torch.device:
        return f"device {value}"
    if type(value) in (list, tuple, torch.Size):
        if nested:
            raise NotKeyable(f"{parameter.name} is a list of lists")
        parts = [describe_value(element, parameter, nested=True) for element in value]
        return parts if type(value) is list else [type(value).__name__, *parts]
    raise NotKeyable(f"{parameter.name} is a {type(value).__name__}")


def _describe_tensor(value: torch.Tensor, parameter: Parameter) -> str:
    reason = why_opaque(value)
    if reason is not None:
        raise NotKeyable(f"{parameter.name} is {reason}")
    if _records_grad(value):
        # A kernel runs below autograd. Above it, another tactic could lose the gradient.
        raise NotKeyable(f"{parameter.name} requires grad, and grad mode is on")
    sizes = []
    for i, size in enumerate(value.shape):
        if not isinstance(size, int):
            raise NotKeyable(f"{parameter.name} has symbolic sizes")
        bucket = parameter.bucket_of(i, value.dim())
        sizes.append(str(size) if bucket is None else bucket.text(size))
    classes = _layout.stride_classes(value.shape, value.stride(), value.element_size())
    strides = "" if classes is None else f"({','.join(map(_layout.class_text, classes))})"
    dtype = str(value.dtype).removeprefix("torch.")
    unaligned = "" if _layout.is_aligned(value) else " unaligned"
    of_class = " Parameter" if type(value) is torch.nn.Parameter else ""
    return f"{dtype}[{','.join(sizes)}]{strides}@{value.device.type}{unaligned}{of_class}"


def why_opaque(value: torch.Tensor) -> str | None:
    """Return what makes a Tensor more than plain memory; None: nothing."""
    keys = torch._C._dispatch_keys(value)
    if keys.raw_repr() & _ALL_OPAQUE:
        return next(name for key, name in _OPAQUE.items() if keys.has(key))
    if type(value) not in _CLASSES:
        return f"of the class {type(value).__name__}"
    if value.layout is not torch.strided:
        return f"of the layout {value.layout}"
    if value.dim() > _LONGEST_DIMENSIONS:
        return f"of more than {_LONGEST_DIMENSIONS} dimensions"
    return None


def _records_grad(value: torch.Tensor) -> bool:
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    return value.requires_grad and torch.is_grad_enabled() and not excluded(DispatchKey.AutogradCPU)


def device_of(values: Sequence[Any]) -> torch.device | None:
    """Return the accelerator on which Tensors lie, else the CPU; None: there are no Tensors.

    Raises:
        NotKeyable: Tensors lie on two accelerators.
    """
    devices = []
    for value in values:
        for tensor in _tensors(value):
            if tensor.device not in devices:
                devices.append(tensor.device)
    accelerators = [device for device in devices if device.type != "cpu"]
    if len(accelerators) > 1:
        raise NotKeyable("Tensors lie on two accelerators")
    return next(iter(accelerators or devices), None)
