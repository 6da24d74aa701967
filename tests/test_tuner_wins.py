"""A tactic wins only if it is the op: every way to be something else."""

import dataclasses
import functools
import sys
from collections import namedtuple

import pytest
import torch
from torch import Tensor, nn

import hotop
from hotop.tuner import tunable
from tuner_cases import slow, tune

numpy = pytest.importorskip("numpy")


pytestmark = pytest.mark.usefixtures("own_tuner_files")


def reused(make):
    """A tactic that returns one buffer in every call."""

    @functools.cache
    def buffer(shape):
        return make(shape)

    return lambda x: buffer(tuple(x.shape)).copy_(x)


def ring(length):
    made = [torch.empty(6) for _ in range(length)]
    turn = iter(range(10**9))
    return lambda x: made[next(turn) % length].copy_(x)


def in_memory_of_numpy(count=1):
    memory = [numpy.empty(6, dtype=numpy.float32) for _ in range(count)]
    turn = iter(range(10**9))

    def tactic(x):
        mine = memory[next(turn) % count]
        mine[:] = x.numpy()
        return torch.from_numpy(mine)

    return tactic


held = []


def holding(view):
    def tactic(x):
        y = x + 0
        held[:] = [y]
        return y[:] if view else y

    return tactic


def memoizing():
    first = []

    def tactic(x):
        first.append(x + 0)
        return first[0].clone()

    return tactic


class Sub(Tensor):
    pass


