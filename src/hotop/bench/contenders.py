"""The contenders: one kernel behind every way of registering and calling it."""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

import hotop
from hotop.bench.timing import Loop, make_loop

__all__ = [
    "CUSTOM_OP",
    "DEFINE_IMPL",
    "DEFINE_NAMESPACE",
    "HOTOP",
    "HOTOP_NAMESPACE",
    "HOTOP_OVERLOAD",
    "HOTOP_PACKET",
    "LABELS",
    "LOOKUPS",
    "PLAIN",
    "TORCH_NAMESPACE",
    "Ops",
    "explain",
    "make_loops",
    "new_name",
    "register",
    "register_define_impl",
]

PLAIN = "plain"
CUSTOM_OP = "custom_op"
DEFINE_IMPL = "define_impl"
HOTOP = "hotop"
HOTOP_PACKET = "hotop_packet"
HOTOP_OVERLOAD = "hotop_overload"
LOOKUPS = "lookups"

LABELS = {
    PLAIN: "plain function",
    CUSTOM_OP: "torch.library.custom_op",
    DEFINE_IMPL: "Library.define + impl",
    HOTOP: "hotop, by object",
    HOTOP_PACKET: "hotop, torch.ops.ns.op with look-ups",
    HOTOP_OVERLOAD: "hotop, by overload",
    LOOKUPS: "plain function + the look-ups of torch.ops.ns.op",
}

HOTOP_NAMESPACE = "hotop_bench_hot"
TORCH_NAMESPACE = "hotop_bench_torch"
DEFINE_NAMESPACE = "hotop_bench_define"

_serial = itertools.count()
_libraries: list[torch.library.Library] = []


@dataclass(frozen=True, slots=True)
class Ops:
    """One kernel and the ops made of it.

    Attributes:
        kernel: The plain function.
        custom_op: The op of ``torch.library.custom_op``.
        define_impl: The overload of ``Library.define`` and ``impl``.
        hotop: The op of ``hotop.custom_op``.
        name: The op's name in each contender's namespace.
    """

    kernel: Callable[..., object]
    custom_op: Callable[..., object]
    define_impl: Callable[..., object]
    hotop: Callable[..., object]
    name: str


def new_name(beginning: str) -> str:
    """Returns an op name that no other op of this process's benchmarks has."""
    return f"{beginning}_{next(_serial)}"


def register(
    kernel: Callable[..., object],
    mutates_args: Iterable[str] = (),
    *,
    schema: str | None = None,
    name: str = "op",
    fake: Callable[..., object] | None = None,
) -> Ops:
    """Registers `kernel` with every contender under a name that is new in this process.

    Args:
        kernel: The Python function that each op runs.
        mutates_args: The names of the arguments that it writes to.
        schema: The schema without the name; inferred from the annotations when None.
        name: The beginning of the op's name.
        fake: The fake implementation, for ops that get compiled.
    """
    name = new_name(name)
    mutates_args = tuple(mutates_args)
    upstream = torch.library.custom_op(
        f"{TORCH_NAMESPACE}::{name}", kernel, mutates_args=mutates_args, schema=schema
    )
    hot = hotop.custom_op(
        f"{HOTOP_NAMESPACE}::{name}", kernel, mutates_args=mutates_args, schema=schema
    )
    define_impl = register_define_impl(name, kernel, mutates_args, schema=schema)
    if fake is not None:
        upstream.register_fake(fake)
        hot.register_fake(fake)
        torch.library.register_fake(f"{DEFINE_NAMESPACE}::{name}", fake, lib=_libraries[-1])
    return Ops(kernel, upstream, define_impl, hot, name)


def register_define_impl(
    name: str,
    kernel: Callable[..., object],
    mutates_args: Iterable[str] = (),
    *,
    schema: str | None = None,
) -> torch._ops.OpOverload:
    """Registers `kernel` by ``Library.define`` and ``impl`` and returns the overload."""
    library = torch.library.Library(DEFINE_NAMESPACE, "FRAGMENT")
    _libraries.append(library)
    if schema is None:
        schema = torch.library.infer_schema(kernel, mutates_args=tuple(mutates_args))
    library.define(name + schema)
    # A call without a Tensor never reaches a kernel of the CPU key.
    has_tensor = re.search(r"\bTensor(\(\w+!\))?(\[\])? ", schema.split("->")[0])
    key = "CPU" if has_tensor else "CompositeExplicitAutograd"
    library.impl(name, kernel, key)
    overload: torch._ops.OpOverload = getattr(getattr(torch.ops, DEFINE_NAMESPACE), name).default
    return overload


def make_loops(
    ops: Ops,
    positional: Sequence[object],
    keywords: Mapping[str, object] | None = None,
    *,
    contenders: Iterable[str] = (
        PLAIN,
        CUSTOM_OP,
        DEFINE_IMPL,
        HOTOP,
        HOTOP_PACKET,
        HOTOP_OVERLOAD,
    ),
) -> dict[str, Loop]:
    """Compiles the loop of each contender for one call shape.

    The packet's loop looks up ``torch.ops.ns.op`` in every call (two attributes, `torch.ops` is
    held); the other contenders hold what they call.
    """
    path = f".{HOTOP_NAMESPACE}.{ops.name}"
    packet = getattr(getattr(torch.ops, HOTOP_NAMESPACE), ops.name)
    arguments = (positional, keywords)
    makers: dict[str, Callable[[], Loop]] = {
        PLAIN: lambda: make_loop(ops.kernel, *arguments),
        CUSTOM_OP: lambda: make_loop(ops.custom_op, *arguments),
        DEFINE_IMPL: lambda: make_loop(ops.define_impl, *arguments),
        HOTOP: lambda: make_loop(ops.hotop, *arguments),
        HOTOP_PACKET: lambda: make_loop(torch.ops, *arguments, path=path),
        HOTOP_OVERLOAD: lambda: make_loop(packet.default, *arguments),
        LOOKUPS: lambda: make_loop(ops.kernel, *arguments, discarded=(torch.ops, path)),
    }
    return {contender: makers[contender]() for contender in contenders}


def explain(
    ops: Ops, positional: Sequence[object], keywords: Mapping[str, object] | None = None
) -> tuple[bool, str]:
    """Asks hotop which way a call goes: whether it is direct, and if not, why."""
    answer = hotop.explain(ops.hotop, *positional, **(keywords or {}))
    return answer.direct, answer.reason
