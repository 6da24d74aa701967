"""Which operators that exist already get C++ calls: rules, look-ups to come, giving back."""

from __future__ import annotations

import functools
import logging
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import _C
from torch._library import custom_ops
from torch._ops import OpOverload, OpOverloadPacket
from torch.library import _defs

from hotop import _accelerated, _core
from hotop._accelerated import AcceleratedOverload, AcceleratedPacket, LastingPacket
from hotop._lock import locked
from hotop._rules import LEFT, RULES, Predicate

logger = logging.getLogger("hotop")

ACCELERATED: weakref.WeakSet[OpOverload] = weakref.WeakSet()
# Namespaces with operators that Inductor lowers to its _CollectiveKernel, which asks for the very
# class of PyTorch: tests/test_exact_classes.py reads PyTorch's sources for it.
EXACT_CLASS = {
    "_c10d_functional",
    "_c10d_functional_autograd",
    "_dtensor",
    "c10d_functional",
    "symm_mem",
}
NEEDS_EXACT_CLASS = "Inductor asks for PyTorch's very class"


def _namespaces() -> Iterator[types.ModuleType]:
    for value in list(vars(torch.ops).values()):
        if isinstance(value, torch._ops._OpNamespace):
            yield value


def _packets() -> Iterator[OpOverloadPacket[Any, Any]]:
    """Yield the packets that were looked up until now."""
    for module in _namespaces():
        for value in list(vars(module).values()):
            if isinstance(value, OpOverloadPacket):
                yield value


def _overloads(packet: OpOverloadPacket[Any, Any]) -> list[OpOverload]:
    return [value for value in list(vars(packet).values()) if isinstance(value, OpOverload)]


@functools.cache
def _learn_python_kernels() -> None:
    """Let the core compare PyTorch's holder of Python kernels with what it believes of it."""
    library = torch.library.Library("hotop_probe", "FRAGMENT")
    try:
        library.define("probe(Tensor x) -> Tensor")

        def probe(*args: Any) -> None:
            raise AssertionError("never called")

        library.impl("probe", probe, "CPU")
        library.impl("probe", probe, "CUDA", with_keyset=True)
        table = _C._dispatch_dump_table("hotop_probe::probe").splitlines()
        autograd = next(line for line in table if line.startswith("AutogradCPU:"))
        has_fallback = "VariableFallbackKernel.cpp" in autograd and "[backend fallback]" in autograd
        if not _core.learn_python_kernels("hotop_probe::probe", probe, has_fallback):
            logger.warning(
                "hotop does not know this PyTorch's kernels in Python: calls of ops that were made "
                "by Library.impl take the boxed road"
            )
    finally:
        library._destroy()


def _op_of(overload: OpOverload) -> custom_ops.CustomOpDef | None:
    op = custom_ops.OPDEFS.get(overload._name)
    return op if op is not None and op._opoverload is overload else None


def cover_overload(overload: OpOverload) -> bool:
    """Accelerate one overload, by its ``CustomOpDef`` where it has one; False: it was left."""
    _learn_python_kernels()
    if isinstance(overload, AcceleratedOverload):
        _accelerated.make_plan(overload)
        return True
    if overload.namespace in EXACT_CLASS:
        LEFT[overload._name] = NEEDS_EXACT_CLASS
        return False
    if type(overload) is not OpOverload:
        made = _accelerated.is_made_by_hotop(overload)
        LEFT[overload._name] = (
            "hotop made it: it is fast already" if made else "it takes script objects"
        )
        return False
    if not _accelerated.in_dispatcher(overload):
        LEFT[overload._name] = "it is TorchScript's: the dispatcher does not have it"
        return False
    op = _op_of(overload)
    if op is not None and type(op) is custom_ops.CustomOpDef:
        _accelerated.accelerate_op(op)
    if type(overload) is OpOverload:
        _accelerated.accelerate_overload(overload)
    ACCELERATED.add(overload)
    LEFT.pop(overload._name, None)
    return True


