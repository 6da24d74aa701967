"""Tuning works on copies: nothing of the caller's changes, and they are laid out as the call."""

import dataclasses
from collections import namedtuple

import pytest
import torch
from torch import Tensor, nn

import hotop
from hotop.tuner import _key, tunable, tuning
from hotop.tuner._workspace import Workspace
from tuner_cases import slow, tune

numpy = pytest.importorskip("numpy")


pytestmark = pytest.mark.usefixtures("own_tuner_files")


def add_one(value):
    """Add 1 in place to every Tensor in a value."""
    if isinstance(value, Tensor):
        value.add_(1)
    elif isinstance(value, dict):
        [add_one(one) for one in value.values()]
    elif dataclasses.is_dataclass(value):
        [add_one(getattr(value, field.name)) for field in dataclasses.fields(value)]
    elif isinstance(value, list | tuple):
        [add_one(one) for one in value]


Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Meta:
    lengths: Tensor
    name: str = "m"


def holders():
    a, b = torch.zeros(3), torch.zeros(2, 2)
    base = torch.zeros(2, 4)
    return {
        "Tensor": a,
        "list": [a, b],
        "tuple": (a, b),
        "optional list": [a, None, b],
        "views of one base": [base[0], base[1]],
        "interleaved": [base[:, 0], base[:, 1]],
        "the same twice": [a, a],
        "overlapping": [base.view(-1)[:5], base.view(-1)[3:]],
        "nested": [[a], [b, [base]]],
        "dict": {"a": a, "b": [b]},
        "namedtuple": Pair(a, (b,)),
        "dataclass": Meta(a),
        "Parameter": nn.Parameter(a, requires_grad=False),
    }


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("holder", holders())
def test_every_holder_of_tensors_is_copied(holder, declared):
    """The values that have no key come as an ignored parameter, whose Tensors are copied too."""

    def body(x, xs):
        add_one(xs)
        return x * 2

    f = tunable(
        "c::holder",
        mutates_args=["xs"] if declared else [],
        ignore=["xs"],
        tactics={"b": lambda x, xs: body(slow(x), xs)},
    )(body)
    xs = holders()[holder]
    expected = holders()[holder]
    add_one(expected)
    f.tactics["default"].function(torch.ones(2), holders()[holder])
    tune(f, torch.ones(2), xs)
    assert repr(xs) == repr(expected), "exactly one call's work"


def test_a_list_named_in_mutates_args():
    """The example of the issue: 714 instead of 1."""

    def body(xs: list[Tensor]) -> None:
        for x in xs:
            x.add_(1)

    f = tunable("c::list", mutates_args=["xs"], tactics={"b": lambda xs: body(xs)})(body)
    a = torch.zeros(3)
    tune(f, [a])
    assert a.tolist() == [1, 1, 1]
    op = hotop.custom_op("tuner_copies::list", f, mutates_args=["xs"])
    with tuning(rounds=1, batch_us=5):
        op([a, torch.zeros(2)])
    assert a.tolist() == [2, 2, 2]


def test_bytes_of_bools_stay():
    x = torch.full((4,), 255, dtype=torch.uint8).view(torch.bool)
    f = tunable("c::bool", tactics={"b": lambda x: x.int() * 1})(lambda x: x.int())
    tune(f, x)
    assert x.view(torch.uint8).tolist() == [255] * 4

    def invert(x):
        x.logical_not_()

    g = tunable("c::bool_", mutates_args=["x"], tactics={"b": invert})(lambda x: invert(x))
    tune(g, x)
    assert x.tolist() == [False] * 4


