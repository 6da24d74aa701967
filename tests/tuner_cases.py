"""Tunables whose tactics count their calls, and the same tunable on the look-up in Python."""

import re
import warnings
from dataclasses import dataclass

from torch import Tensor

from hotop.tuner import _store, _table, _tunable, default_path, tunable, tuning


def tagged(tag, base=lambda x: x):
    def tactic(x: Tensor, *rest, **named) -> Tensor:
        tactic.calls += 1
        return base(x).clone()

    tactic.calls = 0
    tactic.tag = tag
    return tactic


def make(name, body=None, **options):
    """A tunable of f(x, n=1, mode="a,b", flag=None) whose tactics count their calls."""
    slow = body or tagged("default")

    def function(x: Tensor, n: int = 1, mode: str = "a,b", flag: bool | None = None) -> Tensor:
        return slow(x)

    return tunable(name, **options)(function), slow


def python_twin(original):
    """The same tunable on the look-up in Python."""
    names = {k: v for k, v in vars(_tunable.Tunable).items() if k not in ("_encode", "__dict__")}
    names = {k: v for k, v in names.items() if k != "__weakref__"}

    def __init__(self, source):
        _table.PythonTunable.__init__(
            self, _tunable._flat(source._parameters), source._choice_index, source._functions_[0]
        )
        self.__dict__.update({k: v for k, v in vars(source).items() if not k.startswith("__")})
        for function in source._functions_[1:]:
            self._add_tactic(function)

    names["__init__"] = __init__
    original._functions_ = [tactic.function for tactic in original.tactics.values()]
    return type("Twin", (_table.PythonTunable,), names)(original)


def slow(x: Tensor) -> Tensor:
    """What any tactic beats."""
    for _ in range(60):
        x = x + 0
    return x


def tune(f, *args, name=None, **kwargs):
    """Tune one call, of the tunable of this name; return what can be seen of it."""
    with warnings.catch_warnings(record=True) as caught, tuning(rounds=3, batch_us=20):
        warnings.simplefilter("always")
        result = f(*args, **kwargs)
    out = {}
    for warning in caught:
        found = re.search(r"tactic '(.*?)' is out for .*?\]: (.*)", str(warning.message), re.S)
        if found:
            out[found[1]] = found[2]
    return Tuned(result, out, [str(warning.message) for warning in caught], winner(name or f.name))


def winner(name):
    """Return the tactic that won the last key of a tunable; None: no key is tuned."""
    path = default_path()
    op = _store.read(path).ops.get(name) if path.exists() else None
    if op is None or not op["choices"]:
        return None
    return max(op["choices"].values(), key=lambda choice: choice.measured_at).tactic


@dataclass
class Tuned:
    result: object
    out: dict
    said: list
    winner: str | None
