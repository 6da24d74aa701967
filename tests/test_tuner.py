"""``hotop.tunable`` and ``hotop.tuning``: choices, misses, rejections; core and Python alike."""

import gc
import inspect
import sys
import threading
import time
import warnings
import weakref

import pytest
import torch
from torch import Tensor
from torch.testing._internal.optests import opcheck

import hotop
from hotop.tuner import (
    Tactic,
    _key,
    _tunable,
    follows,
    listed,
    power_of_two,
    stats,
    tunable,
    tuning,
)
from tuner_cases import make, python_twin, tagged

pytestmark = pytest.mark.usefixtures("own_tuner_files")


def test_a_choice_serves_its_bucket_and_no_other():
    fast = tagged("fast")
    f, slow = make("t::choice", dims={"x": {0: power_of_two()}}, tactics={"fast": fast})
    description, device = f._describe((torch.ones(8),), {})
    f._learn(description, device, "fast")
    for x, chosen in [
        (torch.ones(5), fast),
        (torch.ones(8), fast),
        (torch.ones(9), slow),
        (torch.ones(5, dtype=torch.float64), slow),
        (torch.ones(16)[::2], slow),
        (torch.ones(8, 1), slow),
    ]:
        before = chosen.calls
        f(x)
        assert chosen.calls == before + 1, x.shape
    before = slow.calls
    f(torch.ones(8), 2)
    f(torch.ones(8), flag=True)
    assert slow.calls == before + 2
    before = fast.calls
    f(x=torch.ones(8))
    f(torch.ones(8), 1, mode="a,b", flag=None)
    assert fast.calls == before + 2


def test_twin_in_python_counts_and_chooses_alike():
    fast, other = tagged("fast"), tagged("other")
    f, _ = make(
        "t::twin",
        dims={"x": {-1: listed(4, 16)}},
        ignore=["n"],
        tactics={"fast": fast, "other": other},
    )
    twin = python_twin(f)
    for table in (f, twin):
        for size, name in ((4, "fast"), (16, "other")):
            description, device = table._describe((torch.ones(2, size),), {})
            table._learn(description, device, name)
    rows = []
    for table in (f, twin):
        fast.calls = other.calls = 0
        for size in (1, 4, 5, 16, 99):
            table(torch.ones(2, size), size)
        table(torch.ones(3, 4))
        table(torch.ones(2, 4), mode="x")
        rows.append((fast.calls, other.calls, table.hits, table.misses, table._choice_count()))
    assert rows[0] == rows[1] == (2, 2, 4, 3, 2)


def test_table_of_many_choices():
    f, slow = make("t::many", tactics={"fast": tagged("fast")})
    description, device = f._describe((torch.ones(1),), {})
    count = 20_000
    for n in range(count):
        f._learn([description[0], description[1], f"int {n}", *description[3:]], device, "fast")
    assert f._choice_count() == count
    x = torch.ones(1)
    for n in range(0, count, 37):
        f(x, n)
    assert slow.calls == 0
    f(x, count)
    assert slow.calls == 1


def test_remembered_defaults_are_misses():
    f, _ = make("t::untuned", choices="mode", default="a", tactics={"b": tagged("b")})
    b = f.tactics["b"].function
    for _ in range(3):
        f(torch.ones(2), mode="b")
    assert (b.calls, f.hits, f.misses) == (3, 0, 3)
    assert stats()["t::untuned"].choices == 0


def slow_default(x):
    for _ in range(200):
        x = x + 0
    return x


def test_tuning_finds_the_faster_tactic_and_answers_with_the_default():
    fast = tagged("fast")
    f, _ = make("t::tune", body=slow_default, tactics={"fast": fast})
    x = torch.randn(3)
    with tuning():
        assert torch.equal(f(x), x)
        calls = fast.calls
        f(x)
        assert fast.calls == calls, "measured once, and answered by the default"
    assert (f.hits, f.misses) == (0, 0)
    f(x)
    assert (f.hits, fast.calls) == (1, calls + 1)


