"""The demo's five ops: kernels and fakes written once, registered in each way compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library, infer_schema

import hotop

PLAIN = "plain function"
CUSTOM_OP = "torch custom_op"
DEFINE_IMPL = "define + impl"
HOTOP = "hotop"


@dataclass(frozen=True)
class OpSet:
    """The decoder's ops under one kind of registration; an argument of the model."""

    rms_norm: Callable[..., Any]
    fused_add_rms_norm: Callable[..., Any]
    rotary: Callable[..., Any]
    silu_and_mul: Callable[..., Any]
    cache_update: Callable[..., Any]


OP_NAMES = tuple(field.name for field in fields(OpSet))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of `x` to unit root mean square, times `weight`."""
    return _normalize(x, weight, eps)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """Add `x` to `residual`, then write the norm of the sum into `x`; both in place."""
    residual.add_(x)
    x.copy_(_normalize(residual, weight, eps))


def _normalize(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # Six small calls: F.rms_norm falls apart into about twice as many on CPU.
    scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (x * scale).mul_(weight)


def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate the two halves of each query and key head by the angles of `position`."""
    cos, sin = cos.index_select(0, position), sin.index_select(0, position)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def silu_and_mul(x: Tensor) -> Tensor:
    """SwiGLU's activation: silu of the first half of each row, times the second half."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def cache_update(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, position: Tensor) -> None:
    """Write a position's keys and values (heads, dim) into caches (heads, positions, dim)."""
    k_cache.index_copy_(1, position, k.unsqueeze(1))
    v_cache.index_copy_(1, position, v.unsqueeze(1))


def _fake_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


def _fake_fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    return None


def _fake_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    # The kernel's `cat` returns contiguous Tensors whatever the strides of its inputs.
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _fake_silu_and_mul(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _fake_cache_update(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, position: Tensor
) -> None:
    return None


@dataclass(frozen=True)
class _Definition:
    kernel: Callable[..., Any]
    fake: Callable[..., Any]
    mutates_args: tuple[str, ...] = ()


_DEFINITIONS = (
    _Definition(rms_norm, _fake_rms_norm),
    _Definition(fused_add_rms_norm, _fake_fused_add_rms_norm, ("x", "residual")),
    _Definition(rotary, _fake_rotary),
    _Definition(silu_and_mul, _fake_silu_and_mul),
    _Definition(cache_update, _fake_cache_update, ("k_cache", "v_cache")),
)

# A Library takes its registrations back when it is collected.
_libraries: list[Library] = []


@cache
def op_sets() -> dict[str, OpSet]:
    """Register the ops (once per process) and return one OpSet per kind of registration."""
    return {
        PLAIN: OpSet(**{d.kernel.__name__: d.kernel for d in _DEFINITIONS}),
        CUSTOM_OP: _with_custom_op(torch.library.custom_op, "hotop_demo_torch"),
        DEFINE_IMPL: _with_define_and_impl("hotop_demo_impl"),
        HOTOP: _with_custom_op(hotop.custom_op, "hotop_demo"),
    }


def _with_custom_op(custom_op: Callable[..., Any], namespace: str) -> OpSet:
    ops = {}
    for d in _DEFINITIONS:
        name = d.kernel.__name__
        op = custom_op(f"{namespace}::{name}", d.kernel, mutates_args=d.mutates_args)
        op.register_fake(d.fake)
        ops[name] = op
    return OpSet(**ops)


def _with_define_and_impl(namespace: str) -> OpSet:
    library: Any = Library(namespace, "DEF")
    _libraries.append(library)
    ops = {}
    for d in _DEFINITIONS:
        name = d.kernel.__name__
        library.define(name + infer_schema(d.kernel, mutates_args=d.mutates_args))
        library.impl(name, d.kernel, "CPU")
        torch.library.register_fake(f"{namespace}::{name}", d.fake, lib=library)
        # The overload, not the packet: the cheapest road to the dispatcher from Python.
        ops[name] = getattr(getattr(torch.ops, namespace), name).default
    return OpSet(**ops)
