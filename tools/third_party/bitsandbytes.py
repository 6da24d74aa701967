"""bitsandbytes: 4-bit and 8-bit layers, quantization, functional; ops by `define` + `impl`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tools.third_party.step import Step

NAMESPACES = ("bitsandbytes",)


def load() -> None:
    """Imports all that registers ops."""
    import bitsandbytes  # noqa: F401


def _linear4bit(quant_type: str, dtype: torch.dtype, nested: bool) -> Any:
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(
        128, 64, compute_dtype=dtype, quant_type=quant_type, compress_statistics=nested
    )
    return layer.to("cpu")


def _forward_backward(layer: torch.nn.Module, dtype: torch.dtype) -> Any:
    x = torch.randn(2, 7, layer.in_features, dtype=dtype, requires_grad=True)
    y = layer(x)
    y.square().sum().backward()
    bias = layer.bias.grad if layer.bias is not None else None
    return y, x.grad, bias


def _mlp4bit() -> Any:
    model = torch.nn.Sequential(
        _linear4bit("nf4", torch.float32, True),
        torch.nn.GELU(),
        torch.nn.Linear(64, 128),
        _linear4bit("fp4", torch.float32, False),
    )
    outputs = []
    with torch.no_grad():
        for rows in (1, 5):
            outputs.append(model(torch.randn(rows, 128)))
    return outputs


def _int8(threshold: float) -> Any:
    import bitsandbytes as bnb

    layer = bnb.nn.Linear8bitLt(128, 64, has_fp16_weights=False, threshold=threshold)
    layer = layer.to("cpu")
    x = torch.randn(4, 128)
    x[:, 3] *= 20  # an outlier column, for the mixed matmul
    x.requires_grad_()
    y = layer(x)
    y.float().sum().backward()
    with torch.no_grad():
        again = layer(x)
    return y, x.grad, again


def _blockwise(dtype: torch.dtype, nested: bool) -> Any:
    import bitsandbytes.functional as functional

    a = torch.randn(33, 65, dtype=dtype)
    packed, state = functional.quantize_blockwise(a, blocksize=256, nested=nested)
    return packed, state.absmax, functional.dequantize_blockwise(packed, state)


def _four_bit(quant_type: str) -> Any:
    import bitsandbytes.functional as functional

    a = torch.randn(64, 96, dtype=torch.bfloat16)
    packed, state = functional.quantize_4bit(
        a, blocksize=64, quant_type=quant_type, compress_statistics=True
    )
    return packed, state.absmax, functional.dequantize_4bit(packed, state)


def _int8_functional() -> Any:
    import bitsandbytes.functional as functional

    a, b = torch.randn(8, 64, dtype=torch.float16), torch.randn(16, 64, dtype=torch.float16)
    qa, sa, _ = functional.int8_vectorwise_quant(a)
    qb, sb, outliers = functional.int8_vectorwise_quant(b, threshold=2.0)
    product = functional.int8_linear_matmul(qa, qb)
    out = torch.empty_like(product)
    functional.int8_linear_matmul(qa, qb, out=out)
    scaled = functional.int8_mm_dequant(product, sa, sb, bias=torch.ones(16, dtype=torch.float16))
    return (
        qa,
        sa,
        qb,
        sb,
        outliers,
        product,
        out,
        scaled,
        functional.int8_vectorwise_dequant(qa, sa),
    )


def _optimizer(name: str, **options: Any) -> Any:
    import bitsandbytes as bnb

    model = torch.nn.Linear(64, 128)
    optimizer = getattr(bnb.optim, name)(model.parameters(), lr=1e-2, **options)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
    return list(model.parameters())


def _compiled() -> Any:
    layer = _linear4bit("nf4", torch.float32, False)
    compiled = torch.compile(layer, backend="aot_eager")
    with torch.no_grad():
        return [compiled(torch.randn(rows, 128)) for rows in (3, 3, 4)]


def _no_kernel() -> Any:
    import bitsandbytes.functional as functional

    a = torch.randn(256)
    packed, state = functional.quantize_blockwise(a, blocksize=256)
    return functional.dequantize_blockwise(packed, state, out=torch.empty_like(a))


def steps() -> Iterator[Step]:
    """The package's layers, functions and optimizers as its documentation calls them."""
    for quant_type, dtype, nested in (
        ("nf4", torch.float32, True),
        ("fp4", torch.bfloat16, False),
        ("nf4", torch.float16, True),
    ):
        yield Step(
            f"Linear4bit {quant_type} {dtype}",
            lambda q=quant_type, d=dtype, n=nested: _forward_backward(_linear4bit(q, d, n), d),
        )
    yield Step("4-bit MLP, no_grad", _mlp4bit)
    yield Step("Linear8bitLt", lambda: _int8(0.0))
    yield Step("Linear8bitLt with outliers", lambda: _int8(6.0))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield Step(f"quantize_blockwise {dtype}", lambda d=dtype: _blockwise(d, False))
    yield Step("quantize_blockwise nested", lambda: _blockwise(torch.float32, True))
    yield Step("quantize_4bit nf4", lambda: _four_bit("nf4"))
    yield Step("quantize_4bit fp4", lambda: _four_bit("fp4"))
    yield Step("int8 functions", _int8_functional)
    yield Step("Adam8bit", lambda: _optimizer("Adam8bit", min_8bit_size=16))
    yield Step("AdamW32bit", lambda: _optimizer("AdamW32bit"))
    yield Step("Lion8bit", lambda: _optimizer("Lion8bit", min_8bit_size=16))
    yield Step("SGD8bit", lambda: _optimizer("SGD8bit", momentum=0.9, min_8bit_size=16))
    yield Step("Linear4bit compiled", _compiled, "compiled")
    yield Step("an overload without a CPU kernel", _no_kernel, "error")
