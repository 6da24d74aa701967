"""What a call costs in the states of a program: recorded by autograd, profiled, autocast, ..."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import hotop
from hotop.bench.contenders import (
    CUSTOM_OP,
    HOTOP,
    HOTOP_NAMESPACE,
    PLAIN,
    TORCH_NAMESPACE,
    new_name,
)
from hotop.bench.timing import Timing, make_loop, time_interleaved

__all__ = ["ATEN", "FUNCTION", "StateRow", "measure"]

FUNCTION = "autograd.Function"
ATEN = "aten op"
_ROUNDS = 60


@dataclass(frozen=True)
class StateRow:
    """One state: the time of each contender's call, and whether hotop's was direct."""

    state: str
    direct: bool
    timings: dict[str, Timing]

    def tax_us(self, contender: str) -> float:
        """Returns the call above the plain function's, in the same state."""
        return (self.timings[contender].minimum_ns - self.timings[PLAIN].minimum_ns) / 1e3

    def as_json(self) -> dict[str, object]:
        """Returns plain data."""
        return asdict(self) | {
            "tax_us": {name: self.tax_us(name) for name in self.timings if name != PLAIN}
        }


def _kernel(x: Tensor) -> Tensor:
    return x * x


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0] * ctx.saved_tensors[0]


def _make(factory: Callable[..., Any], namespace: str) -> Any:
    op = factory(f"{namespace}::{new_name('state')}", _kernel, mutates_args=())
    op.register_autograd(
        lambda ctx, grad: 2 * grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    return op


def _profiler() -> AbstractContextManager[object]:
    return torch.autograd.profiler.profile(use_kineto=False, record_shapes=True)


def measure(*, quick: bool = False) -> list[StateRow]:
    """Times ``x * x`` with a formula, one float32 Tensor of 3 elements, in each state."""
    upstream = _make(torch.library.custom_op, TORCH_NAMESPACE)
    hot = _make(hotop.custom_op, HOTOP_NAMESPACE)
    functions: dict[str, Callable[..., Any]] = {PLAIN: _kernel, CUSTOM_OP: upstream, HOTOP: hot}
    recorded = functions | {FUNCTION: _Square.apply}
    x, leaf = torch.ones(3), torch.ones(3, requires_grad=True)
    one = torch.ones(3)

    def backward(function: Callable[..., Any]) -> Callable[..., None]:
        return lambda x: torch.autograd.backward([function(x)], [one])

    both = {name: backward(function) for name, function in recorded.items()}
    cpu = torch.device("cpu")
    states: list[tuple[str, dict[str, Callable[..., Any]], Tensor, Callable[[], Any]]] = [
        ("no grad required", functions, x, nullcontext),
        ("no_grad, input requires grad", functions, leaf, torch.no_grad),
        ("inference_mode", functions, x, torch.inference_mode),
        ("autocast, no rule", functions, x, lambda: torch.autocast("cpu")),
        ("device context", functions, x, lambda: cpu),
        ("profiled, with shapes", functions | {ATEN: torch.square}, x, _profiler),
        ("recorded: forward", recorded, leaf, nullcontext),
        ("recorded: forward + backward", both, leaf, nullcontext),
    ]
    rounds = _ROUNDS // 10 if quick else _ROUNDS
    rows = []
    for title, contenders, argument, context in states:
        with context():
            direct = hotop.explain(hot, argument).direct
        loops = {name: make_loop(function, [argument]) for name, function in contenders.items()}
        # A profiler keeps every event until its end.
        calls = 20 if context is _profiler else None
        rows.append(
            StateRow(
                title, direct, time_interleaved(loops, rounds=rounds, calls=calls, context=context)
            )
        )
    return rows
