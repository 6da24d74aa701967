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
