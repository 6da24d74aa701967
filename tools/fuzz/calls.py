"""Random calls of an op: good, convertible and wrong arguments, counts and keywords."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from tools.fuzz.grammar import Definition
from torch import Tensor

from twin import Arguments, MakeArguments
from twin_contexts import TENSORS
from twin_values import VALUES

MAKERS: dict[str, Callable[[], Any]] = {**VALUES, **{f"t:{k}": v for k, v in TENSORS.items()}}
# PyTorch casts these to an enumeration without a check, or their order is not fixed.
_UNSOUND = {"set", "frozenset", "257", "2**31", "2**53+1", "-1", "-2**63", "2**63-1"}
ANY_VALUE = sorted(set(VALUES) - _UNSOUND)
ANY_TENSOR = sorted(f"t:{name}" for name in TENSORS)
# With these PyTorch's own lower layers may be switched off without a crash.
_ORDINARY = ("t:plain", "t:leaf", "t:view", "t:non_leaf", "t:double", "t:parameter_frozen")
DEFECTS = ("drop", "extra", "unknown", "twice", "odd keyword", "self")


class Call:
    """One drawn call: makes fresh, equal arguments for each side.

    Attributes:
        ordinary: Every Tensor is a dense one with memory, and each value is good.
    """

    def __init__(self, random: Random, definition: Definition) -> None:
        """Draw the values and how they are passed."""
        parameters = definition.parameters
        wild = random.random() < 0.2
        self.names: list[str] = []
        self.ordinary = True
        for p in parameters:
            draw = random.random()
            if wild and draw < 0.15:
                name = random.choice(ANY_VALUE)
                self.ordinary = False
            elif ((wild and draw < 0.5) or draw < 0.03) and p.kind.written.startswith("Tensor"):
                name = random.choice(ANY_TENSOR)
                self.ordinary = self.ordinary and name in _ORDINARY
            elif p.default is not None and draw > 0.8:
                name = "default"
            else:
                name = random.choice(p.kind.good)
                if p.kind.has_tensor and name not in _ORDINARY:
                    self.ordinary = self.ordinary and name.startswith(("list_", "tuple_", "None"))
            self.names.append(name)
        self.definition = definition
        positional = sum(not p.keyword_only for p in parameters)
        keywordless = random.random() < 0.6
        self.by_position = positional if keywordless else random.randint(0, positional)
        keys = list(range(self.by_position, len(parameters)))
        random.shuffle(keys)
        self.keys = [k for k in keys if parameters[k].default is None or random.random() < 0.5]
        self.cut = 0
        if keywordless and random.random() < 0.4:  # leave trailing defaults out
            while (
                self.cut < positional and parameters[positional - 1 - self.cut].default is not None
            ):
                self.cut += 1
        self.defect = random.choice(DEFECTS) if random.random() < 0.05 else ""
        tensors = [i for i, p in enumerate(parameters) if p.kind.written in ("Tensor", "Tensor?")]
        self.shared: tuple[int, int, str] | None = None
        if len(tensors) > 1 and random.random() < 0.08:
            one, other = random.sample(tensors, 2)
            self.shared = (one, other, random.choice(("same", "view", "detached")))

    def _values(self) -> list[Any]:
        values = [
            p.default_value if name == "default" else MAKERS[name]()
            for p, name in zip(self.definition.parameters, self.names, strict=True)
        ]
        if self.shared is not None:
            one, other, how = self.shared
            source = values[one]
            if isinstance(source, Tensor):
                try:
                    values[other] = {
                        "same": lambda: source,
                        "view": lambda: source.view(source.shape),
                        "detached": source.detach,
                    }[how]()
                except (RuntimeError, NotImplementedError):
                    values[other] = source
        return values

    def make(self) -> Arguments:
        """Make the arguments."""
        values = self._values()
        args = values[: self.by_position - self.cut]
        kwargs = {self.definition.parameters[k].name: values[k] for k in self.keys}
        if self.defect == "drop" and kwargs:
            kwargs.popitem()
        elif self.defect == "drop" and args:
            args.pop()
        elif self.defect == "extra":
            args += [1] * (len(values) + 1 - len(args))
        elif self.defect == "unknown":
            kwargs["unknown"] = 1
        elif self.defect == "twice" and args:
            kwargs[self.definition.parameters[0].name] = args[0]
        elif self.defect == "odd keyword":
            kwargs["".join(("p", "0", "\u00e9"))] = torch.ones(1)
        elif self.defect == "self":
            kwargs["self"] = torch.ones(1)
        return tuple(args), kwargs

    @property
    def maker(self) -> MakeArguments:
        """The function that makes the arguments."""
        return self.make

    def __str__(self) -> str:
        """Return the call in words."""
        words = self.names[: self.by_position - self.cut]
        words += [f"{self.definition.parameters[k].name}={self.names[k]}" for k in self.keys]
        extra = [self.defect] if self.defect else []
        extra += [str(self.shared)] if self.shared else []
        return f"({', '.join(words)}){' ' if extra else ''}{' '.join(extra)}"
