"""What the tuner said of the tactics of a key, against what is known of them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from tools.fuzz_tuner.arguments import Recipe
from tools.fuzz_tuner.observe import Observed
from tools.fuzz_tuner.tunables import Drawn

from hotop.tuner import _session

# Why a call may rightly not be tuned.
EXPECTED = re.compile(
    r"requires grad, and grad mode is on|no Tensor of the bucket's sizes has the layout"
    r"|would overlap itself in the bucket's sizes|cannot be copied|a lazily|no elements"
    r"|its key is too long"
)


@dataclass
class Verdict:
    """What happened to the tactics of one call inside ``tuning()``.

    Attributes:
        choice: The new choice, if there is one.
        refused: Reasons by tactic.
        unproven: Why no tactic may win.
        not_tuned: Why the call was not tuned.
    """

    choice: Any = None
    refused: dict[str, str] = field(default_factory=dict)
    unproven: str = ""
    not_tuned: str = ""


def known_choice(drawn: Drawn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the choice that the open session has for a call's key."""
    with torch.no_grad():
        found = drawn.tunable._describe(args, kwargs)
    session = _session._session
    if found is None or session is None or found[1] not in session.tables:
        return None
    tunable = drawn.tunable
    table = session.tables[found[1]]
    return table.find(tunable.name, tunable.signature, tunable._versions(), found[0])


def verdict(before: Any, after: Any, said: list[str]) -> Verdict:
    """Return what the tuner did, from the choice before and after a call and from its words."""
    found = Verdict(after if after is not before else None)
    for text in said:
        if match := re.search(r"tactic '(.*?)' is out for .*?\]: (.*)", text, re.S):
            found.refused[match[1]] = match[2]
        elif match := re.search(r"no tactic may win for .*\]: (.*)", text, re.S):
            found.unproven = match[1]
        elif match := re.search(r"not tuned(?: for .*\])?: (.*)", text, re.S):
            found.not_tuned = match[1]
    if found.choice is not None:
        found.refused.update(found.choice.rejected)
    return found


def _proves(usual: Observed, recipe: Recipe) -> bool:
    """Return whether a call's data prove something: random, and several results or changes."""
    if any(room.data != "random" for room in recipe.rooms):
        return False
    forms = [form for name, form in usual.facts.items() if name.startswith("argument")]
    if any(0 in (*form["strides"], *form["shape"]) for form in forms):
        return False
    results = [one for name, one in usual.tensors.items() if name.startswith("values")]
    sizes = [one.numel() for one in results] or [math.prod(form["shape"]) for form in forms]
    return min(sizes, default=0) > 6


def problems(
    drawn: Drawn, found: Verdict, shown: dict[str, int], usual: Observed, recipe: Recipe
) -> list[str]:
    """Return where the tuner judged wrongly, in words.

    ``shown``: by tactic, in how many of the calls that the tuner made its fault could be seen;
    ``usual``: what the op does.
    """
    lines = []
    tried = found.choice.tried if found.choice is not None else {}
    results = [values for name, values in usual.tensors.items() if name.startswith("values")]
    # Zeros are right where all results are zero, and then no tactic may win.
    has_zeros = results != [] and min(values.numel() for values in results) > 1
    for name, offer in drawn.offers.items():
        must_go = offer.must_go or (has_zeros and offer.fault == "zeros")
        if offer.fault and name in tried and (shown[name] or must_go):
            winner = " and won" if found.choice.tactic == name else ""
            lines.append(f"a wrong tactic was accepted{winner}: it {offer.fault}")
        if not offer.fault and not offer.is_partial and name in found.refused:
            lines.append(f"a right tactic was refused: {found.refused[name]}")
    if usual.error == "" and found.not_tuned and not EXPECTED.search(found.not_tuned):
        lines.append(f"a call was not tuned: {found.not_tuned}")
    if found.unproven and _proves(usual, recipe):
        lines.append(f"random data prove nothing: {found.unproven}")
    return lines
