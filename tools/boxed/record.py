"""Calls of ATen overloads that PyTorch's own sample inputs (`op_db`) lead to."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from tools.boxed.copies import TooLarge, copied
from tools.boxed.overloads import name_of, overload
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PER_OVERLOAD = 4  # different calls kept of an overload, of one OpInfo
SAMPLES = 10  # sample inputs of an OpInfo and a dtype
# One kind of dtype after the other; the first of a kind that the op supports is taken.
KINDS: tuple[tuple[torch.dtype, ...], ...] = (
    (torch.float32, torch.float64, torch.bfloat16),
    (torch.int64, torch.int32, torch.uint8, torch.bool),
    (torch.complex64,),
)


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        return ("T", str(value.dtype), value.dim(), value.is_contiguous(), value.numel() == 0)
    if isinstance(value, list | tuple):
        return (type(value).__name__, len(value), *map(_signature, value[:3]))
    if isinstance(value, dict):
        return tuple((key, _signature(element)) for key, element in sorted(value.items()))
    if isinstance(value, bool | str | torch.dtype | None):
        return str(value)
    return type(value).__name__


class Record(TorchDispatchMode):
    """Keeps a copy of the arguments of every ATen call that comes by."""

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self.calls: dict[str, dict[Any, tuple[Any, Any]]] = {}

    def keep(self, name: str, args: Any, kwargs: Any) -> None:
        """Keep a call, unless one like it was kept."""
        kept = self.calls.setdefault(name, {})
        signature = (_signature(list(args)), _signature(kwargs))
        if signature in kept or len(kept) >= PER_OVERLOAD:
            return
        with contextlib.suppress(TooLarge, RuntimeError, NotImplementedError):
            kept[signature] = copied(args, kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Keep, then call."""
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and func.namespace == "aten":
            self.keep(name_of(func), args, kwargs)
        return func(*args, **kwargs)


@functools.cache
def infos() -> dict[str, Any]:
    """Return the OpInfos of `op_db` and `custom_op_db` by name and variant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.custom_op_db import custom_op_db
    found: dict[str, Any] = {}
    for info in [*op_db, *custom_op_db]:
        name = info.name + (f".{info.variant_test_name}" if info.variant_test_name else "")
        found[name] = info
    return found


def _dtypes(info: Any) -> Iterator[torch.dtype]:
    for kind in KINDS:
        for dtype in kind:
            if dtype in info.dtypes:
                yield dtype
                break


def _backward(result: Any) -> None:
    outputs = [
        t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad and t.grad_fn
    ]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])


def _run(function: Any, sample: Any, record: Record, inference: bool) -> None:
    # In inference mode the mode sees the composite operators whole.
    guard = torch.inference_mode() if inference else contextlib.nullcontext()
    with guard:
        args, kwargs = copied((sample.input, *sample.args), sample.kwargs)
        with record:
            result = function(*args, **kwargs)
            if not inference:
                _backward(result)


def _like_its_packet(info: Any, sample: Any, record: Record) -> None:
    """Keep the sample also as a call of each overload with the op's name; many are wrong calls."""
    for name in {info.name, info.aten_name, *(alias.name for alias in info.aliases)}:
        for suffix in ("", "_"):
            packet = getattr(torch.ops.aten, name.rpartition(".")[2] + suffix, None)
            for of in packet.overloads() if packet is not None else ():
                record.keep(
                    name_of(getattr(packet, of)), (sample.input, *sample.args), sample.kwargs
                )


def _with_outputs(record: Record) -> None:
    """Keep the recorded calls also as calls of the overload that writes into `out`."""
    for name, kept in list(record.calls.items()):
        op = overload(name)
        inputs = [a.name for a in op._schema.arguments]
        for of in op.overloadpacket.overloads():
            writer = getattr(op.overloadpacket, of)
            outs = [a.name for a in writer._schema.arguments if a.is_out]
            given = [a.name for a in writer._schema.arguments if not a.is_out]
            if not outs or given != inputs:
                continue
            for args, kwargs in list(kept.values())[:3]:
                with contextlib.suppress(Exception):
                    some_args, some_kwargs = copied(args, kwargs)
                    results = tree_leaves(op(*some_args, **some_kwargs))
                    empty = [torch.empty_like(t) for t in results]
                    named = dict(zip(outs, empty, strict=True))
                    record.keep(name_of(writer), args, {**kwargs, **named})


def recorded(name: str) -> dict[str, list[tuple[Any, Any]]]:
    """Return the calls that the samples of an OpInfo lead to, by overload."""
    info = infos()[name]
    record = Record()
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        stack.enter_context(torch.random.fork_rng())
        torch.manual_seed(3)
        for dtype in _dtypes(info):
            grads = dtype.is_floating_point and info.supports_autograd
            try:
                samples = list(
                    itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=grads), SAMPLES)
                )
            except Exception:  # PyTorch cannot make samples of it here
                continue
            for sample in samples:
                for function in filter(None, (info.op, info.inplace_variant)):
                    for inference in (False, True):
                        # What came before an error is kept.
                        with contextlib.suppress(Exception):
                            _run(function, sample, record, inference)
                with contextlib.suppress(Exception):
                    _like_its_packet(info, sample, record)
        _with_outputs(record)
    return {of: list(kept.values()) for of, kept in sorted(record.calls.items()) if kept}