LAYOUTS = {
    "plain": lambda: torch.randn(4, 6),
    "transposed": lambda: torch.randn(6, 4).t(),
    "permuted": lambda: torch.randn(2, 3, 4).permute(1, 2, 0),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(1, 6).expand(4, 6),
    "gaps": lambda: torch.randn(4, 12)[:, ::2],
    "rows of a wide base": lambda: torch.randn(4, 100)[:, :6],
    "odd offset": lambda: torch.randn(25)[1:].view(4, 6),
    "windows": lambda: torch.randn(20).unfold(0, 6, 2),
    "odd strides of size 1": lambda: torch.randn(8, 1).t(),
    "no elements": lambda: torch.randn(0, 6),
    "no dimensions": lambda: torch.randn(()),
    "bfloat16": lambda: torch.randn(3, 5).bfloat16()[:, 1:],
    "complex": lambda: torch.randn(3, 5, dtype=torch.complex64)[1:],
    "Parameter": lambda: nn.Parameter(torch.randn(2, 3)),
    "float8": lambda: torch.randn(4, 4).to(torch.float8_e4m3fn).t(),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_copies_are_laid_out_as_the_call(kind):
    x = LAYOUTS[kind]()
    workspace = Workspace([_key.Parameter("x")], (x,), {})
    with torch.no_grad():
        for _ in range(2):
            (copy,) = workspace.fresh().args
            assert (copy.shape, copy.stride(), copy.dtype) == (x.shape, x.stride(), x.dtype)
            assert (type(copy), copy.requires_grad) == (type(x), x.requires_grad)
            assert copy.data_ptr() % 512 == x.data_ptr() % 512 or x.numel() == 0
            assert copy.is_contiguous() == x.is_contiguous()
            as_number = torch.complex128 if x.is_complex() else torch.float64
            assert torch.equal(copy.to(as_number), x.to(as_number))
            assert x.numel() == 0 or copy.data_ptr() != x.data_ptr()


def test_inference_tensors_stay_so():
    with torch.inference_mode():
        x = torch.ones(3)
    workspace = Workspace([_key.Parameter("x")], (x,), {})
    assert workspace.fresh().args[0].is_inference()
    with torch.inference_mode():
        plain = Workspace([_key.Parameter("x")], (torch.ones(2).clone(),), {}).fresh()
        assert plain.args[0].is_inference()


def test_memory_that_arguments_share_is_shared_by_their_copies():
    base = torch.arange(16.0)
    array = numpy.zeros(8, dtype=numpy.float32)
    values = {
        "two views": (base[2:8], base[10:]),
        "overlap": (base[:8], base[4:]),
        "two storages": (torch.from_numpy(array), torch.from_numpy(array)[2:]),
        "apart": (torch.zeros(3), torch.zeros(3)),
    }
    parameters = [_key.Parameter("a"), _key.Parameter("b", mutated=True)]
    for kind, (a, b) in values.items():
        x, y = Workspace(parameters, (a, b), {}).fresh().args
        shared = a.untyped_storage()._cdata == b.untyped_storage()._cdata or kind == "two storages"
        assert (x.untyped_storage()._cdata == y.untyped_storage()._cdata) == shared, kind
        if shared:
            assert y.data_ptr() - x.data_ptr() == b.data_ptr() - a.data_ptr()
        assert torch.equal(x, a)
        assert torch.equal(y, b)


def test_a_tactic_that_needs_contiguity_does_not_win_a_key_that_is_not():
    """The example of the issue: the copy of a strided changed argument was contiguous."""

    def needs(x):
        if not x.is_contiguous():
            raise RuntimeError("x must be contiguous")
        x.add_(1)

    f = tunable("c::contiguous", mutates_args=["x"], tactics={"fast": needs})(
        lambda x: x.add_(slow(torch.ones(1))).size(0) and None
    )
    found = tune(f, torch.zeros(4, 8)[:, ::2])
    assert "must be contiguous" in found.out["fast"]
    assert tune(f, torch.zeros(4, 8)).winner == "fast"
    f(torch.zeros(8, 4).t())


def test_every_timed_call_starts_from_the_same_data():
    def counts_down(left):
        if left.item() <= 0:
            raise RuntimeError("ran out")
        left.sub_(1)

    f = tunable("c::counter", mutates_args=["left"], tactics={"b": lambda left: counts_down(left)})(
        counts_down
    )
    left = torch.tensor([3.0])
    with tuning(rounds=5, batch_us=300):
        f(left)
    assert left.item() == 2
    assert not tune(f, torch.tensor([9.0])).out


class Thing:
    def __init__(self):
        self.name = "n"
        self.tensor = torch.zeros(2)


@pytest.mark.parametrize("make", [lambda: Meta(torch.zeros(2)), Thing])
def test_objects_that_a_tactic_changes(make):
    def renames(x, thing):
        thing.name = "other"
        return x + 0

    f = tunable("c::objects", ignore=["thing"], tactics={"renames": renames})(
        lambda x, thing: slow(x)
    )
    thing = make()
    assert "changes thing itself" in tune(f, torch.randn(3), thing).out["renames"]
    assert thing.name in "nm"


class Uncopyable:
    def __deepcopy__(self, memo):
        raise RuntimeError("no copies of me")


def test_what_cannot_be_copied_is_not_tuned():
    f = tunable("c::uncopyable", ignore=["y"], tactics={"b": lambda x, y: x + 0})(
        lambda x, y: slow(x)
    )
    found = tune(f, torch.randn(3), Uncopyable())
    assert found.winner is None
    assert "y is a Uncopyable, which cannot be copied (no copies of me)" in found.said[0]
    assert "y is on meta" in tune(f, torch.randn(3), torch.ones(2, device="meta")).said[0]


def test_tensors_of_several_dtypes_in_one_buffer():
    """The later one lies at an odd distance from the first byte of both."""
    buffer = torch.zeros(64, dtype=torch.uint8)
    codes, scale = buffer[1:3], buffer[4:12].view(torch.float32)
    scale.copy_(torch.tensor([2.0, 3.0]))
    codes.fill_(5)

    def default(codes, scale):
        scale.mul_(slow(torch.ones(())))
        codes.add_(1)
        return scale * 2

    f = tunable(
        "c::buffer",
        mutates_args=["codes", "scale"],
        tactics={
            "right": lambda codes, scale: default(codes, scale),
            "wrong": lambda codes, scale: scale * 2,
        },
    )(default)
    found = tune(f, codes, scale)
    assert "right" not in found.out
    assert "wrong" in found.out
    assert (codes.tolist(), scale.tolist()) == ([6, 6], [2.0, 3.0])
    assert buffer.float().sum() == codes.float().sum() + buffer[4:12].float().sum()
