"""NVFP4 on NVIDIA GPUs: quantization by `_nvfp4_cuda.so`, GEMM by PyTorch's block-scaled matmul.

Not yet run on hardware. What the CPU can check is checked: the kernel compiles, its arithmetic is
tested on the host, and PyTorch's own meta function accepts the arguments of the matmul.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import warnings

import torch
from torch import Tensor

from hotop.nvfp4 import reference
from hotop.nvfp4._checks import BACKENDS, check_gemm, check_quantize, swizzled_size

__all__ = ["gemm", "library_problem", "quantize"]

_ABI_VERSION = 1
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ABSENT = (
    "hotop was built without its CUDA kernels: build it where nvcc is found "
    "(HOTOP_CUDA=ON makes a failure an error)"
)


def library_problem() -> str | None:
    """Say in one sentence why the CUDA kernels cannot be used, or None if they can."""
    return _load()[1]


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    # Not a Python module, but found as one, so that every way of installing hotop is served.
    spec = importlib.util.find_spec("hotop._nvfp4_cuda")
    if spec is None or spec.origin is None:
        return None, _ABSENT
    return _open(spec.origin)


def _open(path: str) -> tuple[ctypes.CDLL | None, str | None]:
    try:
        library = ctypes.CDLL(path)
        version = library.hotop_nvfp4_cuda_abi_version()
    except (OSError, AttributeError) as error:
        return None, f"hotop's CUDA kernels cannot be loaded ({error}): rebuild hotop"
    if version != _ABI_VERSION:
        return None, (
            f"hotop's CUDA kernels have interface {version}, this hotop needs {_ABI_VERSION}: "
            "rebuild hotop"
        )
    int32, int64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    library.hotop_nvfp4_cuda_error_string.restype = ctypes.c_char_p
    library.hotop_nvfp4_cuda_error_string.argtypes = [int32]
    library.hotop_nvfp4_cuda_quantize.restype = int32
    library.hotop_nvfp4_cuda_quantize.argtypes = [
        pointer,  # input
        int64,  # rows
        int64,  # k
        int64,  # row_stride
        int32,  # dtype
        pointer,  # input_scale
        pointer,  # packed
        pointer,  # sf
        int32,  # swizzled
        int32,  # device
        pointer,  # stream
    ]
    return library, None


@functools.cache
def _warn_once(problem: str) -> None:
    warnings.warn(
        f"{problem}. Until then NVFP4 on CUDA is quantized by PyTorch operators, which is slow.",
        stacklevel=3,
    )


def quantize(
    input: Tensor,
    input_scale: Tensor,
    scaling_vector_size: int = 16,
    is_sf_swizzled_layout: bool = False,
) -> list[Tensor]:
    """Quantize a CUDA Tensor on the current stream, with the bytes of `reference.quantize`.

    Not yet run on hardware. Without the compiled kernels it warns once and runs the reference.

    Args:
        input: `[..., k]` on a CUDA device, float32, bfloat16 or float16, `k` a multiple of 16.
            Rows may be any distance apart; another layout is made contiguous first.
        input_scale: float32, one element, on the same device.
        scaling_vector_size: 16.
        is_sf_swizzled_layout: the layout of the scales.

    Returns:
        `[packed, sf]` as of `reference.quantize`.

    Raises:
        TypeError: `input` or `input_scale` has another dtype.
        ValueError: a shape, a device or `scaling_vector_size` is wrong.
        RuntimeError: CUDA refused the launch.
    """
    check_quantize(input, input_scale, scaling_vector_size)
    if input.device.type != "cuda" or input_scale.device != input.device:
        raise ValueError(
            "tunable_fp4_quantize: input and input_scale must be on one CUDA device, "
            f"got {input.device} and {input_scale.device}"
        )
    library, problem = _load()
    if library is None:
        _warn_once(str(problem))
        return reference.quantize(input, input_scale, is_sf_swizzled_layout)
    stream = torch.cuda.current_stream(input.device).cuda_stream
    return _launch(library, input, input_scale, is_sf_swizzled_layout, stream)


def _launch(
    library: ctypes.CDLL, input: Tensor, input_scale: Tensor, swizzled: bool, stream: int
) -> list[Tensor]:
    k = input.shape[-1]
    rows = input.numel() // k if k else 0
    # A view if the rows lie evenly, else a copy.
    matrix = input.detach().reshape(rows, k)
    if matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    device = input.device
    packed = torch.empty((*input.shape[:-1], k // 2), dtype=torch.uint8, device=device)
    shape = [*input.shape[:-1], k // 16]
    if swizzled:
        shape = [swizzled_size(rows, k // 16)]
    sf = torch.empty(shape, dtype=torch.uint8, device=device)
    error = library.hotop_nvfp4_cuda_quantize(
        matrix.data_ptr(),
        rows,
        k,
        matrix.stride(0),
        _DTYPES[input.dtype],
        input_scale.data_ptr(),
        packed.data_ptr(),
        sf.data_ptr(),
        swizzled,
        device.index or 0,
        stream,
    )
    if error != 0:
        text = library.hotop_nvfp4_cuda_error_string(error).decode()
        raise RuntimeError(f"tunable_fp4_quantize: CUDA error {error}: {text}")
    return [packed, sf]


def gemm(
    act_fp4: Tensor,
    weight: Tensor,
    act_sf: Tensor,
    weight_scale: Tensor,
    alpha: Tensor,
    output_dtype: torch.dtype,
    to_userbuffers: bool = False,
    allowed_backends: str = BACKENDS,
) -> Tensor:
    """Multiply NVFP4 matrices on a CUDA device: `alpha * (act @ weight.T)`.

    Not yet run on hardware. Blackwell GPUs use `torch.nn.functional.scaled_mm`, that is cuBLAS on
    the tensor cores, if k is a multiple of 32 and n one of 16, as it asks; all else decodes to
    float32 and multiplies that.

    Args:
        act_fp4: `[..., k / 2]` uint8.
        weight: `[n, k / 2]` uint8.
        act_sf: the scales of `act_fp4`, 1-D uint8, swizzled.
        weight_scale: the scales of `weight`, 1-D uint8, swizzled.
        alpha: float32, one element, on the same device.
        output_dtype: float32, bfloat16 or float16.
        to_userbuffers: not read.
        allowed_backends: not read.

    Returns:
        `[..., n]` of `output_dtype`.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: the shapes do not fit.
    """
    check_gemm(act_fp4, weight, act_sf, weight_scale, alpha, output_dtype)
    if not _has_block_scaled_mm(act_fp4.device) or not _fits_block_scaled_mm(act_fp4, weight):
        return reference.gemm(act_fp4, weight, act_sf, weight_scale, alpha, output_dtype)
    one = _one(act_fp4.device)
    return _block_scaled_mm(act_fp4, weight, act_sf, weight_scale, alpha, one, output_dtype)


@functools.cache
def _has_block_scaled_mm(device: torch.device) -> bool:
    return (
        hasattr(torch.nn.functional, "scaled_mm")
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(device)[0] >= 10
    )


def _fits_block_scaled_mm(act_fp4: Tensor, weight: Tensor) -> bool:
    """What `torch._scaled_mm_v2` asks of packed operands (its meta function)."""
    return act_fp4.numel() > 0 and weight.shape[1] % 16 == 0 and weight.shape[0] % 16 == 0


_ones: dict[torch.device, Tensor] = {}


def _one(device: torch.device) -> Tensor:
    one = _ones.get(device)
    if one is None:
        one = torch.ones(1, dtype=torch.float32, device=device)
        # Memory of a graph under capture does not outlive it.
        if not torch.cuda.is_current_stream_capturing():
            _ones[device] = one
    return one


def _block_scaled_mm(
    act_fp4: Tensor,
    weight: Tensor,
    act_sf: Tensor,
    weight_scale: Tensor,
    alpha: Tensor,
    one: Tensor,
    output_dtype: torch.dtype,
) -> Tensor:
    functional = torch.nn.functional
    recipe = [functional.ScalingType.BlockWise1x16, functional.ScalingType.TensorWise]
    swizzle = [functional.SwizzleType.SWIZZLE_32_4_4, functional.SwizzleType.NO_SWIZZLE]
    # PyTorch multiplies the two TensorWise scales into cuBLAS's alpha: ours is in the first.
    result = functional.scaled_mm(
        act_fp4.reshape(-1, act_fp4.shape[-1]).contiguous().view(torch.float4_e2m1fn_x2),
        weight.contiguous().view(torch.float4_e2m1fn_x2).t(),
        [act_sf.contiguous().view(torch.float8_e4m3fn), alpha.reshape(1)],
        recipe,
        [weight_scale.contiguous().view(torch.float8_e4m3fn), one],
        recipe,
        swizzle,
        swizzle,
        output_dtype=output_dtype,
    )
    return result.reshape(*act_fp4.shape[:-1], weight.shape[0])
