"""One bad tactic costs itself only; files are advice; nobody waits while a key is measured."""

import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import hotop
from hotop.__main__ import main
from hotop.tuner import BrokenTable, Tactic, _store, power_of_two, tunable, tuning
from tuner_cases import make, python_twin, slow, tagged, tune

pytestmark = pytest.mark.usefixtures("own_tuner_files")


class Odd(BaseException):
    """Not even an Exception."""


def raises_at(call, error):
    calls = iter(range(1, 10**9))

    def tactic(x):
        if next(calls) >= call:
            raise error
        return x + 0

    return tactic


@pytest.mark.parametrize(
    "error", [RuntimeError("no"), Odd("no"), SystemExit("no"), GeneratorExit()]
)
@pytest.mark.parametrize("call", [1, 2, 3, 4, 6, 9])
def test_a_tactic_that_raises_is_out_and_the_rest_are_timed(call, error):
    """The example of the issue: one that raises from its fourth call on left the key untuned."""
    f = tunable("f::raises", tactics={"bad": raises_at(call, error), "good": lambda x: x + 0})(slow)
    found = tune(f, torch.randn(4))
    assert found.winner == "good"
    assert set(found.out) == {"bad"}
    assert f"raises {type(error).__name__}" in found.out["bad"]
    assert len(found.said) == 1


def test_an_interrupt_is_no_failure():
    f = tunable("f::interrupt", tactics={"bad": raises_at(4, KeyboardInterrupt())})(slow)
    with pytest.raises(KeyboardInterrupt), tuning():
        f(torch.randn(4))
    assert f._choice_count() == 0


def warns(x):
    warnings.warn("old", DeprecationWarning, stacklevel=1)
    return x + 0


def test_warnings_as_errors(caplog):
    f = tunable(
        "f::warns",
        tactics={"warns": warns, "wrong": lambda x: x, "good": lambda x: x + 0},
    )(slow)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tuning(rounds=3, batch_us=20):
            f(torch.randn(4))
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "'warns' is out" in caplog.text
    assert "'wrong' is out" in caplog.text
    (choice,) = _store.read(hotop.tuner.default_path()).ops["f::warns"]["choices"].values()
    assert choice.tactic == "good"


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "hotop-tuner", "version": 1}'])
def test_a_bad_file_ends_no_call_where_warnings_are_errors(text, caplog):
    path = hotop.tuner.default_path()
    path.parent.mkdir(parents=True)
    path.write_text(text)
    f = tunable("f::bad file", tactics={"fast": lambda x: x + 0})(slow)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(torch.randn(3))
        with tuning(rounds=1, batch_us=5):
            f(torch.randn(3))
    assert "ignored, so calls take their default" in caplog.text


def test_all_tunables_of_one_name_are_cleared():
    f, g = (tunable("f::same", tactics={"fast": tagged("fast")})(slow) for _ in range(2))
    for one in (f, g):
        one._learn(*one._describe((torch.ones(1),), {}), "fast")
        one(torch.ones(1))
    hotop.tuner.clear()
    assert [(one.hits, one._choice_count()) for one in (f, g)] == [(0, 0), (0, 0)]


