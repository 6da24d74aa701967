"""Finds in the bytecode of a module's class which submodules' ``weight`` it reads.

Code that reads ``self.linear1.weight`` (a fast path, a fused kernel, a dtype to follow) does not
call the layer, so the layer cannot be replaced by one whose weight is something else.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch import nn

# From `self`, or from something unknown: ("*", "linear1").
Path = tuple[str, ...]
_UNKNOWN = "*"


def weights_read(module_class: type[nn.Module]) -> set[Path]:
    """Return the paths whose ``weight`` is read by ``forward`` and by the methods it names."""
    found: set[Path] = set()
    names, seen = ["forward"], {"forward"}
    while names:
        name = names.pop()
        for base in module_class.__mro__:
            if base in (nn.Module, object) or name not in vars(base):
                continue
            for code in _codes(vars(base)[name]):
                found |= _read_by(code)
                named = _names_in(code) - seen
                seen |= named
                names += named
    return found


def reads(paths: set[Path], parts: Path) -> bool:
    """Whether one of these paths can be that of the submodule at ``parts``, from ``self``."""
    return any(
        path == parts or (path[0] == _UNKNOWN and path[1:] and parts[-len(path) + 1 :] == path[1:])
        for path in paths
    )


def _codes(member: Any) -> Iterator[CodeType]:
    if isinstance(member, property):
        functions = [member.fget, member.fset]
    else:
        functions = [getattr(member, "__func__", member)]  # of static and class methods
    for function in functions:
        code = getattr(inspect.unwrap(function) if function else None, "__code__", None)
        if isinstance(code, CodeType):
            yield code


def _names_in(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def _read_by(code: CodeType) -> set[Path]:
    found: set[Path] = set()
    own = code.co_varnames[0] if code.co_argcount else None
    aliases: dict[Any, Path] = {} if own is None else {own: ()}
    path: Path = (_UNKNOWN,)
    constant = ""
    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        if name.startswith("LOAD_FAST") or name in ("LOAD_DEREF", "LOAD_NAME", "LOAD_CLOSURE"):
            last = value[-1] if isinstance(value, tuple) else value
            path = aliases.get(last, (_UNKNOWN,))
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            if value == "weight" and path:
                found.add(path)
            path = (*path, value)
        elif name in ("LOAD_CONST", "LOAD_SMALL_INT"):
            constant = str(value)
            found |= _nested(value)
        elif name == "BINARY_SUBSCR" or (name == "BINARY_OP" and instruction.argrepr == "[]"):
            # An index from the end can be any of them.
            path = (_UNKNOWN,) if constant.startswith("-") else (*path, constant)
        elif name == "STORE_FAST":
            aliases[value] = path
        elif name not in ("CACHE", "RESUME", "EXTENDED_ARG", "PUSH_NULL", "NOP", "COPY_FREE_VARS"):
            path = (_UNKNOWN,)
    return found


def _nested(constant: Any) -> set[Path]:
    return _read_by(constant) if isinstance(constant, CodeType) else set()
