"""The variants: the same inner callables, registered in each way compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

import hotop
from hotop.ltx2 import kernels as kernel_sets
from hotop.ltx2.kernels import FAKES, GEMM, OP_NAMES, QUANTIZE, REAL, SCHEMAS, TRIVIAL, Kernels
from hotop.ltx2.linear import Forward, by_callables, linear_class
from hotop.nvfp4 import NVFP4Linear

PLAIN = "plain functions"
PLAIN_AGAIN = "plain again"
CUSTOM_OP = "torch custom_op"
DEFINE_IMPL = "define + impl"
CPP_OP = "C++ op"
HOTOP = "hotop, object"
HOTOP_OPS = "hotop, torch.ops"

VARIANTS = (PLAIN, CUSTOM_OP, DEFINE_IMPL, CPP_OP, HOTOP, HOTOP_OPS)
COMPILED_VARIANTS = (CUSTOM_OP, DEFINE_IMPL, CPP_OP, HOTOP, HOTOP_OPS)

CPP_NAMESPACE = "hotop_cpp"

# A Library takes its registrations back when it is collected.
_libraries: list[Library] = []


@dataclass(frozen=True)
class Variant:
    """One way of registering the two ops.

    Attributes:
        name: What tables call it.
        ops: What is called, by op name.
        linear: The class of the converted linears that call it.
        namespace: Where `torch.ops` has them, if they are looked up in every call; else None.
    """

    name: str
    ops: dict[str, Callable[..., Any]]
    linear: type[NVFP4Linear]
    namespace: str | None = None


@cache
def variants(kernel_name: str) -> dict[str, Variant]:
    """Register the ops (once per process and kernel) and return the variants by name.

    Raises:
        ImportError: ``hotop._nvfp4`` is not built.
    """
    kernels = kernel_sets.load(kernel_name)
    plain = {name: kernels[name] for name in OP_NAMES}
    hot = register_custom_op(hotop.custom_op, hotop_namespace(kernel_name), plain)
    torch_namespace = f"hotop_ltx2_torch_{kernel_name}"
    ops = {
        PLAIN: plain,
        CUSTOM_OP: register_custom_op(torch.library.custom_op, torch_namespace, plain),
        DEFINE_IMPL: _define_and_impl(f"hotop_ltx2_impl_{kernel_name}", kernels),
        CPP_OP: _cpp_ops(kernel_name),
        HOTOP: hot,
        HOTOP_OPS: hot,
    }
    made = {}
    for name, pair in ops.items():
        namespace = hotop_namespace(kernel_name) if name == HOTOP_OPS else None
        if namespace is None:
            forward = by_callables(pair[QUANTIZE], pair[GEMM])
        else:
            forward = _BY_TORCH_OPS[kernel_name]
        linear = linear_class(f"{_identifier(name)}Linear", forward)
        made[name] = Variant(name, pair, linear, namespace)
    return made


def hotop_namespace(kernel_name: str) -> str:
    """The namespace of hotop's ops."""
    return f"hotop_ltx2_{kernel_name}"


def _identifier(name: str) -> str:
    return "".join(word.capitalize() for word in name.replace("+", " ").replace(",", " ").split())


def register_custom_op(
    custom_op: Callable[..., Any],
    namespace: str,
    functions: Mapping[str, Callable[..., Any]],
    schemas: Mapping[str, str] = SCHEMAS,
) -> dict[str, Callable[..., Any]]:
    """Make the two ops with `custom_op` (torch's or hotop's) of these functions."""
    ops = {}
    for name in OP_NAMES:
        op = custom_op(
            f"{namespace}::{name}", functions[name], mutates_args=(), schema=schemas[name]
        )
        op.register_fake(FAKES[name])
        ops[name] = op
    return ops


def _define_and_impl(namespace: str, kernels: Kernels) -> dict[str, Callable[..., Any]]:
    library: Any = Library(namespace, "DEF")
    _libraries.append(library)
    ops = {}
    for name in OP_NAMES:
        library.define(name + SCHEMAS[name])
        library.impl(name, kernels[name], "CPU")
        torch.library.register_fake(f"{namespace}::{name}", FAKES[name], lib=library)
        # The overload, not the packet: the cheapest road to the dispatcher from Python.
        ops[name] = getattr(getattr(torch.ops, namespace), name).default
    return ops


def _cpp_ops(kernel_name: str) -> dict[str, Callable[..., Any]]:
    library = Library(CPP_NAMESPACE, "FRAGMENT")
    _libraries.append(library)
    ops = {}
    for name in OP_NAMES:
        own_name = f"{name}_trivial" if kernel_name == TRIVIAL else name
        torch.library.register_fake(f"{CPP_NAMESPACE}::{own_name}", FAKES[name], lib=library)
        ops[name] = getattr(getattr(torch.ops, CPP_NAMESPACE), own_name).default
    return ops


# Written out, as a model's code writes it: all three look-ups in every call.
def _by_torch_ops_trivial(self: NVFP4Linear, x: Tensor) -> Tensor:
    act, act_sf = torch.ops.hotop_ltx2_trivial.tunable_fp4_quantize(x, self.input_scale, 16, True)
    y = torch.ops.hotop_ltx2_trivial.nvfp4_gemm(
        act, self.weight, act_sf, self.weight_scale, self.alpha, x.dtype
    )
    return y if self.bias is None else y + self.bias


def _by_torch_ops_real(self: NVFP4Linear, x: Tensor) -> Tensor:
    act, act_sf = torch.ops.hotop_ltx2_real.tunable_fp4_quantize(x, self.input_scale, 16, True)
    y = torch.ops.hotop_ltx2_real.nvfp4_gemm(
        act, self.weight, act_sf, self.weight_scale, self.alpha, x.dtype
    )
    return y if self.bias is None else y + self.bias


_BY_TORCH_OPS: dict[str, Forward] = {TRIVIAL: _by_torch_ops_trivial, REAL: _by_torch_ops_real}
