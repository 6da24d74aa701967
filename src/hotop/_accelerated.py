"""Existing objects given hotop's call routine in place: overload, packet, ``CustomOpDef``.

Their layout is PyTorch's, so their class can be exchanged for a subclass; the slot stands in their
dict. Identity and hash stay.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import _C
from torch._library import custom_ops, utils
from torch._ops import OpOverload, OpOverloadPacket

from hotop import _core
from hotop._handles import StandIn, itself, reduce_overload, reduce_packet, take_name
from hotop._lock import locked
from hotop._op_kernels import closure, pytorch_kernel, watch
from hotop._planned_op import PlannedOpDef

SLOT = _core.SLOT_NAME
HASH = "_hotop_hash"


# As in hotop._op: __call__ is for Dynamo and inspect; CPython calls the C++ routine.
class AcceleratedOverload(OpOverload, metaclass=StandIn):
    __doc__ = OpOverload.__doc__
    __call__ = OpOverload.__call__

    __copy__ = itself
    __reduce__ = reduce_overload


# PyTorch's hash of a packet is that of its _op, which is another one when an overload is added:
# then formulas, decompositions and whatever else is kept under the packet would be lost.
class LastingPacket(OpOverloadPacket, metaclass=StandIn):
    __doc__ = OpOverloadPacket.__doc__
    __call__ = OpOverloadPacket.__call__

    __copy__ = itself
    __reduce__ = reduce_packet

    def __hash__(self) -> int:
        return self.__dict__[HASH]


class AcceleratedPacket(LastingPacket):
    __doc__ = OpOverloadPacket.__doc__
    __call__ = OpOverloadPacket.__call__

    # PyTorch assigns these when an overload is first looked up, defined or removed.
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("_op", "_overload_names") or isinstance(value, OpOverload):
            bind_packet(self)


class AcceleratedOpDef(PlannedOpDef):
    __doc__ = custom_ops.CustomOpDef.__doc__
    __call__ = custom_ops.CustomOpDef.__call__

    # A formula may come by a bound register_autograd that is older than the acceleration.
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("_backward_fn", "_setup_context_fn"):
            self._read_formula()


for _cls in (AcceleratedOverload, AcceleratedPacket, AcceleratedOpDef):
    _core.point_calls_by_dict(_cls)
    take_name(_cls)
take_name(LastingPacket)


def entry_of_overload(overload: OpOverload) -> Callable[..., Any]:
    """Return PyTorch's own entry; with its Python frame, which some error texts tell."""
    return MethodType(OpOverload.__call__, overload)


def entry_of_packet(packet: OpOverloadPacket[Any, Any]) -> Callable[..., Any]:
    """Return PyTorch's own entry for calls of this packet."""
    return MethodType(OpOverloadPacket.__call__, packet)


def accelerate_overload(overload: OpOverload, plan: _core.Plan | None = None) -> None:
    """Put a plan in front of an overload; without one, it is made when it is first needed."""
    slot = overload.__dict__.get(SLOT) or _core.CallSlot()
    entry = entry_of_overload(overload)
    if plan is None:
        _core.bind_later(slot, functools.partial(make_plan, overload), entry)
    else:
        _core.bind(slot, plan, entry)
    overload.__dict__["_hotop_plan"] = plan
    overload.__dict__["_hotop_direct"] = True
    overload.__dict__[SLOT] = slot
    overload.__class__ = AcceleratedOverload


def in_dispatcher(overload: OpOverload) -> bool:
    """Return whether the dispatcher has this operator; TorchScript's own it has not."""
    try:
        _C._dispatch_find_schema_or_throw(overload._schema.name, overload._schema.overload_name)
    except RuntimeError:
        return False
    return True


@locked
def make_plan(overload: OpOverload) -> None:
    """Make the plan of an overload, and that of its packet, from the kernels in its table."""
    if not isinstance(overload, AcceleratedOverload) or overload.__dict__["_hotop_plan"]:
        return
    op = custom_ops.OPDEFS.get(overload._name)
    if type(op) is custom_ops.CustomOpDef and op._opoverload is overload:
        # It was defined after a rule had covered its overload.
        accelerate_op(op)
        if not overload.__dict__["_hotop_plan"]:
            restore_overload(overload)
        return
    if not in_dispatcher(overload):  # its library has gone
        restore_overload(overload)
        return
    names = (overload._schema.name, overload._schema.overload_name)
    plan = _core.Plan(*names, "nothing", None)
    may_be_direct = overload._defined_in_python or _core.has_python_kernel(*names)
    _core.bind(overload.__dict__[SLOT], plan, entry_of_overload(overload), may_be_direct)
    overload.__dict__["_hotop_plan"] = plan
    overload.__dict__["_hotop_direct"] = may_be_direct
    if isinstance(overload._overloadpacket, AcceleratedPacket):
        bind_packet(overload._overloadpacket)


