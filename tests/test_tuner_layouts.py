"""What a key holds of a Tensor's memory, and what stands for a bucket."""

import json
import warnings
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import hotop
from hotop.tuner import Tactic, _layout, exact, listed, power_of_two, tunable, tuning
from hotop.tuner._stand_in import representative
from tuner_cases import python_twin, slow, tagged, tune, winner

pytestmark = pytest.mark.usefixtures("own_tuner_files")


# All of one dtype and shape, no two of one layout.
SQUARES = {
    "plain": lambda: torch.ones(8, 8),
    "transposed": lambda: torch.ones(8, 8).t(),
    "expanded": lambda: torch.ones(1, 8).expand(8, 8),
    "expanded inside": lambda: torch.ones(8, 1).expand(8, 8),
    "one element": lambda: torch.ones(1, 1).expand(8, 8),
    "columns": lambda: torch.ones(8, 16)[:, ::2],
    "rows": lambda: torch.ones(16, 8)[::2],
    "wide base": lambda: torch.ones(8, 9)[:, :8],
    "wider base": lambda: torch.ones(8, 10)[:, :8],
    "windows": lambda: torch.ones(15).unfold(0, 8, 1),
    "unaligned": lambda: torch.ones(65)[1:].view(8, 8),
    "unaligned and transposed": lambda: torch.ones(65)[1:].view(8, 8).t(),
}
CUBES = {
    str(order): lambda order=order: torch.ones(4, 4, 4).permute(order)
    for order in [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
}
IMAGES = {
    "plain": lambda: torch.ones(2, 3, 4, 4),
    "channels_last": lambda: torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last),
}
LINES = {
    "plain": lambda: torch.ones(1, 8),
    "odd stride of a size 1": lambda: torch.ones(8, 1).t(),
    "another": lambda: torch.ones(1, 100)[:, :8],
}


@pytest.mark.parametrize("group", [SQUARES, CUBES, IMAGES, LINES])
@pytest.mark.parametrize("in_python", [False, True])
def test_layouts_have_keys_of_their_own(group, in_python):
    f = tunable("l::layouts", tactics={"fast": tagged("fast")})(slow)
    f = python_twin(f) if in_python else f
    keys = {}
    for name, make in group.items():
        x = make()
        words = f._key_words((x,), {})
        assert words == f._encode(f._describe((x,), {})[0], None), "a file gives the same key"
        assert keys.setdefault(words, name) == name


def test_the_tactic_of_one_layout_does_not_serve_another():
    """The example of the issue: a tactic that refuses stride 0 served what is expanded."""

    def refuses(x):
        if 0 in x.stride():
            raise RuntimeError("stride 0")
        return x + 0

    f = tunable("l::expanded", tactics={"fast": refuses})(slow)
    assert tune(f, torch.randn(8, 8).t()).winner == "fast"
    x = torch.randn(1, 8).expand(8, 8)
    assert torch.equal(f(x), x)
    assert "stride 0" in tune(f, x).out["fast"]


@pytest.mark.parametrize("kind", ["contiguous", "aligned", "dense"])
def test_a_tactic_that_needs_what_the_key_holds(kind):
    def needs(x):
        good = {
            "contiguous": x.is_contiguous(),
            "aligned": x.data_ptr() % 16 == 0,
            "dense": torch.ops.aten.is_non_overlapping_and_dense(x),
        }[kind]
        if not good:
            raise RuntimeError("refused")
        return x.clone(memory_format=torch.contiguous_format)

    f = tunable("l::needs", tactics={"fast": needs})(
        lambda x: slow(x).clone(memory_format=torch.contiguous_format)
    )
    for _ in range(2):
        for make in SQUARES.values():
            x = make()
            tune(f, x)
            assert torch.equal(f(x), x)
    for make in SQUARES.values():  # tuned or not
        f(make())