def test_applies_that_raises_says_no_once():
    def applies(x):
        raise ValueError("what is x?")

    f = tunable("f::applies", tactics={"bad": Tactic(tagged("bad"), applies)})(slow)
    with pytest.warns(RuntimeWarning, match=r"applies of 'bad' raises ValueError: what is x\?"):
        f(torch.randn(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(torch.randn(4))
        with tuning():
            f(torch.randn(5))
    assert f.tactics["bad"].function.calls == 0


def written(f, x, **changes):
    """Write a file that says that ``fast`` won the key of f(x)."""
    description, device = f._describe((x,), {})
    choice = _store.Choice(
        description, "fast", 1.0, 2.0, _store.versions(""), {"fast": 1.0}, {}, 1.0
    )
    entry = {**vars(choice), **changes}
    table = _store.Table(hotop.tuner._devices.describe(device))
    table.add(f.name, f.signature, _store.Choice(**entry))
    path = hotop.tuner.default_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table.to_json())
    return path


@pytest.mark.parametrize("in_python", [False, True])
@pytest.mark.parametrize("bucketed", [False, True])
def test_applies_is_asked_of_a_choice_that_comes_from_a_file(bucketed, in_python):
    """The example of the issue: the choice was taken although applies says no."""

    asked = []
    says = False

    def applies(x):
        asked.append(x)
        return says

    fast = tagged("fast")
    dims = {"x": {0: power_of_two()}} if bucketed else {}
    f = tunable("f::file", dims=dims, tactics={"fast": Tactic(fast, applies)})(slow)
    x = torch.randn(4)
    written(f, x)
    f = python_twin(f) if in_python else f
    f(x)
    f(x)
    assert (fast.calls, f.hits) == (0, 0)
    says = True
    f(x)
    asked.clear()
    for _ in range(3):
        f(x)
    assert (fast.calls, f.hits) == (4, 4)
    # Without bucket rules one yes is enough: all that applies may look at is in the key.
    assert len(asked) == (3 if bucketed else 0)


VERSIONS = {
    "torch": {"torch": "2.0.0"},
    "hotop": {"hotop": "0.0.1"},
    "tactics": {"tactics": "1"},
}


@pytest.mark.parametrize("what", VERSIONS)
def test_a_choice_of_another_version_is_not_used(what):
    fast = tagged("fast")
    f = tunable("f::version", tactics={"fast": fast})(slow)
    x = torch.randn(4)
    path = written(f, x, versions={**_store.versions(""), **VERSIONS[what]})
    with pytest.warns(
        RuntimeWarning, match=f"were measured with {what} {next(iter(VERSIONS[what].values()))}"
    ):
        f(x)
    assert fast.calls == 0
    with tuning():
        f(x)
    document = json.loads(path.read_text())
    assert len(document["ops"]["f::version"]["choices"]) == 2, "the other version's stays"
    hotop.tuner.clear()
    f(x)
    assert f.hits == 1


def test_the_authors_version():
    x = torch.randn(4)
    for version, known in (("", False), ("2", False), ("2", True), (3, False)):
        f = tunable("f::author", version=version, tactics={"fast": lambda x: x + 0})(slow)
        hotop.tuner.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            f(x)
        assert (f.hits == 1) == known
        tune(f, x)
    text = hotop.tuner.default_path().read_text()
    assert '"tactics": "3"' in text


def special(kind, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "link to a fifo":
        os.mkfifo(path.with_name("real"))
        path.symlink_to(path.with_name("real"))
    else:
        path.symlink_to(kind)
    return path


@pytest.mark.parametrize("kind", ["fifo", "directory", "link to a fifo", "/dev/null", "/dev/zero"])
def test_what_is_no_file_is_refused(kind, capsys):
    path = special(kind, hotop.tuner.default_path())
    f = tunable("f::special", tactics={"fast": tagged("fast")})(slow)
    with pytest.warns(RuntimeWarning, match="ignored, so calls take their default"):
        f(torch.randn(4))
    with pytest.warns(RuntimeWarning, match="they hold in this process"), tuning():
        f(torch.randn(4))
    with pytest.raises(BrokenTable):
        hotop.tuner.load(path)
    for action in (["show"], ["clear"]):
        assert main(["tuner", *action, str(path)]) == 1
    f(torch.randn(4))
    assert f.hits == 1


def test_a_lock_that_is_no_file():
    path = hotop.tuner.default_path()
    special("fifo", path.with_name(path.name + ".lock"))
    f = tunable("f::lock", tactics={"fast": tagged("fast")})(slow)
    with pytest.warns(RuntimeWarning, match="they hold in this process"), tuning():
        f(torch.randn(4))


def inner_tunable():
    inner, _ = make("f::inner", tactics={"fast": tagged("fast")})
    return inner


def in_a_pool(inner, x):
    with ThreadPoolExecutor(2) as pool:
        return next(pool.map(inner, [x + 0, x]))


def in_a_thread_that_tunes(inner, x):
    errors = []

    def work():
        try:
            with tuning():
                inner(x)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert all("open already" in error for error in errors)
    return inner(x)


async def awaited(inner, x):
    await asyncio.sleep(0)
    return await asyncio.to_thread(inner, x)


def in_backward(inner, x):
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x + 0

        @staticmethod
        def backward(ctx, grad):
            return inner(grad)

    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        Function.apply(leaf).sum().backward()
    return x + 0 * leaf.grad


def in_a_fork(inner, x):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            inner(x)
            with tuning(rounds=1, batch_us=5):
                inner(x[:1])
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return x + 0


def in_a_process(inner, x):
    worker = multiprocessing.get_context("fork").Process(target=inner, args=(x,))
    worker.start()
    worker.join(20)
    assert worker.exitcode == 0
    return x + 0


ELSEWHERE = {
    "itself": lambda inner, x: inner(x),
    "thread pool": in_a_pool,
    "a thread that opens a block": in_a_thread_that_tunes,
    "asyncio": lambda inner, x: asyncio.run(awaited(inner, x)),
    "backward": in_backward,
    "fork": in_a_fork,
    "process": in_a_process,
}


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded")
@pytest.mark.parametrize("where", ELSEWHERE)
def test_a_tactic_that_calls_a_tunable_elsewhere(where):
    """The example of the issue: a tactic that calls a tunable from a thread pool hung."""
    inner = inner_tunable()

    def tactic(x):
        return ELSEWHERE[where](inner, x)

    f = tunable("f::outer", tactics={"elsewhere": tactic})(lambda x: tactic(x))
    x = torch.randn(4)
    done = []

    def tuned():
        done.append(tune(f, x))

    thread = threading.Thread(target=tuned, daemon=True)
    thread.start()
    thread.join(60)
    assert done, "hangs"
    assert not done[0].out
    assert torch.equal(done[0].result, x)
    assert f._choice_count() == 1
    f(x)


HANGS = """
import torch, hotop
from concurrent.futures import ThreadPoolExecutor
inner = hotop.tunable("f::inner")(lambda x: x + 0)
pool = ThreadPoolExecutor(2)
by_pool = lambda x: pool.submit(inner, x).result()
outer = hotop.tunable("f::outer", tactics={"b": by_pool})(lambda x: x + 0)
with hotop.tuning():
    outer(torch.randn(3))
    pool.submit(outer, torch.randn(4)).result()
print(outer._choice_count())
"""


def test_calls_of_pools_are_tuned_too():
    done = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "2\n"


def test_a_tactic_that_closes_the_block():
    f, _ = make("f::closes", body=slow)
    block = tuning(rounds=1, batch_us=5)

    def closes(x, *_, **__):
        block.__exit__(None, None, None)
        return x + 0

    f.tactic("closes", closes)
    block.__enter__()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        f(torch.randn(3))
    with tuning(rounds=1, batch_us=5):
        pass
