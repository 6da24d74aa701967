"""The NVFP4 kernels of the CPU, and the dispatcher ops `hotop_cpp::*` for comparison."""

import torch
from torch import Tensor

def quantize(
    input: Tensor,
    input_scale: Tensor,
    scaling_vector_size: int = 16,
    is_sf_swizzled_layout: bool = False,
) -> list[Tensor]:
    """Quantizes with the best instruction set of this machine (or the one set by `set_isa`).

    Args:
        input: [..., k], float32, bfloat16 or float16, any strides; k is a multiple of 16.
        input_scale: The global scale g, float32, one element.
        scaling_vector_size: 16.
        is_sf_swizzled_layout: Whether scales come in the layout of the tensor cores.

    Returns:
        Two uint8 Tensors: packed codes [..., k/2] and e4m3 scales, [..., k/16] or, swizzled, 1-D
        with ceil(m/128)*128 * ceil(k/16/4)*4 elements, zero in the padding.

    Raises:
        TypeError: A dtype is not one of those above.
        ValueError: k, input_scale or scaling_vector_size has the wrong size.
        RuntimeError: A Tensor is not a plain one of the CPU.
    """

def quantize_scalar(
    input: Tensor,
    input_scale: Tensor,
    scaling_vector_size: int = 16,
    is_sf_swizzled_layout: bool = False,
) -> list[Tensor]:
    """Like `quantize`, one element after the other: the reference of the other kernels."""

def quantize_avx2(
    input: Tensor,
    input_scale: Tensor,
    scaling_vector_size: int = 16,
    is_sf_swizzled_layout: bool = False,
) -> list[Tensor]:
    """Like `quantize`, with AVX2; RuntimeError where this CPU lacks it."""

def quantize_avx512(
    input: Tensor,
    input_scale: Tensor,
    scaling_vector_size: int = 16,
    is_sf_swizzled_layout: bool = False,
) -> list[Tensor]:
    """Like `quantize`, with AVX-512; RuntimeError where this CPU lacks it."""

def quantize_trivial(
    input: Tensor,
    input_scale: Tensor,
    scaling_vector_size: int = 16,
    is_sf_swizzled_layout: bool = False,
) -> list[Tensor]:
    """Zeros of the right shapes, nothing checked: for measuring the host time of a call."""

def gemm(
    act_fp4: Tensor,
    weight: Tensor,
    act_sf: Tensor,
    weight_scale: Tensor,
    alpha: Tensor,
    output_dtype: torch.dtype,
    to_userbuffers: bool = False,
    allowed_backends: str = "",
) -> Tensor:
    """cast(alpha * sum (e2m1_a * sf_a)(e2m1_w * sf_w)), by the tactic that suits m.

    Args:
        act_fp4: [..., k/2] uint8.
        weight: [n, k/2] uint8.
        act_sf: Swizzled scales of the activations, 1-D uint8.
        weight_scale: Swizzled scales of the weight, 1-D uint8.
        alpha: float32, one element; usually 1/(g_a * g_w).
        output_dtype: torch.float32, bfloat16 or float16.
        to_userbuffers: Accepted, not read.
        allowed_backends: Accepted, not read.

    Returns:
        [..., n] of `output_dtype`. The bits do not depend on the number of threads.

    Raises:
        TypeError: A dtype is not one of those above.
        ValueError: Sizes do not fit together.
        RuntimeError: A Tensor is not a plain one of the CPU.
    """

def gemm_blas(
    act_fp4: Tensor,
    weight: Tensor,
    act_sf: Tensor,
    weight_scale: Tensor,
    alpha: Tensor,
    output_dtype: torch.dtype,
    to_userbuffers: bool = False,
    allowed_backends: str = "",
) -> Tensor:
    """Like `gemm`: decodes panels to float32 and multiplies with PyTorch's BLAS."""

def gemm_int8(
    act_fp4: Tensor,
    weight: Tensor,
    act_sf: Tensor,
    weight_scale: Tensor,
    alpha: Tensor,
    output_dtype: torch.dtype,
    to_userbuffers: bool = False,
    allowed_backends: str = "",
) -> Tensor:
    """Like `gemm`: exact integer dot products of blocks, summed in float32."""

def gemm_blas_wide(
    act_fp4: Tensor,
    weight: Tensor,
    act_sf: Tensor,
    weight_scale: Tensor,
    alpha: Tensor,
    output_dtype: torch.dtype,
    to_userbuffers: bool = False,
    allowed_backends: str = "",
) -> Tensor:
    """Like `gemm_blas`, with panels of 512 columns in place of 64."""

def gemm_int8_wide(
    act_fp4: Tensor,
    weight: Tensor,
    act_sf: Tensor,
    weight_scale: Tensor,
    alpha: Tensor,
    output_dtype: torch.dtype,
    to_userbuffers: bool = False,
    allowed_backends: str = "",
) -> Tensor:
    """Like `gemm_int8`, with panels of 256 columns in place of 32; the same bits."""

def gemm_scalar(
    act_fp4: Tensor,
    weight: Tensor,
    act_sf: Tensor,
    weight_scale: Tensor,
    alpha: Tensor,
    output_dtype: torch.dtype,
    to_userbuffers: bool = False,
    allowed_backends: str = "",
) -> Tensor:
    """Like `gemm`, one element after the other: the reference of the other tactics."""

def gemm_trivial(
    act_fp4: Tensor,
    weight: Tensor,
    act_sf: Tensor,
    weight_scale: Tensor,
    alpha: Tensor,
    output_dtype: torch.dtype,
    to_userbuffers: bool = False,
    allowed_backends: str = "",
) -> Tensor:
    """Zeros of the right shape, nothing checked: for measuring the host time of a call."""

def dequantize(
    packed: Tensor,
    sf: Tensor,
    global_scale: Tensor,
    dtype: torch.dtype,
    is_sf_swizzled_layout: bool,
) -> Tensor:
    """(code * scale) * (1 / global_scale) in float32, in this order, then cast to `dtype`.

    Args:
        packed: [..., k/2] uint8.
        sf: e4m3 scales, uint8, [..., k/16] or swizzled 1-D.
        global_scale: float32, one element.
        dtype: torch.float32, bfloat16 or float16.
        is_sf_swizzled_layout: Which of the two layouts `sf` has.

    Returns:
        [..., k] of `dtype`.

    Raises:
        TypeError: A dtype is not one of those above.
        ValueError: Sizes do not fit together.
        RuntimeError: A Tensor is not a plain one of the CPU.
    """

def swizzle(sf: Tensor) -> Tensor:
    """Scales [m, columns] uint8 as the tensor cores read them: 1-D, padded with zeros."""

def unswizzle(sf: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `swizzle`: [rows, columns] uint8."""

def isa() -> str:
    """The instruction set in use: "scalar", "avx2" or "avx512"."""

def set_isa(name: str, /) -> None:
    """Chooses the instruction set; RuntimeError where this machine lacks it."""

def available_isas() -> list[str]:
    """The instruction sets of this machine, slowest first."""