MEMORY = {
    "apart": lambda base: (base[:4].clone(), base[4:8].clone()),
    "side by side": lambda base: (base[:4], base[4:8]),
    "one": lambda base: (base[:4], base[:4]),
    "before": lambda base: (base[:4], base[1:5]),
    "behind": lambda base: (base[2:6], base[:4]),
    "interleaved": lambda base: (base[0:8:2], base[1:9:2]),
    "apart and strided": lambda base: (base[0:8:2].clone(), base[1:9:2]),
}


@pytest.mark.parametrize("in_python", [False, True])
def test_arguments_in_changed_memory(in_python):
    f = tunable("l::memory", mutates_args=["out"])(lambda x, out: out.copy_(x))
    f = python_twin(f) if in_python else f
    keys = {}
    for name, make in MEMORY.items():
        args = make(torch.zeros(64))
        words = f._key_words(args, {})
        description, _ = f._describe(args, {})
        assert words == f._encode(json.loads(json.dumps(description)), None)
        same = {"side by side": "apart"}.get(name, name)  # what is apart need not lie apart
        assert keys.setdefault(words, same) == same
    g = tunable("l::memory2")(lambda x, out: x)
    assert g._key_words(MEMORY["one"](torch.zeros(9)), {}) == g._key_words(
        MEMORY["apart"](torch.zeros(9)), {}
    ), "nothing is changed, so it cannot matter"


def test_an_overlap_is_measured_as_an_overlap():
    def backwards(x, out):  # right only where out begins behind x
        for i in reversed(range(len(x))):
            out[i] = x[i]

    def default(x, out):
        out.copy_(slow(x.clone()))

    f = tunable("l::overlap", mutates_args=["out"], tactics={"backwards": backwards})(default)
    found = {}
    for name, make in MEMORY.items():
        for data in (torch.randn(64), torch.randn(64)):
            twin = data.clone()
            x, out = make(data)
            found.setdefault(name, tune(f, x, out).out)
            f(x, out)
            expected = make(twin)
            for _ in range(2):
                default(*expected)
            assert torch.equal(out, expected[1]), name
    assert "backwards" in found["behind"]
    assert "backwards" not in found["before"]


@pytest.mark.parametrize("rule", [power_of_two(cap=64), exact(cap=64), listed(8, 64)])
def test_sizes_above_the_last_bucket(rule):
    """The example of the issue: 65 rows ran a tactic whose applies says at most 64."""
    seen = []

    def small(x):
        seen.append(x.shape[0])
        if x.shape[0] > 64:
            raise RuntimeError("too many rows")
        return x + 0

    def default(x):
        return slow(x)

    small_only = Tactic(small, applies=lambda x: x.shape[0] <= 64)
    for tactics in ({"small": small_only}, {"small": small}):
        f = tunable("l::above", dims={"x": {0: rule}}, tactics=tactics)(default)
        assert tune(f, torch.randn(64, 2)).winner == "small"
        for rows in (65, 100, 1000):
            assert f(torch.randn(rows, 2)).shape[0] == rows
        found = tune(f, torch.randn(65, 2))
        assert winner(f.name) == "default"
        assert "small" not in found.out or "too many rows" in found.out["small"]
        assert f(torch.randn(1000, 2)).shape[0] == 1000
        assert f.hits >= 1
        hotop.tuner.default_path().unlink()
        hotop.tuner.clear()
    description, _ = f._describe((torch.ones(65, 2),), {})
    assert description[1] == "float32[64+,2]@cpu"
    assert description == f._describe((torch.ones(10**6, 2),), {})[0]


def test_a_tactic_that_fails_on_other_sizes_of_its_bucket():
    def from_100(x):
        if x.shape[0] < 100:
            raise RuntimeError("too few rows")
        return x + 0

    f = tunable("l::few", dims={"x": {0: power_of_two()}}, tactics={"big": from_100})(slow)
    assert "too few rows" in tune(f, torch.randn(128, 2)).out["big"], "65 rows share the key"
    f(torch.randn(70, 2))


