"""optimum-quanto: quantized layers, calibration, freezing; ops by `define` + `impl`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tools.third_party.step import Step

NAMESPACES = ("quanto",)


def load() -> None:
    """Imports all that registers ops."""
    import optimum.quanto  # noqa: F401


def _plain(value: torch.Tensor) -> torch.Tensor:
    """The values of a quantized Tensor; others as they are."""
    return value.dequantize() if type(value) is not torch.Tensor else value


class _Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.LayerNorm(64)
        self.up = torch.nn.Linear(64, 256)
        self.down = torch.nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def _model(weights: str, activations: str | None, dtype: torch.dtype, frozen: bool) -> Any:
    from optimum.quanto import Calibration, freeze, qtypes, quantize

    model = _Net().to(dtype)
    quantize(model, weights=qtypes[weights], activations=activations and qtypes[activations])
    x = torch.randn(2, 3, 8, 8, dtype=dtype)
    if activations:
        with torch.no_grad(), Calibration():
            model(x)
    if frozen:
        freeze(model)
        with torch.no_grad():
            return [_plain(model(x + i)) for i in range(2)]
    y = model(x)
    _plain(y).square().mean().backward()
    return _plain(y), [p.grad for p in model.parameters()]


def _weight(name: str, axis: int) -> Any:
    from optimum.quanto import MaxOptimizer, qtypes, quantize_weight

    w = torch.randn(128, 128)
    qtype = qtypes[name]
    if qtype.bits < 8:
        scale, shift = MaxOptimizer()(w, qtype=qtype, axis=axis, group_size=64)
        q = quantize_weight(w, qtype, axis, scale, shift, group_size=64)
    else:
        scale = w.abs().amax(dim=1 - axis % 2, keepdim=True) / 127
        q = quantize_weight(w, qtype, axis, scale, optimized=False)
    return q.dequantize(), torch.nn.functional.linear(torch.randn(3, 128), q)


def _compiled() -> Any:
    from optimum.quanto import freeze, qint8, quantize

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    quantize(model, weights=qint8)
    freeze(model)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        return [compiled(torch.randn(rows, 64)) for rows in (3, 3, 4)]


def _bad_axis() -> Any:
    from optimum.quanto import qint8
    from optimum.quanto.tensor import WeightQBytesTensor

    return WeightQBytesTensor.quantize(torch.ones(2, 2), qint8, 7, torch.ones(2, 1))


def steps() -> Iterator[Step]:
    """A small model quantized as the package's README does it, by weight and activation type."""
    for weights, activations, dtype, frozen in (
        ("qint8", None, torch.float32, False),
        ("qint8", None, torch.float32, True),
        ("qint8", None, torch.bfloat16, True),
        ("qint8", "qint8", torch.float32, True),
        ("qfloat8", None, torch.float32, True),
        ("qfloat8", "qfloat8", torch.float32, True),
        ("qint4", None, torch.float32, True),
        ("qint4", None, torch.float32, False),
        ("qint2", None, torch.float32, True),
    ):
        yield Step(
            f"model {weights} {activations or 'no'} activations {dtype}"
            + (" frozen" if frozen else " forward and backward"),
            lambda w=weights, a=activations, d=dtype, f=frozen: _model(w, a, d, f),
        )
    yield Step("quantize_weight qint4", lambda: _weight("qint4", 0))
    yield Step("quantize_weight qint2", lambda: _weight("qint2", -1))
    yield Step("quantize_weight qint8", lambda: _weight("qint8", 0))
    yield Step("model compiled", _compiled, "compiled")
    yield Step("quantize along a wrong axis", _bad_axis, "error")
