"""Values that someone may pass for an argument: right, convertible and wrong ones."""

import array
import collections
import decimal
import enum
import fractions
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch


class HasIndex:
    """Converts to int only."""

    def __index__(self) -> int:
        """Return a fixed int."""
        return 5

    def __repr__(self) -> str:
        """Return a text without an address."""
        return "HasIndex()"


class HasFloat:
    """Converts to float only."""

    def __float__(self) -> float:
        """Return a fixed float."""
        return 2.25


class HasBool:
    """Converts to bool only."""

    def __bool__(self) -> bool:
        """Return a fixed bool."""
        return False


class BadIndex:
    """Raises where it should convert."""

    def __index__(self) -> int:
        """Raise."""
        raise KeyError("no index")

    __float__ = __bool__ = __index__


class IntSub(int):
    """A subclass of int."""


class FloatSub(float):
    """A subclass of float."""


class StrSub(str):
    """A subclass of str."""


class ListSub(list):
    """A subclass of list."""


class TupleSub(tuple):
    """A subclass of tuple."""


class Pair(NamedTuple):
    """A named tuple."""

    first: Any
    second: Any


class Colour(enum.IntEnum):
    """An int enum."""

    RED = 3


class Word(enum.StrEnum):
    """A str enum."""

    CPU = "cpu"


class Plain(enum.Enum):
    """An enum without a value type."""

    A = 1


def _t(*data: Any, **options: Any) -> torch.Tensor:
    return torch.tensor(*data, **options)


