"""What a call of PyTorch's own operators costs: the torch function, the overload, accelerated."""

import operator
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

import hotop
from hotop.bench.cases import INFERENCE_MODE, NO_GRAD, mode_context
from hotop.bench.existing_ops import ACCELERATED, TODAY
from hotop.bench.timing import Timing, make_loop, time_interleaved

__all__ = ["FUNCTION", "MODES", "AtenRow", "geometric_mean_ratio", "make_calls", "measure_aten"]

FUNCTION = "function"
MODES = (NO_GRAD, INFERENCE_MODE)
_ROUNDS = 120


@dataclass(frozen=True)
class AtenCall:
    """One operator, and one call of it that the function and the overload take alike.

    Attributes:
        overload: The operator.
        function: The same operator's function in C++: no wrapper in Python around it.
        positional: Arguments passed by position.
        keywords: Arguments passed by name.
        function_positional: What the function takes instead, where it is an index expression.
    """

    overload: OpOverload
    function: Callable[..., Any]
    positional: Sequence[object]
    keywords: Mapping[str, object] = field(default_factory=dict)
    function_positional: Sequence[object] | None = None

    def for_function(self) -> Sequence[object]:
        """Returns the function's positional arguments."""
        return self.positional if self.function_positional is None else self.function_positional


@dataclass(frozen=True)
class AtenRow:
    """One operator's call: the function, the overload as PyTorch made it, and accelerated."""

    name: str
    mode: str
    road: str
    reason: str
    timings: dict[str, Timing]

    def ratio(self, contender: str, other: str, *, median: bool = False) -> float:
        """Returns the whole call of `contender` as a multiple of `other`'s, kernel included."""
        first, second = self.timings[contender], self.timings[other]
        if median:
            return first.median_ns / second.median_ns
        return first.minimum_ns / second.minimum_ns

    def as_json(self) -> dict[str, object]:
        """Returns plain data."""
        return asdict(self) | {
            "accelerated / function": self.ratio(ACCELERATED, FUNCTION),
            "today / accelerated": self.ratio(TODAY, ACCELERATED),
        }


def geometric_mean_ratio(
    rows: Sequence[AtenRow], contender: str, other: str, *, median: bool = False
) -> float:
    """Returns the geometric mean over `rows` of `contender`'s call as a multiple of `other`'s."""
    return statistics.geometric_mean(row.ratio(contender, other, median=median) for row in rows)


