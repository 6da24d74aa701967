"""The variants with a tuner: its look-up in Python, or in hotop's call routine.

Each tuner chooses between two tactics that are one kernel under two names, so only the look-up
differs, and outputs stay equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

import hotop
from hotop.ltx2 import kernels as kernel_sets
from hotop.ltx2.kernels import GEMM, OP_NAMES, QUANTIZE, SCHEMAS, Kernels
from hotop.ltx2.linear import by_callables, linear_class
from hotop.ltx2.python_tuner import DynamicDimension, PythonTuner, Runner, TuningSpace
from hotop.ltx2.variants import Variant, register_custom_op
from hotop.nvfp4._ops import act_sf_size
from hotop.tuner import follows, power_of_two, tunable

PYTHON_TUNER = "custom_op, Python tuner"
HOTOP_PYTHON_TUNER = "hotop, Python tuner"
HOTOP_TUNER = "hotop, hotop's tuner"
TUNED_VARIANTS = (PYTHON_TUNER, HOTOP_PYTHON_TUNER, HOTOP_TUNER)

_BACKENDS = "first,second"
_MOST_ROWS = 8192
_SCHEMAS = SCHEMAS | {
    GEMM: SCHEMAS[GEMM].replace('allowed_backends=""', f'allowed_backends="{_BACKENDS}"')
}


@dataclass(frozen=True)
class TunedVariants:
    """The variants and what says whether their look-ups found something.

    Attributes:
        variants: By name.
        tune: Called once with arguments of calls, by op name; afterwards such calls are hits.
        misses: How many look-ups found nothing so far.
    """

    variants: dict[str, Variant]
    tune: Callable[[Mapping[str, Sequence[tuple[Any, ...]]]], None]
    misses: Callable[[], int]


@cache
def tuned_variants(kernel_name: str) -> TunedVariants:
    """Register the ops with a tuner in their body, once per process and kernel."""
    kernels = kernel_sets.load(kernel_name)
    python_tuner = PythonTuner()
    in_python = _python_tuned(kernels, python_tuner)
    in_core = _hotop_tuned(kernels)
    variants = {}
    for name, ops in (
        (PYTHON_TUNER, _register(torch.library.custom_op, f"torch_tuned_{kernel_name}", in_python)),
        (HOTOP_PYTHON_TUNER, _register(hotop.custom_op, f"python_tuned_{kernel_name}", in_python)),
        (HOTOP_TUNER, _register(hotop.custom_op, f"tuned_{kernel_name}", in_core)),
    ):
        forward = by_callables(ops[QUANTIZE], ops[GEMM])
        class_name = "".join(word for word in name.title() if word.isalpha())
        variants[name] = Variant(name, ops, linear_class(f"{class_name}Linear", forward))

    def tune(arguments: Mapping[str, Sequence[tuple[Any, ...]]]) -> None:
        for given in arguments[QUANTIZE]:
            python_tuner.learn(QUANTIZE, _RUNNER, _QUANTIZE_SPACE, given[:2], 1)
        for given in arguments[GEMM]:
            python_tuner.learn(GEMM, _RUNNER, _GEMM_SPACE, given[:5], 1)
        # Told, as the Python tuner is: kernels without work prove nothing to a measurement.
        for op_name in OP_NAMES:
            for given in arguments[op_name]:
                one: Any = in_core[op_name]
                one._learn(*one._key_of(given, {}), list(one.tactics)[-1])

    def misses() -> int:
        tunables: Any = in_core.values()
        return python_tuner.misses + sum(one.misses for one in tunables)

    return TunedVariants(variants, tune, misses)


def _register(
    custom_op: Callable[..., Any], suffix: str, functions: Mapping[str, Callable[..., Any]]
) -> dict[str, Callable[..., Any]]:
    return register_custom_op(custom_op, f"hotop_ltx2_{suffix}", functions, _SCHEMAS)


def _bucket(size: int) -> int:
    return min(1 << (size - 1).bit_length(), _MOST_ROWS)


_QUANTIZE_SPACE = TuningSpace((DynamicDimension(0, -2, _bucket), DynamicDimension(0, -3, _bucket)))
_GEMM_SPACE = TuningSpace(
    (DynamicDimension(0, -2, _bucket), DynamicDimension(0, -3, _bucket)), ((2, 0),)
)
_RUNNER = Runner("second", ())


def _python_tuned(kernels: Kernels, tuner: PythonTuner) -> dict[str, Callable[..., Any]]:
    def quantize(
        input: Tensor,
        input_scale: Tensor,
        scaling_vector_size: int = 16,
        is_sf_swizzled_layout: bool = False,
    ) -> list[Tensor]:
        runners = [Runner("second", (kernels.quantize, kernels.quantize))]
        runner, tactic = tuner.choose(QUANTIZE, runners, _QUANTIZE_SPACE, [input, input_scale])
        function = runner.tactics[tactic]
        return function(input, input_scale, scaling_vector_size, is_sf_swizzled_layout)

    def gemm(
        act_fp4: Tensor,
        weight: Tensor,
        act_sf: Tensor,
        weight_scale: Tensor,
        alpha: Tensor,
        output_dtype: torch.dtype,
        to_userbuffers: bool = False,
        allowed_backends: str = _BACKENDS,
    ) -> Tensor:
        backends = {name.strip() for name in allowed_backends.split(",")}
        runners = [
            Runner(name, (kernels.gemm, kernels.gemm))
            for name in ("first", "second")
            if name in backends
        ]
        inputs = [act_fp4, weight, act_sf, weight_scale, alpha]
        runner, tactic = tuner.choose(GEMM, runners, _GEMM_SPACE, inputs)
        function = runner.tactics[tactic]
        return function(act_fp4, weight, act_sf, weight_scale, alpha, output_dtype)

    return {QUANTIZE: quantize, GEMM: gemm}


def _hotop_tuned(kernels: Kernels) -> dict[str, Callable[..., Any]]:
    rows = {dimension: power_of_two(cap=_MOST_ROWS) for dimension in (-2, -3)}

    @tunable(
        f"hotop_ltx2_{kernels.name}::{QUANTIZE}",
        dims={"input": rows},
        tactics={"again": kernels.quantize},
        rtol=0,
        atol=0,
    )
    def quantize(
        input: Tensor,
        input_scale: Tensor,
        scaling_vector_size: int = 16,
        is_sf_swizzled_layout: bool = False,
    ) -> list[Tensor]:
        return kernels.quantize(input, input_scale, scaling_vector_size, is_sf_swizzled_layout)

    @tunable(
        f"hotop_ltx2_{kernels.name}::{GEMM}",
        dims={"act_fp4": rows, "act_sf": {0: follows(act_sf_size)}},
        ignore=["to_userbuffers"],
        choices="allowed_backends",
        default="first",
        tactics={"second": kernels.gemm},
        rtol=0,
        atol=0,
    )
    def gemm(
        act_fp4: Tensor,
        weight: Tensor,
        act_sf: Tensor,
        weight_scale: Tensor,
        alpha: Tensor,
        output_dtype: torch.dtype,
        to_userbuffers: bool = False,
        allowed_backends: str = _BACKENDS,
    ) -> Tensor:
        return kernels.gemm(act_fp4, weight, act_sf, weight_scale, alpha, output_dtype)

    return {QUANTIZE: quantize, GEMM: gemm}