@pytest.mark.parametrize("rows", [37, 64, 200])
def test_no_call_gets_indices_beyond_its_rows(rows):
    """Sizes are made larger for a measurement; smaller ones only where nothing can be an index."""
    seen = []

    def gather(x, index, count):
        seen.append((x.shape[0], int(index.max()), count))
        assert int(index.max()) < x.shape[0]
        return x[index] + 0

    f = tunable("l::gather", dims={"x": {0: power_of_two(cap=64)}}, tactics={"gather": gather})(
        lambda x, index, count: gather(slow(x), index, count)
    )
    found = tune(f, torch.randn(rows, 2), torch.arange(rows), rows)
    assert not found.out
    assert all(largest < size and count <= size for size, largest, count in seen)


def test_applies_is_asked_in_every_call_of_a_bucket():
    def odd_sizes(x):
        if x.shape[0] == 77:
            raise RuntimeError("77 rows")
        return x + 0

    asked = []

    def applies(x):
        asked.append(x.shape[0])
        return x.shape[0] != 77

    f = tunable(
        "l::asked", dims={"x": {0: power_of_two()}}, tactics={"odd": Tactic(odd_sizes, applies)}
    )(slow)
    for one in (f, python_twin(f)):
        if one is f:
            assert tune(f, torch.randn(128, 2)).winner == "odd"
        else:
            one._learn(*one._describe((torch.ones(128, 2),), {}), "odd", applies=True)
        asked.clear()
        hits, misses = one.hits, one.misses
        one(torch.randn(77, 2))
        one(torch.randn(78, 2))
        assert asked[0] == 77
        assert asked[-1] == 78
        assert (one.hits - hits, one.misses - misses) == (1, 1)


LAYOUTS_TO_RESIZE = {
    "plain": lambda n: torch.randn(n, 4),
    "transposed": lambda n: torch.randn(4, n).t(),
    "gaps": lambda n: torch.randn(n, 8)[:, ::2],
    "wide base": lambda n: torch.randn(n, 37)[:, 5:9],
    "expanded": lambda n: torch.randn(1, 4).expand(n, 4),
    "expanded inside": lambda n: torch.randn(n, 1).expand(n, 4),
    "windows": lambda n: torch.randn(n + 3).unfold(0, 4, 1),
    "unaligned": lambda n: torch.randn(n * 4 + 1)[1:].view(n, 4),
    "three dimensions": lambda n: torch.randn(3, n, 4).permute(1, 2, 0),
    "channels_last": lambda n: torch.randn(n, 2, 3, 4).to(memory_format=torch.channels_last),
    "bfloat16": lambda n: torch.randn(n, 9).bfloat16()[:, 1:],
    "float8": lambda n: torch.randn(n, 4).to(torch.float8_e5m2),
    "bool": lambda n: torch.randn(n, 4) > 0,
}


@pytest.mark.parametrize("kind", LAYOUTS_TO_RESIZE)
@pytest.mark.parametrize("dimension", [0, 1])
def test_stand_ins_have_the_key_of_the_call(kind, dimension):
    f = tunable("l::stand", dims={"x": {dimension: power_of_two(cap=64)}})(lambda x: x)
    for n in (1, 2, 3, 5, 16, 100):
        x = LAYOUTS_TO_RESIZE[kind](n)
        for smallest in (False, True):
            try:
                (stand_in,) = representative(f._parameters, [x], smallest=smallest)
            except hotop.tuner._key.NotKeyable:
                # One element or none has no such layout.
                assert min(x.shape) <= 1 or kind in ("windows", "expanded inside")
                continue
            assert f._key_words((stand_in,), {}) == f._key_words((x,), {})
            assert stand_in.dtype == x.dtype
            assert stand_in.numel() == 0 or set(stand_in.flatten().tolist()) <= set(
                x.flatten().tolist()
            )


