"""Random registrations between calls, the same on both ops."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from tools.fuzz.grammar import Definition
from tools.fuzz.stage import make_kernel
from torch import Tensor
from torch.library import Library

from twin_observe import NAMESPACES, attempt, recorded
from twin_ops import constant_gradients

KEYS = (
    *("CPU", "CPU", "Meta", "Autograd", "AutogradCPU", "ADInplaceOrView", "AutocastCPU"),
    *("CompositeImplicitAutograd", "CompositeExplicitAutograd", "BackendSelect"),
    *("Functionalize", "FuncTorchBatched", "Conjugate", "ZeroTensor", "SparseCPU"),
)
FORMULAS = ("good",) * 6 + ("few", "many", "raises", "wrong type", "not materialized", "non diff")


def _backward(variant: str) -> Callable:
    def backward(ctx: Any, *grads: Any) -> Any:
        if variant == "raises":
            raise ArithmeticError("in backward")
        found = constant_gradients(ctx)
        if variant == "few":
            found = found[:-1]
        elif variant == "many":
            found += [None, torch.ones(2)]
        elif variant == "wrong type":
            found[0] = "no gradient"
        if variant == "not materialized":
            found = [f if any(g is not None for g in grads) else None for f in found]
        return found[0] if len(found) == 1 else tuple(found)

    return backward


def _setup_context(definition: Definition, variant: str) -> Callable:
    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.inputs = inputs
        ctx.save_for_backward(*[v for v in inputs if isinstance(v, Tensor)])
        if variant == "not materialized":
            ctx.set_materialize_grads(False)
        if variant == "non diff":
            first = output[0] if isinstance(output, tuple | list) and output else output
            if isinstance(first, Tensor):
                ctx.mark_non_differentiable(first)

    # PyTorch passes keyword_only_inputs only where the schema has keyword-only arguments.
    if any(p.keyword_only for p in definition.parameters):

        def with_keywords(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
            keep(ctx, inputs, output)

        return with_keywords
    return keep


def add_autograd(op: Any, definition: Definition, variant: str) -> None:
    """Register a formula of one of `FORMULAS`."""
    op.register_autograd(_backward(variant), setup_context=_setup_context(definition, variant))


def add_fake(op: Any, definition: Definition, plus: int) -> None:
    """Register a fake that computes like a kernel."""
    op.register_fake(recorded(make_kernel(definition, plus)))


def add_vmap(op: Any, definition: Definition) -> None:
    """Register a vmap rule that calls a kernel."""
    kernel = make_kernel(definition, 5)

    def rule(info: Any, in_dims: Any, *args: Any, **kwargs: Any) -> Any:
        result = kernel(*args, **kwargs)
        dims = torch.utils._pytree.tree_map(lambda v: 0 if isinstance(v, Tensor) else None, result)
        return result, dims

    op.register_vmap(rule)


class Registrations:
    """Changes both ops of a case, and undoes at its end what would outlive it."""

    def __init__(self, definition: Definition, name: str) -> None:
        """Start without any."""
        self.definition = definition
        self.name = name
        self.libraries: list[Library] = []
        self.overridden = False
        self.removed = False  # an override was taken back
        self.may_override = name[-1] in "123"
        # PyTorch keeps a removed override of a Python kernel where dispatch modes look.
        self.ever_overridden = False
        self.device_list = isinstance(definition.device_types, tuple)
        self.later_kernel = False

    def draw(self, random: Random) -> tuple[str, Callable[[int, Any], object]]:
        """Draw one change: its words, and what makes it on the op of one side."""
        definition = self.definition
        plus = random.choice((10, 100))
        what = random.choice(
            ("kernel",) * 4
            + ("override",) * 3
            + ("undo", "undo", "fake", "autograd", "autograd", "vmap", "autocast", "fallthrough")
            + ("kernel by name", "override kernel", "dispatch rule", "plain autograd key")
        )
        if what in ("override", "fallthrough", "plain autograd key") and not self.may_override:
            what = "kernel"
        if what == "undo" or (self.overridden and random.random() < 0.5):
            return "undo overrides", lambda side, op: self.undo() if side == 1 else None
        if what in ("kernel", "kernel by name", "override kernel"):
            devices: Any = random.choice((None, "cpu", "cpu", "cpu", "meta", "cuda", "bad"))
            if random.random() < 0.02:
                devices = ("cpu", "meta")
            self.later_kernel = self.later_kernel or self.device_list
            self.device_list = self.device_list or isinstance(devices, tuple)
            function = make_kernel(definition, plus)
            if what == "kernel":
                function = recorded(function, varargs=random.random() < 0.3)
                return f"kernel +{plus} for {devices}", lambda s, op: op.register_kernel(
                    devices, function
                )
            function = recorded(function)
            return (
                f"kernel +{plus} for {devices} by name",
                lambda s, op: torch.library.register_kernel(op._qualname, devices, function),
            )
        if what in ("override", "fallthrough", "plain autograd key"):
            key = random.choice(KEYS) if what != "plain autograd key" else "Autograd"
            function = (
                torch.library.fallthrough_kernel
                if what == "fallthrough"
                else recorded(make_kernel(definition, plus), varargs=True)
            )
            self.overridden = self.ever_overridden = True

            def override(side: int, op: Any) -> None:
                library = Library(NAMESPACES[side], "IMPL")
                self.libraries.append(library)
                library.impl(self.name, function, key)

            return f"{what} of {key}", override
        if what == "autograd":
            variant = random.choice(FORMULAS)
            return f"autograd {variant}", lambda s, op: add_autograd(op, definition, variant)
        if what == "fake":
            return f"fake +{plus}", lambda s, op: add_fake(op, definition, plus)
        if what == "vmap":
            return "vmap", lambda s, op: add_vmap(op, definition)
        if what == "dispatch rule":
            return "dispatch rule", lambda s, op: _dispatch_rule(op)
        dtype = random.choice((torch.bfloat16, torch.float16, torch.float32))
        return f"autocast {dtype}", lambda s, op: op.register_autocast("cpu", dtype)

    def first(self, random: Random, op: Any) -> None:
        """Register the rules that the definition starts with."""
        definition = self.definition
        variant = random.choice(FORMULAS)
        for rule in definition.rules:
            if rule == "fake":
                attempt(lambda: add_fake(op, definition, 0))
            elif rule == "vmap":
                attempt(lambda: add_vmap(op, definition))
            elif rule == "autocast":
                attempt(lambda: op.register_autocast("cpu", torch.bfloat16))
            else:
                attempt(lambda: add_autograd(op, definition, variant))

    def undo(self) -> None:
        """Take the overrides back."""
        self.removed = self.removed or bool(self.libraries)
        for library in self.libraries:
            library._destroy()
        self.libraries.clear()
        self.overridden = False


def _dispatch_rule(op: Any) -> None:
    from twin_contexts import LogDispatches

    def rule(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mode.log.append(("rule", len(args), sorted(kwargs or {})))
        return func(*args, **(kwargs or {}))

    op.register_torch_dispatch(LogDispatches, rule)