def cover_packet(packet: OpOverloadPacket[Any, Any]) -> None:
    """Accelerate a packet, and those of its overloads that were looked up until now."""
    if type(packet) not in (OpOverloadPacket, LastingPacket):
        return
    if packet._has_torchbind_op_overload:
        LEFT[packet._qualified_op_name] = "it takes script objects"
        return
    _accelerated.accelerate_packet(packet)


# What is looked up later.


@locked
def _after_overload(overload: OpOverload) -> None:
    if RULES and type(overload) is OpOverload and RULES.cover(overload):
        cover_overload(overload)


@locked
def _after_packet(packet: OpOverloadPacket[Any, Any]) -> None:
    if RULES and _packet_is_covered(packet):
        cover_packet(packet)


def _packet_is_covered(packet: OpOverloadPacket[Any, Any]) -> bool:
    """Return whether every overload is to be covered, those never looked up among them."""
    if any(overload in RULES.exceptions for overload in _overloads(packet)):
        return False
    if packet._qualified_op_name.split("::")[0] in RULES.namespaces:
        return True
    return all(_is_covered(packet, name) for name in packet._overload_names)


def _is_covered(packet: OpOverloadPacket[Any, Any], name: str) -> bool:
    overload = packet.__dict__.get(name or "default")
    if overload is not None:
        return RULES.cover(overload)
    if INSTALLED and f"{packet._qualified_op_name}.{name}".rstrip(".") in _defs:
        return True
    # Perhaps: a predicate will see it in the packet's first call.
    return len(RULES.predicates) > len(INSTALLED)


INSTALLED: list[Predicate] = []  # install()'s own rule, while it is active


@functools.cache
def watch_look_ups() -> None:
    """From now on see each overload and packet when PyTorch makes it."""

    def extend(cls: Any, then: Callable[[Any], None]) -> None:
        original = cls.__init__

        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            then(self)

        cls.__init__ = __init__

    extend(OpOverload, _after_overload)
    extend(OpOverloadPacket, _after_packet)


def namespace_exists(name: str) -> bool:
    """Return whether the dispatcher has an operator of this namespace."""
    prefix = name + "::"
    return any(op.startswith(prefix) for op in _C._dispatch_get_all_op_names())


def is_of_torchscript(name: str) -> bool:
    """Return whether TorchScript has operators of this namespace."""
    return any(schema.name.startswith(name + "::") for schema in _C._jit_get_all_schemas())


def _cover_by_rule() -> None:
    watch_look_ups()
    for packet in _packets():
        for overload in _overloads(packet):
            if RULES.cover(overload):
                cover_overload(overload)
        if _packet_is_covered(packet):
            cover_packet(packet)


@locked
def accelerate_namespace(name: str) -> None:
    """Accelerate a namespace, which may get its operators later."""
    if name in RULES.namespaces:
        _say_again(f"the namespace {name!r}")
    RULES.add_namespace(name)
    _cover_by_rule()


def _say_again(what: str) -> None:
    logger.warning("accelerate: %s is accelerated already", what)


@locked
def accelerate(what: Any) -> None:
    """See :func:`hotop.accelerate`."""
    what = _name_of_namespace(what)
    if isinstance(what, str) and "::" not in what:
        if not namespace_exists(what):
            if is_of_torchscript(what):
                raise ValueError(
                    f"accelerate: the operators of the namespace {what!r} are TorchScript's own, "
                    "which the dispatcher does not have; their calls are PyTorch's"
                )
            raise ValueError(f"accelerate: no operator is defined in the namespace {what!r}")
        accelerate_namespace(what)
    elif _is_predicate(what):
        _check_predicate(what)
        if what in RULES.predicates:
            _say_again(f"what {what!r} picks")
        cover_by_predicate(what)
    else:
        found = _objects_of(what, "accelerate")
        overloads = [one for one in found if isinstance(one, OpOverload)]
        if overloads and RULES.objects.issuperset(overloads):
            _say_again(str(what))
        for overload in overloads:
            if cover_overload(overload):
                RULES.add_object(overload)
        for one in found:
            packet = one._overloadpacket if isinstance(one, OpOverload) else one
            if isinstance(one, OpOverloadPacket) or _packet_is_covered(packet):
                cover_packet(packet)


