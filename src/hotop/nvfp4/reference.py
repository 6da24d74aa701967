"""NVFP4 in plain PyTorch operators: the slow, readable twin of the C++ and CUDA kernels.

The arithmetic is that of `csrc/nvfp4` and of NVIDIA's host code (`cuda_fp4.h`, `cuda_fp8.h`):
float32, every step rounded to nearest even. It runs on any device, takes any strides, and is fit
for `torch.compile`. Float32 subnormals must not be flushed (`torch.set_flush_denormal(False)`, the
default), and a GPU must divide exactly (eager PyTorch does; Triton's default division does not).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hotop.nvfp4._checks import (
    BLOCK,
    check_dequantize,
    check_gemm,
    check_quantize,
    check_unswizzle,
    swizzled_size,
)

__all__ = ["dequantize", "gemm", "quantize", "swizzle", "swizzled_size", "unswizzle"]

E4M3_MAX = 448.0
E2M1_MAX = 6.0
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def quantize(
    input: Tensor, input_scale: Tensor, is_sf_swizzled_layout: bool = False
) -> list[Tensor]:
    """Quantize to NVFP4: e2m1 codes and one e4m3 scale per 16 elements of a row.

    Args:
        input: `[..., k]`, float32, bfloat16 or float16, any strides, `k` a multiple of 16.
        input_scale: float32, one element: the global scale g, normally `448 * 6 / max|tensor|`.
        is_sf_swizzled_layout: the layout of the scales.

    Returns:
        `[packed, sf]`, both uint8. `packed` is `[..., k / 2]`, element `2j` in the low nibble.
        `sf` holds e4m3 bits: `[..., k / 16]` if linear, else 1-D as `swizzle` makes it.

    Raises:
        TypeError: `input` or `input_scale` has another dtype.
        ValueError: `k` is not a multiple of 16, or `input_scale` has not one element.

    Source: NVIDIA's `cuda_fp4.h` and `cuda_fp8.h`, and TensorRT-LLM's `cvt_warp_fp16_to_fp4` with
    exact instead of approximate reciprocals.
    """
    check_quantize(input, input_scale)
    k = input.shape[-1]
    x = input.detach().to(torch.float32).reshape(*input.shape[:-1], k // BLOCK, BLOCK)
    g = input_scale.detach().reshape(())

    nan = x.isnan()
    amax = x.abs().masked_fill(nan, 0.0).amax(-1)  # a NaN beside numbers is ignored
    amax = amax.masked_fill(nan.all(-1), math.nan)
    sf = _e4m3(g * (amax * (1.0 / 6.0)))
    sf_value = _e4m3_value(sf)
    # The order matters: each of these three operations rounds.
    scale = (1.0 / (sf_value * (1.0 / g))).masked_fill(sf_value == 0.0, 0.0)
    codes = _e2m1(x * scale.unsqueeze(-1)).reshape(input.shape)
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    if is_sf_swizzled_layout:
        sf = swizzle(sf.reshape(math.prod(input.shape[:-1]), k // BLOCK))
    return [packed, sf]


def swizzle(sf: Tensor) -> Tensor:
    """Put scales into the layout that tensor cores read.

    Args:
        sf: `[m, columns]` of any dtype, normally e4m3 bits as uint8.

    Returns:
        1-D of `ceil128(m) * ceil4(columns)` elements, zeros in the padding; the scale of row r and
        column c is at `((r/128)*ceil(columns/4) + c/4)*512 + (r%32)*16 + ((r%128)/32)*4 + c%4`.

    Raises:
        ValueError: `sf` is not 2-D.

    Source: the 1-D block scaling layout in the documentation of cuBLAS.
    """
    if sf.dim() != 2:
        raise ValueError(f"swizzle: sf must have two dimensions, got {sf.dim()}")
    rows, columns = sf.shape
    padded = torch.nn.functional.pad(sf, (0, -columns % 4, 0, -rows % 128))
    # [row tile, quarter, row in quarter, column tile, column] -> the formula's order
    tiles = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle(sf: Tensor, rows: int, columns: int) -> Tensor:
    """Undo `swizzle`.

    Args:
        sf: 1-D of `ceil128(rows) * ceil4(columns)` elements of any dtype.
        rows: the rows without padding.
        columns: the columns without padding.

    Returns:
        `[rows, columns]`, contiguous.

    Raises:
        ValueError: `sf` has another shape.
    """
    check_unswizzle(sf, rows, columns)
    row_tiles, column_tiles = (rows + 127) // 128, (columns + 3) // 4
    tiles = sf.reshape(row_tiles, column_tiles, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(row_tiles * 128, column_tiles * 4)[:rows, :columns].contiguous()


def dequantize(
    packed: Tensor,
    sf: Tensor,
    global_scale: Tensor,
    dtype: torch.dtype = torch.float32,
    is_sf_swizzled_layout: bool = False,
) -> Tensor:
    """Decode NVFP4: `(code * float(sf)) * (1 / global_scale)` in float32, in this order, then cast.

    What is 0 before the global scale stays 0 whatever that is.

    Args:
        packed: `[..., k / 2]` uint8 from `quantize`.
        sf: its scales: `[..., k / 16]` uint8, or 1-D if swizzled.
        global_scale: float32, one element: what was given to `quantize` as `input_scale`.
        dtype: float32, bfloat16 or float16.
        is_sf_swizzled_layout: the layout of `sf`.

    Returns:
        `[..., k]` of `dtype`.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: the shapes do not fit.
    """
    check_dequantize(packed, sf, global_scale, dtype, is_sf_swizzled_layout)
    value = _decode(packed, sf, is_sf_swizzled_layout)
    inverse = 1.0 / global_scale.detach().reshape(())
    # That of 0 and of most subnormal numbers is infinite.
    kept = (value == 0.0) & ~inverse.isfinite()
    return torch.where(kept, value, value * inverse).to(dtype)


def gemm(
    act_fp4: Tensor,
    weight: Tensor,
    act_sf: Tensor,
    weight_scale: Tensor,
    alpha: Tensor,
    output_dtype: torch.dtype,
) -> Tensor:
    """Multiply NVFP4 matrices: `alpha * (act @ weight.T)`, both decoded to float32 first.

    Args:
        act_fp4: `[..., k / 2]` uint8.
        weight: `[n, k / 2]` uint8.
        act_sf: the scales of `act_fp4`, 1-D uint8, swizzled.
        weight_scale: the scales of `weight`, 1-D uint8, swizzled.
        alpha: float32, one element, normally `1 / (g_act * g_weight)`.
        output_dtype: float32, bfloat16 or float16.

    Returns:
        `[..., n]` of `output_dtype`. The sum is float32 and in the order of the device's BLAS.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: the shapes do not fit.
    """
    check_gemm(act_fp4, weight, act_sf, weight_scale, alpha, output_dtype)
    act = _decode(act_fp4, act_sf, True)
    matrix = _decode(weight, weight_scale, True)
    return (alpha.detach().reshape(()) * torch.nn.functional.linear(act, matrix)).to(output_dtype)


def _decode(packed: Tensor, sf: Tensor, swizzled: bool) -> Tensor:
    """Decode to `[..., k]` float32, `e2m1 * e4m3`: exact, a product has 6 significant bits."""
    leading, k = packed.shape[:-1], packed.shape[-1] * 2
    if swizzled:
        sf = unswizzle(sf, math.prod(leading), k // BLOCK).reshape(*leading, k // BLOCK)
    codes = torch.stack((packed & 15, packed >> 4), -1).reshape(*leading, k // BLOCK, BLOCK)
    table = torch.tensor(
        [*_E2M1_VALUES, *(-value for value in _E2M1_VALUES)],
        dtype=torch.float32,
        device=packed.device,
    )
    return (table[codes.int()] * _e4m3_value(sf).unsqueeze(-1)).reshape(*leading, k)


def _e4m3(value: Tensor) -> Tensor:
    """Round float32 to e4m3 bits: nearest even, saturating at 448, NaN to 0x7F.

    PyTorch's own cast does not saturate (it gives NaN above 464) and keeps the sign of a NaN.
    """
    nan = value.isnan()
    bits = value.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return bits.masked_fill(nan, 0x7F)


def _e4m3_value(bits: Tensor) -> Tensor:
    """Decode e4m3 bits to float32; 0x7F and 0xFF are NaN."""
    return bits.view(torch.float8_e4m3fn).to(torch.float32)


def _e2m1(value: Tensor) -> Tensor:
    """Round float32 to e2m1 codes: nearest, ties to the even code, saturating at 6, NaN to 7."""
    y = value.abs().clamp(max=E2M1_MAX)
    # e2m1 has steps of 0.5 below 2, 1 below 4, 2 above: the right one of the three is the least.
    code = torch.minimum(
        torch.minimum(torch.round(y * 2.0), torch.round(y) + 2.0), torch.round(y * 0.5) + 4.0
    )
    nan = value.isnan()
    sign = torch.signbit(value).to(torch.uint8) << 3
    return (code.masked_fill(nan, 0.0).to(torch.uint8) | sign).masked_fill(nan, 7)
