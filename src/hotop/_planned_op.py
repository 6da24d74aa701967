"""A ``CustomOpDef`` that tells its plan which kernels, formula and rules stand where."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import _C
from torch._library import autograd, custom_ops, utils
from torch._ops import OpOverload

from hotop import _core
from hotop._handles import StandIn
from hotop._lock import locked
from hotop._versions import formula_of, generated_function


def obligation_of(overload: OpOverload) -> str | None:
    """Return what PyTorch asks of this op's results; None: more than a plan knows."""
    schema = overload._schema
    if schema._is_view_op():
        return None if schema.is_mutable else "view"
    if utils.is_inplace(overload):
        return "inplace"
    return "out" if utils.is_out(overload) else "no_alias"


def find_op(qualified_name: str) -> PlannedOpDef:
    """Return an op by its name; what unpickles one."""
    op = custom_ops.OPDEFS.get(qualified_name)
    if op is None:
        raise RuntimeError(
            f"the op {qualified_name} is not defined in this process; import the module that "
            "defines it before unpickling"
        )
    return op


def backend_key(device_type: str | None) -> str:
    """Return the dispatch key of a device type's kernel, or of the kernel for all devices."""
    if device_type is None:
        return "CompositeExplicitAutograd"
    return _C._dispatch_key_for_device(device_type)


class PlannedOpDef(custom_ops.CustomOpDef, metaclass=StandIn):
    """Base of the ops that hotop makes, and of those that exist and are accelerated."""

    def __copy__(self) -> PlannedOpDef:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedOpDef:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return find_op, (self._qualname,)

    def _begin_plan(self) -> None:
        # Declared here: an annotation of the class would be the op's, to functools.wraps.
        self._plan: _core.Plan | None = None
        # By device: the function of an op of hotop's, PyTorch's kernel of an accelerated one.
        self._kernels: dict[str | None, Callable[..., Any]] = {}
        self._selects_backend = False
        self._node_type: type | None = None

    def _make_plan(self, overload: OpOverload) -> _core.Plan | None:
        schema = overload._schema
        obligation = obligation_of(overload)
        if obligation is None:
            return None
        return _core.Plan(schema.name, schema.overload_name, obligation, self._check_result)

    def _check_result(
        self, device_type: str | None, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Raise what PyTorch raises for a result that a kernel may not return."""
        self._check_count(result)

        def get_module() -> Any:
            import inspect

            return inspect.getmodule(self._backend_fns[device_type])

        if self._is_inplace:
            if result is not args[0]:
                raise RuntimeError(
                    f"{self._name} (with implementation in {get_module()}): "
                    "An operator tagged with torch.Tag.inplace must "
                    "return its first argument."
                )
        elif self._is_out:
            expected = tuple(kwargs[name] for name in self._out_kwarg_names)
            if len(expected) == 1:
                same = result is expected[0]
            else:
                same = (
                    isinstance(result, tuple)
                    and len(result) == len(expected)
                    and all(a is b for a, b in zip(result, expected, strict=True))
                )
            if not same:
                raise RuntimeError(
                    f"{self._name} (with implementation in {get_module()}): "
                    "An operator tagged with torch.Tag.out must "
                    "return its mutable keyword-only arguments."
                )
        elif not self._opoverload._schema._is_view_op():
            utils._c_check_aliasing_constraint(self._name, args, kwargs, result, get_module)

    def _register_autograd_dispatcher_impl(self) -> None:
        schema = self._opoverload._schema

        # PyTorch builds classes for every op here, a third of what a definition costs; most ops
        # never need them.
        @functools.cache
        @torch._disable_dynamo  # type: ignore[attr-defined]
        def make() -> Callable[..., Any]:
            kernel = autograd.make_autograd_impl(self._opoverload, formula_of(self))
            self._record_directly(kernel)
            return kernel

        def refuse() -> None:
            raise NotImplementedError(
                f"{self._qualname}: an input has a forward-mode tangent, which PyTorch would drop "
                "without a word: custom operators have no jvp formula. Detach the input from "
                "forward-mode AD, or write the op with differentiable PyTorch operators."
            )

        kernel = _core.guarded_autograd_kernel(make, refuse, schema.is_mutable)
        self._lib.impl(self._name, kernel, "Autograd", with_keyset=True)
        self._add_kernel("autograd", "Autograd")
        if self._plan is not None:
            self._plan.make_formula_by(make)

    def _record_directly(self, kernel: Callable[..., Any]) -> None:
        """Let calls that autograd records be made from C++, with PyTorch's own node of this op."""
        generated = generated_function(kernel)
        if (
            self._plan is None
            or generated is None
            or self._opoverload._schema._is_view_op()
            or self._is_inplace
            or self._is_out
        ):
            return
        pytorch_node_type = generated._backward_cls
        self._node_type = type(
            pytorch_node_type.__name__,
            (pytorch_node_type,),
            {"__module__": pytorch_node_type.__module__, "_hotop_plan": self._plan},
        )
        _core.add_node_methods(self._node_type)
        self._read_formula()

    def _read_formula(self) -> None:
        """Tell the plan the formula that ``register_autograd`` has noted."""
        node_type = self.__dict__.get("_node_type")
        if node_type is not None and self._plan is not None:
            self._plan.set_formula(node_type, self._setup_context_fn, self._backward_fn)

    @locked
    def register_autocast(self, device_type: str, cast_inputs: torch.dtype) -> Any:
        """Register an autocast rule; see :func:`torch.library.register_autocast`."""
        is_new = getattr(self, "_autocast_dtype", {}).get(device_type) is None
        kernel = super().register_autocast(device_type, cast_inputs)
        if is_new:
            key = "Autocast" + _C._dispatch_key_for_device(device_type)
            self._add_kernel("autocast", key, cast_inputs, device_type)
        return kernel

    def _register_mutation_version_bump(self, schema: _C.FunctionSchema) -> None:
        super()._register_mutation_version_bump(schema)
        self._add_kernel("version_bump", "ADInplaceOrView")

    def _register_backend_select_dispatcher(self, device_arg_index: int) -> None:
        # It reads the table of kernels in every call, so one serves every later device; PyTorch
        # would warn of the second.
        if self._selects_backend:
            return
        self._selects_backend = True
        super()._register_backend_select_dispatcher(device_arg_index)
        self._add_kernel("backend_select", "BackendSelect")

    def _add_kernel(
        self,
        role: str,
        key: str,
        function: Callable[..., Any] | torch.dtype | None = None,
        device_type: str | None = None,
    ) -> None:
        if self._plan is not None:
            self._plan.add_kernel(role, key, function, device_type)

    def _check_count(self, result: Any) -> None:
        """PyTorch does not count a kernel's results: too few pass, too many crash the process."""
        declared = len(self._opoverload._schema.returns)
        if declared > 1 and isinstance(result, Sequence) and len(result) != declared:
            raise RuntimeError(
                f"{self._qualname}: the kernel returned {len(result)} values, but the schema "
                f"declares {declared}"
            )