def keep_hash(packet: OpOverloadPacket[Any, Any]) -> None:
    """From now on a packet has the hash that it has now, whatever overloads it gets."""
    if type(packet) is OpOverloadPacket:
        packet.__dict__[HASH] = hash(packet)
        packet.__class__ = LastingPacket


def accelerate_packet(packet: OpOverloadPacket[Any, Any]) -> None:
    """Let calls of a packet go by the plans of its overloads."""
    keep_hash(packet)
    slot = _core.CallSlot()
    _core.bind(slot, None, entry_of_packet(packet))
    packet.__dict__[SLOT] = slot
    packet.__class__ = AcceleratedPacket
    bind_packet(packet)


@locked
def bind_packet(packet: OpOverloadPacket[Any, Any], *, first_call: bool = True) -> None:
    """Bind a packet's slot to the plans of its overloads, or to PyTorch's entry."""
    slot = packet.__dict__.get(SLOT)
    if slot is None:  # given back
        return
    entry = packet.__dict__.get("_hotop_successor")
    if entry is not None:
        _core.bind(slot, None, entry)
        return
    entry = entry_of_packet(packet)
    plan: _core.Plan | tuple[_core.CallSlot, ...] | None = None
    may_be_direct = True
    planned = _planned_overloads(packet)
    if first_call and len(planned) < len(packet._overload_names):
        # PyTorch makes an overload when it is first looked up; the first call of the packet does.
        _core.bind_later(slot, functools.partial(prepare_packet, packet), entry)
        return
    if len(packet._overload_names) == 1 and planned:
        plan = planned[0].__dict__["_hotop_plan"]
        may_be_direct = planned[0].__dict__.get("_hotop_direct", True)
    elif planned:
        plan = tuple(_slot_of(overload) for overload in planned)
    _core.bind(slot, plan, entry, may_be_direct)


def retire_packet(packet: OpOverloadPacket[Any, Any], successor: Callable[..., Any]) -> None:
    """Let calls of a packet that PyTorch has dropped go to the one that has its name now."""
    packet.__dict__["_hotop_successor"] = successor
    bind_packet(packet)


def _is_fast(overload: Any) -> bool:
    return isinstance(overload, AcceleratedOverload) or is_made_by_hotop(overload)


def _slot_of(overload: OpOverload) -> _core.CallSlot:
    return overload if isinstance(overload, _core.CallSlot) else overload.__dict__[SLOT]


def _planned_overloads(packet: OpOverloadPacket[Any, Any]) -> list[OpOverload]:
    """Return the overloads in the order in which PyTorch tries them, up to one without a plan."""
    found: list[OpOverload] = []
    for name in packet._overload_names:
        overload = packet.__dict__.get(name or "default")
        if overload is None or not _is_fast(overload) or not overload.__dict__["_hotop_plan"]:
            break
        found.append(overload)
    return found


@locked
def prepare_packet(packet: OpOverloadPacket[Any, Any]) -> None:
    """Look up and plan the overloads of a packet, and bind its slot for good."""
    for name in packet._overload_names:
        overload = getattr(packet, name or "default", None)  # None: its library has gone
        if not _is_fast(overload):
            break
        make_plan(overload)  # type: ignore[arg-type]
    if _planned_overloads(packet) or has_fast(packet):
        bind_packet(packet, first_call=False)
    else:  # a predicate wanted none of them
        restore_packet(packet)


def prepare(what: Any) -> None:
    """Make the plan that the first call would make."""
    if isinstance(what, OpOverload):
        make_plan(what)
    elif isinstance(what, OpOverloadPacket):
        prepare_packet(what)


