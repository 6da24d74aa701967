"""The readable form of a tuning key, its form as words, and the Tensors that stand for it."""

from __future__ import annotations

import inspect
import json
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hotop.tuner._buckets import Bucket

# A key as it stands in a file: one entry per argument. JSON keeps it as it is.
Description = list[Any]

_TENSOR = re.compile(r"(\w+)\[([\d,*]*)\](:strided)?@(\w+)")
# KeyTag in the core.
_TAG_TENSOR, _TAG_NONE, _TAG_BOOL, _TAG_INT, _TAG_FLOAT = 1, 2, 3, 4, 5
_TAG_DTYPE, _TAG_OBJECT, _TAG_LIST, _TAG_ALLOWED = 6, 7, 8, 9
_LEFT_OUT = (1 << 64) - 1
# Tensors whose meaning or memory is not what sizes and dtype say; kOpaque in the core.
_OPAQUE = 0
for _key in (
    torch._C.DispatchKey.Conjugate,
    torch._C.DispatchKey.Negative,
    torch._C.DispatchKey.ZeroTensor,
    torch._C.DispatchKey.NestedTensor,
    torch._C.DispatchKey.Python,
    torch._C.DispatchKey.Functionalize,
    torch._C.DispatchKey.FuncTorchGradWrapper,
    torch._C.DispatchKey.FuncTorchBatched,
):
    _OPAQUE |= torch._C.DispatchKeySet(_key).raw_repr()


@dataclass(frozen=True)
class Parameter:
    """One parameter of a tuned function."""

    name: str
    default: Any = inspect.Parameter.empty
    ignored: bool = False
    buckets: Mapping[int, Bucket] = field(default_factory=dict)

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    def bucket_of(self, dimension: int, dimensions: int) -> Bucket | None:
        """Return the rule of one dimension; both ways of counting are looked at."""
        found = self.buckets.get(dimension)
        return found if found is not None else self.buckets.get(dimension - dimensions)


class NotKeyable(Exception):
    """A value of this call has no place in a key."""


def bind(
    parameters: list[Parameter], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Any]:
    """Return the value of every parameter.

    Raises:
        NotKeyable: Too many values, one is missing, or a keyword is unknown or given twice.
    """
    if len(args) > len(parameters):
        raise NotKeyable
    if kwargs and not kwargs.keys() <= {parameter.name for parameter in parameters[len(args) :]}:
        raise NotKeyable
    values = []
    for i, parameter in enumerate(parameters):
        value = args[i] if i < len(args) else kwargs.get(parameter.name, parameter.default)
        if value is inspect.Parameter.empty:
            raise NotKeyable
        values.append(value)
    return values


def is_tensor(value: Any) -> bool:
    """Return whether this is a Tensor, whatever ``__class__`` says."""
    return issubclass(type(value), torch.Tensor)


def describe_value(value: Any, parameter: Parameter, nested: bool = False) -> Any:
    """Return one value's part of a description.

    Raises:
        NotKeyable: It has none.
    """
    if is_tensor(value):
        if torch._C._dispatch_keys(value).raw_repr() & _OPAQUE:
            raise NotKeyable
        if value.layout is not torch.strided or _records_grad(value):
            raise NotKeyable
        sizes = []
        for i, size in enumerate(value.shape):
            if not isinstance(size, int):
                raise NotKeyable
            bucket = parameter.bucket_of(i, value.dim())
            if bucket is not None and bucket.is_left_out:
                sizes.append("*")
            else:
                sizes.append(str(size if bucket is None else bucket(size)))
        strided = "" if value.is_contiguous() else ":strided"
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}[{','.join(sizes)}]{strided}@{value.device.type}"
    if value is None or value is True or value is False:
        return str(value)
    if type(value) is int:
        if not -(1 << 63) <= value < 1 << 63:
            raise NotKeyable
        return f"int {value}"
    if type(value) is float:
        return f"float {value.hex()}"
    if type(value) is str:
        return f"str {json.dumps(value)}"
    if type(value) in (torch.dtype, torch.layout, torch.memory_format):
        return str(value)
    if type(value) is torch.device:
        return f"device {value}"
    if type(value) in (list, tuple, torch.Size) and not nested:
        return [describe_value(element, parameter, nested=True) for element in value]
    raise NotKeyable


def _records_grad(value: torch.Tensor) -> bool:
    # A kernel runs below autograd. Above it, another tactic could lose the gradient.
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    return (
        value.requires_grad
        and torch.is_grad_enabled()
        and not excluded(torch._C.DispatchKey.AutogradCPU)
    )


def device_of(values: list[Any]) -> torch.device | None:
    """Return the accelerator on which Tensors lie, else the CPU; None: there are no Tensors.

    Raises:
        NotKeyable: Tensors lie on two accelerators.
    """
    devices = []
    for value in values:
        for element in value if type(value) in (list, tuple) else (value,):
            if is_tensor(element) and element.device not in devices:
                devices.append(element.device)
    accelerators = [device for device in devices if device.type != "cpu"]
    if len(accelerators) > 1:
        raise NotKeyable
    return next(iter(accelerators or devices), None)


