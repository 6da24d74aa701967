"""The ops ``hotop::tunable_fp4_quantize``, ``nvfp4_gemm`` and ``nvfp4_dequantize``, and tactics."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hotop import _load
from hotop._define import custom_op
from hotop.nvfp4 import _cuda, reference
from hotop.nvfp4._checks import (
    BACKENDS,
    check_dequantize,
    check_gemm,
    check_quantize,
    swizzled_size,
)
from hotop.tuner import Tactic, follows, power_of_two, tunable

kernels: Any = _load.load_extension("_nvfp4")

# Rows are tokens: their number changes from call to call, the widths belong to the model.
_MOST_ROWS = 8192
_ROWS = {d: power_of_two(cap=_MOST_ROWS) for d in (-2, -3, -4)}


def _quantize_by_isa() -> dict[str, Any]:
    """Return the kernels for the instruction sets of this machine, the reference last."""
    here = set(kernels.available_isas())
    by_isa = {"avx2": kernels.quantize_avx2, "avx512": kernels.quantize_avx512}
    found = {isa: kernel for isa, kernel in by_isa.items() if isa in here}
    return {**found, "scalar": kernels.quantize_scalar}


@tunable(
    "hotop::tunable_fp4_quantize",
    dims={"input": _ROWS},
    rtol=0,
    atol=0,
    reference=kernels.quantize_scalar,
    default="auto",
    tactics=_quantize_by_isa(),
)
def _quantize_on_cpu(
    input: Tensor,
    input_scale: Tensor,
    scaling_vector_size: int = 16,
    is_sf_swizzled_layout: bool = False,
) -> list[Tensor]:
    """Quantize with the widest instructions of this machine."""
    return kernels.quantize(input, input_scale, scaling_vector_size, is_sf_swizzled_layout)


#: ``tunable_fp4_quantize(Tensor input, Tensor input_scale, int scaling_vector_size=16,
#: bool is_sf_swizzled_layout=False) -> Tensor[]``; see docs/nvfp4.md.
tunable_fp4_quantize = custom_op(
    "hotop::tunable_fp4_quantize",
    _quantize_on_cpu,
    mutates_args=(),
    device_types="cpu",
    schema=(
        "(Tensor input, Tensor input_scale, int scaling_vector_size=16, "
        "bool is_sf_swizzled_layout=False) -> Tensor[]"
    ),
)
tunable_fp4_quantize.register_kernel("cuda", _cuda.quantize)


@tunable_fp4_quantize.register_fake
def _(
    input: Tensor,
    input_scale: Tensor,
    scaling_vector_size: int = 16,
    is_sf_swizzled_layout: bool = False,
) -> list[Tensor]:
    check_quantize(input, input_scale, scaling_vector_size)
    k = input.shape[-1]
    rows = math.prod(input.shape[:-1])
    packed = input.new_empty((*input.shape[:-1], k // 2), dtype=torch.uint8)
    if is_sf_swizzled_layout:
        return [
            packed,
            input.new_empty((swizzled_size(rows, k // 16),), dtype=torch.uint8),
        ]
    return [packed, input.new_empty((*input.shape[:-1], k // 16), dtype=torch.uint8)]


def act_sf_size(shapes: Any) -> int:
    """Return how many scale bytes the GEMM's activations have, from the shapes of a call."""
    act = shapes["act_fp4"]
    return swizzled_size(math.prod(act[:-1]), act[-1] // 8)


@tunable(
    "hotop::nvfp4_gemm",
    dims={"act_fp4": _ROWS, "act_sf": {0: follows(act_sf_size)}},
    ignore=["to_userbuffers"],
    choices="allowed_backends",
    # The tactics add up in different orders: float32 rounding, then that of the output's dtype.
    rtol=2e-2,
    atol=1e-3,
    reference=kernels.gemm_blas,
    default="auto",
    default_backends=["blas", "int8"],
    tactics={
        "blas": kernels.gemm_blas,
        "int8": kernels.gemm_int8,
        "blas-wide": Tactic(kernels.gemm_blas_wide, backends=("blas",)),
        "int8-wide": Tactic(kernels.gemm_int8_wide, backends=("int8",)),
        "scalar": kernels.gemm_scalar,
        "cublaslt": Tactic(_cuda.gemm, device_types=("cuda",)),
    },
)
def _gemm_on_cpu(
    act_fp4: Tensor,
    weight: Tensor,
    act_sf: Tensor,
    weight_scale: Tensor,
    alpha: Tensor,
    output_dtype: torch.dtype,
    to_userbuffers: bool = False,
    allowed_backends: str = BACKENDS,
) -> Tensor:
    """Integer dot products for few rows, decoding and the BLAS for many."""
    return kernels.gemm(act_fp4, weight, act_sf, weight_scale, alpha, output_dtype)


#: ``nvfp4_gemm(Tensor act_fp4, Tensor weight, Tensor act_sf, Tensor weight_scale, Tensor alpha,
#: ScalarType output_dtype, bool to_userbuffers=False, str allowed_backends="cublaslt,blas,int8")
#: -> Tensor``; see docs/nvfp4.md.
nvfp4_gemm = custom_op(
    "hotop::nvfp4_gemm",
    _gemm_on_cpu,
    mutates_args=(),
    device_types="cpu",
    schema=(
        "(Tensor act_fp4, Tensor weight, Tensor act_sf, Tensor weight_scale, Tensor alpha, "
        "ScalarType output_dtype, bool to_userbuffers=False, "
        f'str allowed_backends="{BACKENDS}") -> Tensor'
    ),
)


def _check_backends(allowed_backends: str, *arguments: Any) -> None:
    """Raise what the CPU's tunable raises for ``allowed_backends``; it knows every tactic."""
    if allowed_backends != BACKENDS:
        _gemm_on_cpu.candidates((*arguments, False, allowed_backends), {})


@nvfp4_gemm.register_kernel("cuda")
def _(
    act_fp4: Tensor,
    weight: Tensor,
    act_sf: Tensor,
    weight_scale: Tensor,
    alpha: Tensor,
    output_dtype: torch.dtype,
    to_userbuffers: bool = False,
    allowed_backends: str = BACKENDS,
) -> Tensor:
    arguments = (act_fp4, weight, act_sf, weight_scale, alpha, output_dtype)
    _check_backends(allowed_backends, *arguments)
    return _cuda.gemm(*arguments)


@nvfp4_gemm.register_fake
def _(
    act_fp4: Tensor,
    weight: Tensor,
    act_sf: Tensor,
    weight_scale: Tensor,
    alpha: Tensor,
    output_dtype: torch.dtype,
    to_userbuffers: bool = False,
    allowed_backends: str = BACKENDS,
) -> Tensor:
    arguments = (act_fp4, weight, act_sf, weight_scale, alpha, output_dtype)
    _check_backends(allowed_backends, *arguments)
    check_gemm(*arguments)
    return act_fp4.new_empty((*act_fp4.shape[:-1], weight.shape[0]), dtype=output_dtype)


def _dequantize(
    packed: Tensor,
    sf: Tensor,
    global_scale: Tensor,
    dtype: torch.dtype,
    is_sf_swizzled_layout: bool,
) -> Tensor:
    dequantize = kernels.dequantize if packed.device.type == "cpu" else reference.dequantize
    result: Tensor = dequantize(packed, sf, global_scale, dtype, is_sf_swizzled_layout)
    return result


_dequantize_op = custom_op(
    "hotop::nvfp4_dequantize",
    _dequantize,
    mutates_args=(),
    schema=(
        "(Tensor packed, Tensor sf, Tensor global_scale, ScalarType dtype, "
        "bool is_sf_swizzled_layout) -> Tensor"
    ),
)


@_dequantize_op.register_fake
def _(
    packed: Tensor,
    sf: Tensor,
    global_scale: Tensor,
    dtype: torch.dtype,
    is_sf_swizzled_layout: bool,
) -> Tensor:
    check_dequantize(packed, sf, global_scale, dtype, is_sf_swizzled_layout)
    return packed.new_empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=dtype)


