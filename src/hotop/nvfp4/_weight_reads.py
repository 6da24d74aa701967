"""Finds in the bytecode of a module's class which submodules' ``weight`` it reads.

Code that reads ``self.linear1.weight`` (a fast path, a fused kernel, a dtype to follow) does not
call the layer, so the layer cannot be replaced by one whose weight is something else.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

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
        for code in (code for place in places for code in _codes(place.get(name))):
            found |= _read_by(code)
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


def _fits(path: Path, parts: Path) -> bool:
    if path[0] == _ANY:
        path = path[1:]
        parts = parts[-len(path) :] if path else ()
    return (
        bool(path)
        and len(path) == len(parts)
        and all(a in (b, _ANY) for a, b in zip(path, parts, strict=True))
    )


def _codes(member: Any) -> Iterator[CodeType]:
    """The code of a method, property or static method, of what it wraps and defines."""
    waiting = [member.fget, member.fset] if isinstance(member, property) else [member]
    seen: set[int] = set()
    while waiting:
        held = waiting.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, CodeType):
            yield held
            waiting += held.co_consts
            continue
        waiting += [getattr(held, "__func__", None), getattr(held, "__wrapped__", None)]
        if isinstance(held, FunctionType):
            waiting.append(held.__code__)
            # What a decorator without functools.wraps calls.
            waiting += [cell.cell_contents for cell in held.__closure__ or () if _is_function(cell)]


def _is_function(cell: CellType) -> bool:
    try:
        return isinstance(cell.cell_contents, FunctionType | MethodType)
    except ValueError:  # empty
        return False


# Instructions that leave the value at hand, those around an inlined comprehension too.
_NO_VALUE = {
    *("CACHE", "RESUME", "EXTENDED_ARG", "PUSH_NULL", "NOP", "COPY", "DUP_TOP", "GET_ITER"),
    *("LOAD_FAST_AND_CLEAR", "SWAP", "BUILD_LIST"),
}


def _read_by(code: CodeType) -> set[Path]:
    """Follow attributes and constant indices from names, instruction by instruction."""
    found: set[Path] = set()
    aliases: dict[Any, Path] = {code.co_varnames[0]: ()} if code.co_argcount else {}
    path: Path = (_ANY,)
    constant = ""
    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        if name in _NO_VALUE:
            continue
        if name.startswith("LOAD_FAST") or name in ("LOAD_DEREF", "LOAD_NAME"):
            last = value[-1] if isinstance(value, tuple) else value
            path = aliases.get(last, (_ANY,))
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            if value == "weight" and path:
                found.add(path)
            path = (*path, value)
        elif name in ("LOAD_CONST", "LOAD_SMALL_INT"):
            constant = str(value)
        elif name == "BINARY_SUBSCR" or (name == "BINARY_OP" and instruction.argrepr == "[]"):
            # An index from the end can be any.
            path = (*path, _ANY if constant.startswith("-") else constant)
        elif name == "FOR_ITER":
            path = (*path, _ANY) if path != (_ANY,) else path
        elif name == "STORE_FAST":
            aliases[value] = path
        elif name == "STORE_FAST_LOAD_FAST":
            aliases[value[0]] = path
            path = aliases.get(value[1], (_ANY,))
        else:
            path = (_ANY,)
    return found
