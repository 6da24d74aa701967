"""The stamp, HOTOP_DISABLE and a missing or foreign core: one sentence, and PyTorch's own op."""

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import hotop
from hotop import _load

PROGRAM = textwrap.dedent(
    """
    import warnings
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import hotop
    import torch
    @hotop.custom_op("load::f", mutates_args=())
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + 1
    @hotop.fast_custom_op("load::g", device_types="CPU")
    def g(x: torch.Tensor) -> torch.Tensor:
        return x + 2
    assert f(torch.ones(1)).item() == 2
    assert g(torch.ones(1)).item() == 3 and g.python_impl(torch.ones(1)).item() == 3
    print(hotop.is_native(), type(f) is torch._library.custom_ops.CustomOpDef)
    print(hotop.explain(f, torch.ones(1)).reason)
    for w in caught:
        if issubclass(w.category, RuntimeWarning):
            print("WARNING", w.message)
    """
)


def run(package_parent: Path, **environment: str) -> list[str]:
    import os

    env = {**os.environ, "PYTHONPATH": str(package_parent), **environment}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def copied_package(tmp_path: Path) -> Path:
    """A copy of the package's Python files, with the core of this process beside it."""
    package = tmp_path / "hotop"
    ignored = shutil.ignore_patterns("*.so", "_stamp.py", "__pycache__")
    shutil.copytree(Path(hotop.__file__).parent, package, ignore=ignored)
    core = Path(_load.CORE.__file__)
    (package / core.name).symlink_to(core)
    stamp = sys.modules["hotop._stamp"].__file__
    (package / "_stamp.py").write_bytes(Path(stamp).read_bytes())
    return package


# An editable install puts an import hook for `hotop` in place; PYTHONPATH must win over it.
WITHOUT_HOOK = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "Scikit" not in type(f).__name__]
"""
PROGRAM = WITHOUT_HOOK + PROGRAM


def test_copied_package_is_native(copied_package: Path) -> None:
    lines = run(copied_package.parent)
    assert lines[0] == "True False"
    assert not any(line.startswith("WARNING") for line in lines)


def test_disable(copied_package: Path) -> None:
    lines = run(copied_package.parent, HOTOP_DISABLE="1")
    assert lines[0] == "False True"
    warned = [line for line in lines if line.startswith("WARNING")]
    assert len(warned) == 1
    assert "HOTOP_DISABLE" in warned[0]
    assert "torch.library.custom_op" in warned[0]


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("TORCH = ", 'TORCH = "2.99.1"\n# ', "2.99.1"),
        ("SOABI = ", 'SOABI = "cpython-39"\n# ', "3."),
    ],
    ids=["torch", "python"],
)
def test_foreign_stamp_is_refused(copied_package: Path, old: str, new: str, named: str) -> None:
    stamp = copied_package / "_stamp.py"
    stamp.write_text(stamp.read_text().replace(old, new))
    lines = run(copied_package.parent)
    assert lines[0].startswith("False")
    (warned,) = [line for line in lines if line.startswith("WARNING")]
    assert named in warned
    assert "rebuild it with: pip install" in warned
    assert lines[1] in warned, "explain gives the same sentence"


def test_missing_core(copied_package: Path) -> None:
    (copied_package / Path(_load.CORE.__file__).name).unlink()
    (copied_package / "_stamp.py").unlink()
    lines = run(copied_package.parent)
    assert lines[0].startswith("False")
    (warned,) = [line for line in lines if line.startswith("WARNING")]
    assert "was not built" in warned


def test_core_itself_refuses_another_torch(copied_package: Path) -> None:
    """Even where the stamp file lies, the binary compares before it touches anything."""
    program = WITHOUT_HOOK + textwrap.dedent(
        """
        import torch
        torch.__version__ = "2.99.0"
        try:
            import importlib.util, sys
            spec = importlib.util.spec_from_file_location("hotop._core", sys.argv[1])
            module = importlib.util.module_from_spec(spec)
        except ImportError as error:
            print(error)
        """
    )
    core = copied_package / Path(_load.CORE.__file__).name
    done = subprocess.run(
        [sys.executable, "-c", program, str(core)], capture_output=True, text=True, check=True
    )
    assert "was built for PyTorch" in done.stdout
    assert "2.99.0" in done.stdout
    assert "rebuild" in done.stdout


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("sys.exit('a.h:1:2: error: no member x\\nb.h:3:4: error: y')", 1, ": no member x; "),
        ("sys.exit(3)", 3, ": exit code 3; "),
        ("sys.stderr.write('a warning')", 0, "a warning"),
    ],
    ids=["errors", "no words", "fits"],
)
def test_build_for_a_newer_torch(tmp_path: Path, program: str, code: int, said: str) -> None:
    """What stands before the compiler when PyTorch is newer than the newest that was tested."""
    launcher = Path(__file__).parents[1] / "cmake" / "unknown_torch.py"
    compiler = [sys.executable, "-c", f"import sys; {program}"]
    command = [sys.executable, launcher, "2.99.0", "2.13 to 2.15", *compiler]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == code
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    if code:
        assert done.stderr.startswith("hotop: PyTorch 2.99.0 is newer")
        assert (tmp_path / "unknown_torch.txt").exists()
