"""NVFP4 quantization and matrix multiplication as two ops, and a linear layer on them."""

from hotop.nvfp4._convert import Conversion, convert, record_amax
from hotop.nvfp4._linear import NVFP4Linear, global_scale
from hotop.nvfp4._ops import (
    nvfp4_dequantize,
    nvfp4_gemm,
    swizzle,
    tunable_fp4_quantize,
    unswizzle,
)

__all__ = [
    "Conversion",
    "NVFP4Linear",
    "convert",
    "global_scale",
    "nvfp4_dequantize",
    "nvfp4_gemm",
    "record_amax",
    "swizzle",
    "tunable_fp4_quantize",
    "unswizzle",
]
