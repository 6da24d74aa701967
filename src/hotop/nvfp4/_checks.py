"""The argument checks of the ops in Python: the twins of `csrc/nvfp4/checks.h`, word for word.

Fake kernels, the CUDA kernels and the reference ask them, so that a call fails with the same words
wherever it runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["check_dequantize", "check_gemm", "check_quantize", "swizzled_size"]

BACKENDS = "cublaslt,blas,int8"  # those that `nvfp4_gemm` may choose among, unless told otherwise
BLOCK = 16  # elements that share one e4m3 scale
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Where PyTorch's C++ name is not the Python name with a capital letter.
_CPP_NAMES = {
    torch.float32: "Float",
    torch.float64: "Double",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.uint8: "Byte",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.uint16: "UInt16",
    torch.uint32: "UInt32",
    torch.uint64: "UInt64",
    torch.complex32: "ComplexHalf",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}


def swizzled_size(rows: int, columns: int) -> int:
    """Count the elements of swizzled scales, the padding with them."""
    return (rows + 127) // 128 * ((columns + 3) // 4) * 512


def check_quantize(input: Tensor, input_scale: Tensor, scaling_vector_size: int = BLOCK) -> None:
    """Raise what `tunable_fp4_quantize` raises."""
    op = "tunable_fp4_quantize"
    _check_float(op, "input", input.dtype)
    if input.dim() == 0:
        raise ValueError(f"{op}: input must have at least one dimension, got none")
    _check_multiple(op, "input", input.shape[-1], BLOCK)
    _check_one_element(op, "input_scale", input_scale)
    if scaling_vector_size != BLOCK:
        raise ValueError(f"{op}: scaling_vector_size must be {BLOCK}, got {scaling_vector_size}")


def check_gemm(
    act_fp4: Tensor,
    weight: Tensor,
    act_sf: Tensor,
    weight_scale: Tensor,
    alpha: Tensor,
    output_dtype: torch.dtype,
) -> None:
    """Raise what `nvfp4_gemm` raises."""
    op = "nvfp4_gemm"
    _check_bytes(op, "act_fp4", act_fp4)
    _check_bytes(op, "weight", weight)
    if act_fp4.dim() == 0:
        raise ValueError(f"{op}: act_fp4 must have at least one dimension, got none")
    if weight.dim() != 2:
        raise ValueError(f"{op}: weight must have two dimensions, got {weight.dim()}")
    count = act_fp4.shape[-1]
    if weight.shape[1] != count:
        raise ValueError(
            f"{op}: weight must have {count} bytes in a row as act_fp4 has, got {weight.shape[1]}"
        )
    if count % 8 != 0:
        raise ValueError(
            f"{op}: the last dimension of act_fp4 must be a multiple of 8, got {count}"
        )
    _check_swizzled(op, "act_sf", act_sf, math.prod(act_fp4.shape[:-1]), count // 8)
    _check_swizzled(op, "weight_scale", weight_scale, weight.shape[0], count // 8)
    _check_one_element(op, "alpha", alpha)
    _check_float(op, "output_dtype", output_dtype)


def check_dequantize(
    packed: Tensor, sf: Tensor, global_scale: Tensor, dtype: torch.dtype, swizzled: bool
) -> None:
    """Raise what `nvfp4_dequantize` raises."""
    op = "nvfp4_dequantize"
    _check_bytes(op, "packed", packed)
    if packed.dim() == 0:
        raise ValueError(f"{op}: packed must have at least one dimension, got none")
    count = packed.shape[-1]
    _check_multiple(op, "packed", count, BLOCK // 2)
    if swizzled:
        _check_swizzled(op, "sf", sf, math.prod(packed.shape[:-1]), count // 8)
    else:
        _check_bytes(op, "sf", sf)
        expected = [*packed.shape[:-1], count // 8]
        if list(sf.shape) != expected:
            raise ValueError(f"{op}: sf must have the size {expected}, got {list(sf.shape)}")
    _check_one_element(op, "global_scale", global_scale)
    _check_float(op, "dtype", dtype)


def check_unswizzle(sf: Tensor, rows: int, columns: int) -> None:
    """Raise what `unswizzle` raises."""
    for name, count in (("rows", rows), ("columns", columns)):
        if count < 0:
            raise ValueError(f"unswizzle: {name} must not be negative, got {count}")
    _check_size("unswizzle", "sf", sf.shape, rows, columns)


def _check_swizzled(op: str, name: str, sf: Tensor, rows: int, columns: int) -> None:
    _check_bytes(op, name, sf)
    _check_size(op, name, sf.shape, rows, columns)


def _check_size(op: str, name: str, shape: Sequence[int], rows: int, columns: int) -> None:
    size = swizzled_size(rows, columns)
    if len(shape) != 1 or shape[0] != size:
        raise ValueError(
            f"{op}: {name} must be 1-D with {size} elements (the swizzled scales of {rows} x "
            f"{columns} blocks), got size {list(shape)}"
        )


def _check_bytes(op: str, name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.uint8:
        raise TypeError(f"{op}: {name} must be uint8, got {_cpp_name(tensor.dtype)}")


def _check_multiple(op: str, name: str, size: int, factor: int) -> None:
    if size % factor != 0:
        raise ValueError(
            f"{op}: the last dimension of {name} must be a multiple of {factor}, got {size}"
        )


def _check_one_element(op: str, name: str, scale: Tensor) -> None:
    if scale.dtype != torch.float32:
        raise TypeError(f"{op}: {name} must be float32, got {_cpp_name(scale.dtype)}")
    if scale.numel() != 1:
        raise ValueError(f"{op}: {name} must have one element, got {scale.numel()}")


def _check_float(op: str, name: str, dtype: torch.dtype) -> None:
    if dtype not in FLOATS:
        raise TypeError(
            f"{op}: {name} must be float32, bfloat16 or float16, got {_cpp_name(dtype)}"
        )


def _cpp_name(dtype: torch.dtype) -> str:
    return _CPP_NAMES.get(dtype) or str(dtype).removeprefix("torch.").capitalize()
