"""Subclasses of `NVFP4Linear`, one for every variant, each with a forward of its own."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor

from hotop.nvfp4 import NVFP4Linear

Forward = Callable[[Any, Tensor], Tensor]


def own_code(function: Any) -> Any:
    """Copy a function with its code object.

    CPython specialises code objects and Dynamo keeps its graphs by them, so variants that shared
    one would slow each other down.
    """
    code: CodeType = function.__code__.replace()
    copied = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def linear_class(name: str, forward: Forward) -> type[NVFP4Linear]:
    """Make the subclass of one variant."""
    return type(name, (NVFP4Linear,), {"forward": own_code(forward)})


def by_callables(quantize: Callable[..., Any], gemm: Callable[..., Any]) -> Forward:
    """Make a forward that calls these two, otherwise that of `NVFP4Linear`."""

    def forward(self: NVFP4Linear, x: Tensor) -> Tensor:
        act, act_sf = quantize(x, self.input_scale, 16, True)
        y = gemm(act, self.weight, act_sf, self.weight_scale, self.alpha, x.dtype)
        return y if self.bias is None else y + self.bias

    return forward
