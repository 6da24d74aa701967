"""Finds in the bytecode of a module's class which submodules' ``weight`` it reads.

Code that reads ``self.linear1.weight`` (a fast path, a fused kernel, a dtype to follow) does not
call the layer, so the layer cannot be replaced by one whose weight is something else.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from hotop.nvfp4._held import closed_over

# From `self`, or from something unknown: ("*", "linear1"). Behind the first part "*" is any index.
Path = tuple[str, ...]
_ANY = "*"


def weights_read(module: nn.Module) -> set[Path]:
    """Return the paths whose ``weight`` is read by ``forward`` and by the methods it names."""
    found: set[Path] = set()
    bases = [base for base in type(module).__mro__ if base not in (nn.Module, object)]
    places = [vars(module), *map(vars, bases)]
    names, seen = ["__call__", "forward"], {"__call__", "forward"}
    while names:
        name = names.pop()
        for code, own in (pair for place in places for pair in _codes(place.get(name))):
            found |= _read_by(code, own)
            named = set(code.co_names) - seen
            seen |= named
            names += named
    return found


def has_own_functions(module: nn.Module) -> bool:
    """Whether :func:`weights_read` says more of this instance than of its class."""
    return any(isinstance(value, FunctionType | MethodType) for value in vars(module).values())


def reads(paths: set[Path], parts: Path) -> bool:
    """Whether one of these paths can be that of the submodule at ``parts``, from ``self``."""
    return any(_fits(path, parts) for path in paths)


def reads_unknown(paths: set[Path]) -> bool:
    """Whether the weight of something is read of which no path says what it is."""
    return (_ANY,) in paths


def _fits(path: Path, parts: Path) -> bool:
    if path[0] == _ANY:
        path = path[1:]
        parts = parts[-len(path) :] if path else ()
    return (
        bool(path)
        and len(path) == len(parts)
        and all(a in (b, _ANY) for a, b in zip(path, parts, strict=True))
    )


def _codes(member: Any) -> Iterator[tuple[CodeType, bool]]:
    """The code of a method or property, of what it wraps, defines and calls by a global name.

    With each, whether its first parameter is the module.
    """
    waiting = [(member, not isinstance(member, staticmethod))]
    if isinstance(member, property):
        waiting = [(member.fget, True), (member.fset, True)]
    seen: set[int] = set()
    while waiting:
        held, own = waiting.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, CodeType):
            yield held, own
            waiting += [(one, False) for one in held.co_consts]
            continue
        waiting += [(getattr(held, name, None), own) for name in ("__func__", "__wrapped__")]
        if isinstance(held, FunctionType):
            waiting.append((held.__code__, own))
            # What a decorator without functools.wraps calls.
            inner = (FunctionType, MethodType)
            waiting += [(one, own) for one in closed_over(held) if isinstance(one, inner)]
            called = (held.__globals__.get(name) for name in held.__code__.co_names)
            waiting += [(one, False) for one in called if _is_of_the_model(one)]


def _is_of_the_model(value: Any) -> bool:
    # PyTorch's own functions take weights, not layers.
    return isinstance(value, FunctionType) and f"{value.__module__}.".partition(".")[0] != "torch"


# Instructions that leave the value at hand, those around an inlined comprehension too.
_NO_VALUE = {
    *("CACHE", "RESUME", "EXTENDED_ARG", "PUSH_NULL", "NOP", "COPY", "DUP_TOP", "GET_ITER"),
    *("LOAD_FAST_AND_CLEAR", "SWAP", "BUILD_LIST"),
}


def _read_by(code: CodeType, own: bool) -> set[Path]:
    """Follow attributes and constant indices from names, instruction by instruction."""
    found: set[Path] = set()
    aliases: dict[Any, Path] = {code.co_varnames[0]: ()} if own and code.co_argcount else {}
    unknown: Path = (_ANY,)
    path = unknown
    constant: str | None = None
    is_swapped = False
    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        if instruction.is_jump_target and name != "FOR_ITER":
            path = unknown  # of two ways that lead here, this is one
        if name in _NO_VALUE:
            is_swapped |= name == "SWAP"
            continue
        index, constant = constant, None
        if name.startswith("STORE_FAST"):
            names = value if isinstance(value, tuple) else (value,)
            loads = name.endswith("LOAD_FAST")
            # The top alone is known, and not which it is once it was swapped.
            for stored in names[:1] if loads else names:
                aliases[stored] = unknown if is_swapped else path
                path = unknown
            if loads:
                path = aliases.get(names[-1], unknown)
            continue
        is_swapped = False
        if name.startswith("LOAD_FAST") or name in ("LOAD_DEREF", "LOAD_NAME"):
            last = value[-1] if isinstance(value, tuple) else value
            path = aliases.get(last, unknown)
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            if value == "weight" and path:
                found.add(path)
            if value != "_modules":  # its keys are the attributes
                path = (*path, value)
        elif name in ("LOAD_CONST", "LOAD_SMALL_INT"):
            constant = str(value)
        elif name == "BINARY_SUBSCR" or (name == "BINARY_OP" and instruction.argrepr == "[]"):
            # An index from the end can be any.
            path = unknown if index is None else (*path, _ANY if index[0] == "-" else index)
        elif name == "FOR_ITER":
            path = (*path, _ANY) if path not in (unknown, ()) else unknown
        else:
            path = unknown
    return found
