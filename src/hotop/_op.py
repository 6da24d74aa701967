"""The op object, its overload and its packet: PyTorch's own classes behind the C++ call slot."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import _C
from torch._library import custom_ops, utils
from torch._ops import OpOverload, OpOverloadPacket, TorchBindOpOverload, _OpNamespace

from hotop import _accelerated, _core
from hotop._accelerated import HASH, AcceleratedPacket, LastingPacket
from hotop._handles import (
    StandIn,
    find_overload,
    find_packet,
    itself,
    reduce_overload,
    take_name,
)
from hotop._lock import locked
from hotop._planned_op import PlannedOpDef, backend_key, find_op


class _Successor:
    """What a handle of a removed definition calls: the op that has its name now."""

    def __init__(self, stale: Any, find: Callable[[], Any]) -> None:
        self._name = str(stale)
        self._stale_id = id(stale)
        self._find = find

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            current = self._find()
        except (AttributeError, RuntimeError):
            current = None
        if current is None or id(current) == self._stale_id:
            raise RuntimeError(f"{self._name}: the definition of this op was removed")
        return current(*args, **kwargs)


# The three classes take over PyTorch's __call__ for Dynamo and inspect to read; CPython never runs
# it, because the types' call slots are pointed at the C++ routine below. The docstrings are
# PyTorch's too, since an op's own __doc__ comes from its class.
class FastOverload(_core.CallSlot, OpOverload, metaclass=StandIn):
    __doc__ = OpOverload.__doc__  # torch.ops.ns.name.overload
    __call__ = OpOverload.__call__

    # See hotop._versions.HAS_PYOBJECT_DISPATCH.
    def _enable_pyobj_dispatch(self, enabled: bool = True) -> None:
        pass

    __copy__ = itself
    __reduce__ = reduce_overload


class FastPacket(_core.CallSlot, LastingPacket):
    __doc__ = OpOverloadPacket.__doc__  # torch.ops.ns.name; direct while it has one overload
    __call__ = OpOverloadPacket.__call__

    # PyTorch assigns both when another overload of this op is defined or goes.
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("_op", "_overload_names"):
            self._bind()

    def _bind(self) -> None:
        plan = None
        if len(self._overload_names) == 1:
            overload = self.__dict__.get(self._overload_names[0] or "default")
            plan = getattr(overload, "_hotop_plan", None)
        _core.bind(self, plan, self._op)


class OpDef(_core.CallSlot, PlannedOpDef):
    __doc__ = custom_ops.CustomOpDef.__doc__  # what hotop.custom_op returns
    __call__ = custom_ops.CustomOpDef.__call__

    def _define_dispatcher_op(self, schema_str: str, tags: Sequence[_C.Tag]) -> None:
        held = _held_packet(self._namespace, self._name)
        if held is not None:
            _accelerated.keep_hash(held)
        try:
            super()._define_dispatcher_op(schema_str, tags)
        except BaseException:
            if type(held) is LastingPacket:
                _accelerated.restore_packet(held)
            raise
        self._begin_plan()
        if isinstance(self._opoverload, TorchBindOpOverload):
            # Script objects are PyTorch's own affair, down to the overload's class.
            _core.bind(self, None, self._opoverload)
            return
        self._plan = self._make_plan(self._opoverload)
        self._opoverload = _install(self._opoverload, self._plan, held is not None)
        _core.bind(self, self._plan, self._opoverload._op)
        # PyTorch destroys these handles when the definition goes.
        self._lib._registration_handles.append(utils.RegistrationHandle(self._retire))

    def register_autograd(
        self,
        backward: Callable[..., Any],
        /,
        *,
        setup_context: Callable[..., Any] | None = None,
    ) -> None:
        """Register a backward formula; see :func:`torch.library.register_autograd`."""
        super().register_autograd(backward, setup_context=setup_context)
        self._read_formula()

    def register_kernel(
        self,
        device_types: custom_ops.device_types_t,
        fn: Callable[..., Any] | None = None,
        /,
    ) -> Callable[..., Any]:
        """Register ``fn`` as the kernel of these device types; see ``torch.library``."""
        # PyTorch checks the device argument when the decorator is made, before it is used.
        register_checked = super().register_kernel

        def inner(fn: Callable[..., Any]) -> Callable[..., Any]:
            if device_types is None or isinstance(device_types, str):
                names: list[str | None] = [device_types]
            else:
                names = list(device_types)
            # One at a time: PyTorch's closure over the loop variable would give every device
            # the last one's kernel.
            for name in names:
                is_new = name not in self._backend_fns
                register_checked(name)(self._with_arity_check(fn))
                self._kernels[name] = fn
                if is_new:
                    self._add_kernel("backend", backend_key(name), fn, name)
                self._refresh(name)
            return fn

        if fn is None:
            if device_types is not None and not utils.has_tensor_arg(self._opoverload._schema):
                register_checked(device_types)
            return inner
        return inner(fn)

    def _with_arity_check(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        if len(self._opoverload._schema.returns) < 2 or self._plan is None:
            return fn

        @functools.wraps(fn)
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = fn(*args, **kwargs)
            self._check_count(result)
            return result

        return counted

    @contextmanager
    def set_kernel_enabled(self, device_type: str, enabled: bool = True) -> Iterator[None]:
        """Disable or re-enable the kernel of a device type; see ``torch.library``."""
        try:
            with super().set_kernel_enabled(device_type, enabled):
                self._refresh(device_type)
                yield
        finally:
            self._refresh(device_type)

    def _refresh(self, device_type: str | None) -> None:
        if self._plan is None or device_type not in self._kernels:
            return
        # The table of disabled kernels is made after the first registrations.
        disabled = device_type in getattr(self, "_disabled_kernel", ())
        function = self._init_fn if disabled else self._kernels[device_type]
        self._plan.set_function(device_type, function)

    def _retire(self) -> None:
        """The dispatcher's entry is gone: old handles go to the current definition, if any."""
        overload: Any = self._opoverload
        packet: Any = overload._overloadpacket
        if self._plan is not None:
            self._plan.retire()
        name, overload_name = overload._schema.name, overload._overloadname
        _core.bind(self, None, _Successor(self, lambda: find_op(self._qualname)))
        _core.bind(overload, None, _Successor(overload, lambda: find_overload(name, overload_name)))
        successor = _Successor(packet, lambda: find_packet(name))
        if isinstance(packet, FastPacket):
            _core.bind(packet, None, successor)
        else:
            _accelerated.retire_packet(packet, successor)