def test_wrong_and_failing_tactics_never_win():
    def wrong(x, n=1, mode="a,b", flag=None):
        return x + 1

    def wrong_dtype(x, n=1, mode="a,b", flag=None):
        return x.double()

    def failing(x, n=1, mode="a,b", flag=None):
        raise RuntimeError("no kernel")

    f, _ = make(
        "t::wrong",
        body=slow_default,
        tactics={"wrong": wrong, "dtype": wrong_dtype, "failing": failing},
    )
    with pytest.warns(RuntimeWarning) as caught, tuning():
        f(torch.ones(2))
    texts = " ".join(str(warning.message) for warning in caught)
    assert "'wrong' is out" in texts
    assert "no kernel" in texts
    table = hotop.tuner._store.read(hotop.tuner.default_path())
    (choice,) = table.ops["t::wrong"]["choices"].values()
    assert choice.tactic == "default"
    assert set(choice.rejected) == {"wrong", "dtype", "failing"}


def test_applicability_and_devices():
    never, elsewhere = tagged("never"), tagged("elsewhere")
    f, _ = make(
        "t::applies",
        tactics={
            "never": Tactic(never, applies=lambda x, *_, **__: x.shape[0] > 10),
            "elsewhere": Tactic(elsewhere, device_types=("cuda",)),
        },
    )
    with tuning():
        f(torch.ones(2))
    assert never.calls == elsewhere.calls == 0
    assert list(f.candidates((torch.ones(11),), {}).values()) == ["default", "never"]


def test_bucket_is_measured_on_its_own_sizes():
    seen = []

    def watch(x, y, n=1):
        seen.append((tuple(x.shape), tuple(y.shape)))
        return x.sum() + y.sum()

    @tunable(
        "t::sizes",
        dims={"x": {0: power_of_two()}, "y": {0: follows(lambda shapes: 2 * shapes["x"][0])}},
        tactics={"watch": watch},
        rtol=1e-4,
        atol=1e-4,
    )
    def f(x: Tensor, y: Tensor, n: int = 1) -> Tensor:
        return x.sum() + y.sum()

    with tuning():
        f(torch.randn(5, 2), torch.randn(10))
    assert seen[0] == ((5, 2), (10,)), "checked on the call's sizes, the bucket's smallest ones too"
    assert set(seen[1:]) == {((8, 2), (16,))}
    f(torch.randn(6, 2), torch.randn(12))
    assert f.hits + f.misses == 1


def test_mutated_arguments_are_measured_on_copies():
    @tunable("t::mutates", mutates_args=["x"], tactics={"other": lambda x, n=1: x.add_(n)})
    def f(x: Tensor, n: int = 1) -> Tensor:
        return x.add_(n)

    x = torch.zeros(3)
    with tuning():
        f(x)
    assert torch.equal(x, torch.ones(3))


def test_interrupt_keeps_what_was_found():
    f, _ = make("t::interrupt", tactics={"fast": tagged("fast")})

    def interrupted():
        with tuning():
            f(torch.ones(2))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "t::interrupt" in hotop.tuner.default_path().read_text()
    f(torch.ones(2))
    assert f.hits == 1
    with tuning():  # no block is left open
        pass


def test_only_one_block_at_a_time():
    with tuning(), pytest.raises(RuntimeError, match="open already"), tuning():
        pass


def test_bad_effort():
    with pytest.raises(ValueError, match="positive"), tuning(rounds=0):
        pass


