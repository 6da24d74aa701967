"""Arguments made from a schema: mostly right, some wrong, for overloads without recorded calls."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor

from twin_values import VALUES

DTYPES = (torch.float32, torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64)
SHAPES = ((2, 3), (2, 3), (3, 3), (3,), (), (2, 3, 4), (1, 3, 4, 4), (0, 3))
# Half of PyTorch's string arguments are one of a few words.
STRINGS = ("mean", "none", "ij", "reflect", "constant", "linear", "trunc", "floor", "words", "")


def _tensor(random: Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = 1
    for size in shape:
        count *= size
    numbers = [random.randrange(4) for _ in range(count)]
    tensor = torch.tensor(numbers).to(dtype).reshape(shape)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor = tensor / 2 + 0.25
    kind = random.randrange(12)
    if kind == 0 and len(shape) >= 2:
        tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    elif kind == 1 and shape:
        tensor = torch.cat([tensor, tensor])[: shape[0]]  # a view
    elif kind == 2:
        tensor = tensor[..., None].expand(*shape, 2)[..., 0]
    elif kind == 3 and len(shape) == 4:
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    return tensor


class Maker:
    """Draws the arguments of one call: a common shape and dtype, and now and then another."""

    def __init__(self, random: Random) -> None:
        """Draw what the call's arguments have in common."""
        self.random = random
        self.shape = random.choice(SHAPES)
        self.dtype = random.choice(DTYPES)
        self.wrong = random.random() < 0.25

    def tensor(self) -> Tensor:
        """Draw a Tensor."""
        other = self.random.random()
        shape = self.shape if other < 0.8 else self.random.choice(SHAPES)
        dtype = self.dtype if other < 0.7 or other > 0.85 else self.random.choice(DTYPES)
        return _tensor(self.random, shape, dtype)

    def integer(self) -> int:
        """Draw a small int: a dimension, a size, an index, a count."""
        return self.random.choice((0, 0, 1, 1, 1, 2, 2, 3, -1))

    def number(self) -> Any:
        """Draw a Scalar."""
        return self.random.choice((0, 1, 2, 0.5, 1.5, True, -1, 2.0, 1j))

    def integers(self, size: int | None) -> Any:
        """Draw an int list; for `int[N]` often of that length."""
        random = self.random
        if size and random.random() < 0.1:
            return self.integer()  # one int for all
        common = (size or random.choice((1, 2, len(self.shape))),) * 3
        length = random.choice((*common, len(self.shape), random.randrange(4)))
        if random.random() < 0.3:
            return list(self.shape)
        return [self.integer() for _ in range(length)]

    def list_of(self, draw: Callable[[], Any], size: int | None = None) -> list[Any]:
        """Draw a list."""
        return [draw() for _ in range(size or self.random.choice((0, 1, 2, 2, 3)))]

    def of_type(self, kind: str, size: int | None = None) -> Any:
        """Draw a value of a schema type, as `str(argument.real_type)` writes it."""
        random = self.random
        if kind.startswith("Optional["):
            kind = kind[len("Optional[") : -1]
            if random.random() < 0.4:
                return None
        if kind == "List[int]":
            return self.integers(size)
        if kind.startswith("List["):
            inner = kind[len("List[") : -1]
            return self.list_of(lambda: self.of_type(inner), size)
        if kind in _MAKERS:
            return _MAKERS[kind](self)
        if kind.startswith("Dict["):
            return {self.of_type(kind[5:].partition(",")[0]): 1}
        return random.choice((1, 1.5, "a", [1], None, torch.ones(2)))  # TorchScript's variables


_MAKERS: dict[str, Callable[[Maker], Any]] = {
    "Tensor": Maker.tensor,
    "int": Maker.integer,
    "bool": lambda m: m.random.random() < 0.5,
    "float": lambda m: m.random.choice((0.0, 0.5, 1.0, 1e-5, 2, -1.5)),
    "complex": lambda m: m.random.choice((1j, 1 + 2j, 0.5)),
    "number": Maker.number,
    "str": lambda m: m.random.choice(STRINGS),
    "ScalarType": lambda m: m.random.choice((*DTYPES, torch.float16, torch.bfloat16)),
    "Layout": lambda m: m.random.choice((torch.strided,) * 4 + (torch.sparse_coo,)),
    "Device": lambda m: m.random.choice(("cpu", torch.device("cpu"), "meta", "cpu:0", "cuda")),
    "MemoryFormat": lambda m: m.random.choice(
        (torch.contiguous_format, torch.preserve_format, torch.channels_last)
    ),
    "Generator": lambda m: torch.Generator().manual_seed(m.random.randrange(9)),
    "Storage": lambda m: torch.ones(6).untyped_storage(),
}


def generated(op: Any, random: Random) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Draw the arguments of a call from the overload's schema."""
    maker = Maker(random)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    by_keyword = False
    for argument in op._schema.arguments:
        if argument.has_default_value() and random.random() < 0.45:
            by_keyword = True  # those behind it need their names
            continue
        value = maker.of_type(str(argument.real_type), argument.N)
        if argument.kwarg_only or by_keyword:
            kwargs[argument.name] = value
        else:
            args.append(value)
    if maker.wrong:
        places = [*range(len(args)), *kwargs]
        if places:
            place = random.choice(places)
            wrong = VALUES[random.choice(WRONG)]()
            if isinstance(place, int):
                args[place] = wrong
            else:
                kwargs[place] = wrong
    return tuple(args), kwargs


# Without what a copy cannot give back as it was.
WRONG = sorted(
    set(VALUES) - {"iterator", "generator_of_tensors", "memoryview", "list_long", "array_int"}
)
