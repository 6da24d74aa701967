"""Tunables under attack: hostile values, odd Tensors, re-entrance, malformed calls, leaks."""

import gc
import pickle
import sys
import weakref

import pytest
import torch
import torch.fx.experimental.proxy_tensor
from torch import Tensor

import hotop
from hotop.tuner import Tactic, power_of_two, tunable, tuning
from hotop.tuner._stand_in import representative
from tuner_cases import make, tagged

needs_core = pytest.mark.skipif(not hotop.is_native(), reason="about the C++ core")


pytestmark = pytest.mark.usefixtures("own_tuner_files")


def slow_default(x):
    for _ in range(200):
        x = x + 0
    return x


def backends(name):
    return make(name, choices="mode", default="a", tactics={"b": tagged("b")})


@tunable("t::importable")
def importable(x: Tensor) -> Tensor:
    return x


def test_pickled_by_name():
    assert pickle.loads(pickle.dumps(importable)) is importable


class Liar:
    """Says that it is a Tensor."""

    @property
    def __class__(self):
        return Tensor


class Bomb:
    @property
    def __class__(self):
        raise RuntimeError("asked for the class")


@pytest.mark.parametrize("make_value", [Liar, Bomb, lambda: [Liar()], lambda: [Bomb()]])
def test_values_that_lie_about_their_class(make_value):
    f, slow = make("s::liar", tactics={"fast": tagged("fast")})
    f(torch.ones(2), make_value())
    with tuning():
        f(torch.ones(2), make_value())
    assert slow.calls == 2
    assert f._choice_count() == 0


def complex_pair():
    x = torch.tensor([1 + 2j, 3 - 1j])
    return {
        "conj": x.conj(),
        "neg": x.conj().imag,
        "zero": torch._efficientzerotensor((2,)),
        "sparse": torch.eye(2).to_sparse(),
    }


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("kind", [*complex_pair(), "nested", "fake", "vmap"])
def test_tensors_that_are_not_plain_memory_take_the_default(kind):
    f, slow = make("s::opaque", tactics={"fast": tagged("fast")})
    fast = f.tactics["fast"].function
    for plain in (torch.ones(2), torch.ones(2, dtype=torch.complex64)):
        f._learn(*f._describe((plain,), {}), "fast")
    f(torch.ones(2))
    assert fast.calls == 1
    if kind == "vmap":
        torch.vmap(f)(torch.ones(3, 2))
    elif kind == "fake":
        with torch._subclasses.FakeTensorMode():
            f(torch.ones(2))
    elif kind == "nested":
        f(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    else:
        f(complex_pair()[kind])
    assert (fast.calls, slow.calls) == (1, 1)


def test_default_serves_no_call_that_forbids_it():
    f, slow = backends("s::forbidden")
    b = f.tactics["b"].function
    f(torch.eye(2).to_sparse(), mode="b")
    f(torch.ones(1), 2**70, "b")
    f(torch.ones(1), [1] * 200, "b")
    assert (slow.calls, b.calls) == (0, 3)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((1, 2, 3, 4, 5), {}), ((), {}), ((1,), {"what": 1}), ((1,), {"x": 1})],
)
@pytest.mark.parametrize("session", [False, True])
def test_malformed_calls(args, kwargs, session):
    lenient = tagged("lenient")
    f, _ = make("s::malformed", choices="mode", default="a", tactics={"b": lenient})
    x = torch.ones(1)
    f._learn(*f._describe((x,), {}), "b")
    args = (x, *args[1:]) if args else ()
    if session:
        with pytest.raises(TypeError), tuning():
            f(*args, **kwargs)
    else:
        with pytest.raises(TypeError):
            f(*args, **kwargs)
    assert lenient.calls == 0


def test_strided_buckets_are_measured_on_strided_tensors():
    seen = []

    def flat_only(x):
        seen.append(x.is_contiguous())
        return x + 0

    f = tunable(
        "s::strided",
        dims={"x": {0: power_of_two()}},
        tactics={"flat": Tactic(flat_only, applies=lambda x: x.is_contiguous())},
    )(lambda x: slow_default(x))
    with tuning():
        f(torch.ones(10, 4)[:, ::2])
        f(torch.ones(4, 10).t())
    assert not seen
    f(torch.ones(10, 4)[:, ::2])
    assert f.hits == 1


