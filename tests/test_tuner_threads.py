"""Tuning in several threads, across forks, and interrupted at any moment."""

import fcntl
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import pytest
import torch

from hotop.tuner import _session, _store, tuning
from tuner_cases import make, tagged

pytestmark = pytest.mark.usefixtures("own_tuner_files")


def test_fork_leaves_the_session_and_the_lock():
    f, slow = make("s::fork", tactics={"b": tagged("b")})
    with tuning(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of threads
        _session._measuring["turn"] = (0, object())  # another thread
        slow.calls = 0
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            f(torch.ones(5))
            os._exit(slow.calls)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        _session._measuring.clear()


def test_lock_of_a_file_is_given_back_though_a_fork_has_it(tmp_path):
    path = tmp_path / "file.json"
    with _store._locked(path):
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
    try:
        with path.with_name("file.json.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


INTERRUPTED = """
    import random, signal, sys, time, warnings, torch, hotop
    from hotop.tuner import _session, tuning
    warnings.simplefilter("ignore")
    f = hotop.tunable("s::interrupt", tactics={"b": lambda x: x + 0})(lambda x: x.clone())
    armed = True

    def interrupt(*_):
        if armed:
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    random.seed(3)
    caught, x = 0, torch.ones(2)
    for _ in range(200):
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 4e-3))
            with tuning(rounds=2, batch_us=20, retune=True):
                f(x)
            time.sleep(0.02)  # pause() would miss a signal that came just before it
        except KeyboardInterrupt as error:
            caught += 1
            # A block that was interrupted as it opened ends with its generator.
            error.__traceback__ = None
        assert _session._session is None
        calls = f.hits + f.misses
        f(x)
        assert f.hits + f.misses == calls + 1, "a session is open"
    armed = False
    assert caught > 100, caught
    known = f._choice_count()
    with tuning(rounds=1, batch_us=5, retune=True):
        f(torch.ones(3))
    assert f._choice_count() == known + 1, "this thread still says that it times tactics"
"""


def test_interrupts_at_any_moment_leave_nothing_open():
    subprocess.run([sys.executable, "-c", textwrap.dedent(INTERRUPTED)], check=True, timeout=100)


@pytest.fixture
def interruptible():
    """A shell starts background jobs with SIGINT ignored; then Python installs no handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_second_interrupt_while_another_thread_measures(interruptible):
    entered, go = threading.Event(), threading.Event()

    def waits(x, n=1, mode="a,b", flag=None):
        entered.set()
        go.wait(20)
        return x.clone()

    f, _ = make("s::second", tactics={"b": waits})
    me = threading.get_ident()
    worker = threading.Thread(target=lambda: f(torch.ones(2)))
    later = threading.Timer(0.3, lambda: signal.pthread_kill(me, signal.SIGINT))

    def interrupted():
        with tuning(rounds=1):
            worker.start()
            entered.wait(20)
            later.start()
            raise KeyboardInterrupt("first")

    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        interrupted()
    assert _session._session is None
    go.set()
    worker.join(20)
    later.join(20)
    f(torch.ones(2))
    assert f.hits + f.misses == 1


def test_eight_threads_hit_miss_tune_and_add():
    f, _ = make("s::eight", choices="mode", default="a", tactics={"b": tagged("b")})
    errors = []
    stop = threading.Event()

    def work(i):
        try:
            while not stop.is_set():
                x = torch.full((i % 5 + 1,), float(i))
                mode = "".join(["a", ",b"]) if i % 2 else "b"
                if not torch.equal(f(x, i % 3, mode), x):
                    raise AssertionError(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for n in range(6):
            with tuning(rounds=1, batch_us=5):
                time.sleep(0.05)
            f.tactic(f"extra{n}", tagged(n), backends=["b"])
            f._clear_choices()
            gc.collect()
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)
        sys.setswitchinterval(interval)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
