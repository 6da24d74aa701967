"""What the sources promise: layers, sizes, and no output or abort from the library."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sorted((ROOT / "src").rglob("*.py")) + sorted((ROOT / "tests").glob("*.py"))
CPP = sorted((ROOT / "csrc").rglob("*.cpp")) + sorted((ROOT / "csrc").rglob("*.h"))
NAMES = [str(path.relative_to(ROOT)) for path in PYTHON + CPP]


@pytest.mark.parametrize("path", PYTHON + CPP, ids=NAMES)
def test_size_and_purpose(path: Path) -> None:
    text = path.read_text()
    lines = text.splitlines()
    assert len(lines) <= 400, "look again: is it still one thing?"
    if path.suffix == ".py":
        assert ast.get_docstring(ast.parse(text)), "the first line says what the file is for"
    else:
        assert lines[0].startswith("// "), "the first line says what the file is for"
    assert not re.search(r"(^|/)(utils?|common|misc|helpers?)\.", path.name)


@pytest.mark.parametrize("path", CPP, ids=NAMES[len(PYTHON) :])
def test_cpp_is_quiet(path: Path) -> None:
    text = path.read_text()
    text.encode("ascii")
    assert not re.search(r"\b(printf|fprintf|std::cout|std::cerr|abort|exit)\s*[(<]", text)


def test_private_members_of_torch_are_read_in_one_file() -> None:
    users = [path.name for path in CPP if "HOTOP_EXPOSE(" in path.read_text()]
    assert users == ["torch_compat.h"]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name for name in found if name.split(".")[0] == "hotop"}


KNOW_THE_CORE = (
    "_op.py",
    "_planned_op.py",
    "_accelerated.py",
    "_existing.py",
    "_op_kernels.py",
    "_stamp.py",
)


def test_layers() -> None:
    """The library knows nothing of its tools; few know the core."""
    library = sorted((ROOT / "src" / "hotop").glob("*.py"))
    for path in library:
        if path.name == "__main__.py":
            continue
        used = imports(path)
        assert not any(re.match(r"hotop\.(bench|demo)", name) for name in used), path
        if path.name not in KNOW_THE_CORE:
            assert "hotop._core" not in used, path