def cover_by_predicate(predicate: Predicate) -> None:
    """Accelerate what a predicate picks, now and later."""
    RULES.add_predicate(predicate)
    _cover_by_rule()


def _name_of_namespace(what: Any) -> Any:
    return what.name if isinstance(what, torch._ops._OpNamespace) else what


def _is_predicate(what: Any) -> bool:
    others = type | OpOverload | OpOverloadPacket | custom_ops.CustomOpDef
    return callable(what) and not isinstance(what, others)


def _check_predicate(predicate: Predicate) -> None:
    try:
        answer: object = predicate(torch.ops.aten.add.Tensor)
    except Exception as error:
        answer = error
    if not isinstance(answer, bool):
        raise TypeError(
            "accelerate: a predicate takes an OpOverload and returns a bool; "
            f"{predicate!r} gave {type(answer).__name__} for aten::add.Tensor"
        )


def _objects_of(what: Any, verb: str) -> list[Any]:
    """Return the packets and overloads that one operator has."""
    if isinstance(what, str):
        namespace, _, name = what.partition("::")
        op_name, _, overload_name = name.partition(".")
        try:
            packet = getattr(getattr(torch.ops, namespace), op_name)
            found = getattr(packet, overload_name) if overload_name else packet
        except AttributeError:
            found = None
        if not isinstance(found, OpOverload | OpOverloadPacket):
            raise ValueError(f"{verb}: there is no operator {what!r}")
        what = found
    if isinstance(what, custom_ops.CustomOpDef):
        return [what._opoverload, what._opoverload._overloadpacket]
    if isinstance(what, OpOverload):
        packet = what._overloadpacket
        return [what, packet] if len(packet._overload_names) == 1 else [what]
    if isinstance(what, OpOverloadPacket):
        return [*what.op_overloads(), what]
    raise TypeError(
        f"{verb} takes a custom op, an OpOverload, an OpOverloadPacket, the name of an "
        f"operator or namespace, or a predicate; got {type(what).__name__}"
    )


@locked
def restore(what: Any = None) -> None:
    """See :func:`hotop.restore`."""
    what = _name_of_namespace(what)
    if what is None:
        RULES.clear()
        INSTALLED.clear()
    elif isinstance(what, str) and "::" not in what:
        if what not in RULES.namespaces:
            raise ValueError(f"restore: the namespace {what!r} is not accelerated")
        RULES.remove_namespace(what)
    elif _is_predicate(what):
        if what not in RULES.predicates:
            raise ValueError("restore: accelerate was never called with this predicate")
        RULES.remove_predicate(what)
    else:
        found = _objects_of(what, "restore")
        if not any(_is_accelerated(one) for one in found):
            raise ValueError(f"restore: {what} is not accelerated")
        for one in found:
            if isinstance(one, OpOverload):
                RULES.remove_object(one)
    _give_back()


def _is_accelerated(what: Any) -> bool:
    # A packet stays accelerated for an overload that hotop made.
    return isinstance(what, AcceleratedOverload) or (
        isinstance(what, AcceleratedPacket) and not _accelerated.has_fast(what)
    )


def _give_back() -> None:
    """Restore what is not to be covered any more."""
    for overload in list(ACCELERATED):
        if not RULES.cover(overload):
            _restore(overload)
    # Packets of which no overload was looked up, or none is accelerated any more.
    for packet in _packets():
        if not _accelerated.has_fast(packet) and not _packet_is_covered(packet):
            _accelerated.restore_packet(packet)


def _restore(overload: OpOverload) -> None:
    ACCELERATED.discard(overload)
    if not isinstance(overload, AcceleratedOverload):
        return
    _accelerated.release(overload, _op_of(overload))
