"""The only differences that the fuzzer lets pass: each named, with its reason."""

from __future__ import annotations

import re
from collections.abc import Callable

from tools.fuzz.compare import Found


def tangent(found: Found) -> bool:
    """PyTorch drops a forward-mode tangent without a word; hotop refuses (docs/contract.md)."""
    left, right = found.errors
    return "forward-mode tangent" in right and "forward-mode tangent" not in left


def wrong_number_of_gradients(found: Found) -> bool:
    """PyTorch's message counts one gradient too many on both sides (docs/contract.md).

    Of a surplus one it says that the further input is no Variable.
    """
    texts = [side.get("backward error", side.get("error")) for side in (found.left, found.right)]
    if not all(isinstance(text, dict) for text in texts):
        return False
    if not all("error.text" in line for line in found.lines):
        return False
    if "forward input was not a Variable" in texts[0]["text"]:
        return "incorrect number of gradients" in texts[1]["text"]
    left, right = (re.findall(r"expected (\d+), got (\d+)", t["text"]) for t in texts)
    if len(left) != 1 or len(right) != 1:
        return False
    one_more = [int(a) - int(b) for a, b in zip(left[0], right[0], strict=True)]
    return one_more == [1, 1]


def keyword_self(found: Found) -> bool:
    """Keyword `self` to the op object: Python's TypeError there, the overload's error here."""
    left, _ = found.errors
    return "multiple values for argument 'self'" in left and found.situation.how == "object"


def kernel_of_a_device_list(found: Found) -> bool:
    """PyTorch gives every device of a list the kernel that one of them got last (its closure).

    Where that one has none of its own, it raises a KeyError with the device's name.
    """
    no_kernel = re.fullmatch(r"'\w+'", found.errors[0]) is not None
    return found.device_list and (found.later_kernel or found.situation.disabled or no_kernel)


def functionalized_out(found: Found) -> bool:
    """PyTorch gives a functionalized out op memory that nobody wrote: its data means nothing."""
    functional = {found.situation.transform, *found.situation.contexts} & {
        *("functional", "functionalize", "functional_mode"),
    }
    return bool(
        functional
        and found.definition.special == "out"
        and all(".data:" in line.partition("\n")[0] for line in found.lines)
    )


def wrong_number_of_returns(found: Found) -> bool:
    """Too few values pass in PyTorch, or meet another check first; hotop says both numbers."""
    _, right = found.errors
    return bool(re.search(r"the kernel returned \d+ values, but the schema declares \d+", right))


def removed_override(found: Found) -> bool:
    """With a dispatch mode on the stack PyTorch still enters a Python override that was removed.

    Its table of Python kernels by operator and key keeps the last one (python_dispatch.cpp).
    """
    modes = {"dispatches", "replace", "stacked", "functional_mode", "fake_mode"}
    modes |= {"functional", "fake", "make_fx"}
    state = {found.situation.transform, *found.situation.contexts}
    return found.removed_override and bool(modes & state)


EXPLAINED: dict[str, Callable[[Found], bool]] = {
    "tangent": tangent,
    "wrong number of gradients": wrong_number_of_gradients,
    "keyword self": keyword_self,
    "wrong number of returns": wrong_number_of_returns,
    "removed override": removed_override,
    "functionalized out": functionalized_out,
    "kernel of a device list": kernel_of_a_device_list,
}


def explanation(found: Found) -> str:
    """Return the name of the predicate that explains all of a difference, or nothing."""
    for name, predicate in EXPLAINED.items():
        if predicate(found):
            return name
    return ""
