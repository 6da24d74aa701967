"""The differential test of the boxed road: every ATen overload, accelerated and by PyTorch."""

import sys
from pathlib import Path

# The twin harness of the tests looks at both sides of a call.
_TESTS = str(Path(__file__).resolve().parents[2] / "tests")
if _TESTS not in sys.path:
    sys.path.insert(0, _TESTS)
