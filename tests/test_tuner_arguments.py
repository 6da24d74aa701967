"""Wrong arguments to the tuner, tactics of other parameters, texts of exceptions."""

import functools

import pytest
import torch

from hotop.tuner import Tactic, exact, follows, listed, power_of_two, tunable, tuning
from tuner_cases import slow, winner

pytestmark = pytest.mark.usefixtures("own_tuner_files")


@pytest.mark.parametrize(
    "bad",
    [
        lambda x: x,
        lambda y, n=1: y,
        lambda n, x=1: x,
        lambda x, n=2: x,
        lambda x, n=True: x,
        lambda x, n: x,
        lambda x, /, n=1: x,
        lambda x, *, n=1: x,
        lambda x, n=1, m=2: x,
        lambda x, *rest: x,
        lambda *rest: rest[0],
    ],
)
def test_a_tactic_has_the_parameters_of_the_function(bad):
    """Calls with and without a default, and by keyword, share a key."""
    with pytest.raises(ValueError, match=r"t::parameters: tactic 'bad' must have the"):
        tunable("t::parameters", tactics={"bad": bad})(lambda x, n=1: x)


@pytest.mark.parametrize(
    ("usual", "tactic"),
    [
        (lambda x, *, s=2.0: slow(x) * s, lambda x, *, s=2.0: s * x),
        (lambda x, /, s=2.0: slow(x) * s, lambda x, /, s=2.0: s * x),
        (
            lambda x, s=2.0: slow(x) * s,
            functools.partial(lambda x, s=2.0, *, block: s * x, block=64),
        ),
    ],
)
def test_parameters_by_keyword_or_position_alone(usual, tactic):
    f = tunable("t::kinds", tactics={"fast": tactic})(usual)
    x = torch.randn(64)
    with tuning(progress=False):
        f(x, s=3.0)
    assert winner("t::kinds") == "fast"
    assert torch.equal(f(x, s=3.0), 3.0 * x)
    hits = f.hits
    f(x)
    f(x, s=3.0)
    assert f.hits == hits + 1


def test_tactics_that_may_be_called_so():
    class Callable:
        def __call__(self, x, n=1):
            return x

    for good in (lambda x, n=1: x, lambda *a, **k: a[0], lambda x, *a, **k: x, Callable(), max):
        tunable("t::good", tactics={"good": good})(lambda x, n=1: x)


class Evil(Exception):
    def __str__(self):
        raise SystemExit("evil")


@pytest.mark.parametrize("error", [Evil(), ValueError("two\nlines \x1b[31m")])
def test_texts_of_exceptions(error):
    def raises(x):
        raise error

    f = tunable("t::evil", tactics={"bad": raises, "fast": lambda x: x + 0})(slow)
    with pytest.warns(RuntimeWarning, match="'bad' is out") as caught, tuning():
        f(torch.randn(3))
    (text,) = (str(warning.message) for warning in caught)
    assert text.isprintable()
    assert f._choice_count() == 1


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: tunable(dims=[1]), "dims must be"),
        (lambda: tunable(dims={"x": 8}), "dims must be"),
        (lambda: tunable(dims={"x": exact()}), "dims must be"),
        (lambda: tunable(dims={"x": {"0": exact()}}), "dims must be"),
        (lambda: exact("a"), "cap must be an int"),
        (lambda: power_of_two(1.5), "cap must be an int"),
        (lambda: listed([1, 2]), "must be an int"),
        (lambda: listed(1.5), "must be an int"),
        (lambda: follows(3), "expects a function"),
        (lambda: Tactic(None), "must be callable"),
        (lambda: Tactic(max, applies=3), "applies must be callable"),
        (lambda: Tactic(max, device_types="cuda"), "device_types must be a sequence of str"),
        (lambda: Tactic(max, backends="cutlass"), "backends must be a sequence of str"),
        (lambda: tunable(default_backends="x"), "default_backends must be a sequence"),
        (lambda: tunable(ignore="x"), "ignore must be a sequence"),
        (lambda: make_tunable().tactic(3, max), "name must be a str"),
        (lambda: make_tunable().tactic("k", 3), "must be callable"),
    ],
)
def test_wrong_arguments(make, text):
    with pytest.raises(TypeError, match=text):
        make()


def make_tunable():
    return tunable("t::arguments")(lambda x: x)
