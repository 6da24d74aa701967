"""Errors of the NVFP4 C++ kernels name the argument, what was expected and what was got."""

import pytest
import torch
from torch import Tensor

kernels = pytest.importorskip("hotop._nvfp4")


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def quantize_with(**changed):
    arguments = {"input": torch.ones(4, 32), "input_scale": scalar(1.0)} | changed
    return kernels.quantize(**arguments)


def gemm_with(**changed):
    packed, sf = kernels.quantize(torch.ones(4, 32), scalar(1.0), 16, True)
    arguments = {"act_fp4": packed, "weight": packed, "act_sf": sf, "weight_scale": sf}
    arguments |= {"alpha": scalar(1.0), "output_dtype": torch.float32} | changed
    return kernels.gemm(**arguments)


def vmapped(x: Tensor):
    return torch.vmap(lambda y: kernels.quantize(y, scalar(1.0))[0])(x)


BYTES = torch.ones(4, 16, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: quantize_with(input=torch.ones(16, dtype=torch.long)),
            TypeError,
            r"input must be float32, bfloat16 or float16, got Long",
        ),
        (
            lambda: quantize_with(input=torch.ones(16, device="meta")),
            RuntimeError,
            r"input must be on the CPU, got a Tensor on meta",
        ),
        (
            lambda: quantize_with(input=torch.ones(2, 24)),
            ValueError,
            r"last dimension of input must be a multiple of 16, got 24",
        ),
        (
            lambda: quantize_with(input=scalar(1.0)),
            ValueError,
            r"input must have at least one dimension",
        ),
        (
            lambda: quantize_with(input=torch.eye(16).to_sparse()),
            RuntimeError,
            r"input must be a plain strided Tensor",
        ),
        (lambda: vmapped(torch.ones(2, 16)), RuntimeError, r"input must be a plain strided Tensor"),
        (
            lambda: quantize_with(input=[1.0]),
            TypeError,
            r"argument 'input' must be Tensor, not list",
        ),
        (
            lambda: quantize_with(input_scale=torch.ones(2)),
            ValueError,
            r"input_scale must have one element, got 2",
        ),
        (
            lambda: quantize_with(input_scale=torch.ones(1).double()),
            TypeError,
            r"input_scale must be float32, got Double",
        ),
        (
            lambda: quantize_with(input_scale=1.0),
            TypeError,
            r"argument 'input_scale' must be Tensor, not float",
        ),
        (
            lambda: quantize_with(scaling_vector_size=32),
            ValueError,
            r"scaling_vector_size must be 16, got 32",
        ),
        (
            lambda: quantize_with(scaling_vector_size="16"),
            TypeError,
            r"'scaling_vector_size' must be int, not str",
        ),
        (
            lambda: quantize_with(is_sf_swizzled_layout=1),
            TypeError,
            r"'is_sf_swizzled_layout' must be bool, not int",
        ),
        (lambda: quantize_with(wrong=1), TypeError, r"unexpected keyword argument 'wrong'"),
        (
            lambda: kernels.quantize(torch.ones(16)),
            TypeError,
            r"missing required argument 'input_scale'",
        ),
        (
            lambda: kernels.quantize(BYTES, BYTES, input=BYTES),
            TypeError,
            r"multiple values for argument 'input'",
        ),
        (lambda: kernels.swizzle(BYTES, 1), TypeError, r"takes 1 arguments but 2 were given"),
        (
            lambda: gemm_with(act_fp4=torch.ones(4, 16)),
            TypeError,
            r"act_fp4 must be uint8, got Float",
        ),
        (
            lambda: gemm_with(weight=torch.ones(4, 16)),
            TypeError,
            r"weight must be uint8, got Float",
        ),
        (lambda: gemm_with(weight=BYTES[0]), ValueError, r"weight must have two dimensions, got 1"),
        (
            lambda: gemm_with(weight=BYTES[:, :8]),
            ValueError,
            r"weight must have 16 bytes in a row as act_fp4 has, got 8",
        ),
        (
            lambda: gemm_with(act_fp4=BYTES[:, :12], weight=BYTES[:, :12]),
            ValueError,
            r"last dimension of act_fp4 must be a multiple of 8, got 12",
        ),
        (
            lambda: gemm_with(act_sf=BYTES.flatten()),
            ValueError,
            r"act_sf must be 1-D with 512 elements .* 4 x 2 blocks.* got size \[64\]",
        ),
        (
            lambda: gemm_with(act_sf=torch.ones(128, 4, dtype=torch.uint8)),
            ValueError,
            r"act_sf must be 1-D",
        ),
        (
            lambda: gemm_with(weight_scale=torch.ones(512)),
            TypeError,
            r"weight_scale must be uint8, got Float",
        ),
        (lambda: gemm_with(alpha=torch.ones(3)), ValueError, r"alpha must have one element, got 3"),
        (
            lambda: gemm_with(alpha=scalar(1.0).half()),
            TypeError,
            r"alpha must be float32, got Half",
        ),
        (
            lambda: gemm_with(output_dtype=torch.int32),
            TypeError,
            r"output_dtype must be float32, bfloat16 or float16, got Int",
        ),
        (
            lambda: gemm_with(output_dtype="f"),
            TypeError,
            r"argument 'output_dtype' must be torch.dtype, not str",
        ),
        (
            lambda: gemm_with(alpha=scalar(1.0).to("meta")),
            RuntimeError,
            r"alpha must be on the CPU",
        ),
        (
            lambda: kernels.dequantize(BYTES, BYTES, scalar(1.0), torch.float32, False),
            ValueError,
            r"sf must have the size \[4, 2\], got \[4, 16\]",
        ),
        (
            lambda: kernels.dequantize(BYTES, BYTES, scalar(1.0), torch.float32, True),
            ValueError,
            r"sf must be 1-D with 512 elements",
        ),
        (
            lambda: kernels.unswizzle(BYTES.flatten(), 4, 4),
            ValueError,
            r"sf must be 1-D with 512 elements",
        ),
        (lambda: kernels.unswizzle(BYTES, -1, 4), ValueError, r"rows must not be negative, got -1"),
        (lambda: kernels.swizzle(torch.ones(2, 2)), TypeError, r"sf must be uint8, got Float"),
        (lambda: kernels.set_isa("sse9"), RuntimeError, r"unknown instruction set 'sse9'"),
        (lambda: kernels.set_isa(3), TypeError, r"'name' must be str, not int"),
    ],
)
def test_errors_name_the_argument(call, error, text):
    with pytest.raises(error, match=text):
        call()
