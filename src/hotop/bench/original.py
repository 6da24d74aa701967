"""The benchmark of the helper that hotop grew from, with its rows and its columns.

TensorRT-LLM's pull request 13149 measured 20,000 calls of an op whose kernel is ``x.clone()``
and multiplied the saving by the calls of two ops in a step of LTX-2.
"""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

import hotop
from hotop.bench.contenders import (
    CUSTOM_OP,
    DEFINE_IMPL,
    DEFINE_NAMESPACE,
    HOTOP_NAMESPACE,
    PLAIN,
    TORCH_NAMESPACE,
    new_name,
    register_define_impl,
)
from hotop.bench.timing import Timing, make_loop, time_interleaved

__all__ = [
    "CALLS",
    "CALLS_PER_STEP",
    "HELPER_OBJECT",
    "HELPER_OPS",
    "LABELS",
    "OriginalResult",
    "measure",
]

CALLS = 20_000
_CALLS_PER_ROUND = 100
CALLS_PER_STEP = {"tunable_fp4_quantize": 1260, "nvfp4_gemm": 840}

HELPER_OPS = "helper_ops"
HELPER_OBJECT = "helper_object"
LABELS = {
    PLAIN: "plain function",
    CUSTOM_OP: "torch.library.custom_op",
    DEFINE_IMPL: "hand-written define + impl, torch.ops.ns.op",
    HELPER_OPS: "hotop.fast_custom_op, torch.ops.ns.op",
    HELPER_OBJECT: "hotop.fast_custom_op, by object",
}


@dataclass(frozen=True)
class OriginalResult:
    """The fastest run of each contender, a run being 20,000 calls in interleaved rounds."""

    timings: dict[str, Timing]

    def total_ms(self, contender: str) -> float:
        """Returns the time of all calls."""
        return self.timings[contender].mean_ns * CALLS / 1e6

    def per_call_us(self, contender: str) -> float:
        """Returns the time of one call."""
        return self.timings[contender].mean_ns / 1e3

    def tax_us(self, contender: str) -> float:
        """Returns the time of one call above the plain function."""
        return self.per_call_us(contender) - self.per_call_us(PLAIN)

    def saving_us(self, contender: str) -> float:
        """Returns what one call saves against ``torch.library.custom_op``."""
        return self.per_call_us(CUSTOM_OP) - self.per_call_us(contender)

    def saving_per_step_ms(self, contender: str) -> dict[str, float]:
        """Returns calls per step x saving, by op."""
        saving = self.saving_us(contender)
        return {op: saving * calls / 1e3 for op, calls in CALLS_PER_STEP.items()}

    def as_json(self) -> dict[str, object]:
        """Returns plain data: the table and the estimate."""
        return {
            "calls": CALLS,
            "timings": {name: asdict(timing) for name, timing in self.timings.items()},
            "tax_us": {name: self.tax_us(name) for name in self.timings if name != PLAIN},
            "saving_us": {name: self.saving_us(name) for name in self.timings},
            "calls_per_step": CALLS_PER_STEP,
            "saving_per_step_ms": {
                name: self.saving_per_step_ms(name)
                for name in (DEFINE_IMPL, HELPER_OPS, HELPER_OBJECT)
            },
        }


def _kernel(x: Tensor) -> Tensor:
    return x.clone()


def measure(*, quick: bool = False) -> OriginalResult:
    """Registers the op four ways and times 20,000 calls of each in interleaved rounds."""
    x = torch.randn(16)
    name = new_name("original")
    upstream = torch.library.custom_op(f"{TORCH_NAMESPACE}::{name}", _kernel, mutates_args=())
    register_define_impl(name, _kernel)
    helper = hotop.fast_custom_op(f"{HOTOP_NAMESPACE}::{name}", device_types="CPU")(_kernel)
    loops = {
        PLAIN: make_loop(_kernel, [x]),
        CUSTOM_OP: make_loop(upstream, [x]),
        DEFINE_IMPL: make_loop(torch.ops, [x], path=f".{DEFINE_NAMESPACE}.{name}"),
        HELPER_OPS: make_loop(torch.ops, [x], path=f".{HOTOP_NAMESPACE}.{name}"),
        HELPER_OBJECT: make_loop(helper, [x]),
    }
    best: dict[str, Timing] = {}
    for _ in range(1 if quick else 5):
        run = time_interleaved(loops, rounds=CALLS // _CALLS_PER_ROUND, calls=_CALLS_PER_ROUND)
        for contender, timing in run.items():
            kept = best.setdefault(contender, timing)
            if timing.mean_ns < kept.mean_ns:
                best[contender] = timing
    return OriginalResult(best)