def encode(
    description: Description,
    device_index: int,
    tensor_word: Callable[[torch.dtype, int, bool, torch.device], int],
    object_number: Callable[[Any], int],
    allowed_mask: Callable[[list[str]], int],
) -> bytes:
    """Return the words that the core makes of a call with this description.

    Raises:
        ValueError: The description is not one of this version.
    """
    words = [_TAG_LIST | description[0] << 8]

    def add(part: Any) -> None:
        if isinstance(part, dict):
            words.extend((_TAG_ALLOWED, allowed_mask(part["allowed"])))
        elif isinstance(part, list):
            words.append(_TAG_LIST | len(part) << 8)
            for element in part:
                add(element)
        elif match := _TENSOR.fullmatch(part):
            dtype, sizes, strided, device = match.groups()
            split = sizes.split(",") if sizes else []
            index = -1 if device == "cpu" else device_index
            where = torch.device(device) if index < 0 else torch.device(device, index)
            words.append(tensor_word(_torch_value(dtype), len(split), not strided, where))
            words.extend(_LEFT_OUT if size == "*" else int(size) for size in split)
        else:
            words.extend(_encode_scalar(part, object_number))

    for part in description[1:]:
        add(part)
    return struct.pack(f"={len(words)}Q", *words)


def _torch_value(name: str) -> Any:
    value = getattr(torch, name, None)
    if not isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        raise ValueError(f"torch.{name} is unknown")
    return value


def _encode_scalar(part: str, object_number: Callable[[Any], int]) -> tuple[int, ...]:
    kind, _, text = part.partition(" ")
    if part == "None":
        return (_TAG_NONE,)
    if part in ("True", "False"):
        return (_TAG_BOOL | (part == "True") << 8,)
    if kind == "int":
        return (_TAG_INT, int(text) & _LEFT_OUT)
    if kind == "float":
        bits = struct.unpack("=Q", struct.pack("=d", float.fromhex(text)))[0]
        return (_TAG_FLOAT, bits)
    if kind == "str":
        return (_TAG_OBJECT | object_number(json.loads(text)) << 8,)
    if kind == "device":
        return (_TAG_OBJECT | object_number(torch.device(text)) << 8,)
    if part.startswith("torch."):
        value = _torch_value(part.removeprefix("torch."))
        if isinstance(value, torch.dtype):
            return (_TAG_DTYPE | _dtype_number(value) << 8,)
        return (_TAG_OBJECT | object_number(value) << 8,)
    raise ValueError(f"{part!r} is not part of a key")


def _dtype_number(dtype: torch.dtype) -> int:
    from hotop._load import CORE

    assert CORE is not None
    return int(CORE.tensor_word(dtype, 0, False, torch.device("cpu"))) >> 8 & 0xFF


def representative(parameters: list[Parameter], values: list[Any]) -> list[Any]:
    """Return the values on which a bucket is measured: its own sizes, the call's data repeated.

    Tensors that are not contiguous stay so: the key holds it.

    Raises:
        NotKeyable: The bucket's sizes cannot be made so.
    """
    shapes: dict[str, tuple[int, ...]] = {
        parameter.name: _bucketed(value, parameter)
        for parameter, value in zip(parameters, values, strict=True)
        if is_tensor(value)
    }
    for parameter in parameters:
        shape = shapes.get(parameter.name, ())
        for i in range(len(shape)):
            bucket = parameter.bucket_of(i, len(shape))
            if bucket is not None and bucket.size_of is not None:
                shape = (*shape[:i], int(bucket.size_of(shapes)), *shape[i + 1 :])
                shapes[parameter.name] = shape
    resized = []
    for parameter, value in zip(parameters, values, strict=True):
        if parameter.name in shapes:
            value = _resized(value, shapes[parameter.name])
        elif type(value) in (list, tuple):
            value = type(value)(
                _resized(one, _bucketed(one, parameter)) if is_tensor(one) else one for one in value
            )
        resized.append(value)
    return resized


def _bucketed(tensor: torch.Tensor, parameter: Parameter) -> tuple[int, ...]:
    return tuple(
        size if bucket is None or bucket.is_left_out else bucket(size)
        for i, size in enumerate(tensor.shape)
        for bucket in [parameter.bucket_of(i, tensor.dim())]
    )


def _resized(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    strides = tensor.stride()
    is_contiguous = tensor.is_contiguous()
    if shape == tensor.shape:
        return tensor
    for i, size in enumerate(shape):
        if size == tensor.shape[i]:
            continue
        if tensor.shape[i] == 0:
            tensor = tensor.new_zeros((*tensor.shape[:i], size, *tensor.shape[i + 1 :]))
            continue
        places = torch.arange(size, device=tensor.device) % tensor.shape[i]
        tensor = tensor.index_select(i, places)
    return tensor if is_contiguous else _strided(tensor, strides)


def _strided(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a copy whose dimensions lie in the order of these strides, with gaps if need be."""
    order = sorted(range(tensor.dim()), key=lambda i: -strides[i])
    back = [order.index(i) for i in range(tensor.dim())]
    copy = tensor.permute(order).contiguous().permute(back)
    if copy.is_contiguous():
        copy = torch.stack([tensor, tensor], -1)[..., 0]
    if copy.is_contiguous():  # it has no two elements
        raise NotKeyable
    return copy