def test_other_threads_tune_too_and_stop_with_the_block():
    f, _ = make("t::threads", tactics={"fast": tagged("fast")})
    errors = []

    def work(size):
        try:
            end = time.monotonic() + 60
            # While another thread measures, a call gets the default.
            while f._choice_count() < 4 and time.monotonic() < end:
                f(torch.ones(size))
        except BaseException as error:
            errors.append(error)

    with tuning(rounds=1, batch_us=10):
        threads = [threading.Thread(target=work, args=(size,)) for size in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert stats()["t::threads"].choices == 4


def test_allowed_backends_are_parsed_once_per_object(monkeypatch):
    f, slow = make("t::allowed", choices="mode", default="a", tactics={"b": tagged("b")})
    parsed = []
    original = _tunable.Tunable._parse_allowed
    monkeypatch.setattr(
        _tunable.Tunable,
        "_parse_allowed",
        lambda self, text: parsed.append(text) or original(self, text),
    )
    f(torch.ones(1))  # reads the file, so the description is made once
    first, second = "".join(["a", ",b"]), "".join(["a,", "b"])
    assert first is not second
    f(torch.ones(1), mode=first)
    parsed.clear()
    for _ in range(5):
        f(torch.ones(1), mode=first)
        f(torch.ones(1), mode=second)
    assert len(parsed) == 1
    assert slow.calls == 12


@pytest.mark.parametrize("text", ["", "c", "a,c", ","])
def test_unknown_backends(text):
    f, _ = make("t::unknown", choices="mode", default="a", tactics={"b": tagged("b")})
    with pytest.raises(ValueError, match=r"must name some of: a, b"):
        f(torch.ones(1), mode=text)
    with pytest.raises(TypeError, match="mode must be a str, got int"):
        f(torch.ones(1), mode=3)


def test_a_tactic_added_later_is_seen():
    f, _ = make("t::later", choices="mode", default="a", tactics={"b": tagged("b")})
    text = "a,b"
    f(torch.ones(1), mode=text)
    late = f.tactic("c", tagged("c"), backends=["b"])
    assert "c" in f._describe((torch.ones(1),), {"mode": text})[0][3]["allowed"]
    f(torch.ones(1), mode=text)
    assert late.calls == 0
    with pytest.raises(ValueError, match="already has a tactic"):
        f.tactic("c", late)


@pytest.mark.parametrize("factory", [hotop.custom_op, torch.library.custom_op])
def test_as_the_kernel_of_an_op(factory):
    name = f"tuner_tests::op_{factory.__module__.split('.')[0]}"
    fast = tagged("fast")
    f, _ = make(name, tactics={"fast": fast}, dims={"x": {0: power_of_two()}})
    op = factory(name, f, mutates_args=())
    op.register_fake(lambda x, n=1, mode="a,b", flag=None: torch.empty_like(x))
    f._learn(*f._describe((torch.ones(4),), {}), "fast")
    x = torch.randn(3)
    if factory is hotop.custom_op:
        assert hotop.explain(op, x).direct
    assert torch.equal(op(x), x)
    assert torch.equal(op._opoverload(x, 1), x)
    assert torch.equal(torch.compile(op, fullgraph=True, backend="aot_eager")(x), x)
    with torch.profiler.profile():  # PyTorch's road
        op(x)
    assert fast.calls == f.hits == 4
    opcheck(op._opoverload, (x,))


def test_signature_and_names():
    f, _ = make("t::names")
    assert f.__name__ == "function"
    assert list(inspect.signature(f).parameters) == ["x", "n", "mode", "flag"]
    assert "t::names" in repr(f)


@pytest.mark.parametrize(
    "options", [{"dims": {"y": {}}}, {"ignore": ["y"]}, {"choices": "y"}, {"mutates_args": ["y"]}]
)
def test_unknown_parameters(options):
    with pytest.raises(ValueError, match="has no parameter y"):
        make("t::bad", **options)
    with pytest.raises(TypeError, match="cannot be tuned"):
        tunable("t::star")(lambda *args: None)


def test_tunables_are_freed():
    f, _ = make("t::freed", tactics={"fast": tagged("fast")})
    f.me = f
    f(torch.ones(1))
    reference = weakref.ref(f)
    del f
    gc.collect()
    assert reference() is None
    assert "t::freed" not in stats()


def test_hit_leaks_nothing():
    f, _ = make("t::leak", choices="mode", default="a", tactics={"b": tagged("b")})
    x = torch.ones(2)
    f._learn(*f._describe((x,), {}), "b")
    before = [sys.getrefcount(o) for o in (x, f, f.tactics["b"].function)]
    for _ in range(100):
        f(x, 1, "a,b")
        f(x, flag=None)
    assert [sys.getrefcount(o) for o in (x, f, f.tactics["b"].function)] == before


def test_nested_lists_are_not_keyed():
    with pytest.raises(_key.NotKeyable):
        _key.describe_value([[1]], _key.Parameter("x"))
    f, _ = make("t::nested")
    assert f._key_words((torch.ones(1), [[1]]), {}) is None


def test_no_warning_in_a_plain_session():
    f, _ = make("t::quiet", tactics={"fast": tagged("fast")})
    with warnings.catch_warnings(), tuning():
        warnings.simplefilter("error")
        f(torch.ones(2))
