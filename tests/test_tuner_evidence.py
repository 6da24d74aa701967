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
        "no weight": lambda x, weight, bias, scale: x * scale + bias,
        "no bias": lambda x, weight, bias, scale: x * weight * scale,
        "no scale": lambda x, weight, bias, scale: x * weight + bias,
        "right": lambda x, weight, bias, scale: x * weight * scale + bias,
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


def remembered(statistic):
    """Keep the first statistic of its argument, as one that stands for a shape."""
    first = []

    def tactic(x):
        first.append(statistic(x))
        return x * first[0]

    return tactic


@pytest.mark.parametrize(
    "statistic", [torch.sum, torch.amax, torch.std, torch.norm, torch.count_nonzero, torch.median]
)
def test_a_statistic_that_is_remembered(statistic):
    f = tunable(
        "w::statistic",
        tactics={"remembers": remembered(statistic), "right": lambda x: x * statistic(x)},
    )(lambda x: slow(x) * statistic(x))
    found = tune(f, torch.randn(64))
    assert set(found.out) == {"remembers"}
    assert found.winner == "right"
    g = tunable("w::alone", tactics={"right": lambda x: statistic(x)})(lambda x: statistic(slow(x)))
    assert not tune(g, torch.randn(64)).said


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x.clone(), lambda x: x[:]])
@pytest.mark.parametrize("in_list", [False, True])
def test_arguments_that_are_alike_do_not_hide_which_is_which(make, in_list):
    """The key of op(x, x) is that of op(x, y), where nothing is changed."""
    default = (lambda xs: slow(xs[0]) + 2 * xs[1]) if in_list else (lambda x, y: slow(x) + 2 * y)
    wrong = (lambda xs: 2 * xs[0] + xs[1]) if in_list else (lambda x, y: 2 * x + y)
    f = tunable("w::same", tactics={"swapped": wrong})(default)
    x = torch.randn(6)
    args = ([x, make(x)],) if in_list else (x, make(x))
    assert "swapped" in tune(f, *args).out


def test_a_default_that_changes_nothing_proves_nothing():
    """vLLM's dummy run writes no slot of the cache."""

    def default(k, v, k_cache, v_cache, slots):
        slow(k)
        for i, slot in enumerate(slots.tolist()):
            if slot >= 0:
                k_cache[slot], v_cache[slot] = k[i], v[i]

    def half(k, v, k_cache, v_cache, slots):
        default(k, v, k_cache, k, slots)

    f = tunable(
        "w::cache",
        mutates_args=["k_cache", "v_cache"],
        tactics={"nothing": lambda *args, **kwargs: None, "half": half},
    )(default)
    k, v, cache = torch.randn(3, 4), torch.randn(3, 4), torch.zeros(2, 8, 4)
    found = tune(f, k, v, cache[0], cache[1], torch.full((3,), -1))
    assert found.winner is None
    assert "the default changes nothing of k_cache, v_cache" in found.said[0]
    found = tune(f, k, v, cache[0], cache[1], torch.tensor([5, 0, 2]))
    assert set(found.out) == {"nothing", "half"}
    g = tunable(
        "w::unknown", mutates_args="unknown", tactics={"right": lambda x, y: x.add_(1) and None}
    )(lambda x, y: (slow(x), x.add_(1))[0] * 0)
    assert "says nothing" not in str(tune(g, torch.randn(3), torch.randn(3)).said)


def test_float4():
    codes = torch.randint(0, 256, (4, 8), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    f = tunable(
        "w::fp4",
        tactics={
            "right": lambda x: x.clone(),
            "zeros": lambda x: (x.view(torch.uint8) * 0).view(x.dtype),
        },
    )(lambda x: (slow(torch.ones(9)), x.clone())[1])
    found = tune(f, codes)
    assert set(found.out) == {"zeros"}
    assert found.winner == "right"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_under_autocast(dtype):
    f = tunable("w::autocast", tactics={"right": lambda x: x + 0, "zeros": torch.zeros_like})(slow)
    with torch.autocast("cpu", torch.bfloat16):
        found = tune(f, torch.randn(3, 4, dtype=dtype))
    assert set(found.out) == {"zeros"}
    assert found.winner == "right"