def accelerate_op(op: custom_ops.CustomOpDef) -> None:
    """Put a plan in front of a ``torch.library.custom_op``, its overload and its packet."""
    overload = op._opoverload
    slot = _core.CallSlot()
    _core.bind(slot, None, entry_of_overload(overload))
    op.__dict__[SLOT] = slot
    op.__class__ = AcceleratedOpDef
    assert isinstance(op, AcceleratedOpDef)
    op._begin_plan()
    plan = op._plan = op._make_plan(overload)
    _core.bind(slot, plan, entry_of_overload(overload))
    if plan is None:
        return
    _read_registrations(op, overload)
    _retire_with_definition(op)
    accelerate_overload(overload, plan)
    packet = overload._overloadpacket
    if isinstance(packet, AcceleratedPacket):
        bind_packet(packet)
    elif not is_made_by_hotop(packet):
        accelerate_packet(packet)


def _read_registrations(op: AcceleratedOpDef, overload: OpOverload) -> None:
    autograd_kernel = pytorch_kernel(overload, "Autograd", "torch._library.autograd")
    if autograd_kernel is not None:
        op._add_kernel("autograd", "Autograd")
        assert op._plan is not None
        op._plan.make_formula_by(lambda: op._record_directly(autograd_kernel))
    custom_ops_module = custom_ops.__name__
    for role, key in (("version_bump", "ADInplaceOrView"), ("backend_select", "BackendSelect")):
        if pytorch_kernel(overload, key, custom_ops_module) is not None:
            op._add_kernel(role, key)
            op._selects_backend |= role == "backend_select"
    for device_type in op._autocast_dtype:
        key = "Autocast" + _C._dispatch_key_for_device(device_type)
        rule = closure(pytorch_kernel(overload, key, custom_ops_module))
        if rule.get("device_type") == device_type and "cast_inputs" in rule:
            op._add_kernel("autocast", key, rule["cast_inputs"], device_type)
    watch(op)


def _retire_with_definition(op: custom_ops.CustomOpDef) -> None:
    """Give the op back to PyTorch when its definition is replaced or removed."""
    if "_hotop_retires" in op.__dict__:
        return
    op.__dict__["_hotop_retires"] = True
    reference = weakref.ref(op)

    @locked
    def retire() -> None:
        op = reference()
        if isinstance(op, AcceleratedOpDef):
            if op._plan is not None:
                op._plan.retire()
            release(op._opoverload, op)

    op._lib._registration_handles.append(utils.RegistrationHandle(retire))


def release(overload: OpOverload, op: custom_ops.CustomOpDef | None) -> None:
    """Give an overload and its op back to PyTorch, and its packet if it was the last of it."""
    if isinstance(op, AcceleratedOpDef):
        restore_op(op)
    restore_overload(overload)
    packet = overload._overloadpacket
    if has_fast(packet):
        bind_packet(packet)
    else:
        restore_packet(packet)


def has_fast(packet: OpOverloadPacket[Any, Any]) -> bool:
    """Return whether an overload of the packet is accelerated, or made by hotop."""
    overloads = (value for value in list(vars(packet).values()) if isinstance(value, OpOverload))
    return any(_is_fast(overload) for overload in overloads)


def restore_overload(overload: OpOverload) -> None:
    """Give an overload back to PyTorch."""
    if SLOT not in overload.__dict__:
        return
    overload.__class__ = OpOverload
    for name in (SLOT, "_hotop_plan", "_hotop_direct"):
        overload.__dict__.pop(name, None)


def restore_packet(packet: OpOverloadPacket[Any, Any]) -> None:
    """Give a packet back to PyTorch, with the hash that it had."""
    if type(packet) in (AcceleratedPacket, LastingPacket):
        same = hash(packet) == OpOverloadPacket.__hash__(packet)
        packet.__class__ = OpOverloadPacket if same else LastingPacket
        packet.__dict__.pop(SLOT, None)


def restore_op(op: custom_ops.CustomOpDef) -> None:
    """Give a ``CustomOpDef`` back to PyTorch, its overload and packet apart."""
    plan = op.__dict__.get("_plan")
    if plan is not None:
        plan.forget_backward()  # nodes that wait for their backward ask PyTorch's
    op.__class__ = custom_ops.CustomOpDef
    for name in (SLOT, "_plan", "_kernels", "_selects_backend", "_node_type"):
        op.__dict__.pop(name, None)


def is_made_by_hotop(what: Any) -> bool:
    """Return whether ``hotop.custom_op`` made this object."""
    return isinstance(what, _core.CallSlot)
