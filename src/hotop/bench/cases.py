"""The cases of the benchmark: a kernel, the arguments of its call, and the mode around it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor

__all__ = ["CASES", "GRAD", "INFERENCE_MODE", "NO_GRAD", "Case", "mode_context"]

GRAD = "grad"
NO_GRAD = "no_grad"
INFERENCE_MODE = "inference_mode"


@dataclass(frozen=True)
class Case:
    """One call shape.

    Attributes:
        name: The name that ``--only`` takes.
        title: What the table calls it.
        make_kernel: Makes the kernel.
        make_positional: Makes the arguments passed by position.
        make_keywords: Makes the arguments passed by name.
        mutates_args: The names of the arguments that the kernel writes to.
        mode: ``grad`` (the default state, no input requires grad), ``no_grad`` or
            ``inference_mode``.
        tensors: The number of Tensors, for the cases that give the slope.
        noop: Whether the kernel does nothing, so that a ratio of taxes means something.
    """

    name: str
    title: str
    make_kernel: Callable[[], Callable[..., object]]
    make_positional: Callable[[], Sequence[object]]
    make_keywords: Callable[[], Mapping[str, object]] = field(default=dict)
    mutates_args: tuple[str, ...] = ()
    mode: str = GRAD
    tensors: int | None = None
    noop: bool = True


def mode_context(mode: str) -> AbstractContextManager[object]:
    """Returns the context that a case's calls run in."""
    match mode:
        case "grad":
            return nullcontext()
        case "no_grad":
            return torch.no_grad()
        case "inference_mode":
            return torch.inference_mode()
        case _:
            raise ValueError(f"unknown mode {mode!r}")


def _tensors(count: int) -> list[Tensor]:
    return [torch.ones(4) for _ in range(count)]


def _make(
    parameters: str, returns: str = "None", result: str = "None", **names: object
) -> Callable[[], Callable[..., object]]:
    def make_kernel() -> Callable[..., object]:
        namespace: dict[str, Any] = {"torch": torch, "Tensor": Tensor, "Optional": Optional}
        # Outputs are made once per kernel: no input's alias, and no cost of their own.
        namespace |= {"out0": torch.zeros(4), "out1": torch.zeros(4), **names}
        exec(f"def kernel({parameters}) -> {returns}:\n    return {result}\n", namespace)
        kernel: Callable[..., object] = namespace["kernel"]
        return kernel

    return make_kernel


def _parameters(count: int) -> str:
    return ", ".join(f"x{index}: Tensor" for index in range(count))


def _count_case(count: int, mode: str = GRAD) -> Case:
    plural = "s" if count > 1 else ""
    suffix = "" if mode == GRAD else f"-{mode}"
    return Case(
        f"tensors-{count}{suffix}",
        f"{count} Tensor{plural}" + ("" if mode == GRAD else f", {mode}"),
        _make(_parameters(count)),
        lambda: _tensors(count),
        mode=mode,
        tensors=count if mode == GRAD else None,
    )


CASES: tuple[Case, ...] = (
    *(_count_case(count) for count in (1, 4, 10, 30, 51)),
    Case(
        "mixed",
        "10 Tensors + int, float, bool, str",
        _make(_parameters(10) + ", i: int, f: float, b: bool, s: str"),
        lambda: [*_tensors(10), 3, 0.5, True, "silu"],
    ),
    Case(
        "keywords",
        "keywords (3 of 4)",
        _make("x: Tensor, weight: Tensor, eps: float, size: int"),
        lambda: _tensors(1),
        lambda: {"weight": torch.ones(4), "eps": 1e-6, "size": 4},
    ),
    Case(
        "optional-given",
        "Optional Tensor, given",
        _make("x: Tensor, bias: Optional[Tensor]"),
        lambda: _tensors(2),
    ),
    Case(
        "optional-none",
        "Optional Tensor, None",
        _make("x: Tensor, bias: Optional[Tensor]"),
        lambda: [*_tensors(1), None],
    ),
    Case("tensor-list", "Tensor[] of 8", _make("xs: list[Tensor]"), lambda: [_tensors(8)]),
    Case(
        "dtype-device",
        "1 Tensor + dtype, device",
        _make("x: Tensor, dtype: torch.dtype, device: torch.device"),
        lambda: [*_tensors(1), torch.bfloat16, torch.device("cpu")],
    ),
    Case(
        "mutated",
        "1 mutated Tensor",
        _make("x: Tensor"),
        lambda: _tensors(1),
        mutates_args=("x",),
    ),
    Case(
        "returns-tensor",
        "1 Tensor, returns a Tensor",
        _make("x: Tensor", "Tensor", "out0"),
        lambda: _tensors(1),
    ),
    Case(
        "returns-tuple",
        "1 Tensor, returns 2 Tensors",
        _make("x: Tensor", "tuple[Tensor, Tensor]", "(out0, out1)"),
        lambda: _tensors(1),
    ),
    *(_count_case(count, mode) for mode in (NO_GRAD, INFERENCE_MODE) for count in (1, 10)),
    Case(
        "clone",
        "1 Tensor, kernel x.clone()",
        _make("x: Tensor", "Tensor", "x.clone()"),
        lambda: _tensors(1),
        noop=False,
    ),
)