@pytest.mark.parametrize("shape", [(10, 4), (9, 1), (3, 4), (16, 2)])
@pytest.mark.parametrize("way", ["t", "gap", "expand"])
def test_stand_ins_have_the_key_of_the_call(shape, way):
    x = torch.randn(shape)
    x = {
        "t": lambda: torch.randn(shape[::-1]).t(),
        "gap": lambda: torch.randn(*shape, 2)[..., 1],
        "expand": lambda: torch.randn(1, shape[1]).expand(shape),
    }[way]()
    f, _ = make("s::stand", dims={"x": {0: power_of_two(cap=8)}})
    (stand_in,) = representative(f._parameters[:1], [x])
    assert f._key_words((stand_in,), {}) == f._key_words((x,), {})
    assert torch.equal(stand_in[: x.shape[0]], x[: stand_in.shape[0]])


def test_lists_are_measured_on_the_buckets_sizes():
    f, _ = make("s::list", dims={"x": {0: power_of_two()}})
    (stand_in,) = representative(f._parameters[:1], [[torch.ones(3), torch.ones(5)]])
    assert [len(x) for x in stand_in] == [4, 8]


def test_tactic_that_applies_to_part_of_a_bucket_may_not_win():
    even = tagged("even")
    f, _ = make(
        "s::part",
        body=slow_default,
        dims={"x": {0: power_of_two()}},
        tactics={"even": Tactic(even, applies=lambda x, *_, **__: x.shape[0] % 2 == 0)},
    )
    with pytest.warns(RuntimeWarning, match="some sizes of the bucket only"), tuning():
        f(torch.ones(7))
    f(torch.ones(7))
    assert (even.calls, f.hits) == (0, 1)


def test_failing_reference_does_not_fail_the_call():
    def reference(x, n=1, mode="a,b", flag=None):
        raise RuntimeError("no reference")

    f, slow = make("s::reference", tactics={"b": tagged("b")}, reference=reference)
    with pytest.warns(RuntimeWarning, match="not tuned .* no reference") as caught, tuning():
        [f(torch.ones(2)) for _ in range(2)]
    assert (slow.calls, len(caught)) == (2, 1)


def test_none_is_not_an_empty_list():
    f = tunable("s::none", tactics={"b": lambda x: []})(lambda x: None)
    with pytest.warns(RuntimeWarning, match="'b' is out"), tuning():
        assert f(torch.ones(1)) is None


def test_later_tactic_is_measured_though_the_file_knows_the_key():
    f, _ = make("s::late", body=slow_default)
    with tuning():
        f(torch.ones(2))
    f.tactic("fast", tagged("fast"))
    with tuning():
        f(torch.ones(2))
    f(torch.ones(2))
    assert f.tactics["fast"].function.calls > 1
    calls = f.tactics["fast"].function.calls
    with tuning():
        f(torch.ones(2))
    assert f.tactics["fast"].function.calls == calls


def test_choices_that_the_tunable_forbids_are_refused():
    f, _ = backends("s::refused")
    f.tactic("elsewhere", tagged("elsewhere"), device_types=["cuda"])
    description, device = f._describe((torch.ones(1),), {"mode": "a"})
    with pytest.raises(ValueError, match="not among the allowed"):
        f._learn(description, device, "b")
    description[3] = {"allowed": ["a", "a"]}
    f._learn(description, device, "a")
    f(torch.ones(1), mode="a")
    f(torch.ones(1), mode="b")
    assert f.hits == 1
    g, _ = make("s::cuda", tactics={"c": Tactic(tagged("c"), device_types=("cuda",))})
    with pytest.raises(ValueError, match="does not work on cpu"):
        g._learn(*g._describe((torch.ones(1),), {}), "c")


@needs_core
def test_made_once():
    f, slow = backends("s::twice")
    with pytest.raises(RuntimeError, match="made already"):
        hotop._load.CORE.Tunable.__init__(f, [], -1, slow)
    bare = type(f).__new__(type(f))
    for use in (
        lambda: bare(1),
        lambda: bare._key_words((), {}),
        lambda: bare._set_choice(b"", 1),
        lambda: bare._clear_choices(),
        lambda: bare._add_tactic(slow),
    ):
        with pytest.raises(RuntimeError, match="made"):
            use()
    with pytest.raises(TypeError, match="keywords must be strings"):
        f._key_words((), {1: 2})


@needs_core
def test_tactics_that_call_each_other_forever():
    f, _ = make("s::loop")
    f.tactic("self", f)
    f._learn(*f._describe((torch.ones(1),), {}), "self")
    with pytest.raises(RecursionError):
        f(torch.ones(1))
    del f.tactics["self"]


