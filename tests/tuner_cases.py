"""Tunables whose tactics count their calls, and the same tunable on the look-up in Python."""

from torch import Tensor

from hotop.tuner import _table, _tunable, tunable


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