WRONG = {
    "returns its argument": lambda x: x,
    "returns a view of its argument": lambda x: x[:],
    "returns memory of its argument": lambda x: torch.from_numpy(x.numpy()),
    "other values": lambda x: x + 1,
    "a small error": lambda x: x * (1 + 1e-4),
    "one element": lambda x: torch.cat([x[:-1], x[-1:] + 0.1]),
    "zeros": torch.zeros_like,
    "NaN": lambda x: x * float("nan"),
    "constants": lambda x: torch.full_like(x, 0.5),
    "magnitudes": torch.abs,
    "the first result": memoizing(),
    "another dtype": lambda x: x.double(),
    "another shape": lambda x: (x + 0).view(1, -1),
    "other strides": lambda x: torch.stack([x, x], 1)[:, 0],
    "too few": lambda x: (x + 0)[:-1],
    "a tuple": lambda x: (x + 0,),
    "a list": lambda x: [x + 0],
    "None": lambda x: None,
    "a number": lambda x: 1.0,
    "a Parameter": lambda x: nn.Parameter(x + 0, requires_grad=False),
    "a subclass": lambda x: (x + 0).as_subclass(Sub),
    "requires_grad": lambda x: (x + 0).requires_grad_(),
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "one buffer": reused(torch.empty),
    "a view of one buffer": reused(lambda shape: torch.empty(9)[:6]),
    "two buffers": ring(2),
    "three buffers": ring(3),
    "nine buffers": ring(9),
    "a buffer of NumPy": in_memory_of_numpy(),
    "three buffers of NumPy": in_memory_of_numpy(3),
    "a result it holds": holding(view=False),
    "a view of what it holds": holding(view=True),
    "changes its argument": lambda x: x.mul_(2),
    "writes the same values": lambda x: x.mul_(1) + 0,
    "changes it through NumPy": lambda x: (x.numpy().__setitem__(0, 9), x + 0)[1],
    "changes it and back": lambda x: (x.add_(1), x.sub_(1), x + 0)[2],
    "resizes its argument": lambda x: (x + 0, x.resize_(2))[0],
    "gives it other memory": lambda x: (x + 0, setattr(x, "data", torch.ones(6)))[0],
    "makes it require grad": lambda x: (x + 0, x.requires_grad_())[0],
    "sets an attribute": lambda x: (x + 0, setattr(x, "seen", 1))[0],
    "sets its gradient": lambda x: (x + 0, setattr(x, "grad", torch.ones(6)))[0],
    "resizes its storage": lambda x: (x + 0, x.untyped_storage().resize_(9999))[0],
    "a result whose storage it holds": lambda x: (
        held.append((x + 0).untyped_storage()) or torch.empty(0).set_(held[-1], 0, (6,), (1,))
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_tactics(kind):
    f = tunable(
        "w::wrong",
        tactics={"wrong": lambda x: WRONG[kind](x), "right": lambda x: x + 0},
    )(slow)
    x = torch.randn(6)
    found = tune(f, x)
    assert found.winner == "right"
    assert set(found.out) == {"wrong"}
    assert torch.equal(f(x), x)


FORMS = {
    "conj": (torch.complex64, lambda x: slow(x).conj().resolve_conj(), lambda x: x.conj()),
    "negated": (torch.complex64, lambda x: -slow(x).imag, lambda x: torch._neg_view(x.imag + 0)),
}


@pytest.mark.parametrize("kind", FORMS)
def test_lazily_conjugated_and_negated_results(kind):
    dtype, default, wrong = FORMS[kind]
    f = tunable("w::lazy", tactics={"wrong": lambda x: wrong(x + 0)})(default)
    assert "lazy" in tune(f, torch.randn(5, dtype=dtype)).out["wrong"]


def test_an_op_that_returns_its_argument_or_a_view_keeps_doing_so():
    f = tunable("w::same", mutates_args=["x"], tactics={"other": lambda x: x.add_(1).clone()})(
        lambda x: x.add_(slow(torch.ones(()))).sub_(0)
    )
    assert "shares memory with nothing" in tune(f, torch.randn(4)).out["other"]
    g = tunable(
        "w::view",
        tactics={
            "copy": lambda x: x[1:].clone(),
            "shifted": lambda x: x[:-1],
            "right": lambda x: x[1:],
        },
    )(lambda x: (slow(x), x[1:])[1])
    found = tune(g, torch.randn(4))
    assert set(found.out) == {"copy", "shifted"}
    assert found.winner == "right"


Pair = namedtuple("Pair", "a b")

RESULTS = {
    "list": (lambda y: [y, y + 1], lambda y: [y + 1, y], lambda y: (y, y + 1)),
    "tuple": (lambda y: (y, 3), lambda y: (y, 4), lambda y: (y, 3.0)),
    "dict": (lambda y: {"a": y}, lambda y: {"a": y + 1}, lambda y: {"b": y}),
    "namedtuple": (lambda y: Pair(y, None), lambda y: Pair(y, 0), lambda y: (y, None)),
    "text": (lambda y: (y, "x"), lambda y: (y, "z"), lambda y: (y, b"x")),
    "nested": (lambda y: [{"a": (y,)}], lambda y: [{"a": (-y,)}], lambda y: [{"a": [y]}]),
    "dtype": (lambda y: (y, y.dtype), lambda y: (y, torch.int8), lambda y: (y, "float32")),
    "chunks": (
        lambda y: list(y.chunk(2)),
        lambda y: [c + 0 for c in y.chunk(2)],
        lambda y: y.chunk(2),
    ),
    "no chunks": (
        lambda y: [y[:3] + 0, y[3:] + 0],
        lambda y: [y[:3], y[3:]],
        lambda y: list((y + 1).split(3)),
    ),
    "shared": (lambda y: (y, y[1:]), lambda y: (y, y[1:] + 0), lambda y: (y, y[:-1])),
    "twice": (lambda y: (y, y), lambda y: (y, y + 0), lambda y: (y, y[:])),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_results_of_every_kind(kind):
    right, *wrong = RESULTS[kind]
    f = tunable(
        "w::results",
        tactics={
            "right": lambda x: right(x + 0),
            "wrong": lambda x: wrong[0](x + 0),
            "wrong too": lambda x: wrong[1](x + 0),
        },
    )(lambda x: right(slow(x)))
    found = tune(f, torch.randn(6))
    assert set(found.out) == {"wrong", "wrong too"}
    assert found.winner == "right"


@dataclasses.dataclass
class Result:
    value: Tensor


def test_a_result_that_cannot_be_compared_is_refused_by_its_class():
    f = tunable("w::class", tactics={"right": lambda x: Result(x + 0)})(lambda x: Result(slow(x)))
    (said,) = tune(f, torch.randn(5)).said
    assert "returns a value of the type Result, which cannot be compared" in said


DECLARED = {
    "not at all": lambda x, n: None,
    "twice": lambda x, n: x.add_(2 * n) and None,
    "outside": lambda x, n: (
        (x.add_(n), x.as_strided((1,), (1,), x.storage_offset() + 23).zero_())[0] and None
    ),
    "before": lambda x, n: (
        (x.add_(n), x.as_strided((1,), (1,), x.storage_offset() - 1).zero_())[0] and None
    ),
    "the other one": lambda x, n: (x.add_(n), n.add_(1))[0] and None,
    "its shape": lambda x, n: (x.add_(n), x.squeeze_(), x.unsqueeze_(0))[0] and None,
}


@pytest.mark.parametrize("kind", DECLARED)
def test_changed_arguments(kind):
    def default(x, n):
        x.add_(slow(n))

    wrong = DECLARED[kind]

    def tactic(x, n):
        wrong(x, n)

    f = tunable("w::declared", mutates_args=["x"], tactics={"wrong": tactic})(default)
    base = torch.randn(4, 12)
    found = tune(f, base[:, ::2][:, :6], torch.ones(1))
    assert found.winner == "default", found.said


def test_memory_between_the_elements_of_a_view():
    def gaps(x):
        x.add_(1)
        x.as_strided((2,), (1,), x.storage_offset())[1] = 7

    f = tunable("w::gaps", mutates_args=["x"], tactics={"gaps": gaps})(
        lambda x: x.add_(slow(torch.ones(1))).size(0) and None
    )
    base = torch.zeros(4, 6)
    assert "where mutates_args does not name it" in tune(f, base[:, ::2]).out["gaps"]
    assert base[:, 1::2].sum() == 0


def test_a_write_outside_of_a_view_costs_nobody_else_a_place():
    def outside(x):
        x.as_strided((1,), (1,), x.storage_offset() + x.numel()).zero_()
        return x + 0

    f = tunable("w::outside", tactics={"right": lambda x: x + 0, "outside": outside})(slow)
    with pytest.warns(RuntimeWarning, match="'outside' is out"), hotop.tuning(rounds=1, warmup=1):
        f(torch.randn(40)[:8])
    (choice,) = (
        hotop.tuner._store.read(hotop.tuner.default_path()).ops["w::outside"]["choices"].values()
    )
    assert set(choice.rejected) == {"outside"}


def test_lists_themselves():
    f = tunable(
        "w::append",
        tactics={"append": lambda xs: (xs.append(xs[0]), xs[0] + 0)[1]},
    )(lambda xs: slow(xs[0]))
    xs = [torch.randn(3)]
    assert "changes xs itself" in tune(f, xs).out["append"]
    assert len(xs) == 1


@pytest.mark.parametrize("scale", [1e-9, 1e-30, 1.0, 1e20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_zeros_do_not_win_whatever_the_scale(scale, dtype):
    f = tunable("w::scale", tactics={"zeros": torch.zeros_like, "right": lambda x: x + 0})(slow)
    found = tune(f, (torch.randn(8) * scale).to(dtype))
    assert set(found.out) == {"zeros"}
    assert found.winner == "right"


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3)[::2][:1],
        lambda: torch.randn(2, 4)[:, ::4],
        lambda: torch.randn(1, 1),
        lambda: torch.randn(()),
    ],
)
def test_one_element(make):
    f = tunable("w::one", tactics={"right": lambda x: x + 0, "view": lambda x: x[...]})(slow)
    assert set(tune(f, make()).out) == {"view"}
    g = tunable("w::narrow", tactics={"right": lambda x: x[..., :1]})(
        lambda x: (slow(x), x.narrow(-1, 0, 1))[1]
    )
    found = tune(g, torch.randn(2))
    assert not found.said
    h = tunable("w::one_", mutates_args=["x"], tactics={"right": lambda x: x.add_(1) and None})(
        lambda x: (slow(x), x.add_(1))[0] * 0
    )
    assert "right" in tune(h, make()).out


def test_tolerances_of_ones_own():
    tactics = {"near": lambda x: x * 1.001}
    for options, wins in (
        ({"rtol": 1e-2, "atol": 0.0}, True),
        ({"rtol": 1e-2}, True),
        ({"rtol": 1e-5, "atol": 1e-5}, False),
        ({}, False),
    ):
        f = tunable("w::near", tactics=tactics, **options)(slow)
        assert ("near" in tune(f, torch.randn(4)).out) != wins
        hotop.tuner.default_path().unlink(missing_ok=True)


def test_values_of_a_reference_and_the_form_of_the_default():
    f = tunable(
        "w::reference",
        reference=lambda x: x.double().mul(2).float().t().contiguous().t(),
        tactics={"right": lambda x: x * 2, "wrong": lambda x: x * 3},
    )(lambda x: slow(x) * 2)
    found = tune(f, torch.randn(3, 4))
    assert found.winner == "right"
    assert set(found.out) == {"wrong"}
    g = tunable("w::wrong default", reference=lambda x: x * 2, tactics={"b": lambda x: x * 2})(
        lambda x: slow(x) * 2.1
    )
    found = tune(g, torch.randn(3))
    assert "default" in found.out
    assert found.winner == "b"


def test_a_default_that_breaks_the_rules_is_told():
    f = tunable("w::rules", tactics={"b": lambda x: x + 0})(lambda x: slow(x.add_(1)))
    x = torch.randn(3)
    before = x.clone()
    found = tune(f, x)
    assert found.winner is None
    assert "the default changes x, which mutates_args does not name" in found.said[0]
    assert torch.equal(x, before + 1), "its own call"


def test_late_faults():
    """Wrong, or changing data, only after some calls."""

    def late(fault, after):
        calls = iter(range(10**9))

        def tactic(x):
            return fault(x) if next(calls) >= after else x + 0

        return tactic

    for after in (1, 2, 3, 5, 8):
        f = tunable(
            "w::late",
            tactics={
                "values": late(lambda x: x + 1, after),
                "changes": late(lambda x: x.numpy().__setitem__(0, 9) or x + 0, after),
                "raises": late(lambda x: [][1], after),
                "exits": late(lambda x: sys.exit(), after),
                "settings": late(lambda x: (torch.set_grad_enabled(False), x + 0)[1], after),
                "right": lambda x: x + 0,
            },
        )(slow)
        found = tune(f, torch.randn(5))
        assert set(found.out) == {"values", "changes", "raises", "exits", "settings"}, after
        assert found.winner == "right"
        hotop.tuner.default_path().unlink()
        hotop.tuner.clear()
        assert torch.is_grad_enabled()
