"""Faults of a process: exit, fork, subinterpreters, memory that ends."""

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from fault_processes import HEAD, ends_well, run


class TestExit:
    def test_live_ops(self) -> None:
        """Handlers that were registered after the import of torch still find every op."""
        out = ends_well("atexit.register(lambda: (check(), print('called')))")
        assert out.endswith("called\n")

    def test_handlers_that_run_after_pytorch_removed_its_ops(self) -> None:
        """PyTorch's own op fails an internal assertion here; hotop's says what happened."""
        late = """
import atexit
def late():
    for call in CALLS[:3]:
        try:
            call()
        except (AttributeError, RuntimeError) as error:
            print(error)
    print(tuned(x, 3.0).tolist())
atexit.register(late)
"""
        out = ends_well("", late + HEAD)
        assert out.count("the definition of this op was removed") == 2
        assert out.endswith("has no attribute 'op'\n[4.0, 4.0]\n")

    def test_thread_that_is_waited_for(self) -> None:
        out = ends_well(
            """
def work():
    threading.main_thread().join()
    check()
    print("done")

threading.Thread(target=work).start()
"""
        )
        assert out == "done\n"

    @pytest.mark.parametrize("call", range(7))
    def test_daemon_thread_inside_a_kernel(self, call: int) -> None:
        """CPython ends the thread where it asks for the GIL, by unwinding hotop's frames."""
        out = ends_well(
            f"""
inside = threading.Event()
def wait():
    inside.set()
    time.sleep(0.5)

def work():
    while True:
        CALLS[{call}]()

threading.Thread(target=work, daemon=True).start()
inside.wait()
print("left")
"""
        )
        assert out == "left\n"

    def test_objects_that_die_last(self) -> None:
        out = ends_well(
            """
class Last:
    def __del__(self, call=CALLS[0], tuned=tuned, x=x, write=os.write):
        try:
            call()
        except Exception:
            pass
        tuned(x, 3.0)
        write(1, b"died")  # from CPython 3.14 on sys.stdout is flushed for the last time before

sys.hotop_last = Last()
"""
        )
        assert out == "died"

    def test_exit_from_a_kernel(self) -> None:
        done = run("def wait():\n    sys.exit(7)\n\nop(x, [1])")
        assert (done.returncode, "Traceback" in done.stderr) == (7, False)
        done = run("def wait():\n    os._exit(9)\n\ntuned_op(x)")
        assert done.returncode == 9


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
class TestFork:
    def test_child_calls(self) -> None:
        ends_well(
            """
child = os.fork()
if child == 0:
    check()
    hotop.custom_op("processes::op", lambda x, ns: x + 5, mutates_args=(),
                    schema="(Tensor x, int[] ns) -> Tensor")
    assert torch.ops.processes.op(x, [1]).tolist() == [6.0, 6.0]
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
check()
"""
        )

    def test_child_made_inside_a_kernel(self) -> None:
        """The child leaves through the call that the parent made."""
        ends_well(
            """
children = []
def wait():
    children.append(os.fork())

result = op(x, [1, 2])
assert result.tolist() == [3.0, 3.0]
if children[0] == 0:
    wait = lambda: None
    check()
    os._exit(0)
assert os.waitpid(children[0], 0)[1] == 0
"""
        )

    def test_child_made_while_other_threads_call(self) -> None:
        ends_well(
            """
stop = threading.Event()
def work():
    while not stop.is_set():
        CALLS[0]()
        tuned_op(x, 3.0)

threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(10):
    child = os.fork()
    if child == 0:
        for call in CALLS:
            assert call().tolist() == [4.0, 4.0]
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
for thread in threads:
    thread.join()
"""
        )

    def test_pool(self) -> None:
        ends_well(
            """
import multiprocessing
def square(n):
    return op(x, [0] * n).tolist()

with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(square, range(20)) == [[1.0 + n] * 2 for n in range(20)]
"""
        )