def make_calls() -> list[AtenCall]:
    """Makes the calls: the operators that exported and compiled models call most, 4 x 4 float32."""
    aten, nn = torch.ops.aten, torch._C._nn
    x, y, row = torch.rand(4, 4) + 0.5, torch.rand(4, 4) + 0.5, torch.rand(4)
    batch, image = torch.rand(1, 4, 4), torch.rand(1, 4, 2, 2)
    heads = [torch.rand(1, 2, 4, 4) for _ in range(3)]
    index = torch.tensor([0, 2])
    return [
        AtenCall(aten.add.Tensor, torch.add, [x, y]),
        AtenCall(aten.add.Tensor, torch.add, [x, 1.0]),
        AtenCall(aten.sub.Tensor, torch.sub, [x, y]),
        AtenCall(aten.mul.Tensor, torch.mul, [x, y]),
        AtenCall(aten.div.Tensor, torch.div, [x, 2]),
        AtenCall(aten.pow.Tensor_Scalar, torch.pow, [x, 2]),
        AtenCall(aten.rsqrt.default, torch.rsqrt, [x]),
        AtenCall(aten.mm.default, torch.mm, [x, y]),
        AtenCall(aten.bmm.default, torch.bmm, [batch, batch]),
        AtenCall(aten.addmm.default, torch.addmm, [row, x, y]),
        AtenCall(aten.matmul.default, torch.matmul, [x, y]),
        AtenCall(aten.linear.default, nn.linear, [x, y, row]),
        AtenCall(aten.conv2d.default, torch.conv2d, [image, torch.rand(4, 4, 1, 1), row]),
        AtenCall(aten.cat.default, torch.cat, [[x, y], -1]),
        AtenCall(aten.view.default, Tensor.view, [x, [2, 8]]),
        AtenCall(aten.reshape.default, torch.reshape, [x, [2, -1]]),
        AtenCall(aten.permute.default, torch.permute, [x, [1, 0]]),
        AtenCall(aten.transpose.int, torch.transpose, [x, 0, 1]),
        AtenCall(aten.t.default, torch.t, [x]),
        AtenCall(aten.select.int, torch.select, [x, 0, 1]),
        AtenCall(
            aten.slice.Tensor, operator.getitem, [x, 0, 1, 3], function_positional=[x, slice(1, 3)]
        ),
        AtenCall(aten.unsqueeze.default, torch.unsqueeze, [x, 0]),
        AtenCall(aten.expand.default, Tensor.expand, [row, [4, 4]]),
        AtenCall(aten.chunk.default, torch.chunk, [x, 2, -1]),
        AtenCall(aten.relu.default, torch.relu, [x]),
        AtenCall(aten.gelu.default, nn.gelu, [x]),
        AtenCall(aten.silu.default, nn.silu, [x]),
        AtenCall(aten.sigmoid.default, torch.sigmoid, [x]),
        AtenCall(aten.dropout.default, torch.dropout, [x, 0.1, False]),
        AtenCall(aten._softmax.default, torch._softmax, [x, -1, False]),
        AtenCall(aten.softmax.int, torch.softmax, [x, -1]),
        AtenCall(aten.layer_norm.default, torch.layer_norm, [x, [4], row, row, 1e-5]),
        AtenCall(aten.native_layer_norm.default, torch.native_layer_norm, [x, [4], row, row, 1e-5]),
        AtenCall(aten.group_norm.default, torch.group_norm, [image, 2, row, row, 1e-5]),
        AtenCall(aten.scaled_dot_product_attention.default, nn.scaled_dot_product_attention, heads),
        AtenCall(aten.mean.dim, torch.mean, [x, [-1], True]),
        AtenCall(aten.sum.dim_IntList, torch.sum, [x, [-1]]),
        AtenCall(aten.embedding.default, torch.embedding, [x, index]),
        AtenCall(aten.index.Tensor, operator.getitem, [x, [index]], function_positional=[x, index]),
        AtenCall(aten.where.self, torch.where, [x > y, x, y]),
        AtenCall(aten.clone.default, torch.clone, [x]),
        AtenCall(aten.copy_.default, Tensor.copy_, [torch.empty(4, 4), x]),
        AtenCall(aten.to.dtype, Tensor.to, [x, torch.float64]),
        AtenCall(aten.empty_like.default, torch.empty_like, [x]),
        AtenCall(aten.dim.default, Tensor.dim, [x]),
    ]


def _twin_of(overload: OpOverload) -> OpOverload:
    """Returns a second object of PyTorch's class for the same operator, never accelerated."""
    twin = OpOverload.__new__(OpOverload)
    twin.__dict__.update(overload.__dict__)
    return twin


@contextmanager
def _accelerated(overloads: Sequence[OpOverload]) -> Iterator[None]:
    for overload in overloads:
        hotop.accelerate(overload)
    try:
        yield
    finally:
        for overload in overloads:
            hotop.restore(overload)


def measure_aten(
    *, quick: bool = False, on_call: Callable[[str], None] = lambda name: None
) -> list[AtenRow]:
    """Times every call in each mode; the three contenders in the same rounds."""
    rounds = _ROUNDS // 10 if quick else _ROUNDS
    calls = make_calls()
    twins = [_twin_of(call.overload) for call in calls]
    rows = []
    # Each operator once: some have two calls here.
    with _accelerated(list({str(call.overload): call.overload for call in calls}.values())):
        for mode in MODES:
            for call, twin in zip(calls, twins, strict=True):
                on_call(f"{_title(call)}, {mode}")
                rows.append(_measure(call, twin, mode, rounds))
    return rows


def _measure(call: AtenCall, twin: OpOverload, mode: str, rounds: int) -> AtenRow:
    loops = {
        FUNCTION: make_loop(call.function, call.for_function(), call.keywords),
        TODAY: make_loop(twin, call.positional, call.keywords),
        ACCELERATED: make_loop(call.overload, call.positional, call.keywords),
    }
    with mode_context(mode):
        answer = hotop.explain(call.overload, *call.positional, **call.keywords)
    timings = time_interleaved(loops, rounds=rounds, context=partial(mode_context, mode))
    return AtenRow(_title(call), mode, str(answer.road), answer.reason, timings)


def _title(call: AtenCall) -> str:
    """Returns the operator's name, and what is unusual about the arguments."""
    name = str(call.overload).removeprefix("aten.").removesuffix(".default")
    second = call.positional[1] if len(call.positional) > 1 else None
    number = name.endswith(".Tensor") and isinstance(second, (int, float))
    return f"{name}, number" if number and len(call.positional) == 2 else name
