"""The inner callables that every variant shares: the C++ kernels, and twins that do nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hotop._load import load_extension
from hotop.nvfp4.reference import swizzled_size

QUANTIZE = "tunable_fp4_quantize"
GEMM = "nvfp4_gemm"
OP_NAMES = (QUANTIZE, GEMM)

TRIVIAL = "trivial"
REAL = "real"
KERNEL_NAMES = (TRIVIAL, REAL)

SCHEMAS = {
    QUANTIZE: (
        "(Tensor input, Tensor input_scale, int scaling_vector_size=16, "
        "bool is_sf_swizzled_layout=False) -> Tensor[]"
    ),
    GEMM: (
        "(Tensor act_fp4, Tensor weight, Tensor act_sf, Tensor weight_scale, Tensor alpha, "
        'ScalarType output_dtype, bool to_userbuffers=False, str allowed_backends="") -> Tensor'
    ),
}


@dataclass(frozen=True)
class Kernels:
    """One pair of inner callables.

    Attributes:
        name: ``"trivial"`` (outputs of the right shapes, no work) or ``"real"``.
        quantize: The quantization, with the arguments of `SCHEMAS`.
        gemm: The product, with the arguments of `SCHEMAS`.
    """

    name: str
    quantize: Callable[..., Any]
    gemm: Callable[..., Any]

    def __getitem__(self, op_name: str) -> Callable[..., Any]:
        return self.quantize if op_name == QUANTIZE else self.gemm


def extension() -> ModuleType:
    """Import ``hotop._nvfp4``.

    Raises:
        ImportError: It is not built.
    """
    return load_extension("_nvfp4")


def load(name: str) -> Kernels:
    """Return the kernels called `name`.

    Raises:
        ValueError: There are none of that name.
        ImportError: ``hotop._nvfp4`` is not built.
    """
    module = extension()
    if name == TRIVIAL:
        return Kernels(name, module.quantize_trivial, module.gemm_trivial)
    if name == REAL:
        return Kernels(name, module.quantize, module.gemm)
    raise ValueError(f"kernels must be one of {', '.join(KERNEL_NAMES)}, got {name!r}")


def fake_quantize(
    input: Tensor,
    input_scale: Tensor,
    scaling_vector_size: int = 16,
    is_sf_swizzled_layout: bool = False,
) -> list[Tensor]:
    """Shapes of the quantization: packed [..., k/2], scales [..., k/16] or swizzled, 1-D."""
    *leading, k = input.shape
    packed = input.new_empty((*leading, k // 2), dtype=torch.uint8)
    shape = (
        (swizzled_size(math.prod(leading), k // 16),)
        if is_sf_swizzled_layout
        else (*leading, k // 16)
    )
    return [packed, input.new_empty(shape, dtype=torch.uint8)]


def fake_gemm(
    act_fp4: Tensor,
    weight: Tensor,
    act_sf: Tensor,
    weight_scale: Tensor,
    alpha: Tensor,
    output_dtype: torch.dtype,
    to_userbuffers: bool = False,
    allowed_backends: str = "",
) -> Tensor:
    """Shape of the product: [..., n] of `output_dtype`."""
    return act_fp4.new_empty((*act_fp4.shape[:-1], weight.shape[0]), dtype=output_dtype)


FAKES: dict[str, Callable[..., Any]] = {QUANTIZE: fake_quantize, GEMM: fake_gemm}
