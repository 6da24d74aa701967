"""Data that prove nothing (all zero, all NaN, all alike): others are drawn, or no tactic wins."""

import pytest
import torch

from hotop.tuner import tunable
from tuner_cases import slow, tune

pytestmark = pytest.mark.usefixtures("own_tuner_files")


PROVES_NOTHING = {
    "zeros": torch.zeros(6),
    "ones": torch.ones(6),
    "NaN": torch.full((6,), float("nan")),
    "infinite": torch.full((6,), float("inf")),
    "minus zero": -torch.zeros(6),
    "bfloat16 zeros": torch.zeros(6).bfloat16(),
    "complex zeros": torch.zeros(6, dtype=torch.complex64),
    "true": torch.ones(6, dtype=torch.bool),
}


@pytest.mark.parametrize("kind", PROVES_NOTHING)
def test_data_that_prove_nothing_are_replaced(kind):
    x = PROVES_NOTHING[kind]
    f = tunable(
        "w::data",
        tactics={"constant": lambda x: torch.full_like(x, x[0]), "right": lambda x: x.clone()},
    )(lambda x: slow(x).to(x.dtype).clone())
    found = tune(f, x)
    assert set(found.out) == {"constant"}
    assert found.winner == "right"


def test_an_argument_that_does_nothing_yet():
    """RMSNorm's weight is all ones, a bias all zeros, a scale 1."""

    def default(x, weight, bias, scale):
        return slow(x) * weight * scale + bias

    tactics = {
        "no weight": lambda x, w, b, s: x * s + b,
        "no bias": lambda x, w, b, s: x * w * s,
        "no scale": lambda x, w, b, s: x * w + b,
        "right": lambda x, w, b, s: x * w * s + b,
    }
    f = tunable("w::ones", tactics=tactics)(default)
    found = tune(f, torch.randn(2, 6), torch.ones(6), torch.zeros(6), torch.ones(()))
    assert set(found.out) == {"no weight", "no bias", "no scale"}
    assert found.winner == "right"


def test_an_op_that_refuses_drawn_data_is_not_tuned():
    def default(x):
        if x.any():
            raise ValueError("only zeros, please")
        return slow(x)

    f = tunable("w::refuses", tactics={"right": lambda x: x + 0})(default)
    found = tune(f, torch.zeros(6))
    assert found.winner is None
    assert "the values of x are all alike, which proves nothing" in found.said[0]
    assert "only zeros, please" in found.said[0]


def test_results_that_are_all_alike_prove_nothing_and_later_data_do():
    f = tunable("w::alike", tactics={"zeros": torch.zeros_like, "right": lambda x: x + 0})(slow)
    zeros = torch.zeros(6, dtype=torch.int64)  # whole numbers are not drawn
    found = tune(f, zeros)
    assert found.winner is None
    assert "all values of a result are alike" in found.said[0]
    found = tune(lambda x: (f(zeros), f(x)), torch.arange(6), name=f.name)
    assert found.winner == "right"
    assert f._choice_count() == 1
    assert torch.equal(f(torch.arange(6)), torch.arange(6))


def test_one_number_of_data_that_are_all_alike_proves_nothing():
    ones = torch.ones(4, dtype=torch.int64)
    f = tunable("w::sum", tactics={"four": lambda x: x.new_tensor(4)})(lambda x: slow(x).sum())
    assert "the result says nothing" in tune(f, ones).said[0]
    assert "four" in tune(f, torch.arange(4)).out


def test_the_defaults_own_function_needs_no_proof():
    def default(x):
        return torch.zeros_like(slow(x))

    f = tunable("w::own", tactics={"again": default, "zeros": torch.zeros_like})(default)
    found = tune(f, torch.ones(6))
    assert found.winner in ("default", "again")
    assert found.out == {"zeros": "all values of a result are alike"}


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64])
def test_data_that_cannot_be_drawn(dtype):
    x = torch.ones(1, 1, dtype=dtype).expand(25, 4)
    f = tunable("w::expanded", tactics={"ones": lambda x: torch.ones(25, 4)})(
        lambda x: slow(x).float() * torch.ones(25, 4)
    )
    found = tune(f, x)
    if dtype is torch.float32:  # one number in memory can be drawn
        assert set(found.out) == {"ones"}
    else:
        assert "alike" in found.said[0]
