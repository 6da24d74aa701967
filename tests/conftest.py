"""Every test, and every process that it starts, keeps its tuned choices out of the user's cache."""

import os
import tempfile
from collections.abc import Iterator

import pytest

_directory = tempfile.TemporaryDirectory(prefix="hotop-tests-")
os.environ["HOTOP_TUNER_DIR"] = _directory.name


@pytest.fixture
def nothing_stays() -> Iterator[None]:
    """Give everything that a test accelerates back to PyTorch."""
    import hotop

    yield
    hotop.uninstall()
    hotop.restore()


@pytest.fixture
def own_tuner_files(tmp_path, monkeypatch) -> Iterator[None]:
    """Give a test a directory of tuned choices of its own, and forget all choices."""
    import hotop
    from hotop.tuner import _session

    monkeypatch.setenv("HOTOP_TUNER_DIR", str(tmp_path / "tuner"))
    hotop.tuner.clear()
    yield
    hotop.tuner.clear()
    assert _session._session is None, "a block was left open"
