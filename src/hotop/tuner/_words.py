"""The words that the core makes of a call, from the description that stands in a file."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from typing import Any

import torch

from hotop.tuner import _layout
from hotop.tuner._key import Description

_TENSOR = re.compile(r"(\w+)\[([\d,*+]*)\](?:\(([\w,]*)\))?@(\w+)( unaligned)?( Parameter)?")
# KeyTag in the core.
_TAG_TENSOR, _TAG_NONE, _TAG_BOOL, _TAG_INT, _TAG_FLOAT = 1, 2, 3, 4, 5
_TAG_DTYPE, _TAG_OBJECT, _TAG_LIST, _TAG_ALLOWED, _TAG_EXACT, _TAG_OVERLAP = 6, 7, 8, 9, 10, 11
_LEFT_OUT = (1 << 64) - 1
# How a description names sequences that are no lists; the numbers are list_word's of the core.
_SEQUENCES = {"tuple": 1, "Size": 2}


def encode(
    description: Description,
    device_index: int,
    tensor_word: Callable[[torch.dtype, int, bool, bool, bool, torch.device], int],
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
            words.extend(_memory(part) if "exact" in part else _allowed(part, allowed_mask))
        elif isinstance(part, list):
            kind = _SEQUENCES.get(part[0], 0) if part and isinstance(part[0], str) else 0
            elements = part[1:] if kind else part
            words.append(_TAG_LIST | len(elements) << 8 | kind << 56)
            for element in elements:
                add(element)
        elif match := _TENSOR.fullmatch(part):
            words.extend(_tensor(match, device_index, tensor_word))
        else:
            words.extend(_scalar(part, object_number, tensor_word))

    for part in description[1:]:
        add(part)
    return struct.pack(f"={len(words)}Q", *words)


def _allowed(part: dict[str, Any], allowed_mask: Callable[[list[str]], int]) -> tuple[int, ...]:
    return _TAG_ALLOWED, allowed_mask(part["allowed"])


def _memory(part: dict[str, Any]) -> list[int]:
    words = []
    for place, sizes, strides in part["exact"]:
        words += [_TAG_EXACT | place << 8, *sizes, *strides]
    for later, earlier, distance in part["overlaps"]:
        words += [_TAG_OVERLAP | (earlier | later << 8) << 8, distance & _LEFT_OUT]
    return words


def _tensor(match: re.Match[str], device_index: int, tensor_word: Callable[..., int]) -> list[int]:
    dtype, sizes, classes, device, unaligned, parameter = match.groups()
    split = sizes.split(",") if sizes else []
    index = -1 if device == "cpu" else device_index
    where = torch.device(device) if index < 0 else torch.device(device, index)
    flags = classes is None, unaligned is None, parameter is not None
    word = tensor_word(_torch_value(dtype), len(split), *flags, where)
    words = [word, *map(_size, split)]
    if classes is not None:
        words += _layout.class_words([_layout.class_number(one) for one in classes.split(",")])
    return words


def _size(text: str) -> int:
    if text == "*":
        return _LEFT_OUT
    # Above the last bucket.
    return ~int(text[:-1]) & _LEFT_OUT if text.endswith("+") else int(text)


def _torch_value(name: str) -> Any:
    value = getattr(torch, name, None)
    if not isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        raise ValueError(f"torch.{name} is unknown")
    return value


def _scalar(
    part: str, object_number: Callable[[Any], int], tensor_word: Callable[..., int]
) -> tuple[int, ...]:
    kind, _, text = part.partition(" ")
    if part == "None":
        return (_TAG_NONE,)
    if part in ("True", "False"):
        return (_TAG_BOOL | (part == "True") << 8,)
    if kind == "int":
        return _TAG_INT, int(text) & _LEFT_OUT
    if kind == "float":
        bits = struct.unpack("=Q", struct.pack("=d", float.fromhex(text)))[0]
        return _TAG_FLOAT, bits
    if kind == "str":
        return (_TAG_OBJECT | object_number(json.loads(text)) << 8,)
    if kind == "device":
        return (_TAG_OBJECT | object_number(torch.device(text)) << 8,)
    if part.startswith("torch."):
        value = _torch_value(part.removeprefix("torch."))
        if isinstance(value, torch.dtype):
            number = tensor_word(value, 0, False, False, False, torch.device("cpu")) >> 8 & 0xFF
            return (_TAG_DTYPE | number << 8,)
        return (_TAG_OBJECT | object_number(value) << 8,)
    raise ValueError(f"{part!r} is not part of a key")
