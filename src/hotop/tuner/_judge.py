"""Whether a tactic is the op: result, effects and memory of its calls against the default's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.testing._comparison import default_tolerances

from hotop.tuner._call import Form, Refused, Seen
from hotop.tuner._evidence import is_constant
from hotop.tuner._process import without_autocast

# Of so many results, about this many tell the magnitude.
_SAMPLE = 1 << 16
_FORM_WORDS = {
    "is_conj": "lazy conjugation",
    "is_neg": "lazy negation",
    "is_inference": "is_inference()",
}


@dataclass(frozen=True)
class Check:
    """How a tactic's result is compared with the reference's before the tactic may win."""

    reference: Any
    rtol: float | None
    atol: float | None


def check_effects(found: Seen, usual: Seen, arguments: Sequence[str]) -> None:
    """Compare all but values: what a call leaves behind, and the form of what it returns.

    ``arguments``: the names of the Tensors that a form counts.

    Raises:
        Refused: It is not what ``usual``, a call of the default tactic, does.
    """
    for problem in found.left:
        if problem not in usual.left:
            raise Refused(problem)
    if not found.random.is_equal(usual.random) or found.generators != usual.generators:
        raise Refused("draws other random numbers than the default")
    if found.structure != usual.structure:
        raise Refused(
            "differs from the reference: returns "
            f"{_words(found.structure)}, not {_words(usual.structure)}"
        )
    for i, (ours, theirs) in enumerate(zip(found.forms, usual.forms, strict=True)):
        _check_form(ours, theirs, _result(i, found), arguments)


def _result(i: int, seen: Seen) -> str:
    return f"result {i}" if len(seen.forms) > 1 else "the result"


def _check_form(ours: Form, theirs: Form, which: str, arguments: Sequence[str]) -> None:
    if ours.is_same != theirs.is_same or ours.shares != theirs.shares:
        found, usual = _shared(ours, arguments), _shared(theirs, arguments)
        raise Refused(f"{which} shares memory with {found}, that of the default with {usual}")
    for one in fields(Form):
        found, usual = getattr(ours, one.name), getattr(theirs, one.name)
        if one.name not in ("is_held", "is_same", "shares") and found != usual:
            name = _FORM_WORDS.get(one.name, one.name)
            raise Refused(f"differs from the reference: {name} of {which} is {found}, not {usual}")
    if ours.is_held and not theirs.is_held:
        raise Refused(f"keeps {which}, or memory of it, and may change it later")


def _shared(form: Form, arguments: Sequence[str]) -> str:
    def name(place: int) -> str:
        return arguments[place] if place >= 0 else f"result {-place - 1}"

    if form.is_same is not None:
        return f"{name(form.is_same)} (the same Tensor)"
    names = [f"{name(place)} at {distance} bytes" for place, distance in form.shares]
    return " and ".join(names) or "nothing"


def _words(structure: Any) -> str:
    if not isinstance(structure, tuple):
        return str(structure.__name__)
    kind, parts = structure
    if kind is dict:
        return "{" + ", ".join(f"{key!r}: {_words(part)}" for key, part in parts) + "}"
    return f"{kind.__name__}({', '.join(map(_words, parts))})"


def check_values(found: Seen, expected: Seen, check: Check) -> None:
    """Compare values of the results and of the changed arguments.

    Raises:
        Refused: They differ by more than the tolerances.
    """
    if len(found.tensors) != len(expected.tensors) or found.structure != expected.structure:
        raise Refused(f"differs from the reference: returns {_words(found.structure)}")
    pairs = [
        *zip(found.tensors, expected.tensors, strict=True),
        *zip(found.changed, expected.changed, strict=True),
    ]
    with without_autocast():
        for ours, theirs in pairs:
            _check_close(ours, theirs, check)
    for our_number, their_number in zip(found.numbers, expected.numbers, strict=True):
        if type(our_number) in (float, complex) and type(their_number) is type(our_number):
            _check_close(our_number, their_number, check)
        elif type(our_number) is not type(their_number) or our_number != their_number:
            raise Refused(
                f"differs from the reference: {our_number!r:.100} instead of {their_number!r:.100}"
            )


def _check_close(ours: Any, theirs: Any, check: Check) -> None:
    if isinstance(theirs, torch.Tensor) and theirs.dtype is torch.float4_e2m1fn_x2:
        ours, theirs = ours.view(torch.uint8), theirs.view(torch.uint8)
    if _is_alike(ours, theirs) and torch.equal(ours, theirs):
        return
    rtol, atol = _tolerances(theirs, check)
    if _is_alike(ours, theirs) and _is_within(ours, theirs, rtol, atol):
        return
    try:
        torch.testing.assert_close(
            ours, theirs, rtol=rtol, atol=atol, equal_nan=True, check_stride=False
        )
    except AssertionError as error:
        raise Refused(f"differs from the reference: {' '.join(str(error).split())}") from None


# A quick look is enough for most; assert_close takes many times as long.
def _is_alike(ours: Any, theirs: Any) -> bool:
    if not isinstance(ours, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return False
    like = ours.layout, ours.dtype, ours.shape, ours.device
    if like != (theirs.layout, theirs.dtype, theirs.shape, theirs.device):
        return False
    return ours.layout is torch.strided and ours.dtype.itemsize > 1


def _is_within(ours: torch.Tensor, theirs: torch.Tensor, rtol: float, atol: float) -> bool:
    """Return whether finite values are near enough; False: look closer."""
    if not ours.dtype.is_floating_point:
        return False
    ours, theirs = ours.detach(), theirs.detach()
    if ours.dtype.itemsize == 2:
        ours, theirs = ours.float(), theirs.float()
    within = theirs.abs().mul_(rtol).add_(atol)
    return bool(((ours - theirs).abs_() <= within).all()) and bool(theirs.isfinite().all())


def _tolerances(expected: Any, check: Check) -> tuple[float, float]:
    is_tensor = isinstance(expected, torch.Tensor)
    dtype = expected.dtype if is_tensor else torch.float64
    rtol, atol = default_tolerances(dtype)
    # Where results are small, PyTorch's absolute tolerance would let zeros pass.
    if atol and check.atol is None:
        atol *= min(1.0, _magnitude(expected))
    return (
        rtol if check.rtol is None else check.rtol,
        atol if check.atol is None else check.atol,
    )


def _magnitude(values: Any) -> float:
    """Return the median of the magnitudes that are neither zero nor infinite; 0: there are none."""
    if not isinstance(values, torch.Tensor):
        return abs(values) if math.isfinite(abs(values)) else 0.0
    values = values.detach()
    if values.numel() > _SAMPLE and values.layout is torch.strided:
        values = values.reshape(-1)[:: values.numel() // _SAMPLE]
    sizes = values.abs()
    sizes = sizes.to(torch.float64 if sizes.dtype is torch.float64 else torch.float32)
    sizes = sizes[sizes.isfinite() & (sizes > 0)]
    return float(sizes.median()) if sizes.numel() else 0.0


def check_kept(earlier: Sequence[Seen], now: Seen) -> None:
    """Compare the memory of results of several calls, all of which are still held.

    Raises:
        Refused: A call returned memory of an earlier one.
    """
    for seen in earlier:
        for i, before in enumerate(seen.ranges):
            for j, after in enumerate(now.ranges):
                # What lies in an argument was compared with the default's.
                if seen.forms[i].shares or now.forms[j].shares or seen.forms[i].is_held:
                    continue
                if before[0] < after[1] and after[0] < before[1]:
                    raise Refused("returns memory of an earlier result again, and changes it")


def unproven(rounds: Sequence[Seen], *, all_alike: bool, all_change: bool) -> str | None:
    """Return what of the expected results says nothing, in words; None: they all vary.

    ``rounds`` are results for the call's data and, where others could be drawn, for those;
    ``all_alike``: every argument's data are; ``all_change``: so must every argument that may.
    """
    if any(seen.structure != rounds[0].structure for seen in rounds):
        return None
    if not rounds[0].tensors and not rounds[0].changed and not any(rounds[0].numbers):
        return "it returns nothing and changes nothing"
    alike = varying = has_one = False
    for values in zip(*([*seen.tensors, *seen.changed] for seen in rounds), strict=True):
        if values[0].numel() > 1:
            alike |= all(is_constant(value) for value in values)
            varying = True
        elif values[0].numel() == 1:
            has_one = True
            varying |= any(not _equal(value, values[0]) for value in values[1:])
    for numbers in zip(*(seen.numbers for seen in rounds), strict=True):
        if type(numbers[0]) in (bool, int, float, complex):
            has_one = True
            varying |= any(number != numbers[0] for number in numbers[1:])
    if alike:
        return "all values of a result are alike"
    untouched = set[str]().union(rounds[0].untouched)
    for seen in rounds:
        untouched &= seen.untouched
    if untouched and (all_change or untouched == rounds[0].mutable):
        return f"the default changes nothing of {', '.join(sorted(untouched))}"
    if has_one and not varying and (len(rounds) > 1 or all_alike):
        return "the result says nothing" if all_alike else "the result is the same for other data"
    return None


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two Tensors of one element have the same bytes."""
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    first, second = (
        t.detach().clone(memory_format=torch.contiguous_format).reshape(1).view(torch.uint8)
        for t in (a, b)
    )
    return torch.equal(first, second)