# name -> maker of a fresh value
VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "False": lambda: False,
    "0": lambda: 0,
    "1": lambda: 1,
    "-1": lambda: -1,
    "257": lambda: 257,
    "2**31": lambda: 2**31,
    "2**53+1": lambda: 2**53 + 1,
    "2**63-1": lambda: 2**63 - 1,
    "2**63": lambda: 2**63,
    "2**64": lambda: 2**64,
    "2**1024": lambda: 2**1024,
    "-2**63": lambda: -(2**63),
    "-2**63-1": lambda: -(2**63) - 1,
    "1.0": lambda: 1.0,
    "1.5": lambda: 1.5,
    "-0.0": lambda: -0.0,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "1e300": lambda: 1e300,
    "1j": lambda: 1j,
    "1+0j": lambda: 1 + 0j,
    "str": lambda: "words",
    "str_empty": lambda: "",
    "str_digit": lambda: "1",
    "str_cpu": lambda: "cpu",
    "str_cuda_0": lambda: "cuda:0",
    "str_not_a_device": lambda: "cpu:x",
    "str_dtype": lambda: "float32",
    "str_accents": lambda: "é漢😀",
    "str_surrogate": lambda: "\ud800",
    "str_nul": lambda: "a\0b",
    "bytes": lambda: b"bytes",
    "bytes_not_utf8": lambda: b"\xff\xfe",
    "bytearray": lambda: bytearray(b"ba"),
    "np_int64": lambda: np.int64(3),
    "np_int8": lambda: np.int8(-3),
    "np_uint64_big": lambda: np.uint64(2**63),
    "np_float32": lambda: np.float32(1.5),
    "np_float64": lambda: np.float64(2.0),
    "np_float16": lambda: np.float16(0.5),
    "np_complex": lambda: np.complex64(1j),
    "np_bool": lambda: np.bool_(True),
    "np_str": lambda: np.str_("cpu"),
    "np_bytes": lambda: np.bytes_(b"x"),
    "np_dtype": lambda: np.dtype("float32"),
    "np_array_0d": lambda: np.array(3),
    "np_array_1": lambda: np.array([4]),
    "np_array_ints": lambda: np.array([1, 2]),
    "np_array_floats": lambda: np.array([1.5, 2.0]),
    "np_array_bools": lambda: np.array([True, False]),
    "np_array_2d": lambda: np.array([[1, 2]]),
    "np_array_strs": lambda: np.array(["a"]),
    "np_array_objects": lambda: np.array([1, None], dtype=object),
    "tensor_int": lambda: _t(3),
    "tensor_float": lambda: _t(2.5),
    "tensor_whole_float": lambda: _t(2.0),
    "tensor_bool": lambda: _t(True),
    "tensor_half": lambda: _t(0.5, dtype=torch.float16),
    "tensor_complex": lambda: _t(1j),
    "tensor_1": lambda: _t([4]),
    "tensor_1x1": lambda: _t([[4.0]]),
    "tensor_ints": lambda: _t([1, 2]),
    "tensor_floats": lambda: _t([1.5, 2.0]),
    "tensor_bools": lambda: _t([True, False]),
    "tensor_2d": lambda: _t([[1, 2], [3, 4]]),
    "tensor_empty": lambda: torch.empty(0),
    "tensor_grad": lambda: _t(2.0, requires_grad=True),
    "tensor_grad_1d": lambda: _t([2.0, 3.0], requires_grad=True),
    "tensor_meta": lambda: torch.empty(1, device="meta"),
    "tensor_sparse": lambda: torch.eye(2).to_sparse(),
    "tensor_conj": lambda: _t([1j]).conj(),
    "tensor_strided": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "parameter_frozen": lambda: torch.nn.Parameter(torch.ones(2), requires_grad=False),
    "buffer": lambda: torch.nn.Buffer(torch.ones(2)),
    "has_index": HasIndex,
    "has_float": HasFloat,
    "has_bool": HasBool,
    "bad_index": BadIndex,
    "int_sub": lambda: IntSub(7),
    "float_sub": lambda: FloatSub(7.5),
    "str_sub": lambda: StrSub("cpu"),
    "int_enum": lambda: Colour.RED,
    "str_enum": lambda: Word.CPU,
    "enum": lambda: Plain.A,
    "fraction": lambda: fractions.Fraction(1, 2),
    "decimal": lambda: decimal.Decimal("1.5"),
    "dtype": lambda: torch.float16,
    "dtype_int": lambda: torch.int64,
    "device_cpu": lambda: torch.device("cpu"),
    "device_cuda_1": lambda: torch.device("cuda", 1),
    "layout": lambda: torch.strided,
    "layout_sparse": lambda: torch.sparse_coo,
    "memory_format": lambda: torch.channels_last,
    "generator": lambda: torch.Generator(),
    "type_float": lambda: float,
    "type_int": lambda: int,
    "object": object,
    "ellipsis": lambda: ...,
    "not_implemented": lambda: NotImplemented,
    "slice": lambda: slice(1, 2),
    "list_empty": lambda: [],
    "tuple_empty": lambda: (),
    "list_ints": lambda: [1, 2],
    "tuple_ints": lambda: (1, 2),
    "list_int_float": lambda: [1, 2.0],
    "list_float_int": lambda: [1.0, 2],
    "list_floats": lambda: [1.5, 2.5],
    "list_bools": lambda: [True, False],
    "list_int_bool": lambda: [1, True],
    "list_complex": lambda: [1j, 2],
    "list_int_None": lambda: [1, None],
    "list_None": lambda: [None],
    "list_Nones": lambda: [None, None],
    "list_strs": lambda: ["a", "b"],
    "list_int_str": lambda: [1, "a"],
    "list_bytes": lambda: [b"a"],
    "list_too_big": lambda: [1, 2**63],
    "list_np": lambda: [np.int64(1), np.float32(2.0)],
    "list_np_ints": lambda: [np.int64(1), np.int8(2)],
    "list_np_bools": lambda: [np.bool_(True)],
    "list_tensor_scalars": lambda: [_t(1), _t(2)],
    "list_tensor_1": lambda: [_t([1]), 2],
    "list_index": lambda: [HasIndex(), 2],
    "list_int_sub": lambda: [IntSub(1), Colour.RED],
    "list_nested": lambda: [[1]],
    "list_nested_deep": lambda: [1, [2, [3]]],
    "list_tensors": lambda: [torch.ones(2), torch.zeros(1)],
    "list_tensors_grad": lambda: [torch.ones(2, requires_grad=True), torch.zeros(1)],
    "list_same_tensor": lambda: [torch.ones(2)] * 2,
    "list_parameters": lambda: [torch.nn.Parameter(torch.ones(1))],
    "tuple_tensors": lambda: (torch.ones(2), torch.zeros(1)),
    "list_tensor_None": lambda: [torch.ones(2), None],
    "list_None_tensor": lambda: [None, torch.ones(2)],
    "list_tensor_int": lambda: [torch.ones(2), 1],
    "list_tensor_list": lambda: [torch.ones(2), [torch.ones(1)]],
    "list_meta": lambda: [torch.empty(2, device="meta")],
    "list_sub": lambda: ListSub([1, 2]),
    "list_sub_tensors": lambda: ListSub([torch.ones(1)]),
    "tuple_sub": lambda: TupleSub((1, 2)),
    "named_tuple": lambda: Pair(1, 2),
    "named_tuple_tensors": lambda: Pair(torch.ones(1), torch.ones(2)),
    "list_dtypes": lambda: [torch.float32],
    "list_devices": lambda: [torch.device("cpu")],
    "list_long": lambda: list(range(100)),
    "size": lambda: torch.Size([2, 3]),
    "range": lambda: range(3),
    "array_int": lambda: array.array("i", [1, 2]),
    "array_double": lambda: array.array("d", [1.5, 2]),
    "memoryview": lambda: memoryview(b"ab"),
    "deque": lambda: collections.deque([1, 2]),
    "set": lambda: {1},
    "frozenset": lambda: frozenset([1]),
    "dict": lambda: {1: 2},
    "dict_str": lambda: {"a": 1},
    "dict_empty": dict,
    "iterator": lambda: iter([1, 2]),
    "generator_of_tensors": lambda: (torch.ones(1) for _ in range(2)),
}