MEMORY_ENDS = """
import _testcapi
def seven(x: Tensor, ns: list[int], ys: list[Tensor], s: str = "a", k: float = 1.0, *,
          flag: bool = False) -> int:
    return 7

def short(x: Tensor, n: int = 1) -> int:
    return 7

full = hotop.custom_op("processes::full", seven, mutates_args=())
mutating = hotop.custom_op("processes::mutating", short, mutates_args={"x"})
tuned = hotop.tunable("processes::short", tactics={"other": lambda x, n=1: 7})(short)
tuned_op = hotop.custom_op("processes::short", tuned, mutates_args=())
fresh = iter(range(10, 10**6))
ways = {
    "lists": lambda: full(x, [1, 2, 3], [x, x]),
    "keywords": lambda: full(x=x, ns=[1, 2], ys=[x], k=3.0, flag=True),
    "conversions": lambda: full(x, (1, True), (x,), "\\u00e4", 3),
    "packet": lambda: torch.ops.processes.full(x, [1], []),
    "mutating": lambda: mutating(x, n=3),
    "tunable": lambda: tuned(x, next(fresh)),
    "tunable op": lambda: tuned_op(x, n=next(fresh)),
}
failed = 0
def storm(way, call):
    global failed
    for _ in range(3):
        call()
    for start in range(60):
        _testcapi.set_nomemory(start, start + 1)
        try:
            assert call() == 7, way
        except MemoryError:
            failed += 1
        finally:
            _testcapi.remove_mem_hooks()
        assert call() == 7, way

gc.disable()
for way, call in ways.items():
    storm(way, call)
with torch.autograd.profiler.profile(record_shapes=True):
    storm("profiled", ways["lists"])
print(failed)
"""


def test_each_allocation_of_a_call_fails_in_turn() -> None:
    """Where PyTorch's own op crashes the process, a direct call raises MemoryError."""
    pytest.importorskip("_testcapi")
    assert int(ends_well(MEMORY_ENDS)) >= 5


SUBINTERPRETER = """
import importlib, sys
for name in ("_interpreters", "_xxsubinterpreters"):
    try:
        interpreters = importlib.import_module(name)
        break
    except ImportError:
        pass
def execute(code):
    made = interpreters.create()
    if hasattr(interpreters, "exec"):
        failed = interpreters.exec(made, code)
        return "" if failed is None else str(failed)
    try:
        interpreters.run_string(made, code)
    except interpreters.RunFailedError as error:
        return str(error)
    return ""
"""


@pytest.mark.parametrize("head", ["", HEAD], ids=["before torch", "beside torch"])
def test_subinterpreters_are_refused(head: str) -> None:
    """``import torch`` there crashes this process or hangs, so hotop says no before it."""
    after = "\ncheck()" if head else ""
    out = ends_well(
        SUBINTERPRETER
        + "for code in ('import hotop', 'import hotop._core', 'from hotop import custom_op'):\n"
        "    print(execute(code))\n"
        "print(execute('import sys; assert \"torch\" not in sys.modules'))" + after,
        head,
    )
    lines = out.strip("\n").split("\n")
    assert len(lines) == 3, out
    assert all("hotop needs CPython's main interpreter" in line for line in lines), out


def test_free_threaded_cpython_is_refused_by_the_compiler(tmp_path: Path) -> None:
    import shutil

    compiler = os.environ.get("CXX") or shutil.which("c++")
    header = Path(__file__).parent.parent / "csrc" / "core" / "python_compat.h"
    if compiler is None or not header.exists():
        pytest.skip("needs a C++ compiler and the sources")
    source = tmp_path / "probe.cpp"
    include = sysconfig.get_paths()["include"]
    command = [*compiler.split(), "-std=c++20", f"-I{include}", "-fsyntax-only", str(source)]
    source.write_text(f'#include "{header}"\n')
    assert subprocess.run(command, capture_output=True).returncode == 0
    source.write_text(f'#include <Python.h>\n#define Py_GIL_DISABLED 1\n#include "{header}"\n')
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode != 0
    assert "hotop needs CPython's GIL" in refused.stderr