def _held_packet(namespace_name: str, name: str) -> OpOverloadPacket[Any, Any] | None:
    """Return the packet of an op that exists before this overload of it."""
    namespace = getattr(torch.ops, namespace_name)
    packet = getattr(namespace, "__dict__", {}).get(name.partition(".")[0])
    return packet if isinstance(packet, OpOverloadPacket) else None


@locked
def _install(overload: OpOverload, plan: _core.Plan | None, is_held: bool) -> FastOverload:
    """Put fast objects in place of PyTorch's; a packet that somebody may hold stays the object."""
    packet = overload._overloadpacket
    if not is_held and len(packet._overload_names) == 1:
        packet = _fast_packet(packet)
    elif not isinstance(packet, FastPacket | AcceleratedPacket):
        _accelerated.accelerate_packet(packet)
    fast = FastOverload.__new__(FastOverload)
    fast.__dict__.update(overload.__dict__)
    fast.__dict__.pop(_core.SLOT_NAME, None)
    fast.__dict__["_overloadpacket"] = packet
    fast.__dict__["_hotop_plan"] = plan
    _core.bind(fast, plan, fast._op)
    setattr(packet, fast._overloadname, fast)
    if isinstance(packet, FastPacket):
        packet._bind()
    return fast


def _fast_packet(slow: OpOverloadPacket[Any, Any]) -> FastPacket:
    packet = FastPacket.__new__(FastPacket)
    packet.__dict__.update(slow.__dict__)
    packet.__dict__.pop(_core.SLOT_NAME, None)
    packet.__dict__[HASH] = hash(slow)
    namespace_name, op_name = slow._qualified_op_name.split("::")
    setattr(getattr(torch.ops, namespace_name), op_name, packet)
    return packet


for _cls in (FastOverload, FastPacket, OpDef):
    _core.point_calls(_cls)
    take_name(_cls)

# torch.ops, torch.ops.ns and torch.ops.ns.name: a third of a microsecond per call in all, before
# the op itself. The classes stay PyTorch's; what they answer does not change.
for _cls in (type(torch.ops), _OpNamespace, FastPacket, AcceleratedPacket):
    _core.shorten_lookups(_cls)