def nvfp4_dequantize(
    packed: Tensor,
    sf: Tensor,
    global_scale: Tensor,
    dtype: torch.dtype = torch.float32,
    is_sf_swizzled_layout: bool = False,
) -> Tensor:
    """Return the values that NVFP4 codes stand for: ``e2m1 * sf * (1 / global_scale)``.

    What is 0 before the global scale stays 0 whatever that is.

    Args:
        packed: uint8 ``[..., k/2]``, two e2m1 codes a byte, the even element in the low half.
        sf: uint8, the e4m3 bits of the scales: ``[..., k/16]``, or swizzled in 1 dimension.
        global_scale: float32, one element: the ``input_scale`` of the quantization.
        dtype: float32, bfloat16 or float16; computed in float32.
        is_sf_swizzled_layout: The layout of ``sf``.

    Returns:
        ``[..., k]`` of ``dtype``.

    Raises:
        TypeError: A dtype is another one.
        ValueError: The sizes of ``sf`` and ``packed`` do not fit.
    """
    result: Tensor = _dequantize_op(packed, sf, global_scale, dtype, is_sf_swizzled_layout)
    return result


def swizzle(sf: Tensor) -> Tensor:
    """Return scales uint8 ``[m, c]`` in the tensor cores' layout, 1-D, zero in the padding.

    The layout is NVIDIA's 1-D block scaling layout of the cuBLAS documentation: row ``r`` and
    column ``c`` lie at ``((r/128)*ceil(C/4) + c/4)*512 + (r%32)*16 + ((r%128)/32)*4 + c%4``.
    """
    if sf.device.type != "cpu":
        return reference.swizzle(sf)
    return kernels.swizzle(sf)


def unswizzle(sf: Tensor, rows: int, columns: int) -> Tensor:
    """Return the scales ``[rows, columns]`` of a swizzled 1-D Tensor; see :func:`swizzle`."""
    if sf.device.type != "cpu":
        return reference.unswizzle(sf, rows, columns)
    return kernels.unswizzle(sf, rows, columns)
