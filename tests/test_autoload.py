"""PyTorch's plugin entry point: nothing without HOTOP=1, and never the end of ``import torch``."""

import os
import shutil
import subprocess
import sys
import textwrap
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import hotop
import hotop_autoload
from hotop import _load

WITHOUT_HOOK = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "Scikit" not in type(f).__name__]
"""
STATE = """
import sys, torch
from torch._library.custom_ops import CustomOpDef
@torch.library.custom_op("hopauto::f", mutates_args=())
def f(x: torch.Tensor) -> torch.Tensor:
    return x + 1
assert f(torch.ones(1)).item() == 2
print("hotop" in sys.modules, "hotop_autoload" in sys.modules, type(f) is CustomOpDef)
"""


def python(program: str, *options: str, **environment: str) -> tuple[list[str], list[str]]:
    """Run a program that must succeed; the lines of stdout and stderr."""
    names = ("HOTOP", "HOTOP_ACCELERATE", "HOTOP_REPORT", "HOTOP_DISABLE", "HOTOP_RUN_PID")
    env = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(program)],
        env=env | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr.splitlines()


def test_installed_package_declares_it() -> None:
    found = {point.value for point in entry_points(group="torch.backends", name="hotop")}
    assert found == {"hotop_autoload:start"}


def test_without_hotop(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = python(STATE, HOTOP_REPORT="1", HOTOP_ACCELERATE="aten")
    assert out == ["False True True"]
    assert err == []
    calls: list[int] = []
    monkeypatch.setattr(hotop_autoload, "_done", False)
    monkeypatch.setattr(hotop_autoload, "_install", lambda: not calls.append(1))
    for value in ("", "0"):
        monkeypatch.setenv("HOTOP", value)
        hotop_autoload.start()
    assert not calls
    monkeypatch.setenv("HOTOP", "1")
    hotop_autoload.start()
    hotop_autoload.start()
    assert len(calls) == 1


LATER = """
library = torch.library.Library("hoplater", "DEF")
library.define("g(Tensor x) -> Tensor")
library.impl("g", lambda x: x + 1, "CPU")
torch.ops.hoplater.g(torch.ones(1))
torch.ops.aten.relu.default(torch.ones(1))
import hotop
print([(op.name, op.how, op.calls, op.pytorch) for op in hotop.report().ops])
"""


def test_namespaces_and_report() -> None:
    """A namespace may come into being later; one that never does is said at the end."""
    program = STATE + LATER
    accelerate = " aten,,hoplater,hopnone,aten"
    out, err = python(program, HOTOP="1", HOTOP_ACCELERATE=accelerate, HOTOP_REPORT="1")
    assert out[0] == "True True False"
    for row in (
        ("aten::relu", "C++", 1, 0),
        ("hopauto::f", "custom_op", 1, 0),
        ("hoplater::g", "Library", 1, 0),
    ):
        assert str(row) in out[1]
        assert sum(line.split()[:2] == list(row[:2]) for line in err) == 1
    assert [line for line in err if "has no operators" in line] == [
        line for line in err if "of the namespace 'hopnone'" in line
    ]
    assert sum("operators called:" in line for line in err) == 1


def test_hotop_imported_first_and_a_fork() -> None:
    """Then torch is imported in the middle of hotop; and a forked child does not report."""
    program = "import hotop\n" + STATE + "import os\nif not os.fork(): sys.exit()\nos.wait()"
    out, err = python(program, HOTOP="1", HOTOP_REPORT="1")
    assert out[0] == "True True False"
    assert sum("operators called:" in line for line in err) == 1


def test_closed_stderr() -> None:
    program = STATE + "sys.stderr.close()"
    out, err = python(program, HOTOP="1", HOTOP_REPORT="1", HOTOP_ACCELERATE="hopnone")
    assert out == ["True True False"]
    assert err == []


def test_disabled() -> None:
    out, err = python(STATE, HOTOP="1", HOTOP_DISABLE="1", HOTOP_REPORT="1")
    assert out == ["True True True"]
    assert err == ["hotop is switched off by HOTOP_DISABLE; the program runs without it"]


@pytest.fixture
def copied_package(tmp_path: Path) -> Path:
    """A copy of the package's Python files without a core."""
    ignored = shutil.ignore_patterns("*.so", "_stamp.py", "__pycache__")
    shutil.copytree(Path(hotop.__file__).parent, tmp_path / "hotop", ignore=ignored)
    return tmp_path / "hotop"


def path(package: Path) -> str:
    return os.pathsep.join(filter(None, [str(package.parent), os.environ.get("PYTHONPATH")]))


def test_missing_core(copied_package: Path) -> None:
    program = WITHOUT_HOOK + STATE
    for options in ((), ("-W", "error::RuntimeWarning")):
        out, err = python(
            program, *options, HOTOP="1", HOTOP_ACCELERATE="aten", PYTHONPATH=path(copied_package)
        )
        assert out == ["True True True"] or options
        (line,) = err
        assert line.startswith("hotop")
        assert "was not built; build it with: pip install" in line
        assert "the program runs without it" in line


def test_broken_package(copied_package: Path) -> None:
    (copied_package / "_load.py").write_text("raise KeyError('first line\\nsecond')")
    out, err = python(WITHOUT_HOOK + STATE, HOTOP="1", PYTHONPATH=path(copied_package))
    assert out[0].endswith("True")
    (line,) = err
    assert line.startswith("hotop: could not be installed (KeyError:")
    assert "unset HOTOP" in line


def test_what_fails_is_taken_back(copied_package: Path) -> None:
    """A namespace that fails leaves the rest installed; an install that fails leaves nothing."""
    core = Path(_load.CORE.__file__)
    (copied_package / core.name).symlink_to(core)
    stamp = Path(sys.modules["hotop._stamp"].__file__)
    (copied_package / "_stamp.py").write_bytes(stamp.read_bytes())
    init = copied_package / "__init__.py"
    text = init.read_text()
    environment = {"HOTOP": "1", "PYTHONPATH": path(copied_package), "HOTOP_ACCELERATE": "aten"}
    for broken, is_pytorchs in (
        ("_existing.accelerate_namespace", False),
        ("_install.install", True),
    ):
        # The real one does its work, then fails.
        patch = f"""
            from hotop import _existing, _install
            _real = {broken}
            def _broken(*words):
                _real(*words)
                raise ValueError("nothing here")
            {broken} = _broken
            """
        cut = text.index("__version__")  # before the end, where hotop may be installed
        init.write_text(text[:cut] + textwrap.dedent(patch) + text[cut:])
        out, err = python(WITHOUT_HOOK + STATE, **environment)
        assert out == [f"True True {is_pytorchs}"]
        (line,) = err
        assert "nothing here" in line


def test_a_namespace_of_torchscript_is_named_so() -> None:
    program = "import torch; print(torch.ops.prim.device(torch.ones(1)))"
    out, err = python(program, HOTOP="1", HOTOP_ACCELERATE="prim")
    assert out == ["cpu"]
    (line,) = err
    assert "the operators of the namespace 'prim', which --accelerate or" in line
    assert "are TorchScript's own" in line