@pytest.mark.parametrize("size", [1, 3])
def test_what_is_changed_is_not_measured_where_it_overlaps_itself(size):
    """A dimension of size 1 may have any stride, and the bucket's sizes then share elements."""
    options = {"dims": {"x": {0: listed(4, 64)}}, "mutates_args": ["x"]}
    f = tunable("l::over", tactics={"b": doubles}, **options)(slow_double)
    x = torch.ones(8).as_strided((size, 2), (1, 1) if size == 1 else (2, 1))
    reason = "x would overlap itself in the bucket's sizes"
    with warnings.catch_warnings(record=True) as caught, tuning():
        warnings.simplefilter("always")
        f(x)
    assert [str(w.message).endswith(reason) for w in caught] == ([True] if size == 1 else [])
    assert torch.equal(x, torch.full((size, 2), 2.0))


def doubles(x):
    x.mul_(2)


def slow_double(x):
    slow(x)
    x.mul_(2)


def tuned_twice(f, args, mode):
    for _ in range(2):
        # What the function says of odd arguments is not the point.
        with mode, suppress(TypeError, RuntimeError, AttributeError, NotImplementedError):
            f(*args)


def test_the_reason_of_a_call_without_a_key_is_said_once():
    f = tunable("l::why", tactics={"b": lambda x, y=None: x + 0})(lambda x, y=None: slow(x))
    plain = torch.randn(3)

    class Sub(Tensor):
        pass

    calls = {
        "x requires grad, and grad mode is on": (torch.randn(3, requires_grad=True),),
        "x is of the layout torch.sparse_coo": (plain.to_sparse(),),
        "y is a lazily conjugated view": (plain, torch.ones(2, dtype=torch.complex64).conj()),
        "x is of the class Sub": (plain.as_subclass(Sub),),
        "y is a object": (plain, object()),
        "y is a list of lists": (plain, [[1]]),
        "y does not fit 64 bits": (plain, 2**70),
        "its key is too long": (plain, [1] * 200),
        "it has no Tensor": (3,),
        "a dispatch mode is active": (plain,),
    }
    for reason, args in calls.items():
        mode = FlopCounterMode(display=False) if "mode is active" in reason else nullcontext()
        with pytest.warns(RuntimeWarning) as caught, tuning():
            tuned_twice(f, args, mode)
        assert [str(w.message) for w in caught] == [f"l::why: a call is not tuned: {reason}"]


@pytest.mark.parametrize("in_python", [False, True])
def test_classes_have_keys_of_their_own(in_python):
    f = tunable("l::classes")(lambda x, v=None: x)
    f = python_twin(f) if in_python else f
    x = torch.ones(2)
    calls = [(x,), (nn.Parameter(x, requires_grad=False),)]
    calls += [(x, v) for v in ([1, 2], (1, 2), torch.Size([1, 2]), [], (), ["tuple"], ("tuple",))]
    keys = [f._key_words(args, {}) for args in calls]
    assert len(set(keys)) == len(calls)
    for args, words in zip(calls, keys, strict=True):
        description, _ = f._describe(args, {})
        assert words == f._encode(json.loads(json.dumps(description)), None)


def test_what_is_set_on_a_tensor_cannot_matter():
    """The key does not hold it, so copies have none of it."""
    weight = nn.Parameter(torch.randn(3), requires_grad=False)
    weight.scale = torch.ones(3)

    def by_attribute(x, w):
        return x * w.scale

    def changes(x, w):
        w.scale.add_(1)
        return x * 1

    f = tunable(
        "l::attributes",
        tactics={
            "attribute": by_attribute,
            "changes": changes,
            "applies": Tactic(lambda x, w: x * 1, lambda x, w: hasattr(w, "scale")),
            "right": lambda x, w: x * 1,
        },
    )(lambda x, w: slow(x) * 1)
    found = tune(f, torch.randn(3), weight)
    assert set(found.out) == {"attribute", "changes", "applies"}
    assert weight.scale.tolist() == [1, 1, 1]
    assert found.winner == "right"


def test_class_numbers_and_texts():
    for number in (0, 1, 2, 3, 4, 5, 6, 128, 130, 191):
        assert _layout.class_number(_layout.class_text(number)) == number
    with pytest.raises(ValueError, match="not a class"):
        _layout.class_number("x3")
