"""Keys of tuned calls: buckets, and the core's words against the description that files hold."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hotop
import seeds
from hotop.tuner import exact, follows, listed, power_of_two, stats, tunable, tuning
from tuner_cases import make

pytestmark = pytest.mark.usefixtures("own_tuner_files")


@pytest.mark.parametrize(
    ("bucket", "pairs"),
    [
        (exact(), {0: 0, 1: 1, 7: 7}),
        (exact(cap=5), {4: 4, 5: 5, 6: 10}),
        (power_of_two(), {0: 0, 1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 1025: 2048}),
        (power_of_two(cap=100), {64: 64, 65: 100, 101: 200, 1000: 1000}),
        (listed(1, 8, 64), {0: 1, 1: 1, 2: 8, 8: 8, 9: 64, 65: 128}),
    ],
)
def test_buckets(bucket, pairs):
    assert {size: bucket(size) for size in pairs} == pairs


@pytest.mark.parametrize("sizes", [(), (3, 2), (1, 1), (-1, 2)])
def test_listed_wants_ascending_sizes(sizes):
    with pytest.raises(ValueError, match="ascending"):
        listed(*sizes)


def test_cap_must_be_positive():
    with pytest.raises(ValueError, match="cap"):
        power_of_two(cap=0)


BUCKETS = st.sampled_from(
    [exact(), exact(3), power_of_two(), power_of_two(6), listed(2, 5), follows(lambda s: 1)]
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(2**63, 2**70),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.sampled_from(
        [torch.float32, torch.int8, torch.strided, torch.channels_last, torch.Size([2, 3])]
    ),
    st.sampled_from([torch.device("cpu"), torch.device("meta"), object(), 1j]),
    st.lists(st.one_of(st.integers(-3, 3), st.text(max_size=2), st.none()), max_size=4),
)
TENSORS = st.builds(
    lambda shape, dtype, transpose: (
        torch.zeros(shape, dtype=dtype).t()
        if transpose and len(shape) == 2
        else torch.zeros(shape, dtype=dtype)
    ),
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
    st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.float8_e4m3fn]),
    st.booleans(),
)


@settings(max_examples=300, deadline=None, derandomize=not seeds.FRESH)
@given(
    x=TENSORS,
    rules=st.dictionaries(st.integers(-3, 3), BUCKETS, max_size=3),
    value=st.one_of(VALUES, TENSORS, st.lists(TENSORS, max_size=3)),
    by_keyword=st.booleans(),
)
def test_key_of_the_core_is_that_of_the_description(x, rules, value, by_keyword):
    @tunable("t::keys", dims={"x": rules})
    def f(x: Tensor, value=0, third: str = "s"):
        return x

    args, kwargs = ((x,), {"value": value}) if by_keyword else ((x, value), {})
    found = f._describe(args, kwargs)
    words = f._key_words(args, kwargs)
    if found is None:
        assert words is None
    else:
        assert f._encode(found[0], found[1].index) == words


def test_calls_that_cannot_be_keyed_take_the_default():
    f, slow = make("t::unkeyable")
    sparse = torch.ones(2).to_sparse()
    f(sparse)
    f(torch.ones(2), 2**80)
    assert (slow.calls, f.hits, f.misses) == (2, 0, 2)
    with tuning():
        f(sparse)
    assert stats()["t::unkeyable"].choices == 0
    assert f._describe(([torch.ones(1)] * 200,), {}) is not None
    assert f._key_words(([torch.ones(1)] * 200,), {}) is None


@pytest.mark.parametrize("args", [(), (1, 2, 3, 4, 5)])
def test_malformed_calls_raise_what_the_function_raises(args):
    f, _ = make("t::malformed")
    with pytest.raises(TypeError) as direct:
        f(*args)
    with pytest.raises(TypeError) as plain:
        f.__wrapped__(*args)
    assert str(direct.value) == str(plain.value)
    with pytest.raises(TypeError, match="unexpected keyword"):
        f(torch.ones(1), what=1)


def test_above_autograd_the_default_serves():
    """A tactic that is a bare kernel would lose the gradient."""

    def without_grad(x, n=1, mode="a,b", flag=None):
        return x.detach().clone()

    f, _ = make("t::grad", body=lambda x: x * 2, tactics={"raw": without_grad})
    f._learn(*f._describe((torch.ones(2),), {}), "raw")
    leaf = torch.ones(2, requires_grad=True)
    f(leaf).sum().backward()
    assert torch.equal(leaf.grad, torch.full((2,), 2.0))
    assert f._describe((leaf,), {}) is None
    assert f._key_words((leaf,), {}) is None
    with torch.no_grad():
        f(leaf)
    op = hotop.custom_op("tuner_tests::below_autograd", f, mutates_args=())
    op(leaf)  # the kernel runs below autograd
    assert (f.hits, f.misses) == (2, 1)
