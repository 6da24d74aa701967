"""torchao: quantized models, QAT, primitives; ops by its helper over `define` + `impl`."""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tools.third_party.step import Step

NAMESPACES = ("torchao", "quant", "blocksparse", "quant_logger", "ao")


def load() -> None:
    """Imports all that registers ops."""
    import torchao
    import torchao.prototype.quant_logger.quant_logger
    import torchao.quantization
    import torchao.quantization.qat
    import torchao.sparsity.blocksparse  # noqa: F401


def _model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)
    ).to(dtype)


def _quantized(config: Any, dtype: torch.dtype) -> Any:
    from torchao.quantization import quantize_

    model = _model(dtype)
    quantize_(model, config())
    with torch.no_grad():
        return [model(torch.randn(rows, 64, dtype=dtype)) for rows in (1, 6)]


def _configs() -> Iterator[tuple[str, Any, torch.dtype]]:
    import torchao.quantization as quantization

    group = quantization.PerGroup(32)
    yield "int8 weights", quantization.Int8WeightOnlyConfig, torch.bfloat16
    yield (
        "int8 weights and activations",
        quantization.Int8DynamicActivationInt8WeightConfig,
        torch.float32,
    )
    for bits in (torch.int2, torch.int4, torch.int8):
        yield (
            f"{bits} weights by group",
            lambda b=bits: quantization.IntxWeightOnlyConfig(weight_dtype=b, granularity=group),
            torch.float32,
        )
    yield (
        "int8 activations int4 weights",
        lambda: quantization.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=group
        ),
        torch.float32,
    )
    yield "float8 weights", quantization.Float8WeightOnlyConfig, torch.bfloat16


def _qat() -> Any:
    import torchao.quantization as quantization
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    model = _model()
    base = quantization.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=quantization.PerGroup(32)
    )
    quantize_(model, QATConfig(base, step="prepare"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 64)).square().mean()
        loss.backward()
        losses.append(loss)
        optimizer.step()
    trained = [p.detach().clone() for p in model.parameters()]
    grads = [p.grad for p in model.parameters()]
    quantize_(model, QATConfig(base, step="convert"))
    with torch.no_grad():
        return losses, trained, grads, model(torch.randn(4, 64))


def _primitives(symmetric: bool, dtype: torch.dtype) -> Any:
    import torchao.quantization.quant_primitives as primitives

    x = torch.randn(8, 64)
    mapping = primitives.MappingType.SYMMETRIC if symmetric else primitives.MappingType.ASYMMETRIC
    bits: dict[str, int] = {} if dtype == torch.int8 else {"quant_min": 0, "quant_max": 15}
    block = (1, 32)
    scale, zero = primitives.choose_qparams_affine(x, mapping, block, dtype, **bits)
    q = primitives.quantize_affine(x, block, scale, zero, dtype, **bits)
    back = primitives.dequantize_affine(q, block, scale, zero, dtype, **bits)
    half = primitives.dequantize_affine(
        q, block, scale, zero, dtype, output_dtype=torch.bfloat16, **bits
    )
    return scale, zero, q, back, half


def _float8() -> Any:
    import torchao.quantization.quant_primitives as primitives

    x = torch.randn(8, 64)
    scale = primitives._choose_scale_float8(x, [1, 64])
    ops = torch.ops.torchao
    q = ops.quantize_affine_float8_non_decomposed(x, scale, torch.float8_e4m3fn)
    back = ops.dequantize_affine_float8_non_decomposed(q, scale, torch.float32)
    return scale, q.view(torch.uint8), back


def _logger() -> Any:
    from torchao.prototype.quant_logger import quant_logger

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    x = torch.randn(2, 8)
    version, count = x._version, quant_logger.counter[0]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        quant_logger.log_tensor(x, "0", "linear", "act")
        quant_logger.log_tensor(x, "0", "linear", "act", extra="again")
    # The package counts its calls in the process: who ran before must not show.
    text = printed.getvalue().replace(f"c={count}", "c=0").replace(f"c={count + 1}", "c=1")
    return model(x), x._version - version, quant_logger.counter[0] - count, text


def _logger_redefined() -> Any:
    """The package's own way to change what is logged: it defines the op a second time."""
    from torchao.prototype.quant_logger import quant_logger

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.csv"
        quant_logger.enable_log_stats_to_file(path)
        x, count = torch.randn(2, 8), quant_logger.counter[0]
        torch.ops.quant_logger.log_tensor(x, "0", "linear", "act")
        rows = path.read_text().replace(f",{count},", ",0,")
    return rows, x._version, quant_logger.counter[0] - count


def _sparse() -> Any:
    from torchao.sparsity.blocksparse import bsr_to_dense

    dense = torch.randn(32, 32) * (torch.rand(4, 4) > 0.5).float().kron(torch.ones(8, 8))
    bsr = dense.to_sparse_bsr(8)
    return bsr_to_dense(bsr.crow_indices(), bsr.col_indices(), bsr.values(), 32, 32), dense


def _compiled() -> Any:
    import torchao.quantization as quantization
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    model = _model()
    base = quantization.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=quantization.PerGroup(32)
    )
    quantize_(model, QATConfig(base, step="prepare"))
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager")
    found = []
    for rows in (3, 3, 4):
        x = torch.randn(rows, 64, requires_grad=True)
        y = compiled(x)
        found.append((y, *torch.autograd.grad(y.square().sum(), x)))
    return found


def _exported() -> Any:
    import torchao.quantization as quantization
    from torchao.quantization import quantize_

    model = _model()
    config = quantization.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4,
        weight_granularity=quantization.PerGroup(32),
    )
    quantize_(model, config)
    from torchao.utils import unwrap_tensor_subclass

    unwrap_tensor_subclass(model)
    x = torch.randn(4, 64)
    with torch.no_grad():
        program = torch.export.export(model, (x,)).module()
        names = sorted(str(n.target) for n in program.graph.nodes if n.op == "call_function")
        return [program(torch.randn(4, 64)) for _ in range(3)], names


def _wrong_block() -> Any:
    import torchao.quantization.quant_primitives as primitives

    return primitives.quantize_affine(
        torch.ones(4, 6), (1, 4), torch.ones(4), torch.zeros(4), torch.int8
    )


def steps() -> Iterator[Step]:
    """Post-training and quantization-aware training of a small model, and the primitives."""
    for name, config, dtype in _configs():
        yield Step(f"model {name}", lambda c=config, d=dtype: _quantized(c, d))
    yield Step("QAT, trained and converted", _qat)
    for symmetric in (True, False):
        for dtype in (torch.int8, torch.uint8):
            yield Step(
                f"primitives {'' if symmetric else 'a'}symmetric {dtype}",
                lambda s=symmetric, d=dtype: _primitives(s, d),
            )
    yield Step("float8 primitives", _float8)
    yield Step("quant_logger", _logger)
    yield Step("block-sparse", _sparse)
    yield Step("QAT compiled", _compiled, "compiled")
    yield Step("model exported and run", _exported, "compiled")
    yield Step("quantize with a wrong block", _wrong_block, "error")
    yield Step("quant_logger, redefined", _logger_redefined, "once")