def test_reentrant_parsing_and_missing(monkeypatch):
    f, _ = backends("s::reentrant")
    x = torch.ones(1)
    plain = type(f)._parse_allowed

    def parse(self, text):
        if "late" not in self.tactics:
            self.tactic("late", tagged("late"), backends=["b"])
            self._clear_choices()
            self(x, mode="a")
            gc.collect()
            return 1
        return plain(self, text)

    monkeypatch.setattr(type(f), "_parse_allowed", parse)
    text = "".join(["a", ",b"])
    for _ in range(2):
        f(x, mode=text)
    names = f._describe((x,), {"mode": text})[0][3]["allowed"]
    assert names == ["a", "b", "late"]
    # The mask of before the tactic is not kept.
    f._learn(*f._describe((x,), {"mode": text}), "late")
    f(x, mode=text)
    assert f.tactics["late"].function.calls == 1


class Text(str):
    """A str that can be part of a cycle."""

    __slots__ = ("__dict__",)


@needs_core
def test_remembered_texts_do_not_keep_a_tunable_alive():
    f, _ = backends("s::text")
    text = Text("a")
    text.owner = f
    f(torch.ones(1), mode=text)
    alive = weakref.ref(f)
    del f, text
    gc.collect()
    assert alive() is None


def test_two_tunables_of_one_name_are_both_tuned():
    f, _ = make("s::same", tactics={"b": tagged("b")})
    g, _ = make("s::same", tactics={"b": tagged("b")})
    with tuning():
        f(torch.ones(2))
        g(torch.ones(2))
    assert (f._choice_count(), g._choice_count()) == (1, 1)


@needs_core
def test_calls_without_tensors_do_not_ask_python(monkeypatch):
    f, slow = make("s::plain", body=tagged("d", lambda x: torch.ones(1)))
    asked = []
    monkeypatch.setattr(type(f), "_missed", lambda *a: asked.append(a) or 0)
    f(3)
    f(3)
    assert (asked, slow.calls, f.misses) == ([], 2, 2)


@needs_core
def test_hits_misses_and_errors_leak_nothing():
    f, _ = backends("s::leak")
    x = torch.ones(2)
    f._learn(*f._describe((x,), {}), "b")
    watched = (x, f, f.tactics["b"].function, f.tactics["a"].function, "a,b")

    def calls(count):
        for _ in range(count):
            f(x, 1, "a,b")
            f(x, 1, mode="b")
            f(x, 2, flag=True)
            for bad in ({"mode": "zz"}, {"mode": 3}, {"what": 1}, {"n": x, "x": x}):
                try:
                    f(x, **bad)
                except (TypeError, ValueError):
                    pass
                else:
                    raise AssertionError(bad)

    calls(20)
    gc.collect()
    before = [sys.getrefcount(one) for one in watched], sys.getallocatedblocks()
    calls(1000)
    gc.collect()
    assert [sys.getrefcount(one) for one in watched] == before[0]
    assert sys.getallocatedblocks() - before[1] < 500


def test_tactics_that_change_arguments_harm_nobody():
    def raw(x, n=1, mode="a,b", flag=None):
        x.detach().numpy()[:] = 7  # no version counter sees it
        return slow_default(x)

    f, _ = make("s::harm", tactics={"raw": raw, "mul": lambda x, *_, **__: x.mul_(2)})
    x = torch.tensor([1.0, float("nan")])
    with pytest.warns(RuntimeWarning, match="mutates_args does not name"), tuning():
        f(x)
    assert x[0] == 1
    table = hotop.tuner._store.read(hotop.tuner.default_path())
    (choice,) = table.ops["s::harm"]["choices"].values()
    assert set(choice.rejected) == {"raw", "mul"}


def test_random_numbers_after_a_session_are_those_without_it():
    f, _ = make("s::random", tactics={"b": lambda x, *_, **__: x + 0 * torch.rand(2)})
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    with tuning():
        f(torch.ones(2))
    assert torch.equal(torch.rand(2), expected)


def test_traces_do_not_record_a_measurement():
    f, _ = make("s::trace", tactics={"b": tagged("b")})
    trace = torch.fx.experimental.proxy_tensor.make_fx(lambda x: f(x))
    with tuning():
        graph = trace(torch.ones(2)).graph
    assert len(graph.nodes) == 3
    assert f._choice_count() == 0
